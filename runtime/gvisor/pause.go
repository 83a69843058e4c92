package gvisor

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var _ runtime.Pauser = (*Kernel)(nil)

// pauseMark is what lies in a paused kernel's directory. The sentry cannot be
// asked whether it is paused, its guest does not answer then, and to resume one
// that is not paused kills it: so it is written down before, under the name of one
// that is not settled, and gets its own name after. A resume renames it back, which
// takes no room: a full disk must not keep a sandbox from waking.
type pauseMark struct {
	Settled   bool   `json:"settled"` // false was under its own name, too, until 2026-11
	Container string `json:"container"`
	InitPID   int    `json:"init_pid"`
}

func (k *Kernel) pauseFile() string { return filepath.Join(k.dir(), "paused") }

// unsettledFile is the mark while a pause or a resume is under way.
func (k *Kernel) unsettledFile() string { return k.pauseFile() + ".new" }

func (k *Kernel) unmarkPause() error {
	for _, f := range []string{k.pauseFile(), k.unsettledFile()} {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (k *Kernel) markPause() error {
	k.mu.Lock()
	m := pauseMark{Settled: true, Container: k.mu.container, InitPID: k.mu.initPID}
	k.mu.Unlock()
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return os.WriteFile(k.unsettledFile(), b, 0o600)
}

func (k *Kernel) settlePause() error { return os.Rename(k.unsettledFile(), k.pauseFile()) }

// Paused says whether the kernel stands still. See runtime.Pauser.
func (k *Kernel) Paused() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.mu.paused
}

// Pause freezes the kernel. See runtime.Pauser.
func (k *Kernel) Pause(ctx context.Context) error {
	const op = "gvisor.pause"
	if k.Paused() {
		return nil
	}
	if err := k.pauseUnsettled(ctx, false); err != nil {
		return k.explain(op, err)
	}
	if err := k.settlePause(); err != nil {
		return k.explain(op, err)
	}
	return nil
}

// pauseUnsettled is a pause that the process which made it ends: should that die
// first, whoever adopts the kernel finds out that it stands still by asking it, for
// unsettledWait. A brief one is over before anybody would feel that deadlines ran on:
// it spares the guest two calls and keeps the spare.
func (k *Kernel) pauseUnsettled(ctx context.Context, brief bool) error {
	var again func()
	wake := k.wake
	if brief {
		again, wake = k.restSpare(), k.guest.Release
	} else {
		// Now, while the sentry can still destroy it: a checkpoint may follow.
		again = k.withoutSpare()
		if err := k.freeze(ctx); err != nil {
			again()
			return err
		}
	}
	err := k.guest.Settle(ctx)
	if err == nil {
		err = k.markPause()
	}
	if err == nil {
		err = k.sb.Pause(k.id)
	}
	if err != nil {
		_ = k.unmarkPause()
		wake()
		again()
		return err
	}
	k.mu.Lock()
	k.mu.paused, k.mu.brief, k.mu.spareAgain = true, brief, again
	k.mu.Unlock()
	return nil
}

// Resume lets a paused kernel run. See runtime.Pauser.
func (k *Kernel) Resume(ctx context.Context) error {
	const op = "gvisor.resume"
	if !k.Paused() {
		return nil
	}
	if err := os.Rename(k.pauseFile(), k.unsettledFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return k.explain(op, err) // not there: a resume before this one failed
	}
	if err := k.sb.Resume(k.id); err != nil {
		return k.explain(op, err)
	}
	k.mu.Lock()
	again, brief := k.mu.spareAgain, k.mu.brief // nil and false in one adopted while paused
	k.mu.paused, k.mu.brief, k.mu.spareAgain = false, false, nil
	k.mu.Unlock()
	if again != nil {
		again()
	}
	if err := k.unmarkPause(); err != nil {
		return k.explain(op, err)
	}
	if brief {
		k.guest.Release()
	} else {
		k.wake()
	}
	return nil
}

// freeze stops the guest's deadlines. A thaw still under way comes first, for
// after it they would run.
func (k *Kernel) freeze(ctx context.Context) error {
	k.mu.Lock()
	thawed := k.mu.thawed
	k.mu.Unlock()
	select {
	case <-thawed:
	case <-ctx.Done():
		return sandbox.Errorf(sandbox.Canceled, "", "waiting for the guest to wake: %w", ctx.Err())
	}
	return k.guest.Freeze(ctx)
}

// wake lets requests through and deadlines run again, which must happen even
// if the caller has left. The thaw is a round trip to a guest that has to wake
// up, 1 of 2 ms of a resume, and nobody need wait for it: the kernel runs.
func (k *Kernel) wake() {
	k.guest.Release()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.destroyed {
		return
	}
	thawed := make(chan struct{})
	k.mu.thawed = thawed
	k.watchers.Go(func() {
		defer close(thawed)
		ctx, cancel := context.WithTimeout(context.Background(), wakeWait)
		defer cancel()
		if err := k.guest.Thaw(ctx); err != nil && !isClosed(k.done) {
			k.d.log.Warn("the guest does not thaw", "kernel", k.id, "err", err)
		}
	})
}

const (
	// wakeWait bounds how long a kernel gets to answer after standing still.
	wakeWait = 20 * time.Second
	// unsettledWait is how long one that may be paused gets to show it is not.
	unsettledWait = 3 * time.Second
)

// adoptPaused takes back a kernel that stands still; false if it runs.
func (k *Kernel) adoptPaused(ctx context.Context) (bool, error) {
	b, err := os.ReadFile(k.pauseFile())
	settled := err == nil
	if errors.Is(err, os.ErrNotExist) {
		b, err = os.ReadFile(k.unsettledFile())
	}
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	var m pauseMark
	markErr := json.Unmarshal(b, &m) // half of one is of a kernel that still ran
	secret, err := hex.DecodeString(k.saved.Secret)
	if err != nil {
		return false, err
	}
	k.guest = guest.NewClient(k.dial, secret)
	if !settled || !m.Settled || markErr != nil {
		// Our process died within a millisecond's work. Running, it answers.
		pctx, cancel := context.WithTimeout(ctx, unsettledWait)
		defer cancel()
		if k.guest.Ping(pctx) == nil {
			k.guest.Close()
			return false, k.unmarkPause()
		}
		if err := errors.Join(ctx.Err(), markErr); err != nil {
			k.guest.Close()
			return false, err
		}
	}
	k.guest.Hold()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.paused, k.mu.container, k.mu.initPID = true, m.Container, m.InitPID
	if m.InitPID != 0 {
		k.watchInitLocked()
	}
	return true, nil
}

// errPaused is the answer to what needs a kernel that runs.
func (k *Kernel) errPaused(op string) error {
	return sandbox.Errorf(sandbox.Precondition, op, "kernel %s is paused", k.id).WithHint("resume it first")
}
