package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/wire"
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
	b, err := d.(runtime.Blanker).Blank(deadline(t), s.id(), s.Class)
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

// What a kernel keeps ready for its next reset is no part of a checkpoint.
func (s *suite) testCheckpointAfterResets(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint)
	s.need(t, d, "able to pause", d.Capabilities().Pause)
	k := s.attached(t, d)
	c := s.container(t)
	for i := range 3 {
		if err := k.Reset(deadline(t), c); err != nil {
			t.Fatal(err)
		}
		s.sh(t, k, fmt.Sprintf("echo %d > kept", i))
		time.Sleep(200 * time.Millisecond) // for the spare, which nothing tells of
	}
	dir, cp := s.checkpoint(t, k)
	child := s.restore(t, d, dir, cp)
	if got := s.sh(t, child, "cat kept"); strings.TrimSpace(got) != "2" {
		t.Errorf("in the child: %q", got)
	}
	if err := child.Reset(deadline(t), c); err != nil {
		t.Errorf("reset of the child: %v", err)
	}
	time.Sleep(200 * time.Millisecond)
	p := k.(runtime.Pauser)
	if err := p.Pause(deadline(t)); err != nil {
		t.Fatal(err)
	}
	dir, cp = s.checkpoint(t, k)
	if err := p.Resume(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if got := s.sh(t, s.restore(t, d, dir, cp), "cat kept"); strings.TrimSpace(got) != "2" {
		t.Errorf("in the child of the paused one: %q", got)
	}
	if err := k.Reset(deadline(t), c); err != nil {
		t.Error(err)
	}
	if got := s.sh(t, k, "cat kept 2>&1 || true"); !strings.Contains(got, "No such file") {
		t.Errorf("after the reset: %q", got)
	}
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
}

// Who is attached to a process while its kernel is checkpointed misses nothing
// and sees no error; and a request of every other kind works right after.
func (s *suite) testCheckpointKeepsReaders(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint)
	k := s.attached(t, d)
	spec := shell(`i=0; while ! test -e stop; do i=$((i+1)); echo $i; done; echo last`)
	spec.ExecID = "talker"
	started, end := s.background(t, k, spec)
	waitFor(t, "the process", started)
	waited := make(chan error, 1)
	go func() {
		_, err := k.Guest().Wait(deadline(t), "talker")
		waited <- err
	}()
	for range 5 {
		s.checkpoint(t, k)
		s.sh(t, k, "true")
	}
	s.sh(t, k, "touch stop")
	if err := waitFor(t, "the waiter", waited); err != nil {
		t.Errorf("a wait over checkpoints: %v", err)
	}
	r := waitFor(t, "the reader", end)
	lines := strings.Split(strings.TrimSpace(r.stdout), "\n")
	if r.end.Cause != sandbox.Exited || lines[len(lines)-1] != "last" {
		t.Fatalf("the reader saw %d lines and %+v", len(lines), r.end)
	}
	for i, l := range lines[:len(lines)-1] {
		if l != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, l)
		}
	}
}

// Children share no secret and no randomness, with each other or the source.
func (s *suite) testCheckpointSecrets(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint && d.Capabilities().Isolated)
	k := s.attached(t, d)
	random := sandbox.ProcessSpec{ExecID: "random", User: "root", Stdin: true, Args: []string{"sh", "-c", "exec 3</dev/urandom; read x; head -c 16 <&3 | od -An -tx1"}}
	started, _ := s.background(t, k, random)
	waitFor(t, "the process", started)
	dir, cp := s.checkpoint(t, k)
	kernels := []runtime.Kernel{k, s.restore(t, d, dir, cp), s.restore(t, d, dir, cp)}
	seen := map[string]bool{}
	differ := func(what, v string) {
		t.Helper()
		if v == "" || seen[v] {
			t.Errorf("%s is shared: %q", what, v)
		}
		seen[v] = true
	}
	for i, k := range kernels {
		differ("the handle", string(k.Handle().Data))
		if err := k.Guest().SendInput(deadline(t), "random", []byte("\n")); err != nil {
			t.Fatal(err)
		}
		var c collector
		if err := k.Guest().Attach(deadline(t), "random", 0, c.sink); err != nil {
			t.Fatal(err)
		}
		differ("an open /dev/urandom", c.stdout)
		differ("/dev/urandom", s.sh(t, k, "head -c 16 /dev/urandom | od -An -tx1"))
		differ("uuid", s.sh(t, k, "python3 -c 'import uuid; print(uuid.uuid4())'"))
		for j, other := range kernels {
			if s.Dial == nil || s.Secret == nil {
				break
			}
			c := guest.NewClient(func(ctx context.Context) (net.Conn, error) { return s.Dial(ctx, k) }, s.Secret(t, other))
			err := c.Ping(deadline(t))
			c.Close()
			if i == j && err != nil || i != j && err == nil {
				t.Errorf("kernel %d with the secret of %d: %v", i, j, err)
			}
			nc, err := s.Dial(deadline(t), k)
			if err != nil {
				t.Fatal(err)
			}
			_, hello, err := wire.NewConn(nc).ReadFrame(64)
			nc.Close()
			if err != nil {
				t.Fatal(err)
			}
			differ("the guest's nonce", string(hello))
		}
	}
}

