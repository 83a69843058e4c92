package agent

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/internal/testport"
)

// The listener lives on a lease that only a host that asks for connections
// keeps, and that does not run while the sandbox stands still.
func TestCallbackLease(t *testing.T) {
	port := testport.Free(t, wire.CallbackAddr)
	var c callbacks
	c.init(slog.New(slog.DiscardHandler))
	defer c.close()
	if err := c.start("one", port); err != nil {
		t.Fatal(err)
	}
	if c.mu.lease == nil || c.mu.lease.timer == nil {
		t.Fatal("nobody asks, and no lease runs")
	}
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan struct{})
	go func() { defer close(asked); c.accept(ctx, "one", 0) }()
	for { // until it asks
		c.mu.Lock()
		n, lease := c.mu.asking, c.mu.lease
		c.mu.Unlock()
		if n == 1 {
			if lease != nil {
				t.Error("a lease runs while a host asks")
			}
			break
		}
	}
	c.clock.freeze()
	cancel() // the checkpoint cuts it off
	<-asked
	if c.mu.lease == nil || c.mu.lease.timer != nil {
		t.Error("the lease of a sandbox that stands still must wait")
	}
	c.clock.thaw()
	if c.mu.lease.timer == nil {
		t.Error("and run when it goes on")
	}
	c.mu.lease.f() // its time is over
	if c.listening() {
		t.Error("the listener outlived its lease")
	}
	if err := c.start("two", port); err != nil {
		t.Errorf("its port is not free: %v", err)
	}
}

func TestAddHost(t *testing.T) {
	const line = "127.0.0.77 cove.internal\n"
	for name, tc := range map[string]struct{ have, want string }{
		"missing":     {"", "127.0.0.1 localhost\n::1 localhost\n" + line},
		"there":       {"127.0.0.1 a\n" + line + "::1 b\n", "127.0.0.1 a\n" + line + "::1 b\n"},
		"no newline":  {"127.0.0.1 a", "127.0.0.1 a\n" + line},
		"in a remark": {"127.0.0.1 a # cove.internal\n", "127.0.0.1 a # cove.internal\n" + line},
		"other case":  {"127.0.0.9 x Cove.Internal\n", "127.0.0.9 x Cove.Internal\n"},
		"other name":  {"127.0.0.9 notcove.internal cove.internal.x\n", "127.0.0.9 notcove.internal cove.internal.x\n" + line},
	} {
		t.Run(name, func(t *testing.T) {
			etc := filepath.Join(t.TempDir(), "etc")
			if tc.have != "" {
				os.Mkdir(etc, 0o755)
				os.WriteFile(filepath.Join(etc, "hosts"), []byte(tc.have), 0o644)
			}
			for range 2 { // the second time changes nothing
				if err := addHost(etc, wire.CallbackAddr, wire.CallbackHost); err != nil {
					t.Fatal(err)
				}
			}
			if got, _ := os.ReadFile(filepath.Join(etc, "hosts")); string(got) != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}

// Whatever code inside put there, the agent neither follows nor hangs.
func TestAddHostRefuses(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"symlink":   func(p string) error { return os.Symlink("/elsewhere", p) },
		"fifo":      func(p string) error { return unix.Mkfifo(p, 0o644) },
		"directory": func(p string) error { return os.Mkdir(p, 0o755) },
	} {
		t.Run(name, func(t *testing.T) {
			etc := t.TempDir()
			if err := put(filepath.Join(etc, "hosts")); err != nil {
				t.Fatal(err)
			}
			if err := addHost(etc, wire.CallbackAddr, wire.CallbackHost); err == nil {
				t.Error("written")
			}
		})
	}
}
