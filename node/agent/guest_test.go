package agent

import (
	"context"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

// These run the real guest, hence in real time.

type guestWorld struct {
	t    *testing.T
	dir  string
	host *fake.Host
	drv  *fake.Driver
	*Node
}

func newGuestWorld(t *testing.T) *guestWorld {
	w := &guestWorld{t: t, dir: t.TempDir(), host: fake.NewHost(t.TempDir(), fake.Options{})}
	t.Cleanup(func() {
		if w.Node != nil {
			_ = w.Node.Close()
		}
		if err := w.host.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *guestWorld) open(edit func(*Config)) {
	w.t.Helper()
	w.drv = w.host.Open()
	cfg := Config{Dir: w.dir, Name: "n1", Images: testImages{}, Limits: Limits{Disk: 1000 * gib, DiskReserve: 1},
		Classes: []Class{{Driver: w.drv, Pool: PoolSettings{Min: 1, Max: 4}}}}
	if edit != nil {
		edit(&cfg)
	}
	n, err := Open(context.Background(), cfg)
	if err != nil {
		w.t.Fatalf("open: %v", err)
	}
	w.Node = n
}

func (w *guestWorld) create(id string, edits ...func(*sandbox.Spec)) {
	w.t.Helper()
	if _, err := w.Create(w.t.Context(), smallBox(id, edits...), baseImage); err != nil {
		w.t.Fatalf("create: %v", err)
	}
}

// exec runs a script to its end, telling output as it comes.
func (w *guestWorld) exec(id, execID, script string, out func(string)) sandbox.ProcessEnd {
	w.t.Helper()
	g, release, err := w.Guest(w.t.Context(), id)
	if err != nil {
		w.t.Errorf("guest: %v", err)
		return sandbox.ProcessEnd{}
	}
	defer release()
	var end sandbox.ProcessEnd
	err = g.Start(w.t.Context(), sandbox.ProcessSpec{ExecID: execID, Args: []string{"sh", "-c", script}}, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil && out != nil {
			out(string(e.Output.Data))
		}
		if e.End != nil {
			end = *e.End
		}
		return nil
	})
	if err != nil {
		w.t.Errorf("start: %v", err)
	}
	return end
}

func TestAProcessOutlivesItsNode(t *testing.T) {
	w := newGuestWorld(t)
	w.open(nil)
	w.create("a")
	g, release, err := w.Guest(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	first := make(chan struct{})
	go func() {
		defer release()
		_ = g.Start(t.Context(), sandbox.ProcessSpec{ExecID: "long", Args: []string{"sh", "-c", "echo one; until test -e go; do sleep 0.05; done; echo two"}}, 0,
			func(e sandbox.ProcessEvent) error {
				if e.Output != nil {
					close(first)
				}
				return nil
			})
	}()
	<-first
	w.drv.Crash()
	_ = w.Node.Close()
	_ = w.drv.Close()

	w.open(nil)
	if end := w.exec("a", "go", "touch go", nil); end.ExitCode != 0 {
		t.Fatalf("exec after recovery: %+v", end)
	}
	g, release, err = w.Guest(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	out := ""
	if err := g.Attach(t.Context(), "long", 4, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			out += string(e.Output.Data)
		}
		return nil
	}); err != nil || out != "two\n" {
		t.Errorf("the process goes on with %q, %v", out, err)
	}
}

func TestRecoveryAsksTheGuestWhetherACreateWasFinished(t *testing.T) {
	w := newGuestWorld(t)
	w.open(nil)
	w.create("whole")
	inAttach := make(chan struct{})
	crashed := make(chan struct{})
	w.drv.Hook(fake.Attach, func(context.Context, string) error {
		close(inAttach)
		<-crashed
		return nil
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = w.Create(context.Background(), smallBox("half"), baseImage)
	}()
	<-inAttach
	// Its record goes through the same queue as this one, so it is durable.
	if err := w.SetExpiry(t.Context(), "whole", time.Time{}); err != nil {
		t.Fatal(err)
	}
	w.drv.Crash()
	old := w.Node
	_ = old.lock.Close() // the process is dead: its lock is free, its journal is not written again
	old.journal.close()
	w.open(nil)
	close(crashed)
	<-done
	_ = old.Close()
	live, _ := w.Live(t.Context())
	if len(live) != 1 || live[0].ID != "whole" {
		t.Errorf("live after recovery: %+v", live)
	}
	if end := w.exec("whole", "x", "true", nil); end.Cause != sandbox.Exited {
		t.Errorf("exec: %+v", end)
	}
}

func TestTheGuestsProcessesDecideWhoIsIdle(t *testing.T) {
	w := newGuestWorld(t)
	looks := make(chan inside, 100)
	w.open(func(c *Config) {
		c.inspect = func(ctx context.Context, k runtime.Kernel) (inside, error) {
			in, err := inspect(ctx, k)
			looks <- in
			return in, err
		}
	})
	w.create("a", idle(300*time.Millisecond))
	g, release, err := w.Guest(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	err = g.Start(ctx, sandbox.ProcessSpec{ExecID: "bg", Args: []string{"sh", "-c", "until test -e go; do sleep 0.05; done"}}, 0,
		func(sandbox.ProcessEvent) error { leave(); return nil })
	if err == nil {
		t.Fatal("the process ended by itself")
	}
	release()     // no call is under way any more
	for range 2 { // and its idle time passes, twice
		if in := <-looks; in.running != 1 {
			t.Errorf("the guest says %+v", in)
		}
	}
	w.exec("a", "go", "touch go", nil)
	for e, err := range w.Ended(t.Context()) {
		if err != nil || e.ID != "a" || e.End.Cause != sandbox.Idle {
			t.Errorf("ended: %+v, %v", e, err)
		}
		break
	}
	if ends, _ := w.Ends(t.Context()); ends["a"].Cause != sandbox.Idle {
		t.Errorf("ends %+v", ends)
	}
}
