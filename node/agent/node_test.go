package agent

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/fake"
	"github.com/cove-sandbox/cove/sandbox"
)

func TestALifeFromCreateToAcknowledgedEnd(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		ctx := t.Context()
		time.Sleep(time.Second)
		w.create("a")
		w.consistent("a")
		live, _ := w.Live(ctx)
		if sb := live[0]; sb.State != sandbox.Running || sb.Episode != 1 || sb.Node != "n1" || sb.ImageID != "sha256:base" || sb.CreatedAt.IsZero() {
			t.Errorf("%+v", sb)
		}
		episode, _, err := w.Reset(ctx, "a")
		if err != nil || episode != 2 {
			t.Fatalf("reset: episode %d, %v", episode, err)
		}
		if err := w.Kill(ctx, "a", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
			t.Fatal(err)
		}
		w.consistent()
		w.expectEnd("a", sandbox.KilledByUser, "")
		w.expectNoNotice() // who killed it knows

		if err := w.Kill(ctx, "a", sandbox.End{Cause: sandbox.TTL}); err != nil {
			t.Errorf("killing what has ended: %v", err)
		}
		w.expectEnd("a", sandbox.KilledByUser, "")
		_, _, err = w.Guest(ctx, "a")
		expectClass(t, err, sandbox.ErrEnded)
		if !strings.Contains(err.Error(), "killed_by_user") {
			t.Errorf("the cause is not told: %v", err)
		}
		_, err = w.Create(ctx, smallBox("a"), baseImage)
		expectClass(t, err, sandbox.ErrAlreadyExists)

		for range 2 {
			if err := w.AckEnd(ctx, "a"); err != nil {
				t.Fatal(err)
			}
		}
		_, _, err = w.Guest(ctx, "a")
		expectClass(t, err, sandbox.ErrNotFound)
		expectClass(t, w.Kill(ctx, "a", sandbox.End{}), sandbox.ErrNotFound)
		_, _, err = w.Reset(ctx, "a")
		expectClass(t, err, sandbox.ErrNotFound)
		expectClass(t, w.SetExpiry(ctx, "a", time.Now()), sandbox.ErrNotFound)
		_, err = w.Stats(ctx, "a")
		expectClass(t, err, sandbox.ErrNotFound)
	})
}

func TestCreateRefusesWhatIsWrong(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("taken")
		for _, c := range []struct {
			name string
			sb   sandbox.Sandbox
			img  string
			want *sandbox.Error
		}{
			{"an id that is not one", smallBox("../a"), "sha256:base", sandbox.ErrInvalid},
			{"no id", smallBox(""), "sha256:base", sandbox.ErrInvalid},
			{"an image that is not here", smallBox("b"), "sha256:other", sandbox.ErrImageNotFound},
			{"an id in use", smallBox("taken"), "sha256:base", sandbox.ErrAlreadyExists},
			{"more memory than the machine has", smallBox("b", func(s *sandbox.Spec) { s.Resources.Memory = 65 * gib }), "sha256:base", sandbox.ErrTooLarge},
		} {
			_, err := w.Create(t.Context(), c.sb, sandbox.Image{ID: c.img})
			if sandbox.ClassOf(err) != c.want.Class {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		w.consistent("taken")
	})
}

func TestAFullNodeSaysSoAndWhenToComeBack(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for _, id := range ids("s", 57) { // of 64 GiB × 0.9
			w.create(id, timeout(10*time.Second))
		}
		_, err := w.Create(t.Context(), smallBox("more"), baseImage)
		expectClass(t, err, sandbox.ErrNoCapacity)
		var e *sandbox.Error
		if !errors.As(err, &e) || e.RetryAfter < time.Second || e.RetryAfter > 10*time.Second {
			t.Errorf("retry after %v", e.RetryAfter)
		}
		time.Sleep(11 * time.Second)
		w.create("more")
		w.consistent("more")
	})
}

