package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// Stream is a byte stream in the Data frames of a connection that has nothing
// else to do any more: what Connect makes of one, on both of its sides.
//
// The connection is its carrier and may be replaced: each side keeps what it sent
// until the other's reader has taken it, and says to a new carrier how far it has
// come (Mark), so that what was on its way when the old one was cut goes out once
// more. Between two carriers a stream stands still and nothing else.
//
// Each side may have a Window on its way that the other's reader has not taken
// (Credit says when it has), so that a reader that rests stops its own writer
// and nothing else: not the other direction, whose credit comes over the same
// connection, and not gVisor's port forward (see the package). It is also all
// that is kept. Shut ends one direction, Over the stream.
//
// Who owns the carrier hands every frame it reads to Feed. An idle stream holds
// no more than its last small messages.
type Stream struct {
	plain bool // the peer knows no Over; set before the first Attach

	sending sync.Mutex // one frame at a time goes out, in the order of put

	mu struct {
		sync.Mutex
		changed sync.Cond // on mu: any of what follows
		conn    *Conn     // its carrier; nil while it has none

		in   [][]byte         // received, not read
		now  func([]byte) int // the writer of WriteTo, as far as it takes without waiting; nil: none, or it cannot
		got  int64            // bytes of the peer that arrived; all of in is before it
		took int64            // of those, that were read
		said int64            // of those, that the peer was told

		kept     []byte // ours from base on: until they were taken
		base     int64
		put      int64 // bytes of ours in all; kept ends there
		had      int64 // of those, that the peer has taken
		reserved int   // of the window, by writers on their way

		eof    bool   // the peer has shut its direction
		shut   bool   // we have shut ours
		closed bool   // by Close or Abort
		over   []byte // content of the Over to send; nil = none is due
		err    error  // why nothing will come any more
		read   deadline
		write  deadline
	}
}

// Mark is how far one side of a stream has come with what the other sent.
type Mark struct {
	Got  int64 `json:"got"`  // arrived
	Took int64 `json:"took"` // of that, read
}

var errShut = errors.New("write on a stream that was shut")

// NewStream begins a stream that has no carrier yet.
func NewStream() *Stream {
	s := &Stream{}
	s.mu.changed.L = &s.mu
	return s
}

// Plain says that the peer is a guest of before streams outlived their
// connections: the end of the one is the end of the other.
func (s *Stream) Plain() { s.plain = true }

// Mark is how far this side has come. It holds until the next Feed.
func (s *Stream) Mark() Mark {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.said = s.mu.took
	return Mark{Got: s.mu.got, Took: s.mu.took}
}

// Attach makes c the carrier, which nobody else may write to from now on, and
// sends what the peer, whose mark is given, did not get. An error says that the
// mark is not of this stream.
func (s *Stream) Attach(c *Conn, peer Mark) error {
	s.sending.Lock()
	s.mu.Lock()
	if peer.Took < s.mu.had || peer.Got < peer.Took || peer.Got < s.mu.base || peer.Got > s.mu.put {
		defer s.sending.Unlock()
		defer s.mu.Unlock()
		return fmt.Errorf("mark %+v of a stream with %d to %d of %d", peer, s.mu.had, s.mu.base, s.mu.put)
	}
	s.mu.conn, s.mu.had = c, peer.Took
	s.forgetLocked(peer.Got)
	rest, shut, over := s.mu.kept, s.mu.shut, s.mu.over // kept grows under sending only
	s.mu.changed.Broadcast()
	s.mu.Unlock()
	if len(rest) == 0 && !shut && over == nil {
		s.sending.Unlock()
		return nil
	}
	// Beside the caller, who must read: both sides may have more to say than the
	// connection takes.
	go func() {
		defer s.sending.Unlock()
		for len(rest) > 0 {
			n := min(len(rest), MaxData)
			if !s.carry(c, Data, rest[:n]) {
				return
			}
			rest = rest[n:]
		}
		if shut && !s.carry(c, Shut, nil) {
			return
		}
		if over != nil {
			s.carry(c, Over, over)
		}
	}()
	return nil
}

