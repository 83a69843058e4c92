package gvisor

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/egress/egresstest"
	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/egress/policy"
	"github.com/cove-sandbox/cove/egress/proxy"
	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// namespace is one whose TCP connections are all answered with the address
// they were meant for.
func namespace(t *testing.T) *runtime.Device {
	t.Helper()
	ns := makeNamespace(t)
	socks, err := ns.Listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { socks.Close() })
	go admitAll(socks)
	l := socks.TCP
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.WriteString(c, c.LocalAddr().String()+"\n")
				io.Copy(c, c)
			}()
		}
	}()
	return deviceOf(t, ns)
}

// admitAll lets every connection come about, until the sockets are closed, but for
// those to ports 1 to 3, which are each refused in another way.
func admitAll(s *netns.Sockets) {
	for {
		syn, err := s.Door.Next()
		if err != nil {
			return
		}
		if p := syn.To.Port(); p <= 3 {
			err = s.Door.Refuse(syn, []netns.Refusal{netns.Reset, netns.NetworkUnreachable, netns.HostUnreachable}[p-1])
		} else {
			err = s.Door.Admit(syn)
		}
		if err != nil {
			return
		}
	}
}

const askRefused = `python3 -c '
import errno, socket
for a in ("203.0.113.7", "2001:db8::7"):
    for port in (1, 2, 3):
        try: socket.create_connection((a, port), timeout=20); print("connected", end=" ")
        except OSError as e: print(errno.errorcode.get(e.errno, e), end=" ")
print()
'`

func makeNamespace(t testing.TB) *netns.Namespace {
	t.Helper()
	ns, err := netns.Make(t.TempDir(), "ns")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ns.Close()
		if err := netns.Remove(ns.Path()); err != nil {
			t.Error(err)
		}
	})
	return ns
}

func deviceOf(t testing.TB, ns *netns.Namespace) *runtime.Device {
	t.Helper()
	f, gso, err := ns.Device()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return &runtime.Device{File: f, MTU: netns.MTU, GSO: gso, MAC: netns.InnerMAC, GateMAC: netns.GateMAC,
		Addresses: []netip.Prefix{netns.Inner4, netns.Inner6}, Gateways: []netip.Addr{netns.Gateway4.Addr(), netns.Gateway6.Addr()}}
}

const askBoth = `python3 -c '
import socket
for a in ("203.0.113.7", "2001:db8::7"):
    s = socket.create_connection((a, 81), timeout=5)
    print(s.makefile().readline().strip())
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen(); socket.create_connection(s.getsockname(), timeout=5)
s = socket.socket(); s.bind(("127.0.0.9", 0)); s.listen(); socket.create_connection(s.getsockname(), timeout=5)
s = socket.socket(socket.AF_INET6); s.bind(("::1", 0)); s.listen(); socket.create_connection(s.getsockname()[:2], timeout=5)
print("loopback")
'`

const answered = "203.0.113.7:81\n[2001:db8::7]:81\nloopback\n"

