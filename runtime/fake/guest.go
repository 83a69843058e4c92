package fake

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/agent"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

var errBare = &sandbox.Error{Class: sandbox.Unsupported, Op: "fake", Msg: "a bare kernel has no guest"}

// start runs the agent of a machine that is not bare.
func (m *machine) start() error {
	if err := os.MkdirAll(m.root, 0o700); err != nil {
		return err
	}
	m.guest = agent.New(agent.Config{Secret: m.secret, Space: agent.HostSpace(m.root)})
	return nil
}

// dial gives the agent one end of a socket pair. The other is the client's. Not
// net.Pipe, which holds nothing: client and guest, who both speak first, would each
// wait for the other to read.
func (m *machine) dial(context.Context) (net.Conn, error) {
	if m.guest == nil {
		return nil, errBare
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.dead {
		return nil, sandbox.Errorf(sandbox.Unavailable, "fake.dial", "kernel %s is dead", m.id)
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "fake.dial", "%w", err)
	}
	go m.guest.ServeConn(theirs) // ended and waited for by Close
	return ours, nil
}

func socketPair() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "guest")
		c, e := net.FileConn(f) // a copy
		conns[i], err = c, errors.Join(err, e, f.Close())
	}
	if err != nil {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
		return nil, nil, err
	}
	return conns[0], conns[1], nil
}

// bulk ends with its context, as the process does that a real kernel runs for it.
func (m *machine) bulk(ctx context.Context, op guest.BulkOp, stdin, stdout *os.File) error {
	if m.guest == nil {
		return errBare
	}
	defer context.AfterFunc(ctx, func() {
		now := time.Now()
		if stdin != nil {
			_ = stdin.SetReadDeadline(now) // of a pipe; a file does not wait
		}
		if stdout != nil {
			_ = stdout.SetWriteDeadline(now)
		}
	})()
	err := agent.RunBulk(agent.HostSpace(m.root), op, stdin, stdout)
	if ctx.Err() != nil {
		return left(ctx, "fake.bulk")
	}
	return err
}

// populate makes the user's root of the image, which is a tar, and has the guest
// serve it. Commands are the host's.
func (k *kernel) populate(ctx context.Context, c runtime.Container) error {
	if k.m.guest == nil {
		return nil
	}
	err := os.MkdirAll(filepath.Join(k.m.root, "tmp"), 0o777)
	if err == nil && c.Rootfs.Path != "" {
		err = unpack(ctx, c.Rootfs.Path, k.m.root)
	}
	if err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "fake.attach", "%w", err)
	}
	return k.serve(ctx, c)
}

// serve has the guest serve the machine's directory.
func (k *kernel) serve(ctx context.Context, c runtime.Container) error {
	return k.guest.Enter(ctx, guest.Container{Env: runtime.Environ(c), WorkingDir: c.Rootfs.WorkingDir, User: c.Rootfs.User})
}

// evacuate has the guest leave and removes the files of an episode.
func (k *kernel) evacuate(ctx context.Context, leave func(context.Context) error) error {
	if k.m.guest == nil {
		return nil
	}
	if err := leave(ctx); err != nil {
		return err
	}
	ents, err := os.ReadDir(k.m.root)
	for _, e := range ents {
		err = errors.Join(err, os.RemoveAll(filepath.Join(k.m.root, e.Name())))
	}
	if err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "fake.reset", "%w", err)
	}
	return nil
}

// MemoryUse is what Host.SetMemory said. See runtime.Meter.
func (k *kernel) MemoryUse() (int64, error) { return k.m.memory.Load(), nil }

// Stats counts what can be counted of something that is no process of its own.
func (k *kernel) Stats(ctx context.Context) (sandbox.Stats, error) {
	if isClosed(k.m.done) {
		return sandbox.Stats{}, sandbox.Errorf(sandbox.Unavailable, "fake.stats", "kernel %s is dead", k.m.id)
	}
	s := sandbox.Stats{Memory: k.m.memory.Load(), Processes: 1}
	if k.m.guest == nil {
		return s, nil
	}
	err := filepath.WalkDir(k.m.root, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // going away as we look
		}
		if info, err := d.Info(); err == nil {
			s.DiskUsed += info.Size()
		}
		return nil
	})
	return s, err
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
