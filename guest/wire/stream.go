package wire

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Stream is a byte stream in the Data frames of a connection that has nothing
// else to do any more: what Connect makes of one, on both of its sides.
//
// Each side may have a Window on its way that the other's reader has not taken
// (Credit says when it has), so that a reader that rests stops its own writer
// and nothing else: not the other direction, whose credit comes over the same
// connection, and not gVisor's port forward (see the package). Shut ends one
// direction. A connection that ends without it was cut.
//
// Who owns the connection hands every frame it reads to Feed, and says with Fail
// that there will be none. An idle stream holds no buffer.
type Stream struct {
	conn *Conn

	wmu sync.Mutex // one frame at a time goes out

	mu      sync.Mutex
	changed sync.Cond // on mu: any of what follows
	in      [][]byte  // received, not read
	held    int       // bytes of in
	unsaid  int       // read, not credited yet
	room    int       // that the peer still takes
	eof     bool      // the peer has shut its direction
	shut    bool      // we have shut ours
	closed  bool      // by Close
	err     error     // no frame will come any more
	read    deadline
	write   deadline
}

var errShut = errors.New("write on a stream that was shut")

// NewStream begins a stream on c. Nobody else may write to c from now on.
func NewStream(c *Conn) *Stream {
	s := &Stream{conn: c, room: Window}
	s.changed.L = &s.mu
	return s
}

// Feed takes a frame of the peer. An error says that the peer does not keep to
// the protocol; the connection is then of no use.
func (s *Stream) Feed(k Kind, p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.changed.Broadcast()
	switch k {
	case Data:
		if s.eof || len(p) == 0 || s.held+s.unsaid+len(p) > Window {
			return fmt.Errorf("%d bytes that the stream has no room for", len(p))
		}
		if s.closed {
			return nil
		}
		s.in = append(s.in, p)
		s.held += len(p)
		return nil
	case Credit:
		n, err := ParseCredit(p)
		if err != nil || n < 0 || s.room+n > Window {
			return fmt.Errorf("credit for what was never sent")
		}
		s.room += n
		return nil
	case Shut:
		s.eof = true
		return nil
	}
	return fmt.Errorf("frame of kind %d in a stream", k)
}

// Fail says that no frame will come any more. What came before is still read.
func (s *Stream) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	s.changed.Broadcast()
}

// Read waits for bytes; io.EOF once the peer has shut its direction.
func (s *Stream) Read(p []byte) (int, error) {
	s.mu.Lock()
	if err := s.awaitLocked(); err != nil {
		s.mu.Unlock()
		return 0, err
	}
	n := 0
	for n < len(p) && len(s.in) > 0 {
		m := copy(p[n:], s.in[0])
		n += m
		if m == len(s.in[0]) {
			s.popLocked()
		} else {
			s.in[0] = s.in[0][m:]
		}
	}
	say := s.tookLocked(n)
	s.mu.Unlock()
	s.credit(say)
	return n, nil
}

// WriteTo reads to the end without a buffer of its own: what io.Copy prefers.
func (s *Stream) WriteTo(w io.Writer) (total int64, err error) {
	for {
		s.mu.Lock()
		if err := s.awaitLocked(); err != nil {
			s.mu.Unlock()
			if err == io.EOF {
				err = nil
			}
			return total, err
		}
		p := s.in[0]
		s.popLocked()
		s.mu.Unlock()
		n, err := w.Write(p) // only what was written is credited: the peer waits for w
		total += int64(n)
		s.mu.Lock()
		say := s.tookLocked(len(p))
		s.mu.Unlock()
		s.credit(say)
		if err != nil {
			return total, err
		}
	}
}

// awaitLocked waits until there is something to read.
func (s *Stream) awaitLocked() error {
	for {
		switch {
		case s.closed:
			return net.ErrClosed
		case s.read.passed():
			return os.ErrDeadlineExceeded
		case len(s.in) > 0:
			return nil
		case s.eof:
			return io.EOF
		case s.err != nil:
			return s.err
		}
		s.changed.Wait()
	}
}