// Detach says that c carries no longer.
func (s *Stream) Detach(c *Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.conn == c {
		s.mu.conn = nil
	}
}

// carry sends one frame, under sending. A carrier that fails is closed, and whoever
// reads it finds out.
func (s *Stream) carry(c *Conn, k Kind, p []byte) bool {
	if err := c.WriteFrame(k, p); err != nil {
		c.Close()
		return false
	}
	return true
}

// Feed takes a frame of the peer. An error says that the peer does not keep to
// the protocol; the stream is then of no use. Bytes for which nothing waits in
// front go to the socket of WriteTo at once, in the caller's goroutine: a hand-over
// to another is a wake-up, which costs more than the write.
func (s *Stream) Feed(k Kind, p []byte) error {
	s.mu.Lock()
	switch k {
	case Data:
		if s.mu.eof || len(p) == 0 || s.mu.got-s.mu.said+int64(len(p)) > Window {
			s.mu.Unlock()
			return fmt.Errorf("%d bytes that the stream has no room for", len(p))
		}
		s.mu.got += int64(len(p))
		if s.mu.closed {
			s.mu.took = s.mu.got
			s.mu.Unlock()
			return nil
		}
		if now := s.mu.now; now != nil && s.mu.took+int64(len(p)) == s.mu.got {
			s.mu.Unlock()
			n := now(p)
			s.mu.Lock()
			say := s.tookLocked(n)
			if p = p[n:]; len(p) == 0 {
				s.mu.Unlock()
				s.credit(say)
				return nil
			}
			defer s.credit(say)
		}
		// Small ones together: 256 KiB in frames of a byte would be 10 MiB.
		if n := len(s.mu.in); n > 0 && len(s.mu.in[n-1])+len(p) <= mergeBelow {
			s.mu.in[n-1] = append(s.mu.in[n-1], p...)
		} else {
			s.mu.in = append(s.mu.in, p)
		}
	case Credit:
		n, err := ParseCredit(p)
		if err != nil || n < 0 || s.mu.had+int64(n) > s.mu.put {
			s.mu.Unlock()
			return errors.New("credit for what was never sent")
		}
		s.mu.had += int64(n)
		s.forgetLocked(s.mu.had)
	case Shut:
		s.mu.eof = true
	default:
		s.mu.Unlock()
		return fmt.Errorf("frame of kind %d in a stream", k)
	}
	s.mu.changed.Broadcast()
	s.mu.Unlock()
	return nil
}

// mergeBelow is how large frames that wait may be to be put together.
const mergeBelow = 4 << 10

// forgetLocked lets go of what is kept in front of an offset.
func (s *Stream) forgetLocked(to int64) {
	if to <= s.mu.base {
		return
	}
	s.mu.kept = s.mu.kept[to-s.mu.base:]
	s.mu.base = to
	if len(s.mu.kept) == 0 && cap(s.mu.kept) > mergeBelow {
		s.mu.kept = nil
	}
}

// Fail says that no frame will come any more. What came before is still read.
func (s *Stream) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.err == nil {
		s.mu.err = err
	}
	s.mu.kept = nil
	s.mu.base = s.mu.put
	s.mu.changed.Broadcast()
}

// Read waits for bytes; io.EOF once the peer has shut its direction.
func (s *Stream) Read(p []byte) (int, error) {
	s.mu.Lock()
	if err := s.awaitLocked(); err != nil {
		s.mu.Unlock()
		return 0, err
	}
	n := 0
	for n < len(p) && len(s.mu.in) > 0 {
		m := copy(p[n:], s.mu.in[0])
		n += m
		if m == len(s.mu.in[0]) {
			s.popLocked()
		} else {
			s.mu.in[0] = s.mu.in[0][m:]
		}
	}
	say := s.tookLocked(n)
	s.mu.Unlock()
	s.credit(say)
	return n, nil
}

