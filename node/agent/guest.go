package agent

import (
	"context"
	"errors"
	"iter"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// What the machine inside is asked. Every call holds the sandbox awake for as
// long as it lasts, a stream for as long as it is ranged over.

// ask calls f with the guest of a sandbox.
func (n *Node) ask(ctx context.Context, id string, f func(g *guest.Client) error) error {
	b, release, err := n.hold(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	err = f(n.inside(b).Guest())
	if sandbox.ClassOf(err) == sandbox.Unavailable && b.ctx.Err() != nil {
		return context.Cause(b.ctx) // the end of the sandbox broke the call
	}
	return err
}

// told is ask for what gives one thing.
func told[T any](n *Node, ctx context.Context, id string, f func(g *guest.Client) (T, error)) (v T, err error) {
	err = n.ask(ctx, id, func(g *guest.Client) error {
		v, err = f(g)
		return err
	})
	return v, err
}

// errLeft is how a sink says that whoever ranged over it has stopped.
var errLeft = errors.New("the reader has left")

// followed is ask for what tells more and more.
func followed[T any](n *Node, ctx context.Context, id string, f func(g *guest.Client, sink func(T) error) error) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		left := false
		err := n.ask(ctx, id, func(g *guest.Client) error {
			return f(g, func(v T) error {
				if left = !yield(v, nil); left {
					return errLeft
				}
				return nil
			})
		})
		if err != nil && !left {
			var none T
			yield(none, err)
		}
	}
}

func (n *Node) Start(ctx context.Context, id string, spec sandbox.ProcessSpec, offset int64) iter.Seq2[sandbox.ProcessEvent, error] {
	return followed(n, ctx, id, func(g *guest.Client, sink func(sandbox.ProcessEvent) error) error {
		clock, err := n.beginExec(ctx, id, spec.ExecID)
		if err != nil {
			return err
		}
		m := n.meterOf(id)
		err = g.Start(ctx, spec, offset, m.sink(clock.sink(spec.ExecID, sink)))
		if err != nil && ctx.Err() == nil {
			clock.end(spec.ExecID) // refused, or its kernel is gone
		}
		if refused := m != nil && err != nil && ctx.Err() == nil; refused {
			m.close()
		}
		return err
	})
}

func (n *Node) Attach(ctx context.Context, id, execID string, offset int64) iter.Seq2[sandbox.ProcessEvent, error] {
	return followed(n, ctx, id, func(g *guest.Client, sink func(sandbox.ProcessEvent) error) error {
		return g.Attach(ctx, execID, offset, n.clockOf(id).sink(execID, sink))
	})
}

func (n *Node) SendInput(ctx context.Context, id, execID string, data []byte) error {
	return n.ask(ctx, id, func(g *guest.Client) error { return g.SendInput(ctx, execID, data) })
}

func (n *Node) CloseInput(ctx context.Context, id, execID string) error {
	return n.ask(ctx, id, func(g *guest.Client) error { return g.CloseInput(ctx, execID) })
}

func (n *Node) Signal(ctx context.Context, id, execID, signal string, processOnly bool) error {
	return n.ask(ctx, id, func(g *guest.Client) error { return g.Signal(ctx, execID, signal, processOnly) })
}

func (n *Node) Resize(ctx context.Context, id, execID string, size sandbox.TermSize) error {
	return n.ask(ctx, id, func(g *guest.Client) error { return g.Resize(ctx, execID, size) })
}

func (n *Node) Processes(ctx context.Context, id string) (procs []sandbox.Process, tasks []sandbox.Task, err error) {
	err = n.ask(ctx, id, func(g *guest.Client) (err error) {
		procs, tasks, err = g.Processes(ctx)
		return err
	})
	return procs, tasks, err
}

func (n *Node) Wait(ctx context.Context, id, execID string) (sandbox.ProcessEnd, error) {
	return told(n, ctx, id, func(g *guest.Client) (sandbox.ProcessEnd, error) { return g.Wait(ctx, execID) })
}

func (n *Node) ReadFile(ctx context.Context, id, path string, offset, length int64) (data []byte, info sandbox.FileInfo, err error) {
	err = n.ask(ctx, id, func(g *guest.Client) (err error) {
		data, info, err = g.ReadFile(ctx, path, offset, length)
		return err
	})
	return data, info, err
}

func (n *Node) WriteFile(ctx context.Context, id, path string, data []byte, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	return told(n, ctx, id, func(g *guest.Client) (sandbox.FileInfo, error) { return g.WriteFile(ctx, path, data, opt) })
}

func (n *Node) StatFile(ctx context.Context, id, path string) (sandbox.FileInfo, error) {
	return told(n, ctx, id, func(g *guest.Client) (sandbox.FileInfo, error) { return g.Stat(ctx, path) })
}

func (n *Node) ListFiles(ctx context.Context, id, path string, opt sandbox.ListOptions) (files []sandbox.FileInfo, truncated bool, err error) {
	err = n.ask(ctx, id, func(g *guest.Client) (err error) {
		files, truncated, err = g.List(ctx, path, opt)
		return err
	})
	return files, truncated, err
}

func (n *Node) MakeDir(ctx context.Context, id, path string, opt sandbox.WriteOptions) (sandbox.FileInfo, error) {
	return told(n, ctx, id, func(g *guest.Client) (sandbox.FileInfo, error) { return g.Mkdir(ctx, path, opt) })
}

func (n *Node) MoveFile(ctx context.Context, id, from, to string) (sandbox.FileInfo, error) {
	return told(n, ctx, id, func(g *guest.Client) (sandbox.FileInfo, error) { return g.Move(ctx, from, to) })
}

func (n *Node) RemoveFile(ctx context.Context, id, path string, recursive bool) error {
	return n.ask(ctx, id, func(g *guest.Client) error { return g.Remove(ctx, path, recursive) })
}

func (n *Node) Chmod(ctx context.Context, id, path string, mode uint32, recursive bool) error {
	return n.ask(ctx, id, func(g *guest.Client) error { return g.Chmod(ctx, path, mode, recursive) })
}

func (n *Node) SetAttributes(ctx context.Context, id, path string, attrs map[string]string) (fi sandbox.FileInfo, err error) {
	err = n.ask(ctx, id, func(g *guest.Client) (err error) { fi, err = g.SetAttributes(ctx, path, attrs); return err })
	return fi, err
}

func (n *Node) Chown(ctx context.Context, id, path, owner string, recursive bool) error {
	return n.ask(ctx, id, func(g *guest.Client) error { return g.Chown(ctx, path, owner, recursive) })
}

func (n *Node) Watch(ctx context.Context, id, path string, recursive bool) iter.Seq2[sandbox.FileChange, error] {
	return followed(n, ctx, id, func(g *guest.Client, sink func(sandbox.FileChange) error) error {
		return g.Watch(ctx, path, recursive, sink)
	})
}
