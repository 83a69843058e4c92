package gvisor

import (
	"context"
	"io"
	"net/netip"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/egress/netns"
	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// namespace is one whose TCP connections are all answered with the address
// they were meant for.
func namespace(t *testing.T) *runtime.Device {
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
	l, u, err := ns.Listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close(); u.Close() })
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
	defer d.Close()
	k, err := d.Boot(t.Context(), "plugged")
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
	b, err := d.Blank(t.Context(), "fork")
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
