package guest

import (
	"encoding/json"
	"errors"
	"sync"

	"github.com/cove-sandbox/cove/guest/wire"
)

// sender writes one request: its header, then its content no faster than the
// guest takes it (see package wire for why).
type sender struct {
	conn  *wire.Conn
	parts [][]byte // of the content, in order
	done  chan error

	mu struct {
		sync.Mutex
		changed *sync.Cond
		window  int // bytes that may still be sent before the guest takes more
		ended   bool
	}
}

var errEnded = errors.New("the answer ended before the request")

// newSender queues the header.
func newSender(conn *wire.Conn, r wire.Req, content []byte) (*sender, error) {
	s := &sender{conn: conn, parts: [][]byte{content}, done: make(chan error, 1)}
	s.mu.window = wire.Window
	s.mu.changed = sync.NewCond(&s.mu)
	r.Content = int64(len(content))
	h, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	if len(h) > wire.MaxHeader {
		return nil, errHeader
	}
	if len(h) > wire.MaxData {
		s.parts = [][]byte{h, content}
		n := int64(len(h))
		if h, err = json.Marshal(wire.Req{Op: r.Op, Header: n, Content: n + r.Content}); err != nil {
			return nil, err
		}
	}
	return s, conn.Queue(wire.Request, h)
}

// start sends the request, from a goroutine of its own if the guest must take
// some of it before all of it may go.
func (s *sender) start() error {
	n := 0
	for _, p := range s.parts {
		n += len(p)
	}
	if n <= wire.Window {
		err := s.send()
		s.done <- err
		return err
	}
	go func() { s.done <- s.send() }()
	return nil
}

func (s *sender) send() error {
	if err := s.conn.Flush(); err != nil {
		return err
	}
	for _, p := range s.parts {
		for len(p) > 0 {
			n := min(len(p), wire.MaxData)
			if !s.take(n) {
				return errEnded
			}
			if err := s.conn.WriteFrame(wire.Data, p[:n]); err != nil {
				return err
			}
			p = p[n:]
		}
	}
	return nil
}

// take waits until n more bytes may be on their way.
func (s *sender) take(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.mu.window < n && !s.mu.ended {
		s.mu.changed.Wait()
	}
	s.mu.window -= n
	return !s.mu.ended
}

// credit says that the guest has taken n bytes.
func (s *sender) credit(n int) {
	s.mu.Lock()
	s.mu.window += n
	s.mu.Unlock()
	s.mu.changed.Signal()
}

// finish waits for the sender; nothing is sent any more once it returns.
func (s *sender) finish() error {
	s.mu.Lock()
	s.mu.ended = true
	s.mu.Unlock()
	s.mu.changed.Signal()
	return <-s.done
}
