package runtimetest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testMemoryLimit(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "limiting", d.Capabilities().Limits)
	small := func(c *runtime.Container) { c.Resources.Memory, c.Resources.MemoryLimit = 64<<20, 128<<20 }
	for name, bomb := range map[string]string{
		"anonymous":              eat,
		"below a shell":          "head -c 2000000000 /dev/zero | tail -c 2000000000 > /dev/null; exit $?",
		"in one system call":     `exec python3 -c 'import os; b = bytearray(100 << 20); a = [bytearray(os.urandom(1) * (16 << 20)) for i in range(64)]'`,
		"given out, touched now": touchLater,
	} {
		t.Run(name, func(t *testing.T) {
			k := s.attached(t, d, small)
			neighbour := s.attached(t, d)
			other := shell("echo kept > /kept; exec sleep 1000")
			other.ExecID = "other"
			started, _ := s.background(t, k, other)
			waitFor(t, "the other", started)
			r := s.exec(t, k, shell(bomb))
			if r.end.Cause != sandbox.OOM || r.end.Detail == "" || r.end.ExitCode != 137 {
				t.Errorf("it ended with %+v\n%s", r.end, r.stderr)
			}
			if isDone(k) {
				t.Fatalf("the sandbox ended: %+v", k.Exit())
			}
			if got := s.sh(t, k, "cat /kept && pgrep -c sleep"); got != "kept\n1" {
				t.Errorf("files and processes after it: %q", got)
			}
			s.sh(t, neighbour, "true")
		})
	}
	t.Run("a read that does not fit", func(t *testing.T) {
		k := s.attached(t, d, small)
		r := s.exec(t, k, shell(`exec python3 -c 'print(len(open("/dev/zero", "rb", 0).read(2000000000)))'`))
		if r.end.Cause != sandbox.OOM && !strings.Contains(r.stderr, "memory") && strings.Contains(r.stdout, "2000000000") {
			t.Errorf("it read all: %+v\n%s", r.end, r.stderr)
		}
		s.sh(t, k, "true")
	})
	t.Run("files in memory are full, and can be removed", func(t *testing.T) {
		k := s.attached(t, d, small)
		r := s.fails(t, k, "head -c 2000000000 /dev/zero > /dev/shm/big")
		if !strings.Contains(r.stderr, "No space left") {
			t.Errorf("it failed with %q, %+v", r.stderr, r.end)
		}
		s.sh(t, k, "rm /dev/shm/big && head -c 50000000 /dev/zero > /dev/shm/small")
		if isDone(k) {
			t.Errorf("exit %+v", k.Exit())
		}
	})
	t.Run("again and again, also after a reset", func(t *testing.T) {
		k := s.attached(t, d, small)
		for i := range 6 {
			if i == 3 {
				if err := k.Reset(deadline(t), s.container(t, small)); err != nil {
					t.Fatal(err)
				}
			}
			if r := s.exec(t, k, shell(eat)); r.end.Cause != sandbox.OOM {
				t.Fatalf("time %d: %+v", i, r.end)
			}
		}
		if st, err := k.Stats(deadline(t)); err != nil || st.OOMKills != 6 {
			t.Errorf("stats %+v, %v", st, err)
		}
	})
	t.Run("in a restored one", func(t *testing.T) {
		s.need(t, d, "able to checkpoint", d.Capabilities().Processes)
		k := s.attached(t, d, small)
		dir, cp := s.checkpoint(t, k)
		k = s.restore(t, d, dir, cp, small)
		if r := s.exec(t, k, shell(eat)); r.end.Cause != sandbox.OOM || isDone(k) {
			t.Errorf("%+v, %+v", r.end, k.Exit())
		}
		s.sh(t, k, "true")
	})
	t.Run("what is written to disk is not memory", func(t *testing.T) {
		k := s.attached(t, d, func(c *runtime.Container) { c.Resources.Memory, c.Resources.MemoryLimit = 64<<20, 128<<20 })
		s.sh(t, k, "head -c 300000000 /dev/zero > /big && wc -c < /big && rm /big")
		if isDone(k) {
			t.Errorf("exit %+v", k.Exit())
		}
	})
}

