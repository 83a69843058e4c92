//go:build !race

package agent_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/sandbox"
)

func network(t testing.TB, mode sandbox.NetworkMode, rules ...string) sandbox.Network {
	t.Helper()
	n := sandbox.Network{Mode: mode}
	for _, l := range rules {
		r, err := policy.ParseRule(l)
		if err != nil {
			t.Fatal(err)
		}
		n.Rules = append(n.Rules, r)
	}
	return n
}

func with(n sandbox.Network) func(*sandbox.Spec) { return func(s *sandbox.Spec) { s.Network = n } }

// fetch asks for a URL in a sandbox and prints the answer or the error's name.
func fetch(urls ...string) string {
	return `python3 -c '
import urllib.request, sys
for u in sys.argv[1:]:
    try: print(urllib.request.urlopen(u, timeout=10).read().decode())
    except Exception as e: print(getattr(e, "code", None) or getattr(e, "reason", e).__class__.__name__)
' ` + strings.Join(urls, " ")
}

// namespaces that are mounted for a machine's sandboxes, spares left out.
func (m *machine) namespaces() (out []string) {
	ents, err := os.ReadDir(m.dir + "/networks")
	if err != nil {
		m.t.Fatal(err)
	}
	for _, e := range ents {
		if !strings.HasPrefix(e.Name(), "spare-") {
			out = append(out, e.Name())
		}
	}
	return out
}

func TestNetworkOnGVisor(t *testing.T) {
	w := egresstest.NewWorld(t)
	m := newMachineOn(t, w.Upstream())
	ctx := t.Context()
	expect := func(when, id, want string, urls ...string) {
		t.Helper()
		if got := m.sh(id, fetch(urls...)); got != want {
			t.Errorf("%s: %s: %q, want %q", when, id, got, want)
		}
	}
	const good, evil = "http://good.test/", "http://evil.test/"
	at := "good.test at " + egresstest.Good

	m.create("none")
	expect("without a network", "none", "gaierror\nOSError", good, "http://203.0.113.10/")
	m.create("a", with(network(t, "rules", "allow good.test")))
	expect("rules", "a", at+"\ngaierror", good, evil)
	expect("rules, by address", "a", "403", "http://203.0.113.66/")
	if got := m.sh("a", `python3 -c 'import socket
try: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
except OSError as e: print(e.errno)
try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)
except OSError as e: print(e.errno)'`); got != "1\n1" {
		t.Errorf("raw sockets: %q", got)
	}
	st, err := m.NetworkStatus(ctx, "a", 100)
	if err != nil || st.Generation != 1 || st.Allowed != 1 || st.Denied < 2 {
		t.Errorf("status %+v, %v", st, err)
	}

	// While it runs: another policy, a network where there was none, none.
	if g, err := m.SetNetwork(ctx, "a", network(t, "rules", "allow evil.test")); err != nil || g != 2 {
		t.Fatalf("generation %d, %v", g, err)
	}
	expect("another policy", "a", "gaierror\nevil.test at "+egresstest.Evil, good, evil)
	if g, err := m.SetNetwork(ctx, "none", network(t, "public")); err != nil || g != 2 {
		t.Fatalf("generation %d, %v", g, err)
	}
	expect("plugged in later", "none", at, good)
	if _, err := m.SetNetwork(ctx, "a", network(t, "rules", "allow good.test", "allow good.test")); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a wrong policy: %v", err)
	}
	if g, err := m.SetNetwork(ctx, "a", network(t, "none")); err != nil || g != 3 {
		t.Fatalf("generation %d, %v", g, err)
	}
	expect("none", "a", "gaierror", evil)
	if _, err := m.SetNetwork(ctx, "a", network(t, "rules", "allow good.test")); err != nil {
		t.Fatal(err)
	}

	// Restart of the node, standby, fork, restore, reset: the same policy.
	m.restart()
	expect("after a restart", "a", at+"\ngaierror", good, evil)
	if st, err := m.NetworkStatus(ctx, "a", 1); err != nil || st.Generation != 4 || len(st.Network.Rules) != 1 {
		t.Errorf("after a restart: %+v, %v", st, err)
	}
	if err := m.Pause(ctx, "a", false); err != nil {
		t.Fatal(err)
	}
	if _, err := m.SetNetwork(ctx, "a", network(t, "rules", "allow evil.test")); err != nil {
		t.Fatal(err)
	}
	expect("set while it slept", "a", "gaierror\nevil.test at "+egresstest.Evil, good, evil)
	if err := m.Pause(ctx, "a", true); err != nil {
		t.Fatal(err)
	}
	if n := len(m.namespaces()); n != 1 { // that of "none"
		t.Errorf("%d namespaces with one sandbox asleep", n)
	}
	if _, err := m.SetNetwork(ctx, "a", network(t, "rules", "allow good.test")); err != nil {
		t.Fatal(err)
	}
	m.restart()
	expect("set while it was on disk, and a restart", "a", at+"\ngaierror", good, evil)
	snap := m.snapshot("a", sandbox.MemorySnapshot, "")
	s := spec()
	s.Network = network(t, "rules", "allow evil.test")
	if _, err := m.CreateFrom(ctx, sandbox.Sandbox{ID: "fork", Spec: s}, m.img, snap); err != nil {
		t.Fatal(err)
	}
	expect("a fork with a policy of its own", "fork", "gaierror\nevil.test at "+egresstest.Evil, good, evil)
	expect("its parent", "a", at+"\ngaierror", good, evil)
	s.Network = sandbox.Network{}
	if _, err := m.CreateFrom(ctx, sandbox.Sandbox{ID: "alone", Spec: s}, m.img, snap); err != nil {
		t.Fatal(err)
	}
	expect("a fork without a network", "alone", "gaierror\nOSError", good, "http://203.0.113.10/")
	if _, _, err := m.Restore(ctx, "a", m.img, snap); err != nil {
		t.Fatal(err)
	}
	expect("restored in place", "a", at+"\ngaierror", good, evil)
	if _, _, err := m.Reset(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	expect("after a reset", "a", at+"\ngaierror", good, evil)
	for _, id := range []string{"a", "none", "fork", "alone"} {
		if err := m.Kill(ctx, id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
			t.Error(err)
		}
	}
	if left := m.namespaces(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// If the network cannot be made there is no sandbox.
func TestNoSandboxWithoutItsNetwork(t *testing.T) {
	m := newMachine(t) // has no networks
	s := spec()
	s.Network = network(t, "public")
	if _, err := m.Create(t.Context(), sandbox.Sandbox{ID: "a", Spec: s}, m.img); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("create: %v", err)
	}
	s.Network = sandbox.Network{Mode: "rules", Rules: []sandbox.NetworkRule{{Action: "allow", Domain: "a..b"}}}
	var e *sandbox.Error
	if _, err := m.Create(t.Context(), sandbox.Sandbox{ID: "a", Spec: s}, m.img); !errors.As(err, &e) || e.Field != "network.rules[0].domain" {
		t.Errorf("create with a wrong rule: %v", err)
	}
	if live, _ := m.Live(t.Context()); len(live) != 0 {
		t.Errorf("live: %v", live)
	}
}

// Sandboxes with policies come and go and leave no namespace, and with that
// no rule, device, route or connection: those are nowhere else.
func TestNothingIsLeftOfNetworks(t *testing.T) {
	w := egresstest.NewWorld(t)
	m := newMachineOn(t, w.Upstream())
	before := hostState(t)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 4)
	for i := range times(200, 50) {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			id := fmt.Sprintf("s%d", i)
			s := spec()
			s.Network = network(t, "rules", "allow good.test", fmt.Sprintf("allow 203.0.113.%d", i))
			if _, err := m.Create(t.Context(), sandbox.Sandbox{ID: id, Spec: s}, m.img); err != nil {
				t.Error(err)
				return
			}
			if err := m.Kill(t.Context(), id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if left := m.namespaces(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if after := hostState(t); after != before {
		t.Errorf("the host's own network changed:\n%s\nbefore:\n%s", after, before)
	}
	// The kernel takes namespaces apart in its own time.
	deadline := time.Now().Add(30 * time.Second)
	for m.mounted() > 4+1 && time.Now().Before(deadline) { // spares, one just taken
		time.Sleep(50 * time.Millisecond)
	}
	if n := m.mounted(); n > 5 {
		t.Errorf("%d namespaces are mounted", n)
	}
}

// mounted counts the namespaces that the machine keeps alive.
func (m *machine) mounted() (n int) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		m.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, m.dir+"/networks/") {
			n++
		}
	}
	return n
}

