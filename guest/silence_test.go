package guest_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// quick looks into a silence at once. Nothing in these tests waits for longer than it must, but
// for what shows that a silence that is right is left alone: bytes that are there and whose
// reader has not run yet, on a loaded machine, are not lost.
var quick = guest.SilenceLimits{Silence: 10 * time.Millisecond, Longest: 20 * time.Millisecond, Arrive: 100 * time.Millisecond, Answer: 5 * time.Second, Deaf: time.Minute}

// lossy is a world whose connections lose frames: those that its faults name.
type lossy struct {
	*guest.Client
	silent atomic.Int32
	out    func(k wire.Kind) bool // says which frames of the guest to lose, with all after them
	in     func(k wire.Kind) bool // and of the client
	all    bool                   // of the questions too, which faults leave alone otherwise
}

func newLossy(t *testing.T, d guest.SilenceLimits) *lossy {
	w, _ := newWorld(t)
	l := &lossy{}
	l.Client = guest.NewClient(func(ctx context.Context) (net.Conn, error) {
		c, err := w.dial(ctx)
		if err != nil {
			return nil, err
		}
		return &lossyConn{Conn: c, l: l}, nil
	}, secret)
	l.SetSilenceLimits(d)
	l.OnSilent(func(string) { l.silent.Add(1) })
	t.Cleanup(func() { l.Close() })
	if err := l.Enter(t.Context(), guest.Container{WorkingDir: "/work"}); err != nil {
		t.Fatal(err)
	}
	return l
}

// once loses the first frame of a kind, from now on.
func once(k wire.Kind) func(wire.Kind) bool {
	var done atomic.Bool
	return func(got wire.Kind) bool { return got == k && done.CompareAndSwap(false, true) }
}

// lossyConn loses everything from a frame on, as a forward that is stuck does.
type lossyConn struct {
	net.Conn
	l       *lossy
	in      bytes.Buffer // of the guest, whole frames or the beginning of one
	ready   []byte
	deadIn  bool
	deadOut bool
	asks    bool // the request under way is a question
}

