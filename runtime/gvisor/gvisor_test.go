package gvisor_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/runtime/runtimetest"
)

func open(t *testing.T, dir string) *gvisor.Driver {
	t.Helper()
	d, err := gvisor.Open(context.Background(), gvisor.Config{
		Dir: dir, RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t), DebugLog: os.Getenv("COVE_TEST_SENTRY_LOG"),
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// rootfs is the base image, or, where that cannot be made (a machine without a
// Debian mirror), the EROFS file of a Debian with python3 that
// COVE_TEST_EROFS names.
func rootfs(t testing.TB) runtime.Rootfs {
	t.Helper()
	if p := os.Getenv("COVE_TEST_EROFS"); p != "" {
		return runtime.Rootfs{Path: p, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"}, User: "root"}
	}
	lib, img := imagetest.Base(t)
	path, err := lib.Path(img.ID)
	if err != nil {
		t.Fatal(err)
	}
	return runtime.Rootfs{Path: path, Env: img.Config.Env, WorkingDir: img.Config.WorkingDir, User: "root"}
}

func TestConformance(t *testing.T) {
	image := rootfs(t)
	runtimetest.Run(t, runtimetest.Factory{
		Open: func(t *testing.T, dir string) runtime.Driver { return open(t, dir) },
		// Nothing of a crashed node's driver lives on but the kernels.
		Crash:  func(d runtime.Driver) { d.Close() },
		Rootfs: func(t *testing.T) runtime.Rootfs { return image },
		SmallDir: func(t *testing.T, size int64) string {
			dir := t.TempDir()
			if err := unix.Mount("none", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Unmount(dir, 0); err != nil {
					t.Error(err)
				}
			})
			return dir
		},
		Dial: func(ctx context.Context, k runtime.Kernel) (net.Conn, error) {
			return gvisor.Dial(ctx, k.(*gvisor.Kernel))
		},
		Secret: func(t *testing.T, k runtime.Kernel) []byte {
			var saved struct{ Secret string }
			if err := json.Unmarshal(k.Handle().Data, &saved); err != nil {
				t.Fatal(err)
			}
			b, err := hex.DecodeString(saved.Secret)
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
		Erofs: func(t *testing.T, tree string) string {
			out := filepath.Join(t.TempDir(), "x.erofs")
			if b, err := exec.Command("mkfs.erofs", "-E", "noinline_data", out, tree).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, b)
			}
			return out
		},
		Kill: func(t *testing.T, k runtime.Kernel) {
			var saved struct{ PID int }
			if err := json.Unmarshal(k.Handle().Data, &saved); err != nil {
				t.Fatal(err)
			}
			if err := unix.Kill(saved.PID, unix.SIGKILL); err != nil {
				t.Error(err)
			}
		},
	})
}
