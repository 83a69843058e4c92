// Package node is the contract between the control plane and a node, the part
// that runs sandboxes on one machine.
//
// Everything in it can cross machines: values in, values out, a context and an
// error in every call, nothing live. What takes long is a stream ([iter.Seq2],
// [io.Reader], [io.Writer], [Conn]); what the caller has to record in the middle
// is two calls with a token between them ([Node.PrepareSnapshot]); what the
// caller could forget is a lease that ends by itself ([Node.Hold]).
//
// Package agent is a node, package remote is one in another process, and
// nodetest says of both, and of any other, whether they keep the contract.
//
// Rules for every method:
//
//   - Errors are *sandbox.Error. Of a sandbox that is not here it is
//     sandbox.ErrNoSandbox, of one that has ended sandbox.ErrEnded, until its end
//     is acknowledged.
//   - A context that ends ends the call, with sandbox.ErrCanceled or ErrDeadline.
//     What was begun and cannot be left half done is finished without the caller.
//   - A stream is an iterator that works when it is ranged over and holds nothing
//     before. An error is its last element. Whoever stops ranging has cut it: what
//     it did on the node ends, processes go on.
//   - Calls that need the sandbox wake it and keep it awake for as long as they
//     last: those into its processes, files and ports, Reset, Mount, UseSecrets and
//     snapshots of files. The others leave it asleep.
package node
