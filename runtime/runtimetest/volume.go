package runtimetest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

// volumeDir is a host directory with a canary beside it that nothing inside a
// sandbox may read or change.
func volumeDir(t *testing.T) (dir, canary string) {
	t.Helper()
	top := t.TempDir()
	dir, canary = filepath.Join(top, "volume"), filepath.Join(top, "canary")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(canary, []byte("host-secret"), 0o666); err != nil {
		t.Fatal(err)
	}
	return dir, canary
}

func withVolume(v runtime.Volume) func(*runtime.Container) {
	return func(c *runtime.Container) { c.Volumes = append(c.Volumes, v) }
}

func (s *suite) testVolume(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to mount volumes", d.Capabilities().Volumes)
	dir, _ := volumeDir(t)
	a := s.attached(t, d, withVolume(runtime.Volume{Source: dir, Target: "/data"}))
	// No sync: what was written is there because write(2) has returned.
	s.sh(t, a, "echo from a > /data/a; mkdir -p /data/d/e; head -c 3000000 /dev/zero | tr '\\0' x > /data/d/e/big; ln -s a /data/link; chown 1000:1000 /data/a; chmod 640 /data/a")
	if err := a.Destroy(deadline(t)); err != nil {
		t.Fatal(err)
	}
	b := s.attached(t, d, withVolume(runtime.Volume{Source: dir, Target: "/other/place"}))
	if got := s.sh(t, b, "cd /other/place && cat a link && stat -c '%u %g %a' a && wc -c < d/e/big && tr -d x < d/e/big | wc -c"); got != "from a\nfrom a\n1000 1000 640\n3000000\n0" {
		t.Errorf("b sees %q", got)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "a")); err != nil || string(got) != "from a\n" {
		t.Errorf("the host sees %q, %v", got, err)
	}
	s.sh(t, b, "cp /bin/true /other/place/run && /other/place/run") // programs run from it
	if strings.Contains(s.sh(t, b, "cat /proc/mounts"), dir) {
		t.Error("the host's path is visible inside")
	}
}

