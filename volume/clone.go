package volume

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// Clone makes a volume with the content of another, also while that is
// attached. It is the content of one instant: writers stand still while the
// image is copied, which takes no time where the host's file system can share
// blocks (XFS, btrfs), and else about a second per GB that is in use. What
// programs inside had not written by then is not in it: as after a power cut,
// with the disk intact.
func (s *Set) Clone(ctx context.Context, from, name string) (Volume, error) {
	const op = "volume.clone"
	src, err := s.Get(ctx, from)
	if err != nil {
		return Volume{}, sandbox.WithOp(op, err)
	}
	v, err := s.make(ctx, op, name, src.ID, src.Size, func(tmp string, size int64) error {
		return s.copyTo(ctx, src.ID, tmp, size)
	})
	if err != nil {
		return Volume{}, fail(op, err)
	}
	return v, nil
}

// copyTo copies the image of a volume as it is at one instant.
func (s *Set) copyTo(ctx context.Context, id, tmp string, size int64) (err error) {
	const op = "volume.copy"
	s.mu.Lock()
	v, err := s.findLocked(op, id)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	s.useLocked(v) // so that Delete is refused
	s.mu.Unlock()
	defer s.release(v)
	free, err := v.take(ctx)
	if err != nil {
		return err
	}
	defer free()
	s.mu.Lock()
	rec := v.rec
	s.mu.Unlock()
	if rec.Made != size {
		return sandbox.Errorf(sandbox.Conflict, op, "volume %s is being resized", rec.Name).WithHint("try again")
	}
	if v.mounted {
		if err := freeze(s.point(id)); err != nil {
			return fmt.Errorf("freezing %s: %w", rec.Name, err)
		}
		// Whatever happens: sandboxes wait for this.
		defer func() { err = errors.Join(err, thaw(s.point(id))) }()
	}
	if err := s.at("copy"); err != nil {
		return err
	}
	if err := copyImage(ctx, s.image(id), tmp); err != nil {
		return err
	}
	return s.at("copied")
}

// copyImage copies a sparse file, durably.
func copyImage(ctx context.Context, from, to string) (err error) {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	if unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) != nil { // not every file system can
		if err := copySparse(ctx, src, dst); err != nil {
			return err
		}
	}
	return dst.Sync()
}

// chunk is how much is copied between two looks at the context.
const chunk = 16 << 20

// copySparse copies what is there and leaves holes holes.
func copySparse(ctx context.Context, src, dst *os.File) error {
	st, err := src.Stat()
	if err != nil {
		return err
	}
	if err := dst.Truncate(st.Size()); err != nil {
		return err
	}
	for end := int64(0); ; {
		start, err := src.Seek(end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // nothing but a hole from here
		}
		if err != nil {
			return err
		}
		if end, err = src.Seek(start, unix.SEEK_HOLE); err != nil {
			return err
		}
		for start < end {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := min(end-start, chunk)
			if _, err := dst.Seek(start, io.SeekStart); err != nil {
				return err
			}
			if _, err := io.Copy(dst, io.NewSectionReader(src, start, n)); err != nil {
				return err
			}
			start += n
		}
	}
}
