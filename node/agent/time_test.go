package agent

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestASandboxEndsWhenItsTimeIsOver(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a", timeout(10*time.Second))
		w.create("forever")
		time.Sleep(9 * time.Second)
		w.consistent("a", "forever")
		time.Sleep(2 * time.Second)
		w.consistent("forever")
		w.expectNotice("a")
		w.expectEnd("a", sandbox.TTL, "")
	})
}

func TestMovedExpiryHoldsAcrossACrash(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("later", timeout(10*time.Second))
		w.create("never", timeout(10*time.Second))
		w.create("sooner", timeout(time.Hour))
		start := time.Now()
		for id, at := range map[string]time.Time{"later": start.Add(time.Minute), "never": {}, "sooner": start.Add(30 * time.Second)} {
			if err := w.SetExpiry(t.Context(), id, at); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(20 * time.Second)
		w.consistent("later", "never", "sooner")
		w.crash(nil)
		time.Sleep(20 * time.Second) // sooner's time passes while no node runs
		w.open()
		time.Sleep(time.Second)
		w.expectNotice("sooner")
		w.expectEnd("sooner", sandbox.TTL, "")
		w.consistent("later", "never")
		time.Sleep(20 * time.Second)
		w.consistent("never")
		w.expectEnd("later", sandbox.TTL, "")
	})
}

func TestAnIdleSandboxEnds(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a", idle(time.Minute))
		time.Sleep(50 * time.Second)
		_, release, err := w.Guest(t.Context(), "a") // a short call
		if err != nil {
			t.Fatal(err)
		}
		release()
		release() // twice does no harm
		time.Sleep(50 * time.Second)
		w.consistent("a")

		_, release, err = w.Guest(t.Context(), "a") // a long one
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		w.consistent("a")
		release()
		time.Sleep(59 * time.Second)
		w.consistent("a")
		time.Sleep(2 * time.Second)
		w.consistent()
		w.expectEnd("a", sandbox.Idle, "")
		w.expectNotice("a")
	})
}

func TestAProcessKeepsItsSandboxFromBeingIdle(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a", idle(time.Minute))
		w.inside.Store(w.kernelOf("a"), inside{running: 1})
		time.Sleep(time.Hour)
		w.consistent("a")
		ended := time.Now()
		w.inside.Store(w.kernelOf("a"), inside{ended: ended})
		time.Sleep(58 * time.Second)
		w.consistent("a")
		time.Sleep(20 * time.Second) // noticed at most a quarter late
		w.consistent()
		w.expectEnd("a", sandbox.Idle, "")
	})
}

func TestLookingAtStatsDoesNotKeepASandboxAlive(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a", idle(time.Minute))
		for range 6 { // the last after 50 s
			if _, err := w.Stats(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Second)
		}
		time.Sleep(time.Second)
		w.consistent()
	})
}

func TestTheTimeoutHoldsForABusySandbox(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a", idle(time.Minute), timeout(5*time.Minute))
		w.inside.Store(w.kernelOf("a"), inside{running: 3})
		time.Sleep(5*time.Minute + time.Second)
		w.consistent()
		w.expectEnd("a", sandbox.TTL, "")
	})
}

func TestAGuestThatDoesNotAnswerIsNotIdle(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir)
		var stuck atomic.Bool
		stuck.Store(true)
		w.cfg = func(c *Config) {
			c.inspect = func(ctx context.Context, _ runtime.Kernel) (inside, error) {
				if !stuck.Load() {
					return inside{attached: true}, nil
				}
				select {
				case <-time.After(inspectTimeout):
				case <-ctx.Done():
				}
				return inside{}, errors.New("no answer")
			}
		}
		w.open()
		defer w.finish()
		w.create("a", idle(time.Minute))
		time.Sleep(10 * time.Minute)
		w.consistent("a")
		stuck.Store(false)
		time.Sleep(time.Minute)
		w.consistent()
	})
}

func TestACallThatComesDuringTheIdleCheckSavesTheSandbox(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir)
		w.cfg = func(c *Config) {
			c.inspect = func(context.Context, runtime.Kernel) (inside, error) {
				time.Sleep(5 * time.Second)
				return inside{attached: true}, nil
			}
		}
		w.open()
		defer w.finish()
		w.create("a", idle(time.Minute))
		time.Sleep(62 * time.Second) // being looked at
		_, release, err := w.Guest(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		release()
		time.Sleep(50 * time.Second)
		w.consistent("a")
	})
}