// WriteTo reads to the end without a buffer of its own: what io.Copy prefers. It is
// the only reader. What Feed writes past it does not count as written.
func (s *Stream) WriteTo(w io.Writer) (total int64, err error) {
	s.writeNow(withoutWaiting(w))
	defer s.writeNow(nil)
	for {
		s.mu.Lock()
		if err := s.awaitLocked(); err != nil {
			s.mu.Unlock()
			if err == io.EOF {
				err = nil
			}
			return total, err
		}
		p := s.mu.in[0]
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

func (s *Stream) writeNow(now func([]byte) int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.now = now
}

// withoutWaiting writes what a socket takes at once; nil if w is none. An error is
// seen by the next write that waits.
func withoutWaiting(w io.Writer) func([]byte) int {
	c, ok := w.(interface {
		net.Conn
		syscall.Conn
	})
	if !ok {
		return nil
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return nil
	}
	return func(p []byte) (n int) {
		_ = rc.Write(func(fd uintptr) bool {
			for {
				var err error
				if n, err = unix.Write(int(fd), p); err != unix.EINTR {
					return true
				}
			}
		})
		return max(n, 0)
	}
}

// awaitLocked waits until there is something to read.
func (s *Stream) awaitLocked() error {
	for {
		switch {
		case s.mu.closed:
			return net.ErrClosed
		case s.mu.read.passed():
			return os.ErrDeadlineExceeded
		case len(s.mu.in) > 0:
			return nil
		case s.mu.eof:
			return io.EOF
		case s.mu.err != nil:
			return s.mu.err
		}
		s.mu.changed.Wait()
	}
}

func (s *Stream) popLocked() {
	s.mu.in[0] = nil
	if s.mu.in = s.mu.in[1:]; len(s.mu.in) == 0 {
		s.mu.in = nil
	}
}

// tookLocked counts n bytes as read and says whether to say so now. In quarters:
// a frame for each small read would be more traffic than the reads. Less goes
// with the next bytes of ours.
func (s *Stream) tookLocked(n int) (say bool) {
	s.mu.took = min(s.mu.took+int64(n), s.mu.got) // a Close in between has taken all
	return s.mu.took-s.mu.said >= Window/4 && !s.mu.eof && s.mu.err == nil && !s.mu.closed
}

func (s *Stream) credit(say bool) {
	if !say {
		return
	}
	s.sending.Lock()
	defer s.sending.Unlock()
	s.mu.Lock()
	c, n := s.creditLocked()
	s.mu.Unlock()
	if n > 0 && c.WriteCredit(n) != nil {
		c.Close()
	}
}

// creditLocked is what to say to the carrier about what was read; a new one is
// told by Mark.
func (s *Stream) creditLocked() (*Conn, int) {
	if s.mu.conn == nil {
		return nil, 0
	}
	n := int(s.mu.took - s.mu.said)
	s.mu.said = s.mu.took
	return s.mu.conn, n
}

// Write returns when the peer has room for all of p and it is on its way, or
// kept until there is one.
func (s *Stream) Write(p []byte) (int, error) {
	total := 0
	for len(p) > 0 {
		n, err := s.reserve(min(len(p), MaxData))
		if err != nil {
			return total, err
		}
		s.send(p[:n])
		total += n
		p = p[n:]
	}
	return total, nil
}

// send sends what there is room for.
func (s *Stream) send(p []byte) {
	s.sending.Lock()
	defer s.sending.Unlock()
	s.mu.Lock()
	s.mu.kept = append(s.mu.kept, p...)
	s.mu.put += int64(len(p))
	s.mu.reserved -= len(p)
	c, n := s.creditLocked()
	s.mu.Unlock()
	if c == nil {
		return
	}
	if n > 0 {
		_ = c.QueueCredit(n) // cannot fail: it is short
	}
	s.carry(c, Data, p)
}

// reserve waits until some of n bytes may go.
func (s *Stream) reserve(n int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.mu.closed:
			return 0, net.ErrClosed
		case s.mu.shut:
			return 0, errShut
		case s.mu.err != nil:
			return 0, s.mu.err
		case s.mu.write.passed():
			return 0, os.ErrDeadlineExceeded
		}
		if free := Window - int(s.mu.put-s.mu.had) - s.mu.reserved; free > 0 {
			n = min(n, free)
			s.mu.reserved += n
			return n, nil
		}
		s.mu.changed.Wait()
	}
}