// A kernel restored from a checkpoint has its volumes, as they are by then, and
// files it had open there.
func (s *suite) testVolumeCheckpoint(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to mount volumes", d.Capabilities().Volumes)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint && d.Capabilities().Processes)
	dir, _ := volumeDir(t)
	with := withVolume(runtime.Volume{Source: dir, Target: "/data", Shared: true})
	k := s.attached(t, d, with)
	started, _ := s.background(t, k, sandbox.ProcessSpec{ExecID: "writer",
		Command: "exec 5>/data/log; i=0; while [ $i -lt 500 ]; do echo line $i >&5; i=$((i+1)); sleep 0.02; done"})
	<-started
	s.sh(t, k, "echo before > /data/file; while [ ! -s /data/log ]; do sleep 0.01; done")
	saved, cp := s.checkpoint(t, k)
	if err := k.Destroy(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("meanwhile\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	// What it had open must be there by its name; who brings it back wakes it.
	log, away := filepath.Join(dir, "log"), filepath.Join(dir, "away")
	if err := os.Rename(log, away); err != nil {
		t.Fatal(err)
	}
	b := s.blank(t, d)
	_, err := b.(runtime.Restorer).Restore(deadline(t), saved, cp, s.container(t, with))
	expectClass(t, "without a file it had open", err, sandbox.Precondition)
	if err == nil || !strings.Contains(err.Error(), "/data/log") {
		t.Errorf("it does not name the file: %v", err)
	}
	if err := errors.Join(b.Destroy(deadline(t)), os.Rename(away, log)); err != nil {
		t.Fatal(err)
	}
	child := s.restore(t, d, saved, cp, with)
	if got := s.sh(t, child, "cat /data/file; n=$(wc -l < /data/log); while [ $(wc -l < /data/log) = $n ]; do sleep 0.01; done; echo goes on"); got != "meanwhile\ngoes on" {
		t.Errorf("the child sees %q", got)
	}
}

// A kernel restored from a checkpoint without volumes has those that were added, and has them
// still when it is saved in its turn and another volume is at the same path.
func (s *suite) testVolumeAdded(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to mount volumes", d.Capabilities().Volumes)
	s.need(t, d, "able to checkpoint", d.Capabilities().Checkpoint && d.Capabilities().Processes)
	dir, _ := volumeDir(t)
	fixed, _ := volumeDir(t)
	other, _ := volumeDir(t)
	with := func(source string, added bool) func(*runtime.Container) {
		return func(c *runtime.Container) {
			c.Volumes = []runtime.Volume{{Source: source, Target: "/mnt/data", Added: added}, {Source: fixed, Target: "/opt/fixed", ReadOnly: true, Added: added}}
		}
	}
	k := s.attached(t, d)
	s.sh(t, k, "mkdir -p /mnt/data; echo hidden > /mnt/data/below; echo file > /mnt/file")
	saved, cp := s.checkpoint(t, k)

	b := s.blank(t, d)
	_, err := b.(runtime.Restorer).Restore(deadline(t), saved, cp, s.container(t, withVolume(runtime.Volume{Source: dir, Target: "/mnt/file", Added: true})))
	expectClass(t, "a volume on a file", err, sandbox.Invalid)

	child := s.restore(t, d, saved, cp, with(dir, true))
	s.sh(t, child, "echo kept > /mnt/data/made; test ! -e /mnt/data/below")
	if b, err := os.ReadFile(filepath.Join(dir, "made")); string(b) != "kept\n" {
		t.Errorf("the volume has %q, %v", b, err)
	}
	if s.fails(t, child, "echo x > /opt/fixed/made"); len(s.sh(t, child, "ls -A /opt/fixed")) != 0 {
		t.Error("a volume that was added read-only was written")
	}
	for _, line := range strings.Split(s.sh(t, child, "grep -e /mnt/data -e /opt/fixed /proc/mounts"), "\n") {
		if !strings.Contains(line, "nosuid") { // gVisor lists no nodev
			t.Errorf("mounted as %q", line)
		}
	}
	started, _ := s.background(t, child, sandbox.ProcessSpec{ExecID: "writer",
		Command: "exec 5>/mnt/data/log; i=0; while [ $i -lt 3000 ]; do echo line $i >&5; i=$((i+1)); sleep 0.02; done"})
	<-started
	s.sh(t, child, "while [ ! -s /mnt/data/log ]; do sleep 0.01; done")
	saved, cp = s.checkpoint(t, child)
	again := s.restore(t, d, saved, cp, with(dir, false))
	if got := s.sh(t, again, "cat /mnt/data/made; n=$(wc -l < /mnt/data/log); while [ $(wc -l < /mnt/data/log) = $n ]; do sleep 0.01; done; echo goes on"); got != "kept\ngoes on" {
		t.Errorf("restored again it sees %q", got)
	}
	if err := os.WriteFile(filepath.Join(other, "log"), nil, 0o666); err != nil { // what is open must be there
		t.Fatal(err)
	}
	third := s.restore(t, d, saved, cp, with(other, false))
	s.sh(t, third, "test ! -e /mnt/data/made; echo third > /mnt/data/third; while [ ! -s /mnt/data/log ]; do sleep 0.01; done")
	if _, err := os.Stat(filepath.Join(dir, "third")); err == nil {
		t.Error("what was written to another volume is on the one it was saved with")
	}
	if b, err := os.ReadFile(filepath.Join(other, "third")); string(b) != "third\n" {
		t.Errorf("the other volume has %q, %v", b, err)
	}
}

func (s *suite) testVolumeReadOnly(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to mount volumes", d.Capabilities().Volumes)
	dir, _ := volumeDir(t)
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("given"), 0o666); err != nil {
		t.Fatal(err)
	}
	k := s.attached(t, d, withVolume(runtime.Volume{Source: dir, Target: "/data", ReadOnly: true}))
	if got := s.sh(t, k, "cat /data/file"); got != "given" {
		t.Errorf("reads %q", got)
	}
	attempts := []string{
		"echo x > /data/file", "echo x >> /data/file", "touch /data/new", "rm /data/file", "mkdir /data/dir", "chmod 700 /data/file",
		"chown 7 /data/file", "mv /data/file /data/other", "ln /data/file /data/other", "ln -s file /data/other", "truncate -s 0 /data/file",
		"touch -d 2001-01-01 /data/file", "setfattr -n user.x -v y /data/file",
		// An open file reached by another name is still the read-only one.
		"exec 5< /data/file; echo x > /proc/self/fd/5",
	}
	for _, script := range attempts {
		s.fails(t, k, script)
		// Root inside may say that its mount is writable. The gofer's is not.
		s.fails(t, k, "mount -o remount,rw /data; "+script)
		s.fails(t, k, "mkdir -p /again; mount --bind /data /again && mount -o remount,bind,rw /again; cd /again; "+strings.ReplaceAll(script, "/data/", "/again/"))
	}
	if got, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(got) != "given" {
		t.Errorf("the host's file is %q, %v", got, err)
	}
	if ents, err := os.ReadDir(dir); err != nil || len(ents) != 1 {
		t.Errorf("the volume has %v, %v", ents, err)
	}
	// A second mount of the same directory in the same sandbox may write, and
	// the read-only one sees it.
	k2 := s.attached(t, d, withVolume(runtime.Volume{Source: dir, Target: "/ro", ReadOnly: true, Shared: true}), withVolume(runtime.Volume{Source: dir, Target: "/rw", Shared: true}))
	if got := s.sh(t, k2, "echo two > /rw/file; cat /ro/file"); got != "two" {
		t.Errorf("the read-only mount shows %q", got)
	}
	s.fails(t, k2, "echo x > /ro/file")
	s.fails(t, k2, "mount -o remount,rw /ro; echo x > /ro/file")
}

func (s *suite) testVolumeShared(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to mount volumes", d.Capabilities().Volumes)
	dir, _ := volumeDir(t)
	v := withVolume(runtime.Volume{Source: dir, Target: "/data", Shared: true})
	a, b := s.attached(t, d, v), s.attached(t, d, v)
	for i, k := range []runtime.Kernel{a, b, a, b} {
		other := []runtime.Kernel{b, a, b, a}[i]
		// A name that was looked up in vain, a file known by another size, and
		// one that goes away: nothing of it may be remembered.
		s.fails(t, other, "cat /data/new")
		s.sh(t, k, "echo made > /data/new")
		if got := s.sh(t, other, "cat /data/new"); got != "made" {
			t.Errorf("a new file reads %q elsewhere", got)
		}
		s.sh(t, k, "echo longer than before > /data/new; mkdir /data/dir; echo x > /data/dir/x")
		if got := s.sh(t, other, "cat /data/new; ls /data/dir; stat -c %s /data/new"); got != "longer than before\nx\n19" {
			t.Errorf("a changed file reads %q elsewhere", got)
		}
		s.sh(t, k, "mv /data/new /data/moved; rm -r /data/dir")
		if got := s.sh(t, other, "ls /data; cat /data/moved"); got != "moved\nlonger than before" {
			t.Errorf("after a rename: %q elsewhere", got)
		}
		s.fails(t, other, "cat /data/new")
		s.sh(t, other, "rm /data/moved")
	}
	// Appends of both sides to a file both hold open are all there.
	started, end := s.background(t, a, shell("exec 5>> /data/log; echo up > /data/up; until test -e /data/go; do sleep 0.01; done; echo a >&5"))
	waitFor(t, "the writer", started)
	s.sh(t, b, "until test -e /data/up; do sleep 0.01; done; echo b >> /data/log; touch /data/go")
	waitFor(t, "its end", end)
	if got, err := os.ReadFile(filepath.Join(dir, "log")); err != nil || string(got) != "b\na\n" {
		t.Errorf("the log is %q, %v", got, err)
	}
}

func (s *suite) testVolumeReset(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to mount volumes", d.Capabilities().Volumes)
	dir, _ := volumeDir(t)
	v := withVolume(runtime.Volume{Source: dir, Target: "/data"})
	k := s.attached(t, d, v)
	for i := range 4 { // from the second on there may be a container made ahead
		s.sh(t, k, "echo kept >> /data/log; echo lost > /tmp/lost")
		if err := k.Reset(deadline(t), s.container(t, v)); err != nil {
			t.Fatalf("reset: %v", err)
		}
		s.fails(t, k, "cat /tmp/lost")
		if got, want := s.sh(t, k, "cat /data/log"), strings.TrimSpace(strings.Repeat("kept\n", i+1)); got != want {
			t.Errorf("after reset %d the volume has %q", i+1, got)
		}
		waitFor(t, "the next container", time.After(100*time.Millisecond)) // both kinds are wanted
	}
	other, _ := volumeDir(t)
	if err := k.Reset(deadline(t), s.container(t, withVolume(runtime.Volume{Source: other, Target: "/data"}))); err != nil {
		t.Fatalf("reset: %v", err)
	}
	if got := s.sh(t, k, "ls /data"); got != "" {
		t.Errorf("another volume shows %q", got)
	}
	if err := k.Reset(deadline(t), s.container(t)); err != nil {
		t.Fatalf("reset: %v", err)
	}
	s.fails(t, k, "test -e /data")
}

func (s *suite) testVolumeAdopt(t *testing.T) {
	dir := t.TempDir()
	d := s.openIn(t, dir)
	s.need(t, d, "able to mount volumes", d.Capabilities().Volumes)
	vol, _ := volumeDir(t)
	k := s.mortal(t, d)
	if err := k.Attach(deadline(t), s.container(t, withVolume(runtime.Volume{Source: vol, Target: "/data"}))); err != nil {
		t.Fatal(err)
	}
	s.sh(t, k, "echo before > /data/x")
	h := journaled(t, k)
	k2, err := s.restart(t, d, dir).Adopt(deadline(t), h)
	if err != nil {
		t.Fatal(err)
	}
	destroyAtEnd(t, k2)
	if got := s.sh(t, k2, "cat /data/x; echo after > /data/y; cat /data/y"); got != "before\nafter" {
		t.Errorf("after a restart: %q", got)
	}
	if c, ok := k2.(runtime.VolumeChecker); ok {
		if err := c.VolumesErr(deadline(t)); err != nil {
			t.Error(err)
		}
	}
}

func (s *suite) testVolumeRefused(t *testing.T) {
	d := s.open(t)
	dir, canary := volumeDir(t)
	if !d.Capabilities().Volumes {
		err := s.boot(t, d).Attach(deadline(t), s.container(t, withVolume(runtime.Volume{Source: dir, Target: "/data"})))
		expectClass(t, "a volume without the capability", err, sandbox.Unsupported)
		return
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		vols []runtime.Volume
		want sandbox.Class
	}{
		{[]runtime.Volume{{Source: dir, Target: ""}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "data"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "/"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "/a/../b"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "/a/"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "/a\x00b"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "/dev/shm"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "/proc"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "/sys/x"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "/a"}, {Source: dir, Target: "/a"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: dir, Target: "/a"}, {Source: dir, Target: "/a/b"}}, sandbox.Invalid},
		{[]runtime.Volume{{Source: canary, Target: "/a"}}, sandbox.Precondition},
		{[]runtime.Volume{{Source: link, Target: "/a"}}, sandbox.Precondition},
		{[]runtime.Volume{{Source: dir + "/missing", Target: "/a"}}, sandbox.Precondition},
	} {
		err := s.boot(t, d).Attach(deadline(t), s.container(t, func(ct *runtime.Container) { ct.Volumes = c.vols }))
		expectClass(t, fmt.Sprintf("%+v", c.vols), err, c.want)
	}
}

