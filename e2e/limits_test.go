package e2e

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// ownLimits finds the limits as others do and prints them: the JDK (os::Linux's
// cgroupSubsystem_linux.cpp: /proc/cgroups, /proc/self/cgroup, a mount of type
// cgroup2 in mountinfo), Go's automaxprocs (the same files), Node's libuv (the path
// of /proc/self/cgroup below /sys/fs/cgroup), and who looks for version 1 by path.
const ownLimits = `
import json, os, re
def jdk():
    rows = [l.split() for l in open('/proc/cgroups') if not l.startswith('#')]
    ctl = {r[0]: r for r in rows}
    assert all(ctl[c][3] == '1' for c in ('memory', 'cpu', 'cpuacct', 'cpuset')), rows
    assert all(r[1] == '0' for r in rows), 'version 2'
    own = [l.rstrip('\n').split(':', 2) for l in open('/proc/self/cgroup')]
    assert own == [['0', '', '/']], own
    # The last: what is mounted over another is what a path leads to.
    at = [m for m in (re.match(r'\d+ \d+ \d+:\d+ (\S+) (\S+) \S+ (?:[^-]\S* )*- (\S+) ', l) for l in open('/proc/self/mountinfo')) if m and m[3] == 'cgroup2']
    assert len(at) == 1 and at[0][1] == '/' and at[0][2] == '/sys/fs/cgroup', at
    d = at[0][2] + own[0][2]
    quota, period = open(d + 'cpu.max').read().split()
    return {'memory': int(open(d + 'memory.max').read()), 'cpu': int(quota) * 1000 // int(period), 'pids': int(open(d + 'pids.max').read())}
def libuv():
    d = '/sys/fs/cgroup/' + re.match('0::/(.*)', open('/proc/self/cgroup').read())[1]
    high = open(d + 'memory.high').read().strip()
    used, limit = int(open(d + 'memory.current').read()), int(open(d + 'memory.max').read())
    assert high == 'max' and 0 < used < limit, (high, used, limit)
    return limit
def version1():
    q, p = (int(open('/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_%s_us' % n).read()) for n in ('quota', 'period'))
    return {'memory': int(open('/sys/fs/cgroup/memory/memory.limit_in_bytes').read()), 'cpu': q * 1000 // p, 'pids': int(open('/sys/fs/cgroup/pids/pids.max').read())}
got = jdk()
assert libuv() == got['memory'] and version1() == got, (libuv(), version1(), got)
assert os.statvfs('/sys/fs/cgroup').f_flag & os.ST_RDONLY
cpus = open('/sys/fs/cgroup/cpuset.cpus.effective').read().strip()
got['cores'] = [len(os.sched_getaffinity(0)), os.cpu_count(), open('/proc/cpuinfo').read().count('processor\t'), int(cpus.split('-')[-1]) + 1]
got['total'] = int(re.search(r'MemTotal:\s+(\d+)', open('/proc/meminfo').read())[1]) << 10
assert 1 < int(open('/sys/fs/cgroup/pids.current').read()) < 10
assert str(os.getpid()) in open('/sys/fs/cgroup/cgroup.procs').read().split()
# Nobody changes them, whatever they do.
def write(p, b):
    f = os.open(p, os.O_WRONLY)
    try: os.write(f, b)
    finally: os.close(f)
for d, dirs, files in os.walk('/sys/fs/cgroup'):
    for f in files:
        for how in (lambda p: write(p, b'1'), lambda p: os.chmod(p, 0o666), os.remove, lambda p: os.truncate(p, 0)):
            try: how(os.path.join(d, f)); raise SystemExit('changed ' + f)
            except OSError: pass
os.system('mount -o remount,rw /sys/fs/cgroup 2>/dev/null')
for how in (lambda: os.mkdir('/sys/fs/cgroup/x'), lambda: write('/sys/fs/cgroup/memory.max', b'max'), lambda: os.rename('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/y')):
    try: how(); raise SystemExit('changed after a remount')
    except OSError: pass
os.system('mount -o remount,ro /sys/fs/cgroup 2>/dev/null')
print(json.dumps(got))
`

type seen struct {
	Memory, CPU, Pids, Total int64
	Cores                    []int
}

// TestLimitsInside demands that a sandbox sees its own limits wherever programs
// look, in all its lives.
func TestLimitsInside(t *testing.T) {
	w := world.New(t, world.Options{})
	spec := world.Small()
	spec.Resources = sandbox.Resources{MilliCPU: 1500, Memory: 256 * sandbox.MiB, MemoryLimit: 384 * sandbox.MiB, Disk: 512 * sandbox.MiB, Pids: 77}
	b := w.Create(t, spec)
	want := func(t *testing.T, b *world.Box, r sandbox.Resources) {
		t.Helper()
		res := b.Exec(t, sandbox.ProcessSpec{User: "root", Args: []string{"python3", "-c", ownLimits}})
		res.WantExit(t, 0)
		var got seen
		if err := json.Unmarshal(res.Out, &got); err != nil {
			t.Fatalf("%v: %q", err, res.Out)
		}
		cores := int(r.MilliCPU+999) / 1000
		if got.Memory != r.MemoryLimit || got.Total != r.MemoryLimit || got.CPU != r.MilliCPU || got.Pids != r.Pids || fmt.Sprint(got.Cores) != fmt.Sprint([]int{cores, cores, cores, cores}) {
			t.Errorf("inside sees %+v of %+v", got, r)
		}
	}
	want(t, b, spec.Resources)
	b.Must(t, "sleep 1000 &") // goes on in all of them
	ended := func(b *world.Box) int64 { return b.Stats(t).OOMKills }
	b.Root(t, `python3 -c 'x = bytearray(1 << 30)' & wait $!; python3 -c 'x = b"1" * (1 << 30)' & wait $!; true`)
	kills := ended(b)
	if kills == 0 {
		t.Fatal("no process ended for want of memory")
	}
	if out := w.CLI(t, "stats", b.ID); !strings.Contains(out.Stdout, "OOM") || !strings.Contains(out.Stdout, strconv.FormatInt(kills, 10)) {
		t.Errorf("cove stats does not tell of %d processes out of memory:\n%s", kills, out.Stdout)
	}

	snap := b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot})
	children, err := b.TryFork(t.Context(), 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = children[0].TryKill(t.Context()) })
	t.Run("fork", func(t *testing.T) { want(t, children[0], spec.Resources) })
	b.Pause(t, true)
	t.Run("cold wake", func(t *testing.T) { want(t, b, spec.Resources) })
	if n := ended(b); n != kills {
		t.Errorf("after a sleep %d processes have ended for want of memory, before it %d", n, kills)
	}
	b.Reset(t)
	t.Run("reset", func(t *testing.T) { want(t, b, spec.Resources) })
	if err := b.TryRestore(t.Context(), snap.ID); err != nil {
		t.Fatal(err)
	}
	t.Run("restore", func(t *testing.T) { want(t, b, spec.Resources) })

	// Another size, with the processes of before.
	other := world.From(snap.ID)
	other.Resources = spec.Resources
	other.Resources.MilliCPU, other.Resources.Memory, other.Resources.MemoryLimit, other.Resources.Pids = 1000, 512*sandbox.MiB, 512*sandbox.MiB, 99
	c := w.Create(t, other)
	t.Run("another size", func(t *testing.T) { want(t, c, other.Resources) })
	c.Pause(t, true)
	t.Run("another size, cold wake", func(t *testing.T) { want(t, c, other.Resources) })
}