func (c *lossyConn) Write(p []byte) (int, error) {
	c.asks = bytes.Contains(p, []byte(`"op":"progress"`)) && !c.l.all
	if len(p) >= 5 && !c.asks && c.l.in != nil && c.l.in(wire.Kind(p[4])) {
		c.deadOut = true
	}
	if c.deadOut {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *lossyConn) Read(p []byte) (int, error) {
	for len(c.ready) == 0 {
		b := make([]byte, 4096)
		n, err := c.Conn.Read(b)
		if err != nil {
			return 0, err
		}
		c.in.Write(b[:n])
		for c.in.Len() >= 5 {
			h := c.in.Bytes()
			size := 5 + int(binary.BigEndian.Uint32(h))
			if c.in.Len() < size {
				break
			}
			f := c.in.Next(size)
			if !c.asks && c.l.out != nil && c.l.out(wire.Kind(f[4])) {
				c.deadIn = true
			}
			if !c.deadIn {
				c.ready = append(c.ready, f...)
			}
		}
	}
	n := copy(p, c.ready)
	c.ready = c.ready[n:]
	return n, nil
}

func TestACallWhoseAnswerIsLostIsAskedAgainAndCounted(t *testing.T) {
	l := newLossy(t, quick)
	ctx := t.Context()
	if _, err := l.WriteFile(ctx, "/f", []byte("content"), sandbox.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	steps := []struct {
		name string
		do   func() error
	}{
		{"read", func() error {
			p, _, err := l.ReadFile(ctx, "/f", 0, 0)
			if err == nil && string(p) != "content" {
				t.Errorf("read %q", p)
			}
			return err
		}},
		{"stat", func() error { _, err := l.Stat(ctx, "/f"); return err }},
		{"append", func() error {
			_, err := l.WriteFile(ctx, "/f", []byte("+"), sandbox.WriteOptions{Append: true})
			return err
		}},
		{"mkdir", func() error { _, err := l.Mkdir(ctx, "/made", sandbox.WriteOptions{}); return err }},
		{"move", func() error { _, err := l.Move(ctx, "/made", "/moved"); return err }},
		{"remove", func() error { return l.Remove(ctx, "/moved", false) }},
	}
	for i, s := range steps {
		l.out = once(wire.Reply)
		if err := s.do(); err != nil {
			t.Errorf("%s: %v", s.name, err)
		}
		if got := l.silent.Load(); got != int32(i+1) {
			t.Errorf("%s: %d lost so far, not %d", s.name, got, i+1)
		}
	}
	if p, _, err := l.ReadFile(ctx, "/f", 0, 0); err != nil || string(p) != "content+" {
		t.Errorf("appended once it is %q (%v)", p, err)
	}
}

func TestARequestThatNeverArrivedIsSentAgain(t *testing.T) {
	l := newLossy(t, quick)
	if err := l.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.in = once(wire.Request)
	if _, err := l.Mkdir(t.Context(), "/made", sandbox.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if l.silent.Load() != 1 {
		t.Errorf("%d lost, not 1", l.silent.Load())
	}
}

func TestAnExecWhoseEndIsLostGoesOnWhereItWas(t *testing.T) {
	l := newLossy(t, quick)
	l.out = once(wire.End)
	var out []byte
	var starts, ends int
	err := l.Start(t.Context(), sandbox.ProcessSpec{ExecID: "e", Args: []string{"sh", "-c", "echo ran >>n; cat n"}}, 0, func(ev sandbox.ProcessEvent) error {
		switch {
		case ev.Started != nil:
			starts++
		case ev.Output != nil:
			out = append(out, ev.Output.Data...)
		case ev.End != nil:
			ends++
		}
		return nil
	})
	if err != nil || starts != 1 || ends != 1 || string(out) != "ran\n" {
		t.Errorf("%d starts, %d ends, %q, %v", starts, ends, out, err)
	}
	if l.silent.Load() != 1 {
		t.Errorf("%d lost, not 1", l.silent.Load())
	}
}

func TestAProcessThatIsQuietIsLeftAlone(t *testing.T) {
	l := newLossy(t, quick)
	began := time.Now()
	err := l.Start(t.Context(), sandbox.ProcessSpec{ExecID: "e", Args: []string{"sleep", "0.3"}}, 0, func(sandbox.ProcessEvent) error { return nil })
	if err != nil || time.Since(began) < 300*time.Millisecond || l.silent.Load() != 0 {
		t.Errorf("%v after %v, %d lost", err, time.Since(began), l.silent.Load())
	}
}

func TestAGuestThatAnswersNothingFailsTheCall(t *testing.T) {
	d := quick
	d.Answer, d.Deaf = 20*time.Millisecond, 50*time.Millisecond
	l := newLossy(t, d)
	l.all, l.in = true, func(k wire.Kind) bool { return k == wire.Request }
	_, err := l.Stat(t.Context(), "/")
	if sandbox.ClassOf(err) != sandbox.Unavailable || l.silent.Load() != 0 {
		t.Errorf("%v, %d lost", err, l.silent.Load())
	}
}

func TestACallThatMeetsAPauseWakes(t *testing.T) {
	_, c := newWorld(t)
	woken := make(chan struct{}, 1)
	c.OnHeld(func() { c.Release(); woken <- struct{}{} })
	if err := c.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Enter(contextFor(t, time.Millisecond), guest.Container{}); err == nil {
		t.Error("a call of the node's own went through")
	}
	select {
	case <-woken:
		t.Error("a call of the node's own woke the sandbox")
	default:
	}
	if _, err := c.Stat(t.Context(), "/"); sandbox.ClassOf(err) != sandbox.Precondition { // it has no container
		t.Error(err)
	}
	<-woken
}

func contextFor(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