// testVolumeEscape is root inside trying to leave the volume.
func (s *suite) testVolumeEscape(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "able to mount volumes", d.Capabilities().Volumes && d.Capabilities().Isolated)
	dir, canary := volumeDir(t)
	// What a host process might have left there, or an earlier, worse sandbox.
	if err := os.Symlink(canary, filepath.Join(dir, "host-link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("..", filepath.Join(dir, "host-up")); err != nil {
		t.Fatal(err)
	}
	// The kernel's log: there is one on the host, and none inside. (A device that
	// gVisor has itself, like 1:5, opens gVisor's own.)
	if err := unix.Mknod(filepath.Join(dir, "host-kmsg"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 11))); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, "host-sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	k := s.attached(t, d, withVolume(runtime.Volume{Source: dir, Target: "/data"}))
	for _, script := range []string{
		"cat /data/../canary", "cat /data/host-link", "cat /data/host-up/canary && test \"$(cat /data/host-up/canary)\" = host-secret",
		"ln -s / /data/root; cat /data/root" + canary,
		"ln -s /proc/self/root /data/self; cat /data/self" + canary,
		"ln -s ../../../../../../../../.. /data/up; cat /data/up" + canary,
		"ln /etc/passwd /data/hard", // another file system
		"ln /data/host-link /data/h && cat /data/h",
		"mknod /data/sda b 8 0", "mknod /data/null c 1 3", "mknod /data/white c 0 0 && cat /data/white",
		"head -c 1 /data/host-kmsg",
		"exec 5< /data; cat /proc/self/fd/5/../canary", "exec 5< /data; cd /proc/self/fd/5 && cat ../canary",
		"cat /proc/1/root" + canary,
		`python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.connect("/data/host-sock")'`,
		// Directories swapped for links under a running lookup.
		`python3 - <<'E'
import os, threading, sys, time
os.makedirs("/data/x/d", exist_ok=True)
found, stop = [], time.time() + 1
def swap():
    while time.time() < stop:
        try:
            os.rename("/data/x/d", "/data/x/e"); os.symlink("../..", "/data/x/d"); os.unlink("/data/x/d"); os.rename("/data/x/e", "/data/x/d")
        except OSError: pass
threading.Thread(target=swap).start()
while time.time() < stop:
    try:
        if "host-secret" in open("/data/x/d/canary").read(): found.append(1)
    except OSError: pass
sys.exit(0 if found else 1)
E`,
		// chroot and a directory kept from outside it: the classic.
		`python3 - <<'E'
import os
fd = os.open("/data", os.O_RDONLY); os.makedirs("/data/jail", exist_ok=True); os.chroot("/data/jail"); os.fchdir(fd)
for _ in range(64): os.chdir("..")
print(open("canary").read())
E`,
	} {
		if r := s.fails(t, k, script); strings.Contains(r.stdout, "host-secret") {
			t.Errorf("%s reads the host", script)
		}
	}
	// A setuid program from the volume gives nobody root.
	s.sh(t, k, "cp /usr/bin/id /data/id && chown 0:0 /data/id && chmod 4755 /data/id")
	spec := shell("/data/id -u")
	spec.User = "1000:1000"
	if got := strings.TrimSpace(s.exec(t, k, spec).stdout); got != "1000" {
		t.Errorf("a setuid program of the volume runs as %q", got)
	}
	if got, err := os.ReadFile(canary); err != nil || string(got) != "host-secret" {
		t.Errorf("the canary is %q, %v", got, err)
	}
	ents, err := os.ReadDir(filepath.Dir(dir))
	if err != nil || len(ents) != 2 {
		t.Errorf("beside the volume: %v, %v", ents, err)
	}
	err = filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error {
		if err == nil && e.Type()&os.ModeDevice != 0 && e.Name() != "host-kmsg" {
			var st unix.Stat_t
			if err := unix.Lstat(p, &st); err != nil || st.Rdev != 0 { // 0:0 is an overlay's whiteout, and no device
				t.Errorf("a device was made: %s", p)
			}
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	s.sh(t, k, "true")
}
