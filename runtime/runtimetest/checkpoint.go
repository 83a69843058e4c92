package runtimetest

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// checkpoint makes one of a kernel that goes on.
func (s *suite) checkpoint(t *testing.T, k runtime.Kernel) (dir string, cp runtime.Checkpoint) {
	t.Helper()
	dir = t.TempDir()
	cp, err := k.(runtime.Checkpointer).Checkpoint(deadline(t), dir, runtime.CheckpointOptions{})
	if err != nil {
		t.Fatalf("checkpoint: %v", err)
	}
	return dir, cp
}

func (s *suite) blank(t *testing.T, d runtime.Driver) runtime.Blank {
	t.Helper()
	b, err := d.(runtime.Blanker).Blank(deadline(t), s.id())
	if err != nil {
		t.Fatalf("blank: %v", err)
	}
	return b
}

// restore makes a kernel of a checkpoint.
func (s *suite) restore(t *testing.T, d runtime.Driver, dir string, cp runtime.Checkpoint, edits ...func(*runtime.Container)) runtime.Kernel {
	t.Helper()
	b := s.blank(t, d)
	k, err := b.(runtime.Restorer).Restore(deadline(t), dir, cp, s.container(t, edits...))
	if err != nil {
		_ = b.Destroy(context.Background())
		t.Fatalf("restore: %v", err)
	}
	destroyAtEnd(t, k)
	return k
}

// A checkpoint holds the files; the source goes on; children are independent.
func (s *suite) testCheckpointFiles(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint)
	k := s.attached(t, d)
	s.sh(t, k, "mkdir -p a/b; echo one > a/b/file; ln -s b a/link; head -c 5000000 /dev/urandom > big; cksum < big > sum")
	dir, cp := s.checkpoint(t, k)
	if len(cp.Files) == 0 || cp.Driver != d.Name() {
		t.Errorf("checkpoint %+v", cp)
	}
	s.sh(t, k, "echo two > a/b/file; rm big")
	x, y := s.restore(t, d, dir, cp), s.restore(t, d, dir, cp, func(c *runtime.Container) { c.Env = map[string]string{"ADDED": "later"} })
	for _, child := range []runtime.Kernel{x, y} {
		if got := s.sh(t, child, `cat a/link/file; cksum < big | cmp - sum && echo same`); got != "one\nsame" {
			t.Errorf("child has %q", got)
		}
	}
	if got := s.sh(t, y, `echo "$ADDED"`); got != "later" {
		t.Errorf("environment of a child: %q", got)
	}
	s.sh(t, x, "echo x > a/b/file")
	if got := s.sh(t, k, "cat a/b/file") + s.sh(t, x, "cat a/b/file") + s.sh(t, y, "cat a/b/file"); got != "twoxone" {
		t.Errorf("source and children share files: %q", got)
	}
	// A child is a kernel like any other.
	if _, err := x.Stats(deadline(t)); err != nil {
		t.Errorf("stats: %v", err)
	}
	dir2, cp2 := s.checkpoint(t, x)
	if err := x.Reset(deadline(t), s.container(t)); err != nil {
		t.Fatalf("reset of a child: %v", err)
	}
	s.sh(t, x, "! test -e a && ! test -e big")
	z := s.restore(t, d, dir2, cp2)
	if got := s.sh(t, z, "cat a/b/file"); got != "x" {
		t.Errorf("a child's child has %q", got)
	}
}

// Processes go on where they were, with all they hold.
func (s *suite) testCheckpointProcesses(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint processes", d.Capabilities().Processes)
	k := s.attached(t, d)
	loop := shell(`i=0; while :; do i=$((i+1)); echo $i; until test -e /tmp/go$i; do sleep 0.01; done; done`)
	loop.ExecID = "loop"
	started, _ := s.background(t, k, loop)
	waitFor(t, "the loop", started)
	py := sandbox.ProcessSpec{ExecID: "py", User: "root", Args: []string{"python3", "-uc", `
import os, socket, threading, time
held = os.urandom(5 << 20)
l = socket.socket(); l.bind(("127.0.0.1", 7777)); l.listen()
print(hash(held), flush=True)
n = 0
while True:
    c, _ = l.accept()
    n += 1
    c.sendall(f"{n} {hash(held)}".encode()); c.close()
`}}
	started, _ = s.background(t, k, py)
	waitFor(t, "python", started)
	ask := `python3 -c 'import socket
s = socket.create_connection(("127.0.0.1", 7777)); print(s.recv(100).decode())'`
	first := s.sh(t, k, "until "+ask+" 2>/dev/null; do sleep 0.05; done")
	pty := sandbox.ProcessSpec{ExecID: "pty", Args: []string{"sh"}, PTY: &sandbox.TermSize{Rows: 24, Cols: 80}, User: "root"}
	started, _ = s.background(t, k, pty)
	waitFor(t, "the terminal", started)
	if err := k.Guest().SendInput(deadline(t), "pty", []byte("x=before\n")); err != nil {
		t.Fatal(err)
	}
	s.sh(t, k, "touch /tmp/go1")
	dir, cp := s.checkpoint(t, k)
	s.sh(t, k, "touch /tmp/go2 /tmp/go3")

	x, y := s.restore(t, d, dir, cp), s.restore(t, d, dir, cp)
	hash := first[strings.Index(first, " ")+1:]
	for i, child := range []runtime.Kernel{k, x, y} {
		if got := s.sh(t, child, ask); got != "2 "+hash {
			t.Errorf("%d: the server says %q, first %q", i, got, first)
		}
		s.sh(t, child, "touch /tmp/go2")
		c := collector{offset: 2}
		ctx, cancel := context.WithCancel(deadline(t))
		err := child.Guest().Attach(ctx, "loop", 2, func(e sandbox.ProcessEvent) error {
			_ = c.sink(e)
			if strings.Contains(c.stdout, "3\n") {
				cancel()
			}
			return nil
		})
		cancel()
		if !strings.HasPrefix(c.stdout, "2\n3\n") || len(c.errs) > 0 {
			t.Errorf("%d: the loop goes on as %q %v %v", i, c.stdout, c.errs, err)
		}
		if err := child.Guest().SendInput(deadline(t), "pty", []byte("echo \"<$x>\" >/tmp/pty; stty size >>/tmp/pty; exit 7\n")); err != nil {
			t.Errorf("%d: terminal: %v", i, err)
		}
		end, err := child.Guest().Wait(deadline(t), "pty")
		if err != nil || end.ExitCode != 7 {
			t.Errorf("%d: the terminal ends as %+v, %v", i, end, err)
		}
		if got := s.sh(t, child, "cat /tmp/pty"); got != "<before>\n24 80" {
			t.Errorf("%d: the terminal wrote %q", i, got)
		}
	}
	if os.Getenv("COVE_TEST_DEBUG") != "" {
		t.Log(cp.Build)
	}
}
