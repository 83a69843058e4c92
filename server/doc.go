// Package server is the control plane: every operation of Cove in domain types,
// callers and what they may do, idempotent creation, and the reconciliation of the
// store with what the node really runs. How operations are asked for over a network
// is a dialect's business: server/native is Cove's own.
//
// One file per resource (sandboxes, processes, files, images, snapshots, templates,
// volumes, keys, …) and per large act (fork, restore, standby, tree). What they
// share:
//
//	operations.go the table of operations: who may, what is audited, which quota
//	call.go       what every operation begins and ends with
//	scopes.go     what a request needs besides, by what it names
//	create.go     the hot path; store and node at the same time
//	origin.go     what a sandbox is made from: an image or a snapshot
//	queue.go      creates that wait their turn for a full node
//	quota.go      what tenants hold, counted in memory
//	content.go    snapshots' content, collected when nothing refers to it
//	sizes.go      what the content of snapshots takes, shared blobs once
//	ends.go       how ends travel from the node to the store and to waiters
//	reconcile.go  store and node brought together at start
//	pump.go       process events to a client, joined but never delayed
//	transfer.go   content of any size over pipes to the node
//	imagebook.go  names, pulls, and content that is never deleted in use
//	reach.go      how the gateway and SSH come into sandboxes
//	drain.go      stopping without breaking what is under way
//
// Every error is a *sandbox.Error with the operation it came of.
package server