// A failure at any step of a create leaves nothing and is survived.
func TestCreateUndoesItself(t *testing.T) {
	full := func(w *world) {
		w.disk.setFault(func(op, _ string) error {
			if op == "write" {
				return syscall.ENOSPC
			}
			return nil
		})
	}
	for _, c := range []struct {
		name    string
		prepare func(w *world)
		want    *sandbox.Error
	}{
		{"boots fail", func(w *world) {
			for _, id := range w.host.IDs() {
				if !w.host.IsAttached(id) {
					w.host.Kill(id, runtime.Exit{Cause: sandbox.Infra})
				}
			}
			w.drv.Fail(fake.Boot, errBroken, errBroken, errBroken)
		}, sandbox.ErrUnavailable},
		{"two kernels in a row are broken", func(w *world) { w.drv.Fail(fake.Attach, errBroken, errBroken) }, sandbox.ErrUnavailable},
		{"the container is refused", func(w *world) {
			w.drv.Fail(fake.Attach, sandbox.InvalidField("image", "is not for this architecture"))
		}, sandbox.ErrInvalid},
		{"the journal's disk is full", full, sandbox.ErrDiskFull},
		{"the container is refused and the disk is full", func(w *world) {
			w.drv.Fail(fake.Attach, errBroken)
			full(w)
		}, sandbox.ErrDiskFull},
		{"two kernels are broken and one resists destruction", func(w *world) {
			w.drv.Fail(fake.Attach, errBroken, errBroken)
			w.drv.Fail(fake.Destroy, errBroken, errBroken, errBroken)
		}, sandbox.ErrUnavailable},
	} {
		t.Run(c.name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				time.Sleep(time.Second)
				w.create("neighbour")
				c.prepare(w)
				_, err := w.Create(t.Context(), smallBox("a"), baseImage)
				if sandbox.ClassOf(err) != c.want.Class {
					t.Fatalf("create: %v, want %s", err, c.want.Class)
				}
				w.disk.setFault(nil)
				time.Sleep(time.Minute)
				w.consistent("neighbour")
				if c := w.endOf("a"); c != "" {
					t.Errorf("what never was has an end: %s", c)
				}
				w.create("a")
				w.consistent("a", "neighbour")
				w.crash(nil)
				w.open()
				w.consistent("a", "neighbour")
			})
		})
	}
}

func TestABrokenKernelIsReplacedOnce(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		time.Sleep(time.Second)
		w.drv.Fail(fake.Attach, errBroken)
		w.create("a")
		w.consistent("a")
	})
}

func TestACreatorWhoLeavesLeavesNothing(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		time.Sleep(time.Second)
		w.drv.Hook(fake.Attach, func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := w.Create(ctx, smallBox("a"), baseImage)
		expectClass(t, err, sandbox.ErrDeadline)
		w.drv.Hook(fake.Attach, nil)
		w.consistent()
	})
}

func TestTheSameIDIsCreatedOnce(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		var wg sync.WaitGroup
		errs := make(chan error, 20)
		for range 20 {
			wg.Go(func() {
				_, err := w.Create(t.Context(), smallBox("a"), baseImage)
				errs <- err
			})
		}
		wg.Wait()
		close(errs)
		won := 0
		for err := range errs {
			if err == nil {
				won++
			} else {
				expectClass(t, err, sandbox.ErrAlreadyExists)
			}
		}
		if won != 1 {
			t.Errorf("%d creates of one id succeeded", won)
		}
		w.consistent("a")
	})
}

