package remote

import (
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
)

// pipeBuffer is what one direction of a connection holds here.
const pipeBuffer = 256 << 10

// pipe is one direction of a connection: bytes between one who writes and one who
// reads, each of whom may have a deadline.
type pipe struct {
	mu struct {
		sync.Mutex
		buf     []byte
		shut    bool      // nothing more is written
		err     error     // after buf: why nothing comes; or why nothing is taken
		by      time.Time // deadline of the side that the caller has
		changed notify.Change
	}
}

// change does f and wakes who waits.
func (p *pipe) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.mu.changed.Tell()
}

// wait does f until it says that it is done; timed: not beyond the deadline.
func (p *pipe) wait(timed bool, f func() (done bool)) error {
	for {
		p.mu.Lock()
		done := f()
		if done {
			p.mu.changed.Tell()
		}
		changed, by := p.mu.changed.Next(), p.mu.by
		p.mu.Unlock()
		if done {
			return nil
		}
		if !timed || by.IsZero() {
			<-changed
			continue
		}
		left := time.Until(by)
		if left <= 0 {
			return os.ErrDeadlineExceeded
		}
		timer := time.NewTimer(left)
		select {
		case <-changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (p *pipe) read(b []byte, timed bool) (n int, err error) {
	if len(b) == 0 {
		return 0, nil
	}
	if werr := p.wait(timed, func() bool {
		switch {
		case len(p.mu.buf) > 0:
			n = copy(b, p.mu.buf)
			if p.mu.buf = p.mu.buf[n:]; len(p.mu.buf) == 0 {
				p.mu.buf = nil
			}
		case p.mu.err != nil:
			err = p.mu.err
		case p.mu.shut:
			err = io.EOF
		default:
			return false
		}
		return true
	}); werr != nil {
		return 0, werr
	}
	return n, err
}

func (p *pipe) write(b []byte, timed bool) (total int, err error) {
	for len(b) > 0 && err == nil {
		n := 0
		if werr := p.wait(timed, func() bool {
			switch {
			case p.mu.err != nil:
				err = p.mu.err
			case p.mu.shut:
				err = net.ErrClosed
			case len(p.mu.buf) < pipeBuffer:
				n = min(len(b), pipeBuffer-len(p.mu.buf))
				p.mu.buf = append(p.mu.buf, b[:n]...)
			default:
				return false
			}
			return true
		}); werr != nil {
			return total, werr
		}
		total, b = total+n, b[n:]
	}
	return total, err
}

// close ends writing in order; what was written is read.
func (p *pipe) close() { p.change(func() { p.mu.shut = true }) }

// fail ends both ends at once; the first reason stays.
func (p *pipe) fail(err error) {
	p.change(func() {
		if p.mu.err == nil {
			p.mu.err, p.mu.buf = err, nil
		}
	})
}

// finish is fail for who reads after what is there.
func (p *pipe) finish(err error) {
	p.change(func() {
		if p.mu.err == nil {
			p.mu.err = err
		}
	})
}

func (p *pipe) deadline(t time.Time) { p.change(func() { p.mu.by = t }) }
