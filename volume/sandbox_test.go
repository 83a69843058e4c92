//go:build !race

package volume_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/volume"
)

const mib = 1 << 20

// world is real volumes in real sandboxes.
type world struct {
	t     *testing.T
	set   *volume.Set
	d     *gvisor.Driver
	image runtime.Rootfs
	execs int
}

func newWorld(t *testing.T) *world {
	t.Helper()
	if err := volume.Supported(); err != nil {
		t.Skipf("this host cannot have volumes: %v", err)
	}
	w := &world{t: t, image: runtime.Rootfs{Path: os.Getenv("COVE_TEST_EROFS"), Env: []string{"PATH=/usr/bin:/bin"}, User: "root"}}
	if w.image.Path == "" {
		lib, img := imagetest.Base(t)
		var err error
		if w.image.Path, err = lib.Path(img.ID); err != nil {
			t.Fatal(err)
		}
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if w.set, err = volume.Open(t.Context(), dir, volume.Options{Linger: -1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.set.Close(); err != nil {
			t.Error(err)
		}
		if b, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(b), dir) {
			t.Errorf("a mount is left, %v", err)
		}
		backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
		for _, f := range backing {
			if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), dir) {
				t.Errorf("a loop device is left: %s %s", f, b)
			}
		}
	})
	if w.d, err = gvisor.Open(t.Context(), gvisor.Config{Dir: t.TempDir(), RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.d.Close() })
	return w
}

// sandbox starts one with a volume at /data; end takes both away.
func (w *world) sandbox(id, vol string, mode volume.Mode) (k runtime.Kernel, end func()) {
	w.t.Helper()
	dir, err := w.set.Attach(w.t.Context(), vol, id, mode)
	if err != nil {
		w.t.Fatal(err)
	}
	if k, err = w.d.Boot(w.t.Context(), id, runtime.Class{}); err != nil {
		w.t.Fatal(err)
	}
	over := false
	end = func() {
		if over {
			return
		}
		over = true
		if err := k.Destroy(context.Background()); err != nil {
			w.t.Error(err)
		}
		if err := w.set.Detach(context.Background(), vol, id); err != nil {
			w.t.Error(err)
		}
	}
	w.t.Cleanup(end)
	err = k.Attach(w.t.Context(), runtime.Container{Rootfs: w.image,
		Resources: sandbox.Resources{MilliCPU: 2000, Memory: 256 * mib, MemoryLimit: 512 * mib, Disk: 1024 * mib, Pids: 512},
		Volumes:   []runtime.Volume{{Source: dir, Target: "/data", ReadOnly: mode == volume.ReadOnly, Shared: mode == volume.Shared}}})
	if err != nil {
		w.t.Fatal(err)
	}
	return k, end
}