// eat takes more memory than there is, as fast as it can.
const eat = `exec python3 -c 'b = b"x" * (1 << 30)'`

// touchLater touches one page of each two megabytes of much more memory than
// there is, and then all of it.
const touchLater = `exec python3 -c '
import mmap
m = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for i in range(0, 1 << 30, 2 << 20): m[i] = 1
page = b"x" * (1 << 20)
for i in range(0, 1 << 30, 1 << 20): m[i:i + (1 << 20)] = page
'`

// seen is what programs size themselves by.
const seen = `python3 -c '
import os, re
mem = {k: int(v) for k, v in re.findall(r"(\w+): +(\d+) kB", open("/proc/meminfo").read())}
disk, shm = os.statvfs("/"), os.statvfs("/dev/shm")
print(len(os.sched_getaffinity(0)), os.cpu_count(), open("/proc/cpuinfo").read().count("processor\t"), os.sysconf("SC_NPROCESSORS_CONF"),
      open("/sys/devices/system/cpu/online").read().strip(), mem["MemTotal"] // 1024, os.sysconf("SC_PHYS_PAGES") // 256,
      0 < mem["MemAvailable"] <= mem["MemTotal"], mem["MemFree"] <= mem["MemTotal"], disk.f_blocks * disk.f_frsize >> 20, 0 < disk.f_bavail <= disk.f_blocks, shm.f_blocks * shm.f_frsize >> 20)
'`

func (s *suite) testSize(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "limiting", d.Capabilities().Limits)
	sized := func(milli, memory, disk int64) func(*runtime.Container) {
		return func(c *runtime.Container) {
			c.Resources.MilliCPU, c.Resources.Memory, c.Resources.MemoryLimit, c.Resources.Disk = milli, memory<<20, memory<<20, disk<<20
		}
	}
	see := func(t *testing.T, k runtime.Kernel, what, want string) {
		t.Helper()
		if got := s.sh(t, k, seen); got != want {
			t.Errorf("%s: inside sees %s, want %s", what, got, want)
		}
	}
	const one = "1 1 1 1 0 384 384 True True 2048 True 192"
	half := sized(500, 384, 2048)
	k := s.attached(t, d, half)
	see(t, k, "half a core", one)
	for i := range 3 { // the later ones of a container that was started ahead
		if err := k.Reset(deadline(t), s.container(t, half)); err != nil {
			t.Fatal(err)
		}
		see(t, k, fmt.Sprintf("reset %d", i), one)
	}
	see(t, s.attached(t, d, sized(3000, 1024, 1024)), "three cores", "3 3 3 3 0-2 1024 1024 True True 1024 True 512")
	if !d.Capabilities().Processes {
		return
	}
	dir, cp := s.checkpoint(t, k)
	see(t, s.restore(t, d, dir, cp, half), "restored", one)
	if got := s.sh(t, s.restore(t, d, dir, cp, sized(2000, 640, 2048)), "nproc; grep MemTotal /proc/meminfo; cat /sys/devices/system/cpu/online"); strings.Join(strings.Fields(got), " ") != "2 MemTotal: 655360 kB 0-1" {
		t.Errorf("restored into a larger one: %s", got)
	}
}

