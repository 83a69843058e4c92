package agent_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// checkpoint parts the client from its guest and lets it find it again, as a
// checkpoint does.
func checkpoint(t *testing.T, b *box) {
	t.Helper()
	if err := b.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.Park(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.Release()
	if err := b.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Whatever is on its way when a checkpoint cuts the connection under a stream
// arrives once and in order, and so does the end of each direction.
func TestConnectLosesNothingToCheckpoints(t *testing.T) {
	b := newBox(t)
	const streams, size = 4, 6 << 20
	up, down := randomBytes(size), randomBytes(size + 1)[1:]
	// pieces of random length, slowly enough that checkpoints meet them anywhere
	pour := func(c net.Conn, p []byte, seed uint64) error {
		r := rand.New(rand.NewPCG(seed, 1))
		for len(p) > 0 {
			n := min(len(p), 1+r.IntN(90<<10))
			if r.IntN(3) == 0 {
				n = min(n, 1+r.IntN(20))
			}
			if _, err := c.Write(p[:n]); err != nil {
				return err
			}
			p = p[n:]
		}
		return c.(interface{ CloseWrite() error }).CloseWrite()
	}
	inside := make(chan error, streams)
	port := listen(t, func(c *net.TCPConn) {
		var wg sync.WaitGroup
		wg.Go(func() { _ = pour(c, down, 7) })
		got, err := io.ReadAll(c)
		if err == nil && !bytes.Equal(got, up) {
			err = errors.New("the server got something else")
		}
		inside <- err
		wg.Wait()
	})
	var wg sync.WaitGroup
	for i := range streams {
		c := connect(t, b, port)
		wg.Go(func() {
			if err := pour(c, up, uint64(i)); err != nil {
				t.Errorf("write: %v", err)
			}
		})
		wg.Go(func() {
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, down) {
				t.Errorf("%d bytes of %d came back, or others: %v", len(got), len(down), err)
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	cuts := 0
	for over := false; !over; cuts++ {
		checkpoint(t, b)
		select {
		case <-done:
			over = true
		case <-time.After(time.Duration(rand.IntN(3000)) * time.Microsecond):
		}
	}
	for range streams {
		if err := <-inside; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d checkpoints", cuts)
	if cuts < 5 {
		t.Errorf("%d checkpoints met the streams: too few to say anything", cuts)
	}
}

// A fork's child has the memory of its parent, and so the guest's ends of the
// parent's connections. They are not its own: its servers see them cut.
func TestConnectionsOfTheSourceEndInAChild(t *testing.T) {
	b := newBox(t)
	seen := make(chan error, 1)
	port := listen(t, func(c *net.TCPConn) {
		_, err := io.ReadAll(c)
		seen <- err
	})
	c := connect(t, b, port)
	if _, err := c.Write([]byte("half a que")); err != nil {
		t.Fatal(err)
	}
	if err := b.Park(t.Context()); err != nil {
		t.Fatal(err)
	}
	child := guest.NewClient(dialer(b.addr), secret)
	defer child.Close()
	if err := child.Rekey(t.Context(), bytes.Repeat([]byte("c"), 32), guest.Container{}, false); err != nil {
		t.Fatal(err)
	}
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("the server in the child saw %v, not a reset", err)
	}
	if n := b.agent.Visitors(); n != 0 {
		t.Fatalf("%d connections from outside are left", n)
	}
}

// The same sandbox, woken in another kernel under another secret, has them still.
func TestConnectGoesOnInAnotherKernel(t *testing.T) {
	b := newBox(t)
	port := listen(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	c := connect(t, b, port)
	ask(t, c, "before")
	if err := b.Park(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("asleep")); err != nil {
		t.Fatal(err)
	}
	b.Outlive()
	b.Client.Close() // its kernel is gone
	next := guest.NewClient(dialer(b.addr), secret)
	if err := next.Rekey(t.Context(), bytes.Repeat([]byte("n"), 32), guest.Container{}, true); err != nil {
		t.Fatal(err)
	}
	b.MoveTo(next)
	got := make([]byte, 6)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "asleep" {
		t.Fatalf("%q, %v", got, err)
	}
	ask(t, c, "after")
}

func ask(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if _, err := c.Write([]byte(s)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(s))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != s {
		t.Fatalf("%q came back for %q, %v", got, s, err)
	}
}

// Who closes a connection of a sleeping sandbox has written all the same.
func TestConnectClosedAsleepIsClosedAtTheWake(t *testing.T) {
	b := newBox(t)
	seen := make(chan string, 1)
	port := listen(t, func(c *net.TCPConn) {
		p, _ := io.ReadAll(c)
		seen <- string(p)
	})
	c := connect(t, b, port)
	if err := b.Park(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("last words")); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	b.Release()
	if got := <-seen; got != "last words" {
		t.Fatalf("the server read %q", got)
	}
	eventually(t, "the guest forgets it", func() bool { return b.agent.Visitors() == 0 })
}

// A client outside that breaks off is not one that ended in order.
func TestConnectAbortResetsTheServersEnd(t *testing.T) {
	b := newBox(t)
	seen := make(chan error, 1)
	port := listen(t, func(c *net.TCPConn) { _, err := io.ReadAll(c); seen <- err })
	c := connect(t, b, port)
	if err := c.Abort(nil); err != nil {
		t.Fatal(err)
	}
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("the server saw %v", err)
	}
}

// A host that dies leaves nobody to carry its connections on.
func TestConnectEndsWithoutItsHost(t *testing.T) {
	b := newBox(t)
	seen := make(chan error, 1)
	port := listen(t, func(c *net.TCPConn) { _, err := io.ReadAll(c); seen <- err })
	host := guest.NewClient(dialer(b.addr), secret)
	c, err := host.Connect(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	host.Close()
	began := time.Now()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Fatalf("the host's end: %v", err)
	}
	select {
	case <-seen:
	case <-time.After(time.Minute):
		t.Fatal("the server inside still waits for its client")
	}
	if waited := time.Since(began); waited < 5*time.Second {
		t.Fatalf("after %s: a host that comes back would be late", waited)
	}
	eventually(t, "the guest forgets it", func() bool { return b.agent.Visitors() == 0 })
}

// Connections that begin and end while checkpoints come and go.
func TestConnectBeginsAndEndsAmidCheckpoints(t *testing.T) {
	b := newBox(t)
	port := listen(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 15 {
				c, err := b.Connect(t.Context(), port)
				if err != nil {
					t.Errorf("connect: %v", err)
					return
				}
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				if _, err := c.Write([]byte("ping")); err != nil {
					t.Errorf("write: %v", err)
				}
				_ = c.CloseWrite()
				if got, err := io.ReadAll(c); err != nil || string(got) != "ping" {
					t.Errorf("%q, %v", got, err)
				}
				c.Close()
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for over := false; !over; {
		checkpoint(t, b)
		select {
		case <-done:
			over = true
		case <-time.After(time.Duration(rand.IntN(2000)) * time.Microsecond):
		}
	}
	eventually(t, "the guest forgets them", func() bool { return b.agent.Visitors() == 0 })
}
