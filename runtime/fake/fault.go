package fake

import (
	"context"
	"sync"

	"github.com/cove-sandbox/cove/sandbox"
)

// Op names an operation that can be made to fail.
type Op string

const (
	Boot    Op = "boot"
	Adopt   Op = "adopt"
	Attach  Op = "attach"
	Reset   Op = "reset"
	Vacate  Op = "vacate"
	Destroy Op = "destroy"
	Sweep   Op = "sweep"

	Pause      Op = "pause"
	Resume     Op = "resume"
	Checkpoint Op = "checkpoint"
	Restore    Op = "restore"
	Hold       Op = "hold"
	Take       Op = "take"
	Diff       Op = "diff"
)

// faults are what a test asked to go wrong.
type faults struct {
	mu struct {
		sync.Mutex
		fail  map[Op][]error
		hooks map[Op]func(ctx context.Context, id string) error
		dead  bool
	}
}

// Fail makes the next calls of op fail, one per error, before they do
// anything.
func (d *Driver) Fail(op Op, errs ...error) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	if d.faults.mu.fail == nil {
		d.faults.mu.fail = map[Op][]error{}
	}
	d.faults.mu.fail[op] = append(d.faults.mu.fail[op], errs...)
}

// Heal takes back what Fail asked for and has not happened yet.
func (d *Driver) Heal() {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.mu.fail = nil
}

// Hook runs f at the start of every op from now on; nil takes it away. An
// error from f is the operation's.
func (d *Driver) Hook(op Op, f func(ctx context.Context, id string) error) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	if d.faults.mu.hooks == nil {
		d.faults.mu.hooks = map[Op]func(context.Context, string) error{}
	}
	d.faults.mu.hooks[op] = f
}

// Crash makes every further call through this driver fail without effect, as
// if its process had been killed. Its kernels live on in the host.
func (d *Driver) Crash() {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.mu.dead = true
}

func (d *Driver) crashed() bool {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	return d.faults.mu.dead
}

var errCrashed = &sandbox.Error{Class: sandbox.Unavailable, Op: "fake", Msg: "this process has crashed"}

// enter decides the fate of one call.
func (d *Driver) enter(ctx context.Context, op Op, id string) error {
	d.faults.mu.Lock()
	hook := d.faults.mu.hooks[op]
	var err error
	if q := d.faults.mu.fail[op]; len(q) > 0 {
		err, d.faults.mu.fail[op] = q[0], q[1:]
	}
	d.faults.mu.Unlock()
	if err == nil && hook != nil {
		err = hook(ctx, id)
	}
	if d.crashed() {
		return errCrashed
	}
	if err == nil && ctx.Err() != nil {
		err = left(ctx, "fake."+string(op))
	}
	return err
}

// left is that the caller of an operation is gone.
func left(ctx context.Context, op string) error {
	class := sandbox.Canceled
	if ctx.Err() == context.DeadlineExceeded {
		class = sandbox.DeadlineReached
	}
	return sandbox.Errorf(class, op, "%w", context.Cause(ctx))
}