func (w *world) run(k runtime.Kernel, script string) (string, sandbox.ProcessEnd) {
	w.t.Helper()
	w.execs++
	var out strings.Builder
	var end sandbox.ProcessEnd
	err := k.Guest().Start(w.t.Context(), sandbox.ProcessSpec{ExecID: fmt.Sprint("e", w.execs), Args: []string{"sh", "-c", "exec 2>&1; " + script}}, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			out.Write(e.Output.Data)
		}
		if e.End != nil {
			end = *e.End
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.TrimSpace(out.String()), end
}

func (w *world) sh(k runtime.Kernel, script string) string {
	w.t.Helper()
	out, end := w.run(k, script)
	if end.Cause != sandbox.Exited || end.ExitCode != 0 {
		w.t.Fatalf("%q: %+v %s", script, end, out)
	}
	return out
}

func TestSandbox(t *testing.T) {
	w := newWorld(t)
	v, err := w.set.Create(t.Context(), "work", 64*mib)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.set.Put(t.Context(), "work", "in", strings.NewReader("from outside"), volume.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	k, end := w.sandbox("sb1", "work", volume.ReadWrite)
	if got := w.sh(k, "cat /data/in; ls -A /data; echo from inside > /data/out"); got != "from outsidein" {
		t.Errorf("%q", got)
	}
	// Without a sandbox, while one has it.
	r, _, err := w.set.GetFile(t.Context(), "work", "out")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := b.ReadFrom(r); err != nil || b.String() != "from inside\n" {
		t.Errorf("%q %v", &b, err)
	}
	r.Close()
	if _, err := w.set.Put(t.Context(), "work", "in", strings.NewReader("changed outside"), volume.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := w.sh(k, "cat /data/in"); got != "changed outside" {
		t.Errorf("inside still reads %q", got)
	}
	// A clone of what is being written to, in another sandbox.
	if _, err := w.set.Clone(t.Context(), "work", "branch"); err != nil {
		t.Fatal(err)
	}
	k2, _ := w.sandbox("sb2", "branch", volume.ReadWrite)
	if got := w.sh(k2, "cat /data/out; echo only here > /data/out; cat /data/out"); got != "from inside\nonly here" {
		t.Errorf("%q", got)
	}
	if got := w.sh(k, "cat /data/out"); got != "from inside" {
		t.Errorf("a branch changed its origin: %q", got)
	}
	reader, _ := w.sandbox("sb3", "work", volume.ReadOnly)
	w.sh(k, "echo more >> /data/out")
	if got := w.sh(reader, "cat /data/out"); got != "from inside\nmore" {
		t.Errorf("a reader beside the writer sees %q", got)
	}
	end()
	if got := w.sh(reader, "cat /data/out"); got != "from inside\nmore" { // its writer is gone, the volume is not
		t.Errorf("%q", got)
	}
	if err := w.set.Delete(t.Context(), v.ID); sandbox.ClassOf(err) != sandbox.Precondition || !strings.Contains(err.Error(), "sb3") {
		t.Errorf("delete: %v", err)
	}
}

// TestSandboxSizeLimit is root inside trying for more than the volume has.
func TestSandboxSizeLimit(t *testing.T) {
	w := newWorld(t)
	v, err := w.set.Create(t.Context(), "small", 32*mib)
	if err != nil {
		t.Fatal(err)
	}
	k, _ := w.sandbox("sb1", "small", volume.ReadWrite)
	for _, script := range []string{
		"head -c 100000000 /dev/urandom > /data/big; ls -l /data/big; test $(stat -c %s /data/big) -lt 33554432 && echo x > /data/y; true",
		"rm -f /data/*; fallocate -l 100M /data/big",
		`rm -f /data/*; python3 -c 'for i in range(100000): open("/data/f%d" % i, "w").close()'`, // inodes
	} {
		out, end := w.run(k, script)
		if !strings.Contains(out, "No space left") {
			t.Errorf("%q: %+v %.500s", script, end, out)
		}
	}
	// Written through memory there is no call to fail: the process dies of it,
	// or its sandbox, and nothing else.
	out, end := w.run(k, `find /data -type f -delete; python3 - <<'E'
import mmap, os
fd = os.open("/data/sparse", os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 200 << 20)
m = mmap.mmap(fd, 200 << 20)
block = os.urandom(1 << 20)
for i in range(200): m[i << 20:(i + 1) << 20] = block
print("all of it")
m.flush()
print("flushed")
E`)
	t.Logf("a mapping over the limit: %+v %s", end, out)
	if strings.Contains(out, "flushed") {
		t.Error("200 MiB went into a volume of 32")
	}
	if got, err := w.set.Get(t.Context(), v.ID); err != nil || got.Used > 33*mib {
		t.Errorf("it takes %d bytes of the host, %v", got.Used, err)
	}
	select {
	case <-k.Done():
		t.Logf("the sandbox ended: %+v", k.Exit())
	default:
		if got := w.sh(k, "rm -f /data/sparse; echo fine > /data/x; cat /data/x"); got != "fine" {
			t.Errorf("after it: %q", got)
		}
	}
	k2, _ := w.sandbox("sb2", "small", volume.ReadOnly)
	w.sh(k2, "ls /data")
}
