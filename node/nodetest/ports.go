package nodetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) dial(t *testing.T, id string) node.Conn {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	c, err := s.Node.Dial(ctx, id, s.Echo(t, id))
	cancel() // of the dialling only
	must(t, "dial", err)
	t.Cleanup(func() { c.Close() })
	must(t, "deadline", c.SetDeadline(time.Now().Add(patience)))
	return c
}

func (s *suite) testDial(t *testing.T) {
	id := s.box(t)
	c := s.dial(t, id)
	for _, word := range []string{"one", "two"} {
		_, err := io.WriteString(c, word)
		must(t, "write", err)
		got := make([]byte, 3)
		if _, err := io.ReadFull(c, got); err != nil || string(got) != word {
			t.Errorf("%q, %v", got, err)
		}
	}
	must(t, "close", c.Close())
	if _, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("reading what is closed: %v", err)
	}
	_, err := s.Node.Dial(t.Context(), id, 1)
	expect(t, "nothing listens", err, sandbox.ErrPortClosed)
}

// Each half ends by itself, and much goes both ways at once.
func (s *suite) testDialHalfClose(t *testing.T) {
	id := s.box(t)
	for _, size := range []int{0, 1, 9<<20 + 1} {
		c := s.dial(t, id)
		r, sum := random(size)
		h := sha256.New()
		var wg sync.WaitGroup
		wg.Go(func() {
			if n, err := io.Copy(h, c); err != nil || n != int64(size) {
				t.Errorf("%d bytes came back of %d, %v", n, size, err)
			}
		})
		_, err := io.Copy(c, r)
		must(t, "write", err)
		must(t, "close", c.CloseWrite())
		if _, err := c.Write([]byte("more")); err == nil {
			t.Error("written to a half that is closed")
		}
		wg.Wait()
		if size > 0 && [32]byte(h.Sum(nil)) != sum {
			t.Errorf("%d bytes came back as others", size)
		}
		must(t, "close", c.Close())
	}
}

func (s *suite) testDialDeadlines(t *testing.T) {
	id := s.box(t)
	c := s.dial(t, id)
	must(t, "deadline", c.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	must(t, "deadline", c.SetReadDeadline(time.Time{}))
	_, err := c.Write([]byte("x"))
	must(t, "write", err)
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Errorf("read after a deadline: %v", err)
	}
	// Nobody reads what comes back, so that writing stops.
	must(t, "deadline", c.SetWriteDeadline(time.Now().Add(300*time.Millisecond)))
	for err = nil; err == nil; {
		_, err = c.Write(make([]byte, 1<<20))
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write: %v", err)
	}
	must(t, "deadline", c.SetDeadline(time.Now().Add(patience)))
	must(t, "close", c.CloseWrite())
	_, err = io.Copy(io.Discard, c) // it goes on after a deadline
	must(t, "read", err)
}

func (s *suite) testDialEnds(t *testing.T) {
	id := s.box(t)
	c := s.dial(t, id)
	read := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		read <- err
	}()
	must(t, "kill", s.Node.Kill(t.Context(), id, sandbox.End{Cause: sandbox.KilledByUser}))
	if err := <-read; err == nil || err == io.EOF || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
}

func (s *suite) testCallbacks(t *testing.T) {
	id, port := s.box(t), s.Free(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l, err := node.Listen(ctx, s.Node, id, port)
	must(t, "listen", err)
	var wg sync.WaitGroup
	for range 3 {
		inside := s.Call(t, id, port)
		wg.Go(func() {
			defer inside.Close()
			_, _ = inside.Write([]byte("question"))
			_ = inside.(*net.TCPConn).CloseWrite()
			if got, err := io.ReadAll(inside); err != nil || string(got) != "question answered" {
				t.Errorf("inside: %q, %v", got, err)
			}
		})
		c, err := l.Accept()
		must(t, "accept", err)
		got, err := io.ReadAll(c)
		must(t, "read", err)
		_, err = c.Write(append(got, " answered"...))
		must(t, "write", err)
		must(t, "close", c.(node.Conn).CloseWrite())
		wg.Wait()
		c.Close()
	}
	must(t, "close", l.Close())
	_, err = s.Node.OpenCallback(ctx, "none")
	expect(t, "no such callback", err, sandbox.ErrNotFound)

	free := s.Occupy(t, id, port) // it is free again
	defer free()
	_, err = node.Listen(ctx, s.Node, id, port)
	expect(t, "the port is taken", err, sandbox.ErrPortTaken)
	_, err = node.Listen(ctx, s.Node, "nobody", port)
	expect(t, "nobody", err, sandbox.ErrNoSandbox)
}

func (s *suite) testCallbacksTakenOver(t *testing.T) {
	id, port := s.box(t), s.Free(t)
	first, err := node.Listen(t.Context(), s.Node, id, port)
	must(t, "listen", err)
	defer first.Close()
	second, err := node.Listen(t.Context(), s.Node, id, port)
	must(t, "listen again", err)
	_, err = first.Accept()
	expect(t, "the first", err, sandbox.ErrConflict)
	inside := s.Call(t, id, port)
	defer inside.Close()
	c, err := second.Accept()
	must(t, "accept", err)
	_, err = c.Write([]byte("hello"))
	must(t, "write", err)
	got := make([]byte, 5)
	if _, err := io.ReadFull(inside, got); err != nil || !bytes.Equal(got, []byte("hello")) {
		t.Errorf("%q, %v", got, err)
	}
	c.Close()
	must(t, "kill", s.Node.Kill(t.Context(), id, sandbox.End{Cause: sandbox.KilledByUser}))
	_, err = second.Accept()
	expect(t, "the second, of a sandbox that has ended", err, sandbox.ErrEnded)
	second.Close()
}
