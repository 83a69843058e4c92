package agent

import (
	"io/fs"
	"maps"
	"sync"
)

// memFS is a file system that forgets what was not synced when it crashes, and
// fails where a test wants it to.
type memFS struct {
	mu      sync.Mutex
	names   map[string]*memFile // as running programs see it
	durable map[string]*memFile // as a crash leaves it
	fault   func(op, name string) error
	syncs   int
	block   chan struct{} // syncs wait for it, where set
}

type memFile struct {
	fs     *memFS
	name   string
	data   []byte
	synced int
}

func newMemFS() *memFS { return &memFS{names: map[string]*memFile{}, durable: map[string]*memFile{}} }

// crash leaves what was synced, and of the rest what torn keeps of each file.
func (m *memFS) crash(torn func(unsynced int) int) *memFS {
	m.mu.Lock()
	defer m.mu.Unlock()
	after := newMemFS()
	for name, f := range m.durable {
		keep := f.synced
		if torn != nil {
			keep += torn(len(f.data) - f.synced)
		}
		g := &memFile{fs: after, name: name, data: append([]byte(nil), f.data[:keep]...), synced: keep}
		after.names[name], after.durable[name] = g, g
	}
	m.fault = func(string, string) error { return errDead }
	return after
}

type deadError struct{}

func (deadError) Error() string { return "the process is dead" }

var errDead error = deadError{}

func (m *memFS) setFault(f func(op, name string) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault = f
}

func (m *memFS) check(op, name string) error {
	if m.fault != nil {
		return m.fault(op, name)
	}
	return nil
}

func (m *memFS) ReadFile(name string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.check("read", name); err != nil {
		return nil, err
	}
	f := m.names[name]
	if f == nil {
		return nil, fs.ErrNotExist
	}
	return append([]byte(nil), f.data...), nil
}

func (m *memFS) Create(name string) (logFile, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.check("create", name); err != nil {
		return nil, err
	}
	f := &memFile{fs: m, name: name}
	m.names[name] = f
	return f, nil
}

func (m *memFS) Rename(from, to string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.check("rename", from); err != nil {
		return err
	}
	m.names[to] = m.names[from]
	m.names[to].name = to
	delete(m.names, from)
	return nil
}

func (m *memFS) Remove(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.names, name)
	return nil
}

func (m *memFS) SyncDir(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.check("syncdir", name); err != nil {
		return err
	}
	m.durable = maps.Clone(m.names)
	return nil
}

// Write keeps half of what a fault interrupts, as a full disk does.
func (f *memFile) Write(b []byte) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.fs.check("write", f.name); err != nil {
		if err != errDead {
			f.data = append(f.data, b[:len(b)/2]...)
		}
		return 0, err
	}
	f.data = append(f.data, b...)
	return len(b), nil
}

func (f *memFile) Sync() error {
	f.fs.mu.Lock()
	block := f.fs.block
	f.fs.mu.Unlock()
	if block != nil {
		<-block
	}
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	f.fs.syncs++
	if err := f.fs.check("sync", f.name); err != nil {
		return err
	}
	f.synced = len(f.data)
	return nil
}

func (f *memFile) Close() error { return nil }