func (s *suite) testHostname(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "isolating", d.Capabilities().Isolated)
	named := func(id string) func(*runtime.Container) {
		return func(c *runtime.Container) { c.Sandbox = id }
	}
	const ask = "hostname; cat /etc/hostname; echo $COVE_SANDBOX_ID; getent hosts $(hostname) | tr -s ' '; grep -c 'this sandbox' /etc/hosts"
	expect := func(t *testing.T, k runtime.Kernel, what, id string) {
		t.Helper()
		want := fmt.Sprintf("%s\n%s\n%s\n127.0.1.1 %s\n1", id, id, id, id)
		var got string
		for range 100 { // a restored one writes its hosts while code runs
			if got = s.exec(t, k, shell(ask)).stdout; strings.TrimSpace(got) == want {
				return
			}
		}
		t.Errorf("%s: %q, want %q", what, got, want)
	}
	k := s.attached(t, d, named("sb-one"))
	expect(t, k, "created", "sb-one")
	for range 2 {
		if err := k.Reset(deadline(t), s.container(t, named("sb-one"))); err != nil {
			t.Fatal(err)
		}
		expect(t, k, "reset", "sb-one")
	}
	if !d.Capabilities().Processes {
		return
	}
	dir, cp := s.checkpoint(t, k)
	expect(t, s.restore(t, d, dir, cp, named("sb-two")), "a copy", "sb-two")
	expect(t, k, "its source", "sb-one")
}

func (s *suite) testDiskLimit(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "limiting", d.Capabilities().Limits)
	k := s.attached(t, d, func(c *runtime.Container) { c.Resources.Disk = 64 << 20 })
	r := s.fails(t, k, "head -c 200000000 /dev/zero > /big")
	if !strings.Contains(r.stderr, "No space left") {
		t.Errorf("it failed with %q", r.stderr)
	}
	if got := s.sh(t, k, "test $(wc -c < /big) -gt 30000000 && rm /big && echo again > /small && cat /small"); got != "again" {
		t.Errorf("after making room: %q", got)
	}
	st, err := k.Stats(deadline(t))
	if err != nil || st.DiskUsed > 100<<20 {
		t.Errorf("stats %+v, %v", st, err)
	}
}

func (s *suite) testPidsLimit(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "limiting", d.Capabilities().Limits)
	k := s.attached(t, d, func(c *runtime.Container) { c.Resources.Pids = 64 })
	neighbour := s.attached(t, d)
	spec := shell("i=0; while [ $i -lt 200 ]; do sleep 1000 & i=$((i+1)); done; echo all; wait")
	spec.ExecID = "bomb"
	_, end := s.background(t, k, spec)
	s.sh(t, neighbour, "true")
	// The shell gives up at its first fork that fails, or goes on and waits:
	// in both cases never 200 live.
	deadlineAt := time.Now().Add(patience)
	for {
		_, tasks, err := k.Guest().Processes(deadline(t))
		if err != nil {
			t.Fatal(err)
		}
		if len(tasks) > 70 {
			t.Errorf("%d processes with a limit of 64", len(tasks))
		}
		if len(tasks) > 40 || time.Now().After(deadlineAt) {
			break
		}
		select {
		case r := <-end:
			if strings.Contains(r.stdout, "all") {
				t.Errorf("all 200 were started: %+v", r)
			}
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
	if err := k.Guest().Signal(deadline(t), "bomb", "SIGKILL", false); err != nil && sandbox.ClassOf(err) != sandbox.NotFound && sandbox.ClassOf(err) != sandbox.Precondition {
		t.Fatalf("kill the bomb: %v", err)
	}
	if r := waitFor(t, "the bomb", end); strings.Contains(r.stdout, "all") {
		t.Error("all 200 were started")
	}
}

func (s *suite) testCPULimit(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "limiting", d.Capabilities().Limits)
	k := s.attached(t, d, func(c *runtime.Container) { c.Resources.MilliCPU = 200 })
	before, err := k.Stats(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	spec := shell("(while :; do :; done) & (while :; do :; done) & wait")
	spec.Timeout = 2 * time.Second
	s.exec(t, k, spec)
	after, err := k.Stats(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	// A busy machine can only make the share smaller.
	if share := float64(after.CPUTime-before.CPUTime) / float64(time.Since(start)); share > 0.35 {
		t.Errorf("two busy loops used %.2f of a core, limit 0.2", share)
	}
}
