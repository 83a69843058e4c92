package runtimetest

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// restart lets the driver die and opens another on its directory.
func (s *suite) restart(t *testing.T, d runtime.Driver, dir string) runtime.Driver {
	t.Helper()
	s.abandoned[d] = true
	if s.Crash != nil {
		s.Crash(d)
	} else if err := d.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	return s.openIn(t, dir)
}

// mortal is a kernel that its driver's death makes somebody else's to destroy.
func (s *suite) mortal(t *testing.T, d runtime.Driver) runtime.Kernel {
	t.Helper()
	k, err := d.Boot(deadline(t), s.id(), s.Class)
	if err != nil {
		t.Fatalf("boot: %v", err)
	}
	return k
}

// journaled is a handle as it comes back from a journal.
func journaled(t *testing.T, k runtime.Kernel) (h runtime.Handle) {
	t.Helper()
	b, err := json.Marshal(k.Handle())
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &h); err != nil {
		t.Fatal(err)
	}
	return h
}

func (s *suite) testAdopt(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to adopt", d.Capabilities().Adopt)
	k := s.mortal(t, d)
	h := journaled(t, k) // before Attach, when the node writes it
	if err := k.Attach(deadline(t), s.container(t, func(c *runtime.Container) { c.Env = map[string]string{"KEPT": "env"} })); err != nil {
		t.Fatal(err)
	}
	s.sh(t, k, "echo kept > file")
	spec := shell("echo one; while ! test -e go; do sleep 0.05; done; echo two; exit 5")
	spec.ExecID = "long"
	started, _ := s.background(t, k, spec)
	waitFor(t, "the process", started)

	d = s.restart(t, d, dir)
	k, err := d.Adopt(deadline(t), h)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	destroyAtEnd(t, k)
	if isDone(k) || k.ID() != h.ID {
		t.Errorf("adopted %s, done %v: %+v", k.ID(), isDone(k), k.Exit())
	}
	if again := k.Handle(); again.ID != h.ID || again.Driver != h.Driver {
		t.Errorf("handle after adoption %+v", again)
	}
	if got := s.sh(t, k, `cat file; echo "$KEPT"`); got != "kept\nenv" {
		t.Errorf("file and environment after adoption: %q", got)
	}
	s.sh(t, k, "touch go")
	c := collector{offset: 4}
	if err := k.Guest().Attach(deadline(t), "long", 4, c.sink); err != nil {
		t.Fatalf("attach to the process: %v", err)
	}
	if c.stdout != "two\n" || c.end.ExitCode != 5 || len(c.errs) > 0 {
		t.Errorf("the process of before goes on as %+v", c)
	}
	if _, err := k.Stats(deadline(t)); err != nil {
		t.Errorf("stats: %v", err)
	}
	if err := k.Attach(deadline(t), s.container(t)); err == nil {
		t.Error("an adopted kernel with a container took another")
	}
	if err := k.Reset(deadline(t), s.container(t)); err != nil {
		t.Fatalf("reset: %v", err)
	}
	s.sh(t, k, "! test -e file")
	if s.Kill != nil {
		s.Kill(t, k)
		waitFor(t, "done", k.Done())
		if x := k.Exit(); x.Cause != sandbox.Infra {
			t.Errorf("exit %+v", x)
		}
	}
}

func (s *suite) testAdoptGone(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to adopt", d.Capabilities().Adopt)
	destroyed, killed := s.mortal(t, d), s.mortal(t, d)
	hd, hk := journaled(t, destroyed), journaled(t, killed)
	if err := destroyed.Destroy(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if s.Kill != nil {
		s.Kill(t, killed)
		waitFor(t, "done", killed.Done())
	}
	d = s.restart(t, d, dir)
	if _, err := d.Adopt(deadline(t), hd); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("adopt of a destroyed kernel: %v", err)
	}
	if s.Kill != nil { // either way its sandbox ends, at best with the cause
		k, err := d.Adopt(deadline(t), hk)
		if err == nil && !isDone(k) || err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("adopt of a dead kernel: %v", err)
		}
	}
	if _, err := d.Sweep(deadline(t), nil); err != nil { // removes what is left of it
		t.Error(err)
	}
}

