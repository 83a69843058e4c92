package guest

import "github.com/cove-sandbox/cove/sandbox"

// BulkOp is one large transfer between a host descriptor and the user's
// container. It is passed as the JSON argument of "cove-guest bulk", run in
// the guest's container, which enters the user's container first.
type BulkOp struct {
	Kind    string               `json:"kind"` // "read", "write", "tar", "untar"
	InitPID int                  `json:"init_pid"`
	Path    string               `json:"path"`
	Offset  int64                `json:"offset,omitempty"` // read
	Length  int64                `json:"length,omitempty"` // read; 0 = to the end
	Write   sandbox.WriteOptions `json:"write,omitzero"`   // write, untar
	User    string               `json:"user,omitempty"`   // default user of the container
}
