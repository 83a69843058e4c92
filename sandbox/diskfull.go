package sandbox

import (
	"errors"
	"syscall"
)

// NoSpace says whether err comes from a disk, or a quota on it, that has no
// space left: what DiskFull is the class of. Callers add the class, because
// only they know whose disk it is and what frees it.
func NoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}
