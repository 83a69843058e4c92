package blob

import (
	"context"
	"crypto/sha256"
	"io"

	"golang.org/x/sync/errgroup"
)

// job is a frame on its way: read, decoded, written, hashed.
type job struct {
	number  uint64
	buf     []byte // frameMax
	plain   []byte // FrameSize, once needed
	size    int    // stored bytes in buf
	content []byte // valid after done
	done    chan struct{}
}

// ReadTo writes the content to w, with workers that decode beside the one that
// hashes: the digest of the whole is sequential and the slowest step (some
// 1.5–2 GB/s a core with SHA-NI), so everything else runs beside it. What is in
// w after an error is authentic frame by frame, and incomplete.
func (b *Blob) ReadTo(ctx context.Context, w io.WriterAt, workers int) error {
	g, ctx := errgroup.WithContext(ctx)
	depth := workers * 4 // enough that nobody waits for the one beside
	free := make(chan *job, depth)
	work := make(chan *job, depth)
	order := make(chan *job, depth)
	for range min(uint64(depth), b.count()) {
		free <- &job{buf: make([]byte, frameMax)}
	}

	g.Go(func() error { // reads in order; the place of a frame is known from the one before
		defer close(work)
		defer close(order)
		off := int64(headerSize)
		for number := range b.count() {
			var j *job
			select {
			case j = <-free:
			case <-ctx.Done():
				return ctx.Err()
			}
			r := Reader{b: b, off: off, number: number, buf: j.buf}
			if err := r.readRaw(); err != nil {
				return err
			}
			j.number, j.size, j.done = number, int(r.off-off), make(chan struct{})
			off = r.off
			work <- j // never blocks: there are depth jobs in all
			order <- j
		}
		if off != b.stored-endSize {
			return Corrupt(b.ID, "bytes between the last frame and the end record")
		}
		return nil
	})
	for range workers {
		g.Go(func() error {
			for j := range work {
				if _, kind := parseHead(j.buf); kind == kindZstd && j.plain == nil {
					j.plain = make([]byte, FrameSize)
				}
				content, err := b.decode(j.number, j.buf[:j.size], j.plain)
				if err != nil {
					return err
				}
				if _, err := w.WriteAt(content, int64(j.number)*FrameSize); err != nil {
					return err
				}
				j.content = content
				close(j.done)
			}
			return nil
		})
	}
	g.Go(func() error {
		sum, hashed := sha256.New(), uint64(0)
		for j := range order {
			select {
			case <-j.done:
			case <-ctx.Done():
				return ctx.Err()
			}
			sum.Write(j.content)
			hashed++
			free <- j
		}
		// The reader may have ended early; then its error is the one that counts.
		if hashed == b.count() && [sha256.Size]byte(sum.Sum(nil)) != b.sum {
			return Corrupt(b.ID, "the content has another digest")
		}
		return nil
	})
	return g.Wait()
}