func (s *suite) testRestoreRefuses(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint)
	k := s.attached(t, d)
	dir, cp := s.checkpoint(t, k)
	b := s.blank(t, d)
	try := func(what string, dir string, reason sandbox.Reason, edit func(*runtime.Checkpoint)) {
		t.Helper()
		c := cp
		edit(&c)
		_, err := b.(runtime.Restorer).Restore(deadline(t), dir, c, s.container(t))
		expectClass(t, what, err, sandbox.Precondition)
		var e *sandbox.Error
		if errors.As(err, &e) && e.Reason != reason {
			t.Errorf("%s: reason %q, want %q", what, e.Reason, reason)
		}
	}
	try("another driver", dir, sandbox.RestoreRefused, func(c *runtime.Checkpoint) { c.Driver = "other" })
	try("another version", dir, sandbox.RestoreRefused, func(c *runtime.Checkpoint) { c.Version++ })
	try("another build", dir, sandbox.RestoreRefused, func(c *runtime.Checkpoint) { c.Build = strings.Replace(c.Build, "v0", "v9", 1) + "x" })
	try("no files", t.TempDir(), "", func(c *runtime.Checkpoint) {})
	// The blank is none the worse for it.
	got, err := b.(runtime.Restorer).Restore(deadline(t), dir, cp, s.container(t))
	if err != nil {
		t.Fatal(err)
	}
	destroyAtEnd(t, got)
	s.sh(t, got, "true")
	if _, err := k.(runtime.Checkpointer).Checkpoint(deadline(t), dir, runtime.CheckpointOptions{}); err == nil {
		t.Error("a directory that is not empty was taken")
	}
	s.sh(t, k, "true")
	bare := s.boot(t, d)
	_, err = bare.(runtime.Checkpointer).Checkpoint(deadline(t), t.TempDir(), runtime.CheckpointOptions{})
	expectClass(t, "a kernel without a container", err, sandbox.Precondition)
}

func (s *suite) testCheckpointStop(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint)
	k := s.attached(t, d)
	s.sh(t, k, "echo kept > file")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	stop := runtime.CheckpointOptions{Stop: true}
	if _, err := k.(runtime.Checkpointer).Checkpoint(ctx, dir, stop); sandbox.ClassOf(err) != sandbox.Canceled {
		t.Errorf("cancelled: %v", err)
	}
	if isDone(k) {
		t.Fatal("a checkpoint that failed stopped the kernel")
	}
	s.sh(t, k, "true")
	cp, err := k.(runtime.Checkpointer).Checkpoint(deadline(t), dir, stop)
	if err != nil {
		t.Fatalf("checkpoint: %v", err)
	}
	waitFor(t, "its end", k.Done())
	if err := k.Destroy(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if got := s.sh(t, s.restore(t, d, dir, cp), "cat file"); got != "kept" {
		t.Errorf("restored with %q", got)
	}
}

// Many at once, from one checkpoint, while the source makes another.
func (s *suite) testRestoreConcurrent(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint)
	k := s.attached(t, d)
	s.sh(t, k, "echo kept > file")
	dir, cp := s.checkpoint(t, k)
	var blanks []runtime.Blank
	for range 4 {
		blanks = append(blanks, s.blank(t, d))
	}
	errs := make(chan error, len(blanks))
	container := s.container(t)
	for _, b := range blanks {
		go func() {
			child, err := b.(runtime.Restorer).Restore(deadline(t), dir, cp, container)
			if err == nil {
				var r result
				r, err = s.tryExec(deadline(t), child, shell("cat file"))
				if err == nil && r.stdout != "kept\n" {
					err = fmt.Errorf("it has %q", r.stdout)
				}
				err = errors.Join(err, child.Destroy(deadline(t)))
			}
			errs <- err
		}()
	}
	s.checkpoint(t, k)
	for range blanks {
		if err := waitFor(t, "a restore", errs); err != nil {
			t.Error(err)
		}
	}
}

