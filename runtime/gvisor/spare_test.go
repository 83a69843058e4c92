package gvisor

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// diff takes the files of a kernel, as a grade does.
func diff(t *testing.T, k *Kernel) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := k.Diff(t.Context(), f, 0); err != nil {
		t.Fatal(err)
	}
}

// A kernel that was reset has its next container ready; it is used when it
// fits, thrown away when not, found again after a restart, and always pristine.
func TestSpare(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	d, err := Open(ctx, Config{Dir: t.TempDir(), RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	booted, err := d.Boot(ctx, "k", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	k := booted.(*Kernel)
	defer func() {
		if err := k.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	c := runtime.Container{Rootfs: runtime.Rootfs{Path: baseImage(t), User: "root"},
		Resources: sandbox.Resources{MilliCPU: 1000, MemoryLimit: 256 << 20, Disk: 64 << 20, Pids: 100}}
	execs := 0
	expect := func(script, want string) {
		t.Helper()
		var out bytes.Buffer
		execs++
		err := k.Guest().Start(ctx, sandbox.ProcessSpec{ExecID: fmt.Sprint(execs), Command: script}, 0, func(e sandbox.ProcessEvent) error {
			if e.Output != nil {
				out.Write(e.Output.Data)
			}
			return nil
		})
		if err != nil || out.String() != want {
			t.Errorf("%s: %q %v, want %q", script, out.String(), err, want)
		}
	}
	waiting := func() *spare {
		t.Helper()
		for ctx.Err() == nil {
			k.mu.Lock()
			s := k.mu.spare
			k.mu.Unlock()
			if s != nil {
				<-s.ready
				if s.err != nil {
					t.Fatal(s.err)
				}
				return s
			}
			time.Sleep(time.Millisecond)
		}
		t.Fatal("no spare is made")
		return nil
	}
	reset := func(c runtime.Container) {
		t.Helper()
		expect("echo x > /note; sleep 1000 & echo ok", "ok\n")
		if err := k.Reset(ctx, c); err != nil {
			t.Fatal(err)
		}
		expect("ls /note 2>/dev/null; pgrep sleep | wc -l", "0\n")
	}
	if err := k.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	k.mu.Lock()
	if k.mu.spareTimer != nil {
		t.Error("a kernel of an image that is not reset makes a spare")
	}
	k.mu.Unlock()
	reset(c)
	for i := range 3 {
		if i == 2 { // right after a reset: taking the files keeps the next from being made meanwhile, and no longer
			diff(t, k)
		}
		s := waiting()
		if i == 1 {
			diff(t, k)
		}
		reset(c)
		if k.mu.container != s.cid {
			t.Errorf("serving %s, the spare was %s", k.mu.container, s.cid)
		}
	}

	s := waiting()
	larger := c
	larger.Resources.Disk *= 2
	reset(larger)
	if k.mu.container == s.cid {
		t.Error("a spare with another disk limit was used")
	}

	waiting()
	h := k.Handle()
	adopted, err := d.Adopt(ctx, h)
	if err != nil {
		t.Fatal(err)
	}
	was := k.mu.container
	k.stop() // as the death of its process would
	k = adopted.(*Kernel)
	if k.mu.container != was {
		t.Errorf("adopted %s, it served %s", k.mu.container, was)
	}
	reset(larger)
	for _, cid := range k.containers() {
		if episode(cid) <= episode(was)+1 {
			t.Errorf("%s is left after the reset: %v", cid, k.containers())
		}
	}

	// The next kernel of the image has one for its first reset.
	first := k
	booted, err = d.Boot(ctx, "k2", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	k = booted.(*Kernel)
	defer func() {
		if err := first.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	if err := k.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	s = waiting()
	reset(c)
	if k.mu.container != s.cid {
		t.Errorf("serving %s, the spare was %s", k.mu.container, s.cid)
	}
	waiting()
	if err := k.Vacate(ctx); err != nil {
		t.Fatal(err)
	}
	if err := k.Attach(ctx, c); err != nil {
		t.Fatal(err)
	}
	expect("ls /note 2>/dev/null; pgrep sleep | wc -l", "0\n")
}

func TestResets(t *testing.T) {
	var r resets
	now := time.Now()
	if r.likely("a", now) {
		t.Error("without any")
	}
	r.note("a", now)
	if !r.likely("a", now.Add(lately)) || r.likely("a", now.Add(lately+1)) || r.likely("b", now) {
		t.Error("lately, and of that image")
	}
	r.note("b", now.Add(2*lately))
	if len(r.mu.last) != 1 {
		t.Errorf("%d are remembered", len(r.mu.last))
	}
}
