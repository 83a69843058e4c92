package agent

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// fileError gives a failed file call its class and words. path is what the
// caller named, so that the message speaks of it and not of our descriptors.
func fileError(path string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*sandbox.Error](err); ok {
		return e
	}
	mk := func(c sandbox.Class, format string, args ...any) error {
		return &sandbox.Error{Class: c, Msg: fmt.Sprintf(format, args...)}
	}
	errno, ok := errors.AsType[unix.Errno](err)
	switch {
	case errors.Is(err, errLeft):
		return errReset()
	case errors.Is(err, fs.ErrClosed):
		return mk(sandbox.Unavailable, "%s: %v", path, err)
	case sandbox.NoSpace(err):
		return &sandbox.Error{Class: sandbox.DiskFull, Msg: "no space left for " + path, Hint: "remove files inside or create the sandbox with more disk"}
	case !ok:
		return &sandbox.Error{Class: sandbox.Internal, Msg: path, Err: err}
	}
	switch errno {
	case unix.ENOENT, unix.ESRCH: // of /proc: the process has ended meanwhile
		return mk(sandbox.NotFound, "no such file or directory: %s", path)
	case unix.EACCES, unix.EPERM:
		return mk(sandbox.Denied, "permission denied: %s", path)
	case unix.EROFS:
		return mk(sandbox.Denied, "read-only file system: %s", path)
	case unix.EEXIST:
		return mk(sandbox.AlreadyExists, "already exists: %s", path)
	case unix.ENOTDIR:
		return mk(sandbox.Precondition, "not a directory: %s", path)
	case unix.EISDIR:
		return mk(sandbox.Precondition, "is a directory: %s", path)
	case unix.ENOTEMPTY:
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "directory not empty: " + path, Hint: "remove it recursively"}
	case unix.EXDEV:
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "another file system: " + path, Hint: "copy and remove instead of moving"}
	case unix.EBUSY, unix.ETXTBSY:
		return mk(sandbox.Precondition, "in use or a mount point: %s", path)
	case unix.ENXIO, unix.ENODEV, unix.EOPNOTSUPP:
		return errNotRegular(path)
	case unix.ELOOP:
		return &sandbox.Error{Class: sandbox.Invalid, Field: "path", Msg: "too many symbolic links: " + path}
	case unix.ENAMETOOLONG:
		return &sandbox.Error{Class: sandbox.Invalid, Field: "path", Msg: "name too long"}
	case unix.EINVAL:
		return &sandbox.Error{Class: sandbox.Invalid, Field: "path", Msg: "not possible for this path: " + path}
	case unix.EIO:
		// Of /proc/PID/mem and the like; the writable layer's own are the host's.
		return mk(sandbox.Precondition, "cannot be read or written there: %s", path)
	case unix.EFBIG:
		return mk(sandbox.TooLarge, "file too large: %s", path)
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EAGAIN:
		return mk(sandbox.Unavailable, "%s: %v", path, errno)
	}
	return mk(sandbox.Internal, "%s: %v", path, errno)
}

func errNotRegular(path string) error {
	return &sandbox.Error{Class: sandbox.Precondition, Msg: "not a regular file: " + path,
		Hint: "devices, pipes and sockets can only be used by a process inside"}
}

func errNoContainer() error {
	return &sandbox.Error{Class: sandbox.Precondition, Msg: "the guest serves no container now", Hint: "the sandbox is being made or reset; ask again"}
}

// errBetween is a request that met the end of its episode before it had begun.
var errBetween = errors.New("its episode was left")

// errReset is what a caller hears of that who cannot be served in the next one.
func errReset() error {
	return &sandbox.Error{Class: sandbox.Unavailable, Msg: "the sandbox was reset before this had begun", Hint: "ask again", Err: errBetween}
}
