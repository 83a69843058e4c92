package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/internal/testport"
	"github.com/cove-sandbox/cove/sandbox"
)

// listen serves each connection on a loopback port with handle.
func listen(t *testing.T, handle func(*net.TCPConn)) (port int) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().(*net.TCPAddr).Port
}

// bounded ends a test that hangs with an error instead of with the suite.
func bounded(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
}

func connect(t *testing.T, b *box, port int) *guest.Conn {
	t.Helper()
	c, err := b.Connect(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	bounded(t, c)
	return c
}

func randomBytes(n int) []byte {
	p := make([]byte, n)
	src := rand.NewChaCha8([32]byte{1})
	_, _ = src.Read(p)
	return p
}

func TestConnectCarriesBothWaysAtOnce(t *testing.T) {
	b := newBox(t)
	port := listen(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c); c.CloseWrite() })
	c := connect(t, b, port)
	want := randomBytes(20 << 20)
	go func() {
		_, _ = c.Write(want)
		_ = c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	if sha256.Sum256(got) != sha256.Sum256(want) {
		t.Fatalf("%d bytes came back of %d, or others", len(got), len(want))
	}
}

func TestConnectHalfCloseEachWay(t *testing.T) {
	b := newBox(t)
	after := make(chan []byte, 1)
	port := listen(t, func(c *net.TCPConn) {
		_, _ = c.Write([]byte("banner"))
		_ = c.CloseWrite() // done talking, still listening
		p, _ := io.ReadAll(c)
		after <- p
	})
	c := connect(t, b, port)
	got, err := io.ReadAll(c)
	if err != nil || string(got) != "banner" {
		t.Fatalf("%q, %v", got, err)
	}
	if _, err := c.Write([]byte("late")); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if got := <-after; string(got) != "late" {
		t.Fatalf("the server read %q", got)
	}
}

// One direction that rests must not stop the other: their credit shares the
// connection.
func TestConnectUnreadBannerDoesNotStopAnUpload(t *testing.T) {
	b := newBox(t)
	sum := make(chan [32]byte, 1)
	big := randomBytes(8 << 20)
	port := listen(t, func(c *net.TCPConn) {
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = c.Write(big); _ = c.CloseWrite() })
		p, _ := io.ReadAll(c)
		sum <- sha256.Sum256(p)
		wg.Wait()
	})
	c := connect(t, b, port)
	want := randomBytes(4 << 20)
	if _, err := c.Write(want); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if <-sum != sha256.Sum256(want) {
		t.Fatal("another upload arrived")
	}
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, big) {
		t.Fatalf("%d bytes of %d, %v", len(got), len(big), err)
	}
}

func TestConnectWriterWaitsForAReaderInside(t *testing.T) {
	b := newBox(t)
	read := make(chan struct{})
	port := listen(t, func(c *net.TCPConn) { <-read; _, _ = io.Copy(io.Discard, c) })
	c := connect(t, b, port)
	big := make([]byte, 64<<20)
	_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
	n, err := c.Write(big)
	if !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err) {
		t.Fatalf("wrote %d, %v; a server that does not read took all of it", n, err)
	}
	close(read)
	_ = c.SetWriteDeadline(time.Now().Add(time.Minute))
	if _, err := c.Write(big[n:]); err != nil {
		t.Fatal(err)
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func TestConnectToNothing(t *testing.T) {
	b := newBox(t)
	_, err := b.Connect(t.Context(), testport.Free(t, "127.0.0.1"))
	if !errors.Is(err, sandbox.ErrPortClosed) || !errors.Is(err, sandbox.ErrPrecondition) {
		t.Fatalf("%v", err)
	}
	if errors.Is(err, sandbox.ErrAsleep) {
		t.Fatal("one reason passes for another")
	}
	for _, port := range []int{0, -1, 65536} {
		if _, err := b.Connect(t.Context(), port); !errors.Is(err, sandbox.ErrInvalid) {
			t.Fatalf("port %d: %v", port, err)
		}
	}
	if err := b.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestConnectIPv6Only(t *testing.T) {
	b := newBox(t)
	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6 loopback here")
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, _ = c.Write([]byte("six"))
			c.Close()
		}
	}()
	got, err := io.ReadAll(connect(t, b, l.Addr().(*net.TCPAddr).Port))
	if err != nil || string(got) != "six" {
		t.Fatalf("%q, %v", got, err)
	}
}

// A server that resets its connection is not one that ended it in order.
func TestConnectResetIsSeen(t *testing.T) {
	b := newBox(t)
	port := listen(t, func(c *net.TCPConn) {
		_, _ = io.ReadFull(c, make([]byte, 1))
		_ = c.SetLinger(0)
	})
	c := connect(t, b, port)
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(c); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Fatalf("a reset reads as %v", err)
	}
}

// Leaving the container and closing the client end open streams; the server
// inside sees its connections end. A client that is closed and never comes back is
// one whose process died: that takes the guest its grace.
func TestConnectEndsWithItsSandbox(t *testing.T) {
	for name, end := range map[string]func(*box) error{
		"leave": func(b *box) error { return b.Leave(context.Background()) },
		"close": func(b *box) error { return b.Client.Close() },
		"rekey": func(b *box) error {
			return b.Rekey(context.Background(), bytes.Repeat([]byte("s"), 32), guest.Container{}, false)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			inside := make(chan error, 1)
			port := listen(t, func(c *net.TCPConn) { _, err := io.ReadAll(c); inside <- err })
			c := connect(t, b, port)
			read := make(chan error, 1)
			go func() { _, err := io.ReadAll(c); read <- err }()
			if err := end(b); err != nil {
				t.Fatal(err)
			}
			if err := <-read; !errors.Is(err, sandbox.ErrUnavailable) {
				t.Fatalf("the reader saw %v", err)
			}
			<-inside
			b.Release()
		})
	}
}

func TestConnectManyIdle(t *testing.T) {
	b := newBox(t)
	port := listen(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	var conns []*guest.Conn
	for range 100 {
		conns = append(conns, connect(t, b, port))
	}
	for i, c := range conns {
		if _, err := c.Write([]byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
		var p [1]byte
		if _, err := io.ReadFull(c, p[:]); err != nil || p[0] != byte(i) {
			t.Fatalf("stream %d: %d, %v", i, p[0], err)
		}
	}
}
