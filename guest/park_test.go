package guest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

func enter(t *testing.T, c *guest.Client) {
	t.Helper()
	if err := c.Enter(t.Context(), guest.Container{Env: []string{"PATH=/usr/bin:/bin"}}); err != nil {
		t.Fatal(err)
	}
}

// A held client makes requests wait; released, they run.
func TestHold(t *testing.T) {
	_, c := newWorld(t)
	c.Hold()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := c.Ping(ctx); sandbox.ClassOf(err) != sandbox.DeadlineReached {
		t.Errorf("while held: %v", err)
	}
	asked := make(chan error, 1)
	go func() { asked <- c.Ping(t.Context()) }()
	c.Release()
	if err := <-asked; err != nil {
		t.Error(err)
	}
	c.Hold()
	go func() { asked <- c.Ping(t.Context()) }()
	c.Close()
	if err := <-asked; !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("held and closed: %v", err)
	}
}

// Park cuts what is endless off, which then goes on by itself, byte for byte.
func TestParkedStreamsGoOn(t *testing.T) {
	streamsGoOn(t, func(c *guest.Client) error {
		defer c.Release()
		return c.Park(t.Context())
	})
}

// So does Rekey, whose connections the guest ends.
func TestRekeyedStreamsGoOn(t *testing.T) {
	n := 0
	streamsGoOn(t, func(c *guest.Client) error {
		n++
		return c.Rekey(t.Context(), fmt.Appendf(nil, "the secret of the %dth kernel", n), guest.Container{}, true)
	})
}

func streamsGoOn(t *testing.T, cut func(*guest.Client) error) {
	w, c := newWorld(t)
	enter(t, c)
	spec := sandbox.ProcessSpec{ExecID: "talker", Args: []string{"sh", "-c", "i=0; while [ ! -e stop ]; do i=$((i+1)); echo $i; done"}}
	var out strings.Builder
	started := 0
	first := make(chan struct{}) // closed when it talks; a shell may be long in coming to its first line
	talks := sync.OnceFunc(func() { close(first) })
	done := make(chan error, 2)
	go func() {
		done <- c.Start(t.Context(), spec, 0, func(e sandbox.ProcessEvent) error {
			if e.Started != nil {
				started++
			}
			if e.Output != nil {
				out.Write(e.Output.Data)
				talks()
			}
			return nil
		})
	}()
	<-first
	go func() { _, err := c.Wait(t.Context(), "talker"); done <- err }()
	for range 10 {
		before := w.dials.Load()
		if err := cut(c); err != nil {
			t.Fatal(err)
		}
		if err := c.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		// What was cut off comes back by itself, on a machine with load later.
		for until := time.Now().Add(20 * time.Second); w.dials.Load() == before; time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				t.Fatal("a connection outlived it")
			}
		}
	}
	if _, err := c.WriteFile(t.Context(), "/stop", nil, sandbox.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	lines := strings.Fields(out.String())
	for i, l := range lines {
		if l != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, l)
		}
	}
	if started != 1 || len(lines) == 0 {
		t.Errorf("started %d times, %d lines", started, len(lines))
	}
}

