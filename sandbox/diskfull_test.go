package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"testing"
)

func TestNoSpace(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{syscall.ENOSPC, true},
		{syscall.EDQUOT, true},
		{fmt.Errorf("writing: %w", &fs.PathError{Op: "write", Path: "/x", Err: syscall.ENOSPC}), true},
		{errors.Join(errors.New("first"), syscall.EDQUOT), true},
		{Errorf(DiskFull, "op", "%w", syscall.ENOSPC), true},
		{nil, false},
		{syscall.EIO, false},
		{syscall.EFBIG, false},
		// It has its class and its hint already.
		{Errorf(DiskFull, "op", "the sandbox's own"), false},
	} {
		if NoSpace(c.err) != c.want {
			t.Errorf("%v: %v", c.err, !c.want)
		}
	}
}
