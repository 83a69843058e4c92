// Package remote is a node in another process: [Handler] and [Server] show one,
// [Dial] is the node that a server sees.
//
// A call is POST /node/v1/METHOD over HTTP/2 and mutual TLS. Both bodies are
// frames (kind, length, content): the arguments, then what the caller streams, and
// the other way the results, or the elements of an iterator, or bytes. Every
// direction ends with a frame that says so, in order or with the error, so that a
// connection that broke is never taken for an end.
//
// The table of methods is the contract itself: [Handler] serves each method of
// node.Node by the shape of its arguments and results. A method with a shape that
// is not known is served to nobody, and a test fails.
//
// The caller's deadline crosses as the time that is left of it; a caller that
// leaves resets its stream, which ends the context of the call on the node.
package remote
