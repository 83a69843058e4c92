//go:build !race

package agent_test

import (
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/node/agent"
	"github.com/cove-sandbox/cove/sandbox"
)

// hoard takes memory a bit at a time, up to a number of MiB that it is given, and then
// says of it again and again that it is all there.
const hoard = `nohup python3 -c '
import sys, time, hashlib
want, held = int(sys.argv[1]), []
while len(held) < want // 16:
    held.append(hashlib.sha256(str(len(held)).encode()).digest() * (1 << 19))
    open("/tmp/held", "w").write(str(16 * len(held)))
    time.sleep(0.02)
n = 0
while True:
    ok = all(b[:32] == b[-32:] == hashlib.sha256(str(i).encode()).digest() for i, b in enumerate(held))
    n += 1
    open("/tmp/whole", "w").write("%s %d" % (ok, n))
    time.sleep(0.05)
' SIZE >/dev/null 2>&1 &`

// Real memory, on a machine that is said to have 1.5 GiB: one that takes more than is
// reserved for it is parked before the machine is full, its neighbour, which has as much
// reserved as it uses, notices nothing, and when that has ended the first goes on with
// all it had.
func TestParkingOnGVisor(t *testing.T) {
	m := &machine{}
	m.edit = func(c *agent.Config) { c.OnMachine(1536<<20, 512<<20, m.opened.Load) }
	m.start(t)
	sized := func(memory, reserve int64) func(*sandbox.Spec) {
		return func(s *sandbox.Spec) {
			s.Resources.Memory, s.Resources.MemoryLimit, s.Resources.Reserve = memory, memory, reserve
		}
	}
	m.create("neighbour", sized(640<<20, 640<<20))
	m.create("greedy", sized(1000<<20, 8<<20))
	m.sh("neighbour", counter)
	m.sh("neighbour", strings.ReplaceAll(hoard, "SIZE", "480"))
	until(t, "the neighbour has what it wants", func() bool { return m.sh("neighbour", "cat /tmp/whole 2>/dev/null | cut -d' ' -f1") == "True" })
	m.sh("greedy", strings.ReplaceAll(hoard, "SIZE", "816"))
	until(t, "the greedy one is parked", func() bool { return m.StandbyNow()["greedy"] == sandbox.Cold })
	m.counts("neighbour")
	if got := m.sh("neighbour", "cut -d' ' -f1 /tmp/whole"); got != "True" || m.StandbyNow()["neighbour"] != sandbox.Awake {
		t.Errorf("the neighbour: %q, %v", got, m.StandbyNow())
	}
	if err := m.Kill(t.Context(), "neighbour", sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
		t.Fatal(err)
	}
	until(t, "the greedy one is back by itself", func() bool { return m.StandbyNow()["greedy"] == sandbox.Awake })
	until(t, "it has all it wanted, and what it had", func() bool { return strings.HasPrefix(m.sh("greedy", "cat /tmp/whole 2>/dev/null"), "True ") })
}

func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("not within two minutes: %s", what)
}