// A watch goes on too, and says that it was away.
func TestParkedWatchReportsOverflow(t *testing.T) {
	_, c := newWorld(t)
	enter(t, c)
	ops := make(chan string, 10)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- c.Watch(ctx, "/", false, func(ch sandbox.FileChange) error { ops <- ch.Op; return nil })
	}()
	if op := <-ops; op != "ready" {
		t.Errorf("first %q", op)
	}
	if err := c.Park(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.Release()
	if op := <-ops; op != "overflow" {
		t.Errorf("after Park %q", op)
	}
	if _, err := c.WriteFile(t.Context(), "/x", nil, sandbox.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if op := <-ops; op != "create" {
		t.Errorf("then %q", op)
	}
	cancel()
	<-done
}

// After Rekey only the new secret opens the door, and who was in is out.
func TestRekey(t *testing.T) {
	w, c := newWorld(t)
	enter(t, c)
	old := guest.NewClient(w.dial, secret)
	defer old.Close()
	if err := old.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	spec := sandbox.ProcessSpec{ExecID: "sleeper", Args: []string{"sleep", "1000"}}
	started := make(chan struct{})
	left := make(chan error, 1)
	go func() {
		left <- old.Start(t.Context(), spec, 0, func(sandbox.ProcessEvent) error { close(started); return nil })
	}()
	<-started
	if err := c.Rekey(t.Context(), []byte("short"), guest.Container{}, false); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a short secret: %v", err)
	}
	next := []byte("another secret of thirty-two byte")
	if err := c.Rekey(t.Context(), next, guest.Container{Env: []string{"PATH=/usr/bin:/bin", "NEW=env"}}, false); err != nil {
		t.Fatal(err)
	}
	if err := <-left; !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("a stream of the old secret ended with %v", err)
	}
	if err := old.Ping(t.Context()); err == nil {
		t.Error("the old secret still works")
	}
	dials := w.dials.Load()
	var out strings.Builder
	err := c.Start(t.Context(), sandbox.ProcessSpec{ExecID: "e", Args: []string{"sh", "-c", "echo $NEW"}}, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			out.Write(e.Output.Data)
		}
		return nil
	})
	if err != nil || out.String() != "env\n" {
		t.Errorf("with the new secret: %q, %v", out.String(), err)
	}
	if w.dials.Load() != dials {
		t.Error("the connection that asked is not gone on with")
	}
}

// Frozen, no deadline passes; thawed, what was left of each counts.
func TestFreeze(t *testing.T) {
	_, c := newWorld(t)
	enter(t, c)
	ended := make(chan sandbox.ProcessEnd, 1)
	started := make(chan struct{})
	spec := sandbox.ProcessSpec{ExecID: "timed", Args: []string{"sleep", "1000"}, Timeout: 300 * time.Millisecond}
	for range 2 { // twice is once
		if err := c.Freeze(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	asked := time.Now()
	go c.Start(t.Context(), spec, 0, func(e sandbox.ProcessEvent) error {
		if e.Started != nil {
			close(started)
		}
		if e.End != nil {
			ended <- *e.End
		}
		return nil
	})
	<-started
	select {
	case e := <-ended:
		t.Errorf("frozen, it ended as %+v", e)
	case <-time.After(2 * spec.Timeout): // real time is what is tested
	}
	for range 2 {
		if err := c.Thaw(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// On a busy machine it ends late, but the time it was frozen is not its own.
	if e := <-ended; e.Cause != sandbox.Deadline || e.Duration < spec.Timeout || time.Since(asked)-e.Duration < 2*spec.Timeout {
		t.Errorf("thawed, it ended after %s as %+v", time.Since(asked), e)
	}
}

// An exec that ends soon is let end by a pause; one that does not is frozen.
func TestAPauseLetsAYoungExecEnd(t *testing.T) {
	for _, c := range []struct {
		sleep string
		young time.Duration
		ends  bool
	}{{"0.02", time.Minute, true}, {"20", time.Millisecond, false}} {
		t.Run(c.sleep, func(t *testing.T) {
			_, g := newWorld(t)
			g.SetYoung(c.young)
			enter(t, g)
			var over atomic.Bool
			started, left := make(chan struct{}), make(chan error, 1)
			ctx, leave := context.WithCancel(t.Context())
			spec := sandbox.ProcessSpec{ExecID: "e", Args: []string{"sleep", c.sleep}, Stdin: true} // Stdin: its start is told at once
			go func() {
				left <- g.Start(ctx, spec, 0, func(ev sandbox.ProcessEvent) error {
					if ev.Started != nil {
						close(started)
					}
					over.Store(ev.End != nil)
					return nil
				})
			}()
			<-started
			if err := g.Settle(t.Context()); err != nil {
				t.Fatal(err)
			}
			if over.Load() != c.ends {
				t.Errorf("sleep %s had ended: %v", c.sleep, over.Load())
			}
			leave()
			<-left
			g.Release()
		})
	}
}
