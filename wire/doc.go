// Package wire turns the domain ([sandbox]) into cove.v1 and back, so that
// neither side of the network has to know the other's types. Errors keep
// their class: errors.Is(err, sandbox.ErrNotFound) holds in the server, after
// [ToConnect], the wire and [FromConnect], in the client.
//
// [Client] is the Go client the CLI uses: the generated Connect clients over
// one HTTP/2 connection, and the plain HTTP endpoints for bulk content over
// HTTP/1.1.
package wire
