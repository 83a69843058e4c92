package fake

import (
	"context"
	"os"
	"path/filepath"
	"sync"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Driver is one process's view of a host. Safe for concurrent use.
type Driver struct {
	host   *Host
	faults faults

	mu struct {
		sync.Mutex
		kernels map[string]*kernel // views handed out and not destroyed
	}
}

var _ runtime.Driver = (*Driver)(nil)

// Open is a new process starting on the host.
func (h *Host) Open() *Driver {
	d := &Driver{host: h}
	d.mu.kernels = map[string]*kernel{}
	return d
}

func (d *Driver) Name() string { return d.host.opts.Name }

// Capabilities: kernels survive their driver, if not the process. Checkpoints hold
// files, and of processes no more than how they were started.
func (d *Driver) Capabilities() runtime.Capabilities {
	return runtime.Capabilities{Adopt: true, Pause: true, Checkpoint: true, Hold: true, Diff: true, Reuse: true,
		Devices: d.host.opts.Devices, FixedSize: d.host.opts.FixedSize, Volumes: d.host.opts.Volumes, Network: d.host.opts.Network, Mount: d.host.opts.Mount}
}

func (d *Driver) Boot(ctx context.Context, id string, c runtime.Class) (runtime.Kernel, error) {
	if err := c.Check(d.Name(), d.Capabilities()); err != nil {
		return nil, err
	}
	if err := d.enter(ctx, Boot, id); err != nil {
		return nil, err
	}
	m, err := d.host.boot(id, c)
	if err != nil {
		return nil, err
	}
	return d.view(m), nil
}

// Adopt takes a kernel back. One that died and was not destroyed comes back
// with Done closed, so that its cause is not lost.
func (d *Driver) Adopt(ctx context.Context, h runtime.Handle) (runtime.Kernel, error) {
	if err := d.enter(ctx, Adopt, h.ID); err != nil {
		return nil, err
	}
	m := d.host.get(h.ID)
	if m == nil || h.Driver != d.Name() {
		return nil, sandbox.Errorf(sandbox.NotFound, "fake.adopt", "no kernel %s", h.ID)
	}
	return d.view(m), nil
}

func (d *Driver) Sweep(ctx context.Context, keep map[string]bool) ([]string, error) {
	if err := d.enter(ctx, Sweep, ""); err != nil {
		return nil, err
	}
	var removed []string
	for _, id := range d.host.IDs() {
		if keep[id] {
			continue
		}
		if err := d.host.remove(id, runtime.Exit{Cause: sandbox.KilledByUser, Detail: "swept"}); err != nil {
			return removed, sandbox.Errorf(sandbox.Unavailable, "fake.sweep", "%w", err)
		}
		removed = append(removed, id)
	}
	for _, id := range d.host.leftovers() {
		if err := os.RemoveAll(filepath.Join(d.host.dir, id)); err != nil {
			return removed, sandbox.Errorf(sandbox.Unavailable, "fake.sweep", "%w", err)
		}
		removed = append(removed, id)
	}
	return removed, nil
}

func (d *Driver) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, k := range d.mu.kernels {
		k.hangUp()
	}
	clear(d.mu.kernels)
	return nil
}

func (d *Driver) view(m *machine) *kernel {
	k := &kernel{d: d, m: m, guest: guest.NewClient(m.dial, m.secret)}
	if k.Paused() {
		k.guest.Hold()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.kernels[m.id] = k
	return k
}

// kernel is a driver's view of a machine.
type kernel struct {
	d     *Driver
	m     *machine
	guest *guest.Client
	once  sync.Once
}

func (k *kernel) ID() string { return k.m.id }

func (k *kernel) Handle() runtime.Handle {
	return runtime.Handle{Version: 1, Driver: k.d.Name(), ID: k.m.id}
}

func (k *kernel) Attach(ctx context.Context, c runtime.Container) error {
	if err := k.d.enter(ctx, Attach, k.m.id); err != nil {
		return err
	}
	if len(c.Volumes) > 0 && !k.d.host.opts.Volumes {
		return sandbox.Errorf(sandbox.Unsupported, "fake.attach", "the fake driver has no volumes")
	}
	if err := k.m.claim(c.Sandbox); err != nil {
		return err
	}
	if err := k.populate(ctx, c); err != nil {
		return err
	}
	for _, m := range c.Mounts {
		if err := k.Mount(ctx, m.Source, m.Target); err != nil {
			return err
		}
	}
	return nil
}

func (k *kernel) Reset(ctx context.Context, c runtime.Container) error {
	if err := k.d.enter(ctx, Reset, k.m.id); err != nil {
		return err
	}
	if !k.m.isAttached() {
		return sandbox.Errorf(sandbox.Precondition, "fake.reset", "kernel %s has no container", k.m.id)
	}
	if err := k.evacuate(ctx, k.guest.Leave); err != nil {
		return err
	}
	return k.populate(ctx, c)
}

// Vacate is Reset without the next container. See runtime.Reuser.
func (k *kernel) Vacate(ctx context.Context) error {
	if err := k.d.enter(ctx, Vacate, k.m.id); err != nil {
		return err
	}
	if !k.m.isAttached() || k.Paused() {
		return sandbox.Errorf(sandbox.Precondition, "fake.vacate", "kernel %s has no container that runs", k.m.id)
	}
	next := guest.NewClient(nil, nil)
	next.MoveTo(k.guest)
	k.guest = next
	if err := k.evacuate(ctx, k.guest.Scrub); err != nil {
		return err
	}
	k.m.vacate()
	return nil
}

func (k *kernel) Guest() *guest.Client { return k.guest }

func (k *kernel) Bulk(ctx context.Context, op guest.BulkOp, stdin, stdout *os.File) error {
	return k.m.bulk(ctx, op, stdin, stdout)
}

func (k *kernel) Done() <-chan struct{} { return k.m.done }

func (k *kernel) Exit() runtime.Exit {
	k.m.mu.Lock()
	defer k.m.mu.Unlock()
	return k.m.mu.exit
}

func (k *kernel) Destroy(ctx context.Context) error {
	if err := k.d.enter(ctx, Destroy, k.m.id); err != nil {
		return err
	}
	k.hangUp()
	k.d.mu.Lock()
	delete(k.d.mu.kernels, k.m.id)
	k.d.mu.Unlock()
	return k.d.host.remove(k.m.id, runtime.Exit{Cause: sandbox.KilledByUser})
}

// hangUp closes this view's connections; the guest lives on.
func (k *kernel) hangUp() {
	if k.m.guest != nil {
		k.once.Do(func() { _ = k.guest.Close() })
	}
}