func (s *suite) testAdoptUnattached(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to adopt", d.Capabilities().Adopt)
	k := s.mortal(t, d)
	h := journaled(t, k)
	d = s.restart(t, d, dir)
	k, err := d.Adopt(deadline(t), h)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	_, _, err = k.Guest().Processes(deadline(t)) // how a node tells that a create was cut off
	expectClass(t, "asking a kernel without a container", err, sandbox.Precondition)
	removed, err := d.Sweep(deadline(t), map[string]bool{})
	if err != nil || len(removed) != 1 {
		t.Errorf("sweep: %v, %v", removed, err)
	}
	waitFor(t, "done", k.Done())
}

// A process that dies amid a reset leaves a kernel whose guest serves no
// container. The node finishes the reset: a crash of ours ends no sandbox.
func (s *suite) testAdoptAmidAReset(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to adopt", d.Capabilities().Adopt)
	k := s.mortal(t, d)
	if err := k.Attach(deadline(t), s.container(t)); err != nil {
		t.Fatal(err)
	}
	s.sh(t, k, "echo old > marker")
	h := journaled(t, k)
	if err := k.Guest().Leave(deadline(t)); err != nil { // what a reset does first
		t.Fatal(err)
	}
	d = s.restart(t, d, dir)
	k, err := d.Adopt(deadline(t), h)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	destroyAtEnd(t, k)
	if err := k.Reset(deadline(t), s.container(t)); err != nil {
		t.Fatalf("reset: %v", err)
	}
	s.sh(t, k, "! test -e marker")
	if err := k.Reset(deadline(t), s.container(t)); err != nil {
		t.Errorf("another reset: %v", err)
	}
}

// A process that dies right after a reset takes with it what it was about to
// prepare for the next. Nothing of the episodes before may stay in the kernel:
// it could not be checkpointed any more, ever.
func (s *suite) testAdoptBetweenResets(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to adopt", d.Capabilities().Adopt)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint)
	k := s.mortal(t, d)
	h, c := journaled(t, k), s.container(t)
	if err := k.Attach(deadline(t), c); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		// A driver that makes the next container ahead of its reset says when it has.
		if w, ok := k.(interface{ AwaitSpare(context.Context) error }); ok && i > 0 {
			if err := w.AwaitSpare(deadline(t)); err != nil {
				t.Fatal(err)
			}
		}
		if err := k.Reset(deadline(t), c); err != nil {
			t.Fatal(err)
		}
	}
	d = s.restart(t, d, dir)
	k, err := d.Adopt(deadline(t), h)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	destroyAtEnd(t, k)
	if err := k.Reset(deadline(t), c); err != nil {
		t.Fatalf("reset: %v", err)
	}
	s.sh(t, k, "echo third > kept")
	at, cp := s.checkpoint(t, k)
	if got := s.sh(t, s.restore(t, d, at, cp), "cat kept"); got != "third" {
		t.Errorf("in the child: %q", got)
	}
}

// A process that dies amid a checkpoint leaves a kernel that can be
// checkpointed, goes on and can be reset.
func (s *suite) testAdoptAmidACheckpoint(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to adopt", d.Capabilities().Adopt)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint)
	k := s.mortal(t, d)
	h, c := journaled(t, k), s.container(t)
	if err := k.Attach(deadline(t), c); err != nil {
		t.Fatal(err)
	}
	if err := k.Reset(deadline(t), c); err != nil {
		t.Fatal(err)
	}
	s.sh(t, k, "echo written > kept")
	ended := make(chan struct{})
	lost := t.TempDir()
	go func() {
		defer close(ended)
		_, _ = k.(runtime.Checkpointer).Checkpoint(deadline(t), lost, runtime.CheckpointOptions{}) // it is nobody's any more
	}()
	for { // until something of it is written
		ents, err := os.ReadDir(lost)
		if err != nil || len(ents) > 0 || isClosed(ended) {
			break
		}
	}
	d = s.restart(t, d, dir)
	k, err := d.Adopt(deadline(t), h)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	destroyAtEnd(t, k)
	<-ended
	at, cp := s.checkpoint(t, k)
	if got := s.sh(t, s.restore(t, d, at, cp), "cat kept"); got != "written" {
		t.Errorf("in the child: %q", got)
	}
	if err := k.Reset(deadline(t), c); err != nil {
		t.Errorf("reset: %v", err)
	}
	s.sh(t, k, "! test -e kept")
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