// hostState is what of the host's network could have been touched.
func hostState(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	for _, f := range []string{"/proc/net/route", "/proc/net/ipv6_route", "/proc/net/dev"} {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			w := strings.Fields(line)
			if f == "/proc/net/dev" {
				w = w[:1] // its name
			} else if f == "/proc/net/ipv6_route" {
				w = append(w[:1], w[len(w)-1])
			}
			out.WriteString(strings.Join(w, " ") + "\n")
		}
	}
	return out.String()
}

// A create with a network against one without, in turns.
// go test ./node -run xxx -bench CreateNetwork -benchtime 100x
func BenchmarkCreateNetwork(b *testing.B) {
	w := egresstest.NewWorld(b)
	m := newMachineOn(b, w.Upstream())
	benchCreates(b, m, func(s *sandbox.Spec, has bool) {
		if has {
			s.Network = network(b, "rules", "allow good.test")
		}
	})
}

// benchCreates measures creates that have something against such that have not,
// in turns.
func benchCreates(b *testing.B, m *machine, give func(s *sandbox.Spec, has bool)) {
	took := map[bool][]time.Duration{}
	i := 0
	for b.Loop() {
		for _, has := range []bool{false, true} {
			i++
			id, s := fmt.Sprintf("b%d", i), spec()
			give(&s, has)
			// Both find a warm kernel, and none being booted beside them.
			for c := m.CapacityNow(); c.WarmKernels < c.WarmTarget; c = m.CapacityNow() {
				time.Sleep(5 * time.Millisecond)
			}
			time.Sleep(100 * time.Millisecond)
			d, err := m.Create(b.Context(), sandbox.Sandbox{ID: id, Spec: s}, m.img)
			if err != nil {
				b.Fatal(err)
			}
			took[has] = append(took[has], d)
			if err := m.Kill(b.Context(), id, sandbox.End{Cause: sandbox.KilledByUser}); err != nil {
				b.Fatal(err)
			}
		}
	}
	p50 := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2]) / float64(time.Millisecond)
	}
	b.ReportMetric(p50(took[false]), "without-ms")
	b.ReportMetric(p50(took[true]), "with-ms")
	b.ReportMetric(p50(took[true])/p50(took[false]), "ratio")
}
