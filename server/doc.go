// Package server is the control plane: authentication, the cove.v1 API over
// Connect and plain HTTP, idempotent creation, and the reconciliation of the
// store with what the node really runs.
//
// One file per resource (sandboxes, processes, files, images, snapshots,
// templates, volumes, keys, system) and per large act (fork, restore, standby,
// tree), each a thin service that checks its request and asks the [Node] or the
// store. What they share:
//
//	routes.go     the one door: recover, track, authenticate, limit
//	create.go     the hot path; store and node at the same time
//	origin.go     what a sandbox is made from: an image or a snapshot
//	content.go    snapshots' content, collected when nothing refers to it
//	ends.go       how ends travel from the node to the store and to waiters
//	reconcile.go  store and node brought together at start
//	pump.go       process events to a client, joined but never delayed
//	transfer.go   content of any size over pipes to the node
//	imagebook.go  names, pulls, and content that is never deleted in use
//	drain.go      stopping without breaking what is under way
//
// Every error is a *sandbox.Error and crosses the wire as one (package wire).
package server
