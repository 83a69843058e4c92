package fake

import (
	"crypto/rand"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/guest/agent"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// Options of a host.
type Options struct {
	// Bare kernels have no guest: nothing can be run in them. For tests that
	// only care who lives and who does not; a bare kernel touches no file.
	Bare bool
	// Name of its driver; "" = fake. Two hosts are two drivers of one node.
	Name string
	// Devices, FixedSize, Volumes, Network and Mount are capabilities that a test
	// wants the driver to have. The fake only takes note of what a class says, mounts
	// no volume, plugs no device in, and mounts an image, which is a tar, by
	// unpacking it.
	Devices, FixedSize, Volumes, Network, Mount bool
}

// Host is the machine on which fake kernels live. Safe for concurrent use.
type Host struct {
	dir  string
	opts Options

	mu struct {
		sync.Mutex
		machines map[string]*machine
	}
}

// NewHost makes a host that keeps its kernels' files under dir, which is its
// alone.
func NewHost(dir string, opts Options) *Host {
	if opts.Name == "" {
		opts.Name = "fake"
	}
	h := &Host{dir: dir, opts: opts}
	h.mu.machines = map[string]*machine{}
	return h
}

// IDs lists the kernels that exist, alive or dead but not yet destroyed.
func (h *Host) IDs() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.mu.machines))
}

// Attached lists the kernels that were given a container.
func (h *Host) Attached() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ids []string
	for id, m := range h.mu.machines {
		if m.isAttached() {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Class is what a kernel was booted as, if it exists.
func (h *Host) Class(id string) runtime.Class {
	if m := h.get(id); m != nil {
		return m.class
	}
	return runtime.Class{}
}

// IsAttached says whether a kernel exists and was given a container.
func (h *Host) IsAttached(id string) bool {
	m := h.get(id)
	return m != nil && m.isAttached()
}

// SetMemory is what a kernel uses from now on.
func (h *Host) SetMemory(id string, bytes int64) {
	if m := h.get(id); m != nil {
		m.memory.Store(bytes)
	}
}

// Kernel is the id of the kernel that has the container of a sandbox; "" = none.
func (h *Host) Kernel(box string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, m := range h.mu.machines {
		if m.serves(box) {
			return id
		}
	}
	return ""
}

// Kill ends a kernel the way exit says, as the outside world would. It says
// whether there was one alive.
func (h *Host) Kill(id string, exit runtime.Exit) bool {
	m := h.get(id)
	return m != nil && m.die(exit)
}

// Reboot ends every kernel and forgets it, as a restart of the machine does.
func (h *Host) Reboot() {
	for _, id := range h.IDs() {
		_ = h.remove(id, runtime.Exit{Cause: sandbox.Infra, Detail: "reboot"})
	}
}

// Close ends every kernel and removes its files.
func (h *Host) Close() error {
	var errs []error
	for _, id := range h.IDs() {
		errs = append(errs, h.remove(id, runtime.Exit{Cause: sandbox.KilledByUser}))
	}
	return errors.Join(errs...)
}

func (h *Host) get(id string) *machine {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.machines[id]
}

func (h *Host) boot(id string, c runtime.Class) (*machine, error) {
	m := &machine{id: id, class: c, done: make(chan struct{})}
	m.memory.Store(10 << 20)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.machines[id] != nil {
		return nil, sandbox.Errorf(sandbox.AlreadyExists, "fake.boot", "kernel %s exists", id)
	}
	if !h.opts.Bare {
		m.secret = make([]byte, 32)
		_, _ = rand.Read(m.secret) // never fails
		m.root = filepath.Join(h.dir, id)
		if err := m.start(); err != nil {
			return nil, sandbox.Errorf(sandbox.Unavailable, "fake.boot", "start the guest: %w", err)
		}
	}
	h.mu.machines[id] = m
	return m, nil
}

// leftovers are the directories of kernels that a process before this one had.
func (h *Host) leftovers() []string {
	if h.opts.Bare {
		return nil
	}
	ents, _ := os.ReadDir(h.dir) // no directory, no leftovers
	h.mu.Lock()
	defer h.mu.Unlock()
	var ids []string
	for _, e := range ents {
		if h.mu.machines[e.Name()] == nil {
			ids = append(ids, e.Name())
		}
	}
	return ids
}

func (h *Host) remove(id string, exit runtime.Exit) error {
	h.mu.Lock()
	m := h.mu.machines[id]
	delete(h.mu.machines, id)
	h.mu.Unlock()
	if m == nil {
		return nil
	}
	m.die(exit)
	if m.root == "" {
		return nil
	}
	return os.RemoveAll(m.root)
}

// machine is one fake kernel as the host sees it.
type machine struct {
	id     string
	class  runtime.Class
	root   string // the user's file system; "" when bare
	secret []byte
	guest  *agent.Agent // nil when bare
	done   chan struct{}
	memory atomic.Int64 // that it is said to use

	mu struct {
		sync.Mutex
		attached bool
		sandbox  string // of its container
		paused   bool
		dead     bool
		exit     runtime.Exit
	}
}

func (m *machine) isAttached() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.attached
}

func (m *machine) serves(box string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.attached && !m.mu.dead && m.mu.sandbox == box
}

func (m *machine) die(exit runtime.Exit) bool {
	m.mu.Lock()
	if m.mu.dead {
		m.mu.Unlock()
		return false
	}
	m.mu.dead = true
	if exit.At.IsZero() {
		exit.At = time.Now()
	}
	m.mu.exit = exit
	m.mu.Unlock()
	if m.guest != nil {
		m.guest.Close()
	}
	close(m.done)
	return true
}

// vacate undoes claim.
func (m *machine) vacate() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.attached, m.mu.sandbox = false, ""
}

// claim marks the machine attached to a sandbox, once.
func (m *machine) claim(box string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.mu.dead:
		return sandbox.Errorf(sandbox.Unavailable, "fake.attach", "kernel %s is dead: %s", m.id, m.mu.exit.Cause)
	case m.mu.attached:
		return sandbox.Errorf(sandbox.Precondition, "fake.attach", "kernel %s has a container already", m.id)
	}
	m.mu.attached, m.mu.sandbox = true, box
	return nil
}