func TestKernelsThatDieEndTheirSandboxWithTheRightCause(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for _, c := range []struct {
			id   string
			exit runtime.Exit
			want sandbox.Cause
			says string
		}{
			{"oom", runtime.Exit{Cause: sandbox.OOM, Detail: "over 512 MiB"}, sandbox.OOM, "over 512 MiB"},
			{"init", runtime.Exit{Cause: sandbox.InitKilled}, sandbox.InitKilled, ""},
			{"crash", runtime.Exit{Cause: sandbox.Infra, Detail: "panic"}, sandbox.Infra, "panic"},
			{"silent", runtime.Exit{}, sandbox.Infra, "did not say why"},
			{"foreign", runtime.Exit{Cause: sandbox.KilledByUser}, sandbox.Infra, "the kernel is gone"},
		} {
			w.create(c.id)
			w.host.Kill(w.kernelOf(c.id), c.exit)
			w.expectNotice(c.id)
			w.expectEnd(c.id, c.want, c.says)
			w.consistent()
			_, _, err := w.Guest(t.Context(), c.id)
			expectClass(t, err, sandbox.ErrEnded)
		}
		w.crash(nil)
		w.open()
		w.expectEnd("oom", sandbox.OOM, "over 512 MiB") // ends outlive the node
		w.expectEnd("init", sandbox.InitKilled, "")
	})
}

func TestTheFirstCauseWins(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a", timeout(10*time.Second))
		w.drv.Hook(fake.Destroy, func(context.Context, string) error { time.Sleep(time.Second); return nil })
		done := make(chan error, 2)
		go func() { done <- w.Kill(t.Context(), "a", sandbox.End{Cause: sandbox.LeaseExpired}) }()
		synctest.Wait()
		go func() { done <- w.Kill(t.Context(), "a", sandbox.End{Cause: sandbox.KilledByUser}) }()
		synctest.Wait()
		live, _ := w.Live(t.Context())
		if len(live) != 1 || live[0].State != sandbox.Ending {
			t.Errorf("while it is torn down: %+v", live)
		}
		_, _, err := w.Guest(t.Context(), "a")
		expectClass(t, err, sandbox.ErrEnded)
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		w.expectEnd("a", sandbox.LeaseExpired, "")
		w.drv.Hook(fake.Destroy, nil)
	})
}

func TestAKernelThatResistsRemovalIsAccountedForUntilGone(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a")
		w.drv.Fail(fake.Destroy, errBroken, errBroken, errBroken)
		err := w.Kill(t.Context(), "a", sandbox.End{Cause: sandbox.KilledByUser})
		expectClass(t, err, &sandbox.Error{Class: sandbox.Unavailable})
		w.consistent("a") // Ending, and still holding its resources
		time.Sleep(time.Minute)
		w.consistent()
		w.expectEnd("a", sandbox.KilledByUser, "")
	})
}

func TestKillFreesAFullDisk(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a")
		w.disk.setFault(func(op, _ string) error {
			if op == "write" {
				return syscall.ENOSPC
			}
			return nil
		})
		if err := w.Kill(t.Context(), "a", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
			t.Fatalf("kill: %v", err)
		}
		w.consistent()
		w.disk.setFault(nil)
		w.create("b")
		w.crash(nil)
		w.open()
		w.consistent("b")
		w.expectEnd("a", sandbox.KilledByUser, "")
	})
}

