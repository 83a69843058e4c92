package gvisor

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var _ runtime.Holder = (*blank)(nil)

// Methods of cmd/runsc/edits (add/hold_boot.go.in).
const (
	holdMethod  = "containerManager.HoldRestored"
	letGoMethod = "containerManager.LetGo"
)

// held is a kernel that was restored for nobody yet.
type held struct {
	*Kernel
	was checkpointed
}

// Hold is Restore up to where the sandbox comes in. See runtime.Holder.
//
// The guest runs, and has a secret and a name of its kernel's own: that the sentry has
// made its threads, and that it has answered, written and started a process a first time, are
// 25 ms of a restore and the exec after it. Its deadlines stand, as the checkpoint left them. Nothing
// else has a task that may run.
func (b *blank) Hold(ctx context.Context, dir string, cp runtime.Checkpoint, c runtime.Container) (runtime.Held, error) {
	const op = "gvisor.hold"
	was, err := b.restorable(dir, cp, c)
	if err != nil {
		return nil, err
	}
	if len(c.Volumes) > 0 || len(was.Held) > 0 {
		return nil, sandbox.Errorf(sandbox.Precondition, op, "a kernel with volumes cannot be held for nobody")
	}
	if err := b.holdFrom(ctx, dir, was, c); err != nil {
		return nil, b.fail(ctx, op, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, b.undo(ctx, op, err)
	}
	return &held{b.Kernel, was}, nil
}

func (b *blank) holdFrom(ctx context.Context, dir string, was checkpointed, c runtime.Container) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.control(holdMethod, nil, nil); err != nil {
		return err
	}
	vols, err := b.loadLocked(ctx, b.spec, dir, was, c)
	if err != nil {
		return err
	}
	vols.close() // it has none
	secret, err := hex.DecodeString(b.saved.Secret)
	if err != nil {
		return err
	}
	process := sandbox.ProcessSpec{Args: []string{guestMount + guestBinary, "true"}, User: "0:0", Cwd: "/"}
	if err := b.guest.RekeyForNobody(ctx, secret, guest.Container{Pids: c.Resources.Pids, Hostname: b.id}, process); err != nil {
		return fmt.Errorf("giving the guest its secret: %w", err)
	}
	return nil
}

// Take makes it a sandbox's and lets it run. See runtime.Held.
func (h *held) Take(ctx context.Context, c runtime.Container) (runtime.Kernel, error) {
	const op = "gvisor.take"
	h.mu.Lock()
	defer h.mu.Unlock()
	if used, ok := h.CPUTime(); ok { // until now it was nobody's
		h.saved.Before = used
	}
	sized := make(chan error, 1) // beside the guest, which knows nothing of it
	go func() { sized <- errors.Join(h.setSize(c), h.d.groups.limit(h.id, c.Resources)) }()
	if err := errors.Join(h.rekeyLocked(ctx, c), <-sized); err != nil {
		return nil, h.explain(op, err)
	}
	if err := h.control(letGoMethod, nil, nil); err != nil {
		return nil, h.explain(op, err)
	}
	h.servesLocked(h.was, c)
	return h.Kernel, nil
}
