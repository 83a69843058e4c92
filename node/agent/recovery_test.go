package agent

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestAKilledNodeFindsItsSandboxesAgain(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		time.Sleep(time.Second)
		w.create("a")
		w.create("b")
		w.create("gone")
		if _, _, err := w.Reset(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
		kernel, dying := w.kernelOf("a"), w.kernelOf("gone")
		time.Sleep(time.Second)
		w.crash(nil)
		w.host.Kill(dying, runtime.Exit{Cause: sandbox.OOM, Detail: "while nobody looked"})
		w.open()
		w.consistent("a", "b")
		if got := w.kernelOf("a"); got != kernel {
			t.Errorf("a has kernel %s, had %s", got, kernel)
		}
		live, _ := w.Live(t.Context())
		for _, sb := range live {
			if sb.State != sandbox.Running || sb.Spec.Image != "base" || (sb.ID == "b") != (sb.Episode == 2) {
				t.Errorf("recovered as %+v", sb)
			}
		}
		w.expectEnd("gone", sandbox.OOM, "while nobody looked")
		if episode, _, err := w.Reset(t.Context(), "b"); err != nil || episode != 3 {
			t.Errorf("episode %d, %v", episode, err)
		}
	})
}

func TestARestartedMachineLosesItsSandboxesByName(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a")
		w.crash(nil)
		w.host.Reboot()
		w.boot = "boot-2"
		w.open()
		w.consistent()
		w.expectEnd("a", sandbox.NodeLost, "the machine restarted")
		w.crash(nil)
		w.open()
		w.expectEnd("a", sandbox.NodeLost, "the machine restarted")
	})
}

func TestAVanishedKernelIsNodeLost(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a")
		w.crash(nil)
		w.host.Reboot()
		w.open()
		w.expectEnd("a", sandbox.NodeLost, "while no node was running")
	})
}

func TestACrashAmidACreateUndoesIt(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		time.Sleep(time.Second)
		w.create("neighbour")
		w.drv.Hook(fake.Attach, func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := w.Create(ctx, smallBox("a"), baseImage)
			done <- err
		}()
		synctest.Wait() // its record is durable, its container is not there
		if w.journal.state.entries["a"] == nil {
			t.Error("the record is not durable; the test proves nothing")
		}
		w.drv.Crash()
		cancel()
		<-done
		w.crash(nil)
		w.open()
		w.consistent("neighbour")
		if c := w.endOf("a"); c != "" {
			t.Errorf("what never was has an end: %s", c)
		}
		w.create("a")
	})
}

func TestRecoveryRetriesAHiccupAndNamesAFailure(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir)
		w.open()
		w.create("a")
		w.crash(nil)
		fail := 2
		w.cfg = func(c *Config) {
			w.drv.Hook(fake.Adopt, func(context.Context, string) error {
				if fail--; fail >= 0 {
					return errors.New("try again")
				}
				return nil
			})
		}
		w.open()
		w.consistent("a")
		w.crash(nil)
		fail = 100
		w.open()
		defer w.finish()
		w.consistent()
		w.expectEnd("a", sandbox.Infra, "try again")
	})
}

func TestANodeDoesNotStartBesideStrangersItCannotRemove(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir)
		w.open()
		w.create("a")
		w.crash(nil)
		w.cfg = func(*Config) { w.drv.Fail(fake.Sweep, errBroken) }
		if err := w.tryOpen(); err == nil {
			t.Fatal("it started")
		}
		w.cfg = nil
		w.open() // and nothing was lost by the attempt
		defer w.finish()
		w.consistent("a")
	})
}

func TestAnInterruptedOpenLosesNothing(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir)
		w.open()
		w.create("a")
		w.create("b")
		w.crash(nil)
		w.drv = w.host.Open()
		ctx, cancel := context.WithCancel(context.Background())
		w.drv.Hook(fake.Adopt, func(context.Context, string) error { cancel(); return nil })
		_, err := Open(ctx, Config{Dir: dir, Classes: []Class{{Driver: w.drv}}, Images: testImages{}, fsys: w.disk, bootID: "boot-1"})
		expectClass(t, err, sandbox.ErrCanceled)
		w.open()
		defer w.finish()
		w.consistent("a", "b")
		if ends, _ := w.Ends(context.Background()); len(ends) != 0 {
			t.Errorf("ends: %v", ends)
		}
	})
}
