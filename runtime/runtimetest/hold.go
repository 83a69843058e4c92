package runtimetest

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// hold makes a kernel of a checkpoint that is nobody's yet.
func (s *suite) hold(t *testing.T, d runtime.Driver, dir string, cp runtime.Checkpoint) runtime.Held {
	t.Helper()
	b := s.blank(t, d)
	h, err := b.(runtime.Holder).Hold(deadline(t), dir, cp, s.container(t))
	if err != nil {
		_ = b.Destroy(context.Background())
		t.Fatalf("hold: %v", err)
	}
	t.Cleanup(func() { _ = h.Destroy(context.Background()) }) // of one that was taken it is the second
	return h
}

// What is held begins when it is taken, as whoever takes it, and no two are alike.
func (s *suite) testHold(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to hold what was restored", d.Capabilities().Hold)
	k := s.attached(t, d, func(c *runtime.Container) { c.Sandbox = "source" })
	processes := d.Capabilities().Processes
	if processes {
		// Every turn it says who it is and when: what ran while it was held would show.
		ticks := sandbox.ProcessSpec{ExecID: "ticks", Args: []string{"sh", "-c", "while :; do echo $(hostname) $(date +%s%N) >> ticks; sleep 0.01; done"}}
		go k.Guest().Start(deadline(t), ticks, 0, func(sandbox.ProcessEvent) error { return nil })
		s.sh(t, k, "until test -s ticks; do sleep 0.01; done")
	}
	s.sh(t, k, "echo kept > file")
	dir, cp := s.checkpoint(t, k)
	held := []runtime.Held{s.hold(t, d, dir, cp), s.hold(t, d, dir, cp)}
	time.Sleep(300 * time.Millisecond) // in which the ticks would be thirty
	random := map[string]bool{}
	for i, h := range held {
		name := "child" + string(rune('a'+i))
		taken := time.Now()
		child, err := h.Take(deadline(t), s.container(t, func(c *runtime.Container) {
			c.Sandbox = name
			c.Env = map[string]string{"WHO": name}
			c.Resources.Pids = 77
		}))
		if err != nil {
			t.Fatalf("take: %v", err)
		}
		destroyAtEnd(t, child)
		if got := s.sh(t, child, "cat file; echo $WHO"); got != "kept\n"+name {
			t.Errorf("it has %q", got)
		}
		if st, err := child.Stats(deadline(t)); err != nil || st.CPUTime > 5*time.Second {
			t.Errorf("stats %+v, %v", st, err)
		}
		if !processes {
			continue
		}
		random[s.sh(t, child, "od -An -tx1 -N16 /dev/urandom")] = true
		s.sh(t, child, "until grep -q "+name+" ticks; do sleep 0.01; done")
		for line := range strings.Lines(s.sh(t, child, "grep -v source ticks")) {
			who, at, _ := strings.Cut(strings.TrimSpace(line), " ")
			when, err := time.ParseDuration(at + "ns")
			if err != nil || who != name || time.Unix(0, int64(when)).Before(taken.Add(-time.Millisecond)) {
				t.Errorf("%s has a tick %q, and was taken at %d (%v)", name, line, taken.UnixNano(), err)
			}
		}
		// The name may be the source's once more: a turn that the checkpoint cut in two.
		if n := s.sh(t, child, "awk '$1==\"source\" && $2>"+nanos(taken)+"' ticks | wc -l"); n != "0" && n != "1" {
			t.Errorf("%s was %s times the source after it was taken", name, n)
		}
		if got := s.sh(t, child, "test $(date +%s) -ge "+nanos(taken)[:10]+" && hostname"); got != name {
			t.Errorf("it is %q, want %q, now", got, name)
		}
	}
	if processes && len(random) != len(held) {
		t.Errorf("%d held kernels have %d streams of random bytes", len(held), len(random))
	}
	if got := s.sh(t, k, "cat file"); got != "kept" {
		t.Errorf("the source has %q", got)
	}
}

func nanos(t time.Time) string { return strconv.FormatInt(t.UnixNano(), 10) }

// That it was held shows nowhere inside: the next pid, the execs, and what is in the
// names of the host are those of one that is restored when it is wanted.
func (s *suite) testHeldUnseen(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to hold what was restored, with processes", d.Capabilities().Hold && d.Capabilities().Processes)
	k := s.attached(t, d)
	s.sh(t, k, "echo kept > file")
	dir, cp := s.checkpoint(t, k)
	named := func(c *runtime.Container) { c.Sandbox = "twin" }
	look := func(k runtime.Kernel) string {
		t.Helper()
		seen := s.sh(t, k, "echo $$; cat /etc/hosts; hostname; set -- /proc/[0-9]*; echo $#; find / -xdev -newer file -type f | sort")
		execs, _, err := k.Guest().Processes(deadline(t))
		if err != nil {
			t.Fatal(err)
		}
		return seen + "\n" + strconv.Itoa(len(execs)) + " execs"
	}
	want := look(s.restore(t, d, dir, cp, named))
	taken, err := s.hold(t, d, dir, cp).Take(deadline(t), s.container(t, named))
	if err != nil {
		t.Fatal(err)
	}
	destroyAtEnd(t, taken)
	if got := look(taken); got != want {
		t.Errorf("held it sees\n%s\nand restored\n%s", got, want)
	}
}

// A held kernel that dies says so, cannot be taken, and leaves nothing.
func (s *suite) testHeldDies(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to hold what was restored", d.Capabilities().Hold && s.Kill != nil)
	dir, cp := s.checkpoint(t, s.attached(t, d))
	h := s.hold(t, d, dir, cp)
	s.Kill(t, h.(runtime.Kernel))
	waitFor(t, "the death of a held kernel", h.Done())
	if _, err := h.Take(deadline(t), s.container(t)); err == nil {
		t.Error("a dead kernel was taken")
	}
	if err := h.Destroy(deadline(t)); err != nil {
		t.Error(err)
	}
	if removed, err := d.Sweep(deadline(t), nil); err != nil || len(removed) > 1 { // the source
		t.Errorf("swept %v, %v", removed, err)
	}
}
