package agent

import (
	"io"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// bulkBuf is what one system call moves. Below it the calls show in the
// profile of a transfer to a donated descriptor, above it nothing is won.
const bulkBuf = 1 << 20

// RunBulk runs one transfer between the caller's descriptors and a container,
// apart from any agent: "cove-guest bulk" calls it in a process of its own. The
// space is only its pattern and may be in use. Owners in a tar are not kept
// when it is unpacked: all belongs to Write.User, or to the container's user.
func RunBulk(space Space, op guest.BulkOp, stdin io.Reader, stdout io.Writer) (err error) {
	defer func() { err = sandbox.WithOp("guest.bulk."+clip(op.Kind, 20), err) }()
	p, err := cleanPath("path", op.Path)
	if err != nil {
		return err
	}
	if op.Write.Mode > maxMode {
		return sandbox.InvalidField("mode", "must be at most 07777")
	}
	if op.Offset < 0 || op.Length < 0 {
		return sandbox.InvalidField("offset", "offset and length must not be negative")
	}
	sp := space.forFiles()
	if _, err := sp.enter(op.InitPID, 0, ""); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "", "%w", err)
	}
	defer sp.leave()
	ep := &episode{space: sp, user: op.User, workdir: "/"}
	switch op.Kind {
	case "read":
		return fileError(p, ep.bulkRead(p, op.Offset, op.Length, stdout))
	case "write":
		_, err := ep.write(p, op.Write, pieces(stdin))
		return fileError(p, err)
	case "tar":
		return fileError(p, ep.tar(p, stdout))
	case "untar":
		return fileError(p, ep.untar(p, op.Write, stdin))
	}
	return sandbox.InvalidField("kind", "must be read, write, tar or untar, not %q", clip(op.Kind, 20))
}

func (ep *episode) bulkRead(p string, offset, length int64, w io.Writer) error {
	fd, _, err := ep.openRegular(p, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if length == 0 {
		length = 1<<63 - 1
	}
	buf := make([]byte, bulkBuf)
	for length > 0 {
		n, err := retryEINTR(func() (int, error) { return unix.Pread(fd, buf[:min(bulkBuf, length)], offset) })
		if err != nil {
			return err
		}
		if n == 0 {
			return nil
		}
		if _, err := w.Write(buf[:n]); err != nil {
			return outputError(err)
		}
		offset += int64(n)
		length -= int64(n)
	}
	return nil
}

// pieces makes a source of a reader.
func pieces(r io.Reader) source {
	return func(f func([]byte) error) error {
		buf := make([]byte, bulkBuf)
		for {
			n, err := r.Read(buf)
			if n > 0 {
				if err := f(buf[:n]); err != nil {
					return err
				}
			}
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return inputError(err)
			}
		}
	}
}

// The caller's own ends are not files of the sandbox; their errors must not
// read as if they were.
// A full disk behind the output is the host's, which has the hint to it.
func outputError(err error) error {
	class := sandbox.Unavailable
	if sandbox.NoSpace(err) {
		class = sandbox.DiskFull
	}
	return sandbox.Errorf(class, "", "output: %w", err)
}
func inputError(err error) error { return sandbox.Errorf(sandbox.Unavailable, "", "input: %w", err) }
