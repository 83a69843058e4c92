package fake

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"

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

// dial gives the agent one end of a pipe. The other is the client's.
func (m *machine) dial(context.Context) (net.Conn, error) {
	if m.guest == nil {
		return nil, errBare
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return nil, sandbox.Errorf(sandbox.Unavailable, "fake.dial", "kernel %s is dead", m.id)
	}
	ours, theirs := net.Pipe()
	go m.guest.ServeConn(theirs) // ended and waited for by Close
	return ours, nil
}

func (m *machine) bulk(op guest.BulkOp, stdin, stdout *os.File) error {
	if m.guest == nil {
		return errBare
	}
	return agent.RunBulk(agent.HostSpace(m.root), op, stdin, stdout)
}

// populate makes the user's root and has the guest serve it. The image's
// content is not there: commands are the host's.
func (k *kernel) populate(ctx context.Context, c runtime.Container) error {
	if k.m.guest == nil {
		return nil
	}
	if err := os.Mkdir(filepath.Join(k.m.root, "tmp"), 0o777); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "fake.attach", "%w", err)
	}
	return k.serve(ctx, c)
}

// serve has the guest serve the machine's directory.
func (k *kernel) serve(ctx context.Context, c runtime.Container) error {
	return k.guest.Enter(ctx, guest.Container{Env: runtime.Environ(c), WorkingDir: c.Rootfs.WorkingDir, User: c.Rootfs.User})
}

// evacuate ends the processes and removes the files of an episode.
func (k *kernel) evacuate(ctx context.Context) error {
	if k.m.guest == nil {
		return nil
	}
	if err := k.guest.Leave(ctx); err != nil {
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

// Stats counts what can be counted of something that is no process of its own.
func (k *kernel) Stats(ctx context.Context) (sandbox.Stats, error) {
	if isClosed(k.m.done) {
		return sandbox.Stats{}, sandbox.Errorf(sandbox.Unavailable, "fake.stats", "kernel %s is dead", k.m.id)
	}
	s := sandbox.Stats{Memory: 10 << 20, Processes: 1}
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
