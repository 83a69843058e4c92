// Package server is the control plane: authentication, the cove.v1 API over
// Connect and plain HTTP, idempotent creation, and the reconciliation of the
// store with what the node really runs.
package server