func TestDeviceIsPluggedIntoARunningKernel(t *testing.T) {
	lib, base := imagetest.Base(t)
	path, err := lib.Path(base.ID)
	if err != nil {
		t.Fatal(err)
	}
	d, err := Open(t.Context(), Config{Dir: t.TempDir(), RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() }) // after its kernel
	k, err := d.Boot(t.Context(), "plugged", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Destroy(context.Background()) })
	c := runtime.Container{Rootfs: runtime.Rootfs{Path: path, Env: base.Config.Env, User: "root"},
		Resources: sandbox.Resources{MilliCPU: 2000, MemoryLimit: 512 << 20, Disk: 256 << 20, Pids: 100}, Device: namespace(t)}
	if err := k.Attach(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if out := runIn(t, k.(*Kernel), askBoth); out != answered {
		t.Fatalf("%q", out)
	}
	// The kernel's own TCP takes the answers of the door for what they say.
	if out := runIn(t, k.(*Kernel), askRefused); out != "ECONNREFUSED ENETUNREACH EHOSTUNREACH ECONNREFUSED ENETUNREACH EHOSTUNREACH \n" {
		t.Errorf("connects that are refused: %q", out)
	}
	if err := k.(runtime.Plugger).Plug(t.Context(), *c.Device); sandbox.ClassOf(err) != sandbox.Precondition {
		t.Errorf("a second device: %v", err)
	}

	// Through a checkpoint, with a connection open.
	runIn(t, k.(*Kernel), `python3 -c '
import socket, time
s = socket.create_connection(("203.0.113.7", 82)); f = s.makefile("rw"); f.readline()
open("/tmp/up", "w").close()
while True:
    try:
        s.sendall(b"x\n"); open("/tmp/echo", "a").write(f.readline() or "eof\n")
        time.sleep(0.05)
    except OSError as e:
        open("/tmp/echo", "a").write(repr(e)+"\n"); break
' >/dev/null 2>&1 & while [ ! -e /tmp/up ]; do sleep 0.05; done`)
	dir := t.TempDir()
	cp, err := k.(runtime.Checkpointer).Checkpoint(t.Context(), dir, runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if out := runIn(t, k.(*Kernel), askBoth); out != answered {
		t.Fatalf("after a checkpoint: %q", out)
	}
	// The connection of the source goes on.
	runIn(t, k.(*Kernel), `n=$(wc -l </tmp/echo); while [ $(wc -l </tmp/echo) -lt $((n+3)) ]; do sleep 0.05; done`)
	b, err := d.Blank(t.Context(), "fork", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	c.Device = namespace(t)
	fork, err := b.(runtime.Restorer).Restore(t.Context(), dir, cp, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { fork.Destroy(context.Background()) })
	if out := runIn(t, fork.(*Kernel), askBoth); out != answered {
		t.Fatalf("after a restore: %q", out)
	}
	// In a fork it has ended, and whoever waits for it is told.
	runIn(t, fork.(*Kernel), `until tail -1 /tmp/echo | grep -q Error; do sleep 0.05; done`)
	if out := runIn(t, k.(*Kernel), askBoth); !strings.Contains(out, "loopback") {
		t.Fatalf("the source of a fork: %q", out)
	}
	if err := fork.Reset(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if out := runIn(t, fork.(*Kernel), askBoth); out != answered {
		t.Fatalf("after a reset: %q", out)
	}
}

// What the proxy costs: the same program in two kernels, one whose namespace
// serves it directly and one behind a proxy with a policy by domain, in turns.
// go test ./runtime/gvisor -run xxx -bench Throughput -benchtime 5x
func BenchmarkThroughput(b *testing.B) {
	const size = 256 << 20
	serve := func(l net.Listener) {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReader(c)
				if line, _ := r.ReadString('\n'); strings.HasPrefix(line, "DOWN") {
					io.CopyN(c, zeros{}, size)
					return
				}
				n, _ := io.CopyN(io.Discard, r, size)
				fmt.Fprintln(c, n)
			}()
		}
	}
	w := egresstest.NewWorld(b)
	l, err := w.Listen(egresstest.Good + ":5001")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	go serve(l)
	direct, proxied := makeNamespace(b), makeNamespace(b)
	ds, err := direct.Listen(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer ds.Close()
	go admitAll(ds)
	go serve(ds.TCP)
	p, err := policy.Compile(sandbox.Network{Mode: "rules", Rules: []sandbox.NetworkRule{{Action: "allow", Domain: "good.test"}, {Action: "allow", CIDR: "203.0.113.0/24", Ports: []sandbox.PortRange{{From: 5001}}}}})
	if err != nil {
		b.Fatal(err)
	}
	ps, err := proxied.Listen(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	own, err := netns.Open(proxied.Path())
	if err != nil {
		b.Fatal(err)
	}
	box := proxy.Open(own, ps, w.Upstream(), p, 1, nil, slog.New(slog.DiscardHandler))
	defer box.Close()

	lib, base := imagetest.Base(b)
	path, err := lib.Path(base.ID)
	if err != nil {
		b.Fatal(err)
	}
	d, err := Open(b.Context(), Config{Dir: b.TempDir(), RunscPath: testbin.Runsc(b), GuestPath: testbin.Guest(b)})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	kernel := func(id string, ns *netns.Namespace) *Kernel {
		k, err := d.Boot(b.Context(), id, runtime.Class{})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { k.Destroy(context.Background()) })
		if err := k.Attach(b.Context(), runtime.Container{Rootfs: runtime.Rootfs{Path: path, Env: base.Config.Env, User: "root"},
			Resources: sandbox.Resources{MilliCPU: 2000, MemoryLimit: 512 << 20, Disk: 256 << 20, Pids: 100}, Device: deviceOf(b, ns)}); err != nil {
			b.Fatal(err)
		}
		return k.(*Kernel)
	}
	kernels := map[string]*Kernel{"direct": kernel("direct", direct), "proxied": kernel("proxied", proxied)}
	const program = `python3 -c '
import socket, sys, time
s = socket.create_connection(("203.0.113.10", 5001)); t = time.time(); n = 0
if sys.argv[1] == "DOWN":
    s.sendall(b"DOWN\n"); buf = bytearray(1 << 20)
    while (m := s.recv_into(buf)): n += m
else:
    s.sendall(b"UP\n"); data = bytes(1 << 20)
    for _ in range(256): s.sendall(data)
    n = int(s.makefile().readline())
assert n == 256 << 20, n
print(n / (time.time() - t) / 1e6)
' `
	best := map[string]float64{}
	for b.Loop() {
		for _, way := range []string{"UP", "DOWN"} {
			for _, name := range []string{"direct", "proxied"} {
				v, err := strconv.ParseFloat(strings.TrimSpace(runIn(b, kernels[name], program+way)), 64)
				if err != nil {
					b.Fatal(err)
				}
				best[name+way] = max(best[name+way], v)
			}
		}
	}
	for _, way := range []string{"UP", "DOWN"} {
		for _, name := range []string{"direct", "proxied"} {
			b.ReportMetric(best[name+way], name+"-"+strings.ToLower(way)+"-MB/s")
		}
		b.ReportMetric(best["proxied"+way]/best["direct"+way], strings.ToLower(way)+"-ratio")
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