// CloseWrite shuts our direction: the peer reads its end after what was written.
func (s *Stream) CloseWrite() error {
	s.mu.Lock()
	switch {
	case s.mu.closed:
		s.mu.Unlock()
		return net.ErrClosed
	case s.mu.shut || s.mu.err != nil:
		defer s.mu.Unlock()
		return s.mu.err
	}
	s.mu.Unlock()
	s.sending.Lock()
	defer s.sending.Unlock()
	s.mu.Lock()
	c, again := s.mu.conn, s.mu.shut
	s.mu.shut = true
	s.mu.changed.Broadcast()
	s.mu.Unlock()
	if c != nil && !again {
		s.carry(c, Shut, nil)
	}
	return nil
}

// Close ends the stream both ways. What was written before is still read by the
// peer, which ends the carrier. It does not wait.
func (s *Stream) Close() error { return s.end(true, nil) }

// Abort is Close that lets the peer see that the stream was cut, and why; what is
// on its way may be lost.
func (s *Stream) Abort(why error) error { return s.end(false, why) }

func (s *Stream) end(inOrder bool, why error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil
	}
	s.mu.closed = true
	s.mu.in, s.mu.took = nil, s.mu.got
	s.mu.read.stop()
	s.mu.write.stop()
	// Behind what a writer is sending just now, for which nobody waits here: the
	// peer may stand still.
	go func() {
		s.sending.Lock()
		defer s.sending.Unlock()
		s.mu.Lock()
		s.mu.over = []byte{}
		if !inOrder {
			if why == nil {
				why = sandbox.Errorf(sandbox.Unavailable, "", "the other side broke off")
			}
			s.mu.over, _ = json.Marshal(FlattenError(why))
		}
		say := inOrder && !s.mu.shut
		s.mu.shut = s.mu.shut || inOrder
		c, over := s.mu.conn, s.mu.over
		s.mu.changed.Broadcast()
		s.mu.Unlock()
		if c == nil || say && !s.carry(c, Shut, nil) {
			return
		}
		if s.plain {
			c.Close()
			return
		}
		s.carry(c, Over, over)
	}()
	s.mu.changed.Broadcast()
	return nil
}

// Closed says whether Close or Abort was called on this side.
func (s *Stream) Closed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.closed
}

// ParseOver is the content of an Over frame: nil if the peer closed in order.
func ParseOver(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	e := &sandbox.Error{}
	if err := json.Unmarshal(p, e); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "", "the stream was cut")
	}
	return e
}

// LocalAddr and RemoteAddr are of no use: the two ends are in different kernels.
func (s *Stream) LocalAddr() net.Addr  { return addr{} }
func (s *Stream) RemoteAddr() net.Addr { return addr{} }

type addr struct{}

func (addr) Network() string { return "cove" }
func (addr) String() string  { return "stream" }

// SetDeadline, SetReadDeadline and SetWriteDeadline are as net.Conn has them.
func (s *Stream) SetDeadline(t time.Time) error {
	_ = s.SetReadDeadline(t)
	return s.SetWriteDeadline(t)
}

func (s *Stream) SetReadDeadline(t time.Time) error  { return s.setDeadline(&s.mu.read, t) }
func (s *Stream) SetWriteDeadline(t time.Time) error { return s.setDeadline(&s.mu.write, t) }

func (s *Stream) setDeadline(d *deadline, t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return net.ErrClosed
	}
	d.stop()
	d.at = t
	if wait := time.Until(t); !t.IsZero() && wait > 0 {
		d.timer = time.AfterFunc(wait, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.mu.changed.Broadcast()
		})
	}
	s.mu.changed.Broadcast()
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
