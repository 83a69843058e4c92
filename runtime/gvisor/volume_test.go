package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/image/imagetest"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func volumeKernel(t *testing.T, vols ...runtime.Volume) (*Kernel, runtime.Container) {
	t.Helper()
	d, err := Open(t.Context(), Config{Dir: t.TempDir(), RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	k, err := d.Boot(t.Context(), "vol1", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	})
	c := runtime.Container{Rootfs: runtime.Rootfs{Path: baseImage(t), Env: []string{"PATH=/usr/bin:/bin"}, User: "root"}, Volumes: vols,
		Resources: sandbox.Resources{MilliCPU: 2000, Memory: 256 << 20, MemoryLimit: 512 << 20, Disk: 1 << 30, Pids: 512}}
	if err := k.Attach(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	return k.(*Kernel), c
}

// baseImage is the file of the base image, or the one that COVE_TEST_EROFS names.
func baseImage(t testing.TB) string {
	t.Helper()
	if path := os.Getenv("COVE_TEST_EROFS"); path != "" {
		return path
	}
	lib, img := imagetest.Base(t)
	path, err := lib.Path(img.ID)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

var execs int

// run runs a script and returns what it wrote and its exit code.
func run(t testing.TB, k *Kernel, script string) (string, int) {
	t.Helper()
	execs++
	var out strings.Builder
	code := -1
	err := k.Guest().Start(t.Context(), sandbox.ProcessSpec{ExecID: fmt.Sprint("v", execs), Args: []string{"sh", "-c", script}}, 0, func(e sandbox.ProcessEvent) error {
		if e.Output != nil {
			out.Write(e.Output.Data)
		}
		if e.End != nil {
			code = e.End.ExitCode
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out.String()), code
}

// gone waits for a process to end.
func gone(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 30_000)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n != 1 {
			t.Fatalf("process %d is still there: %v", pid, err)
		}
		return
	}
}

func TestVolumeGoferDies(t *testing.T) {
	dir := t.TempDir()
	k, c := volumeKernel(t, runtime.Volume{Source: dir, Target: "/data"})
	if out, code := run(t, k, "echo safe > /data/x && cat /data/x"); code != 0 {
		t.Fatal(out)
	}
	if err := k.VolumesErr(t.Context()); err != nil {
		t.Error(err)
	}
	pid := k.goferOf(k.mu.container)
	if pid == 0 {
		t.Fatal("no gofer in the kernel's cgroup")
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(t, pid)
	if out, code := run(t, k, "timeout 20 cat /data/x"); code == 0 || code == 124 {
		t.Errorf("a volume without its server: exit code %d, %q", code, out)
	}
	if out, code := run(t, k, "echo alive > /tmp/x; cat /tmp/x"); code != 0 || out != "alive" {
		t.Errorf("the rest of the sandbox: %q %d", out, code)
	}
	if err := k.VolumesErr(t.Context()); sandbox.ClassOf(err) != sandbox.Unavailable || !strings.Contains(err.Error(), "/data") {
		t.Errorf("VolumesErr: %v", err)
	}
	select {
	case <-k.Done():
		t.Errorf("the kernel counts as ended: %+v", k.Exit())
	default:
	}
	if err := k.Reset(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if out, code := run(t, k, "cat /data/x"); code != 0 || out != "safe" {
		t.Errorf("after a reset: %q %d", out, code)
	}
	if err := k.VolumesErr(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestVolumeGoferEndsWithTheSentry(t *testing.T) {
	k, _ := volumeKernel(t, runtime.Volume{Source: t.TempDir(), Target: "/data"})
	pid := k.goferOf(k.mu.container)
	if err := unix.Kill(k.saved.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	gone(t, pid) // nobody but itself ends it
	<-k.Done()
}

func TestVolumeGoferOfALeftContainerEnds(t *testing.T) {
	k, c := volumeKernel(t, runtime.Volume{Source: t.TempDir(), Target: "/data"})
	pid := k.goferOf(k.mu.container)
	if err := k.Reset(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	gone(t, pid)
	if now := k.goferOf(k.mu.container); now == 0 || now == pid {
		t.Errorf("the gofer of the new container is %d", now)
	}
}

func TestVolumeNoneNoGofer(t *testing.T) {
	k, _ := volumeKernel(t)
	for _, pid := range k.d.groups.procs(k.id) {
		if b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.HasPrefix(string(b), goferName) {
			t.Errorf("process %d: %q", pid, b)
		}
	}
}

// The gofer is the process a broken sentry would turn against.
func TestVolumeGoferIsConfined(t *testing.T) {
	dir := t.TempDir()
	k, _ := volumeKernel(t, runtime.Volume{Source: dir, Target: "/data"}, runtime.Volume{Source: t.TempDir(), Target: "/ro", ReadOnly: true})
	if out, code := run(t, k, "ls /data"); code != 0 { // it serves, so it has confined itself
		t.Fatal(out)
	}
	pid := k.goferOf(k.mu.container)
	proc := func(name string) string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if s := proc("status"); !strings.Contains(s, "Seccomp:\t2") {
		t.Errorf("no seccomp filter:\n%s", s)
	}
	limit := regexp.MustCompile(`Max open files +(\d+) +(\d+)`).FindStringSubmatch(proc("limits"))
	var own unix.Rlimit // more than we may have ourselves is not ours to give
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err != nil {
		t.Fatal(err)
	}
	if want := strconv.FormatUint(min(goferFiles, own.Max), 10); len(limit) != 3 || limit[2] != want {
		t.Errorf("open files are limited to %q, not %s", limit, want)
	}
	for _, ns := range []string{"user", "mnt", "pid", "net", "ipc", "uts"} {
		ours, err1 := os.Readlink("/proc/self/ns/" + ns)
		its, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		if err1 != nil || err2 != nil || ours == its {
			t.Errorf("namespace %s: ours %s, the gofer's %s, %v %v", ns, ours, its, err1, err2)
		}
	}
	var seen []string
	for line := range strings.Lines(proc("mountinfo")) {
		f := strings.Fields(line)
		seen = append(seen, f[4])
		if strings.HasPrefix(f[4], "/v") && (!strings.Contains(f[5], "nosuid") || !strings.Contains(f[5], "nodev")) {
			t.Errorf("mount options: %s", line)
		}
		if f[4] == "/v1" && !strings.HasPrefix(f[5], "ro") {
			t.Errorf("a read-only volume is writable for its gofer: %s", line)
		}
	}
	if len(seen) != 2 { // its chroot hides the tmpfs they are mounted on
		t.Errorf("it sees mounts %v", seen)
	}
	root, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", pid))
	if err != nil || len(root) != 2 {
		t.Errorf("its root has %v, %v", root, err)
	}
}
