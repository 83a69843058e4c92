package agent

import (
	"io"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// RunBulk runs one transfer.
func RunBulk(space Space, op guest.BulkOp, stdin io.Reader, stdout io.Writer) error {
	return sandbox.ErrUnsupported
}