func (s *Stream) popLocked() {
	s.in[0] = nil
	if s.in = s.in[1:]; len(s.in) == 0 {
		s.in = nil
	}
}

// tookLocked counts n bytes as read and says what to credit now. In quarters: a
// frame for each small read would be more traffic than the reads.
func (s *Stream) tookLocked(n int) (say int) {
	if s.held -= n; s.closed {
		s.held = 0
	}
	s.unsaid += n
	if s.unsaid >= Window/4 && !s.eof && s.err == nil && !s.closed {
		say, s.unsaid = s.unsaid, 0
	}
	return say
}

func (s *Stream) credit(n int) {
	if n == 0 {
		return
	}
	s.wmu.Lock()
	err := s.conn.WriteCredit(n)
	s.wmu.Unlock()
	if err != nil {
		s.Fail(err)
	}
}

// Write returns when the peer has room for all of p and it is on its way.
func (s *Stream) Write(p []byte) (int, error) {
	total := 0
	for len(p) > 0 {
		n, err := s.take(min(len(p), MaxData))
		if err != nil {
			return total, err
		}
		s.wmu.Lock()
		err = s.conn.WriteFrame(Data, p[:n])
		s.wmu.Unlock()
		if err != nil {
			s.Fail(err)
			return total, err
		}
		total += n
		p = p[n:]
	}
	return total, nil
}

// take waits until some of n bytes may go.
func (s *Stream) take(n int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.closed:
			return 0, net.ErrClosed
		case s.shut:
			return 0, errShut
		case s.err != nil:
			return 0, s.err
		case s.write.passed():
			return 0, os.ErrDeadlineExceeded
		case s.room > 0:
			n = min(n, s.room)
			s.room -= n
			return n, nil
		}
		s.changed.Wait()
	}
}

// CloseWrite shuts our direction: the peer reads its end after what was written.
func (s *Stream) CloseWrite() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return net.ErrClosed
	}
	if s.shut {
		s.mu.Unlock()
		return nil
	}
	s.shut = true
	s.changed.Broadcast()
	s.mu.Unlock()
	s.wmu.Lock()
	defer s.wmu.Unlock()
	return s.conn.WriteFrame(Shut)
}

// Close ends the stream both ways, and its connection. What was written before
// is still read by the peer.
func (s *Stream) Close() error {
	_ = s.CloseWrite()
	return s.Abort()
}

// Abort is Close that lets the peer see that the stream was cut.
func (s *Stream) Abort() error {
	s.mu.Lock()
	s.closed = true
	s.in, s.held = nil, 0
	s.read.stop()
	s.write.stop()
	s.changed.Broadcast()
	s.mu.Unlock()
	return s.conn.Close()
}

// Shutdown says whether both directions ended in order.
func (s *Stream) Shutdown() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.shut && s.eof
}

// LocalAddr and RemoteAddr are those of the connection, which are of no use: the
// two ends are in different kernels.
func (s *Stream) LocalAddr() net.Addr  { return s.conn.LocalAddr() }
func (s *Stream) RemoteAddr() net.Addr { return s.conn.RemoteAddr() }

// SetDeadline, SetReadDeadline and SetWriteDeadline are as net.Conn has them.
func (s *Stream) SetDeadline(t time.Time) error {
	_ = s.SetReadDeadline(t)
	return s.SetWriteDeadline(t)
}

func (s *Stream) SetReadDeadline(t time.Time) error  { return s.setDeadline(&s.read, t) }
func (s *Stream) SetWriteDeadline(t time.Time) error { return s.setDeadline(&s.write, t) }

func (s *Stream) setDeadline(d *deadline, t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	d.stop()
	d.at = t
	if wait := time.Until(t); !t.IsZero() && wait > 0 {
		d.timer = time.AfterFunc(wait, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.changed.Broadcast()
		})
	}
	s.changed.Broadcast()
	return nil
}

// deadline is guarded by the stream's mu.
type deadline struct {
	at    time.Time
	timer *time.Timer // wakes who waits; nil for none
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}