func TestResetFailures(t *testing.T) {
	t.Run("the kernel cannot: the sandbox ends", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			w.create("a")
			w.drv.Fail(fake.Reset, errBroken)
			_, _, err := w.Reset(t.Context(), "a")
			if sandbox.ClassOf(err) != sandbox.Ended {
				t.Errorf("reset: %v", err)
			}
			w.expectNotice("a")
			w.expectEnd("a", sandbox.Infra, "reset failed")
			w.consistent()
		})
	})
	t.Run("the journal cannot: nothing happened", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			w.create("a")
			w.disk.setFault(func(op, _ string) error { return syscall.EIO })
			_, _, err := w.Reset(t.Context(), "a")
			expectClass(t, err, &sandbox.Error{Class: sandbox.Unavailable})
			w.disk.setFault(nil)
			if episode, _, err := w.Reset(t.Context(), "a"); err != nil || episode != 2 {
				t.Errorf("episode %d, %v", episode, err)
			}
			w.consistent("a")
		})
	})
	t.Run("the caller leaves: it is finished", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			w.create("a")
			ctx, cancel := context.WithCancel(t.Context())
			w.drv.Hook(fake.Reset, func(ctx context.Context, _ string) error { cancel(); return ctx.Err() })
			if episode, _, err := w.Reset(ctx, "a"); err != nil || episode != 2 {
				t.Errorf("episode %d, %v", episode, err)
			}
			w.consistent("a")
		})
	})
	t.Run("a kill does not wait for a slow one", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			w.create("a")
			w.drv.Hook(fake.Reset, func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() })
			done := make(chan error)
			go func() { _, _, err := w.Reset(t.Context(), "a"); done <- err }()
			synctest.Wait()
			start := time.Now()
			if err := w.Kill(t.Context(), "a", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
				t.Error(err)
			}
			if d := time.Since(start); d != 0 {
				t.Errorf("the kill waited %v", d)
			}
			if err := <-done; sandbox.ClassOf(err) != sandbox.Ended {
				t.Errorf("reset: %v", err)
			}
			w.expectEnd("a", sandbox.KilledByUser, "")
		})
	})
}

func TestResetsOfOneSandboxQueue(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.create("a")
		var busy atomic.Bool
		w.drv.Hook(fake.Reset, func(context.Context, string) error {
			if busy.Swap(true) {
				t.Error("two resets at once")
			}
			time.Sleep(time.Millisecond)
			busy.Store(false)
			return nil
		})
		seen := map[int64]bool{}
		var mu sync.Mutex
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				episode, _, err := w.Reset(t.Context(), "a")
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				seen[episode] = true
			})
		}
		wg.Wait()
		if len(seen) != 10 || !seen[11] {
			t.Errorf("episodes %v", seen)
		}
	})
}

func TestTwoNodesCannotShareADirectory(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		_, err := Open(t.Context(), Config{Dir: w.dir, Classes: []Class{{Driver: w.drv}}})
		expectClass(t, err, &sandbox.Error{Class: sandbox.Precondition})
		if !strings.Contains(err.Error(), "process "+strconv.Itoa(os.Getpid())) {
			t.Errorf("does not name the holder: %v", err)
		}
	})
}

func TestCloseLeavesSandboxesAndOnlyThem(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		time.Sleep(time.Second)
		w.create("a")
		kernel := w.kernelOf("a")
		time.Sleep(time.Second) // the pool is full again
		if err := w.Node.Close(); err != nil {
			t.Fatal(err)
		}
		if got := w.host.IDs(); len(got) != 1 || got[0] != kernel {
			t.Errorf("left: %v", got)
		}
		_, err := w.Create(t.Context(), smallBox("b"), baseImage)
		expectClass(t, err, &sandbox.Error{Class: sandbox.Unavailable})
		for e, err := range w.Ended(t.Context()) {
			if err == nil {
				t.Errorf("a closed node tells of %+v", e)
			}
		}
		w.open()
		w.consistent("a")
	})
}

func TestTheSweepRemovesOnlyStrangers(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		time.Sleep(time.Second)
		w.create("a")
		if _, err := w.drv.Boot(t.Context(), "stranger", runtime.Class{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Minute)
		w.consistent("a")
		if ready, _ := w.classes[0].pool.counts(); ready == 0 {
			t.Error("the warm kernels were swept")
		}
	})
}

func TestALowDiskStopsAdmissionUntilItIsNot(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir)
		var free atomic.Int64
		free.Store(gib)
		w.cfg = func(c *Config) {
			c.host = func() (Host, error) { return Host{Memory: 20 * gib, Disk: free.Load()}, nil }
		}
		w.open()
		defer w.finish()
		synctest.Wait()
		_, err := w.Create(t.Context(), smallBox("a"), baseImage)
		expectClass(t, err, sandbox.ErrNoCapacity)
		free.Store(50 * gib)
		time.Sleep(lookMost + time.Second)
		w.create("a")
	})
}