// A kernel that dies amid a checkpoint leaves an error and nothing else.
func (s *suite) testCheckpointKilled(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint processes", d.Capabilities().Processes && s.Kill != nil)
	k := s.attached(t, d)
	// Enough that it is not over at once.
	spec := sandbox.ProcessSpec{ExecID: "big", User: "root", Args: []string{"python3", "-uc", "import os,time; x=os.urandom(200<<20); print('up'); time.sleep(1000)"}}
	up := make(chan struct{})
	isUp := sync.OnceFunc(func() { close(up) }) // a line may come in two pieces
	go k.Guest().Start(deadline(t), spec, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			isUp()
		}
		return nil
	})
	waitFor(t, "memory", up)
	dir := t.TempDir()
	failed := make(chan error, 1)
	go func() {
		_, err := k.(runtime.Checkpointer).Checkpoint(deadline(t), dir, runtime.CheckpointOptions{})
		failed <- err
	}()
	for { // the first file says it has begun
		if ents, err := os.ReadDir(dir); err != nil || len(ents) > 0 {
			break
		}
	}
	s.Kill(t, k)
	if err := waitFor(t, "the checkpoint", failed); err == nil {
		t.Error("a checkpoint of a killed kernel succeeded")
	}
	if ents, err := os.ReadDir(dir); err != nil || len(ents) > 0 {
		t.Errorf("it left %v, %v", ents, err)
	}
	waitFor(t, "its end", k.Done())
}

func (s *suite) testCheckpointDiskFull(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint && s.SmallDir != nil)
	k := s.attached(t, d)
	s.sh(t, k, "head -c 20000000 /dev/urandom > big")
	spec := shell("until test -e done; do sleep 0.01; done; exit 3")
	spec.ExecID = "lives"
	started, end := s.background(t, k, spec)
	waitFor(t, "the process", started)
	for _, stop := range []bool{false, true} {
		for _, size := range []int64{64 << 10, 4 << 20, 16 << 20} {
			dir := s.SmallDir(t, size)
			_, err := k.(runtime.Checkpointer).Checkpoint(deadline(t), dir, runtime.CheckpointOptions{Stop: stop})
			expectClass(t, fmt.Sprintf("a disk of %d bytes", size), err, sandbox.DiskFull)
			if ents, err := os.ReadDir(dir); err != nil || len(ents) > 0 {
				t.Errorf("it left %v, %v", ents, err)
			}
			s.sh(t, k, "cksum < big")
		}
	}
	s.sh(t, k, "touch done")
	if r := waitFor(t, "its end", end); r.end.ExitCode != 3 {
		t.Errorf("a process of a kernel whose checkpoints failed: %+v", r.end)
	}
	dir, cp := s.checkpoint(t, k)
	s.sh(t, s.restore(t, d, dir, cp), "cksum < big")
}

// What restores must survive like any other kernel.
// A kernel that was reset keeps its next container ready, and a process that
// adopts it finds that one too.
func (s *suite) testCheckpointAdoptedAfterReset(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to checkpoint and adopt", d.Capabilities().Checkpoint && d.Capabilities().Adopt)
	k := s.mortal(t, d)
	c := s.container(t)
	if err := k.Attach(deadline(t), c); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := k.Reset(deadline(t), c); err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond) // for the spare, which nothing tells of
	}
	s.sh(t, k, "echo kept > file")
	h := journaled(t, k)
	k.Guest().Close() // as its process's end does
	d = s.restart(t, d, dir)
	k, err := d.Adopt(deadline(t), h)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	destroyAtEnd(t, k)
	cpdir, cp := s.checkpoint(t, k)
	if got := s.sh(t, s.restore(t, d, cpdir, cp), "cat file"); got != "kept" {
		t.Errorf("the child has %q", got)
	}
	if err := k.Reset(deadline(t), c); err != nil {
		t.Error(err)
	}
}

func (s *suite) testRestoredAdopt(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to checkpoint and adopt", d.Capabilities().Checkpoint && d.Capabilities().Adopt)
	k := s.mortal(t, d)
	if err := k.Attach(deadline(t), s.container(t)); err != nil {
		t.Fatal(err)
	}
	s.sh(t, k, "echo kept > file")
	cpdir, cp := s.checkpoint(t, k)
	if err := k.Destroy(deadline(t)); err != nil {
		t.Fatal(err)
	}
	child, err := s.blank(t, d).(runtime.Restorer).Restore(deadline(t), cpdir, cp, s.container(t))
	if err != nil {
		t.Fatal(err)
	}
	h := journaled(t, child)
	child.Guest().Close() // as its process's end does
	d = s.restart(t, d, dir)
	child, err = d.Adopt(deadline(t), h)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	destroyAtEnd(t, child)
	if got := s.sh(t, child, "cat file"); got != "kept" {
		t.Errorf("it has %q", got)
	}
	if err := child.Attach(deadline(t), s.container(t)); err == nil {
		t.Error("an adopted child took another container")
	}
	cpdir, cp = s.checkpoint(t, child) // of one whose image it was not told
	if got := s.sh(t, s.restore(t, d, cpdir, cp), "cat file"); got != "kept" {
		t.Errorf("its child has %q", got)
	}
	for range 3 { // with and without a spare
		if err := child.Reset(deadline(t), s.container(t)); err != nil {
			t.Fatal(err)
		}
		s.sh(t, child, "! test -e file")
		s.checkpoint(t, child)
	}
}
