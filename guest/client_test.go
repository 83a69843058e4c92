package guest_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/agent"
	"github.com/cove-sandbox/cove/sandbox"
)

var secret = []byte("0123456789abcdef0123456789abcdef")

// world is an agent that can be restarted behind the same client.
type world struct {
	t     *testing.T
	mu    sync.Mutex
	agent *agent.Agent
	dials atomic.Int32
	down  atomic.Bool
}

func newWorld(t *testing.T) (*world, *guest.Client) {
	t.Helper()
	w := &world{t: t}
	w.restart()
	c := guest.NewClient(w.dial, secret)
	t.Cleanup(func() { c.Close(); w.agent.Close(); goleak.VerifyNone(t) })
	return w, c
}

func (w *world) restart() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.agent != nil {
		w.agent.Close()
	}
	w.agent = agent.New(agent.Config{Secret: secret, Space: agent.HostSpace(w.t.TempDir())})
}

// dial is a socketpair, as the port forward of a kernel is.
func (w *world) dial(context.Context) (net.Conn, error) {
	w.dials.Add(1)
	if w.down.Load() {
		return nil, errors.New("no kernel")
	}
	l, err := net.Listen("unix", filepath.Join(w.t.TempDir(), "s"))
	if err != nil {
		return nil, err
	}
	defer l.Close()
	out, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		return nil, err
	}
	in, err := l.Accept()
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	go w.agent.ServeConn(in)
	w.mu.Unlock()
	return out, nil
}

func TestConnectionsAreReused(t *testing.T) {
	w, c := newWorld(t)
	for range 20 {
		if err := c.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Stat(t.Context(), "/"); !errors.Is(err, sandbox.ErrPrecondition) { // an error of the guest keeps it too
		t.Errorf("not entered: %v", err)
	}
	if n := w.dials.Load(); n != 1 {
		t.Errorf("%d dials", n)
	}
	c.CloseIdle()
	if err := c.Ping(t.Context()); err != nil || w.dials.Load() != 2 {
		t.Errorf("%v, %d dials", err, w.dials.Load())
	}
}

func TestAStaleConnectionIsReplaced(t *testing.T) {
	w, c := newWorld(t)
	if err := c.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.restart()
	if err := c.Enter(t.Context(), guest.Container{}); err != nil {
		t.Fatal(err)
	}
	w.restart()
	if err := c.Signal(t.Context(), "none", "TERM", false); !errors.Is(err, sandbox.ErrPrecondition) { // not safe to repeat, and not repeated
		t.Errorf("%v", err)
	}
}

func TestADeadKernelIsUnavailable(t *testing.T) {
	w, c := newWorld(t)
	if err := c.Enter(t.Context(), guest.Container{}); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	started := make(chan struct{})
	go func() {
		stopped <- c.Start(context.Background(), sandbox.ProcessSpec{ExecID: "e", Command: "sleep 300"}, 0, func(ev sandbox.ProcessEvent) error {
			if ev.Started != nil {
				close(started)
			}
			return nil
		})
	}()
	<-started
	w.down.Store(true)
	w.agent.Close()
	if err := <-stopped; !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("stream: %v", err)
	}
	if err := c.Ping(t.Context()); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("ping: %v", err)
	}
}

func TestLeavingByContextCostsTheConnectionOnly(t *testing.T) {
	w, c := newWorld(t)
	if err := c.Enter(t.Context(), guest.Container{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := c.Start(ctx, sandbox.ProcessSpec{ExecID: "e", Command: "echo up; read x; echo $x", Stdin: true}, 0, func(ev sandbox.ProcessEvent) error {
		if ev.Output != nil {
			cancel()
		}
		return nil
	})
	if !errors.Is(err, sandbox.ErrCanceled) || !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := c.SendInput(t.Context(), "e", []byte("on\n")); err != nil {
		t.Fatal(err)
	}
	if end, err := c.Wait(t.Context(), "e"); err != nil || end.ExitCode != 0 || end.OutputBytes != 6 {
		t.Errorf("%v %+v", err, end)
	}
	_ = w
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Ping(late); !errors.Is(err, sandbox.ErrCanceled) {
		t.Errorf("%v", err)
	}
}

func TestCloseEndsWhatIsUnderWay(t *testing.T) {
	_, c := newWorld(t)
	if err := c.Enter(t.Context(), guest.Container{}); err != nil {
		t.Fatal(err)
	}
	started := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- c.Start(context.Background(), sandbox.ProcessSpec{ExecID: "e", Command: "sleep 300"}, 0, func(sandbox.ProcessEvent) error { close(started); return nil })
	}()
	<-started
	c.Close()
	if err := <-done; !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("%v", err)
	}
	if err := c.Ping(t.Context()); !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("after close: %v", err)
	}
	c.Close()
}

func TestManyCallsAtOnce(t *testing.T) {
	_, c := newWorld(t)
	if err := c.Enter(t.Context(), guest.Container{}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			p := filepath.Join("/", string(rune('a'+i%26)), "f")
			if _, err := c.WriteFile(t.Context(), p, []byte("x"), sandbox.WriteOptions{Parents: true}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}
