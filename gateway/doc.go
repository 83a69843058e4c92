// Package gateway shows the HTTP servers inside sandboxes to the outside.
//
// A port has an address of its own, <port>-<sandbox>.<domain>, and one below the
// API's, /p/<sandbox>/<port>/, for people without wildcard DNS. [Gateway.Wrap]
// takes both out of the requests of a listener.
//
// Ports are private: a request needs a token ([Tokens]) or an API key unless the
// port was made public. What opens the door is taken off before the request goes
// in: code inside is hostile, and must not learn what its visitors hold.
// Between sandboxes that share an origin (the path form) it may neither set
// cookies for the others nor send headers that act on the whole origin.
//
// Every request is parsed and written anew by net/http, so that both sides agree
// where it ends. Each goes over a stream of its own into the sandbox (kept for
// the next one when it is over): a client that reads slowly holds up its own
// stream and nothing else.
package gateway
