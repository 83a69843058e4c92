package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const (
	// rangeStep is how much is copied between two looks at the context.
	rangeStep = 8 * mib
	// flushStep is after how much the disk is asked to begin writing. Without
	// it nothing is written before the fsync at the end, and the disk idles
	// while the digest is computed.
	flushStep = 16 * mib
	// hashAhead is how many pieces may wait for the digest: with 1 MiB each, 8 MiB.
	hashAhead = 8
)

// sink is the file an image is written to, front to back. The digest is
// computed beside the writing, by a goroutine of its own: at 1.4 GB/s it costs
// as much as the copy. It implements erofs.RangeWriter.
type sink struct {
	ctx      context.Context
	f        *os.File
	progress *reporter
	pos      int64
	flushed  int64

	queue chan piece
	free  chan []byte
	ended bool
	done  chan struct{} // closed by the hashing goroutine, after which:
	sum   hash.Hash
	err   error
}

// piece is what is hashed next: bytes, or a range of a file.
type piece struct {
	data   []byte
	src    io.ReaderAt
	off, n int64
}

func newSink(ctx context.Context, f *os.File, progress *reporter) *sink {
	s := &sink{ctx: ctx, f: f, progress: progress, sum: sha256.New(),
		queue: make(chan piece, hashAhead), free: make(chan []byte, hashAhead+1), done: make(chan struct{})}
	go s.hash()
	return s
}

// hash reads ranges from where they were copied from, not from the copy: the
// source is what sandboxes run from, so it is in the page cache, and a copy
// that shares its extents is not. The first error sticks; the queue is emptied
// regardless, so that no writer waits.
func (s *sink) hash() {
	defer close(s.done)
	buf := make([]byte, mib)
	for p := range s.queue {
		if p.src == nil {
			s.sum.Write(p.data)
			select {
			case s.free <- p.data[:0]:
			default:
			}
			continue
		}
		for p.n > 0 && s.err == nil && s.ctx.Err() == nil {
			b := buf[:min(p.n, int64(len(buf)))]
			if n, err := p.src.ReadAt(b, p.off); n < len(b) {
				s.err = err
				break
			}
			s.sum.Write(b)
			p.off, p.n = p.off+int64(len(b)), p.n-int64(len(b))
		}
	}
}

func (s *sink) Write(b []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := s.f.Write(b)
	s.advance(int64(n))
	if err != nil {
		return n, err
	}
	var data []byte
	select {
	case data = <-s.free:
	default:
	}
	s.queue <- piece{data: append(data, b...)}
	return n, nil
}

// CopyRange lets the kernel copy. XFS with reflinks and Btrfs then share the
// blocks with the source, and an image derived from another takes the space of
// its changes. Elsewhere, on ext4 for one, it is a copy that never passes
// through here, and the image takes the space of all it holds.
func (s *sink) CopyRange(src io.ReaderAt, off, n int64) error {
	from, ok := src.(*os.File)
	if !ok {
		return s.copyBytes(src, off, n)
	}
	s.queue <- piece{src: src, off: off, n: n}
	for n > 0 {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		at := off
		got, err := unix.CopyFileRange(int(from.Fd()), &at, int(s.f.Fd()), nil, int(min(n, rangeStep)), 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP):
			// The file system cannot; nothing of this step was written.
			return s.copyPlain(src, off, n)
		case err != nil:
			return err
		case got == 0:
			return io.ErrUnexpectedEOF
		}
		off, n = off+int64(got), n-int64(got)
		s.advance(int64(got))
	}
	return nil
}

// copyPlain writes a range that is already queued for the digest.
func (s *sink) copyPlain(src io.ReaderAt, off, n int64) error {
	buf := make([]byte, min(n, mib))
	for n > 0 {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		b := buf[:min(n, int64(len(buf)))]
		if got, err := src.ReadAt(b, off); got < len(b) {
			return err
		}
		if _, err := s.f.Write(b); err != nil {
			return err
		}
		off, n = off+int64(len(b)), n-int64(len(b))
		s.advance(int64(len(b)))
	}
	return nil
}

func (s *sink) copyBytes(src io.ReaderAt, off, n int64) error {
	_, err := io.Copy(s, io.NewSectionReader(src, off, n))
	return err
}

func (s *sink) advance(n int64) {
	s.pos += n
	s.progress.add(n)
	if s.pos-s.flushed >= flushStep {
		// A head start only; the fsync at the end is what counts.
		_ = unix.SyncFileRange(int(s.f.Fd()), s.flushed, s.pos-s.flushed, unix.SYNC_FILE_RANGE_WRITE)
		s.flushed = s.pos
	}
}

// close ends the hashing goroutine. Safe to call twice.
func (s *sink) close() {
	if !s.ended {
		s.ended = true
		close(s.queue)
	}
	<-s.done
}

// digest waits for the digest of all that was written.
func (s *sink) digest() (string, error) {
	s.close()
	if s.err != nil {
		return "", s.err
	}
	if err := s.ctx.Err(); err != nil {
		return "", err
	}
	return hex.EncodeToString(s.sum.Sum(nil)), nil
}
