package agent_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/guest/agent"
	"github.com/cove-sandbox/cove/sandbox"
)

// container is a container of plain Linux namespaces, enough of one to be
// entered: own processes, own mounts, and an init without CAP_SYS_ADMIN.
type container struct {
	init  *exec.Cmd
	stdin io.Closer
}

func newContainer(t *testing.T) *container {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: makes namespaces")
	}
	cmd := exec.Command("sh", "-c", `set -e
mount --make-rprivate /
mount -t tmpfs none /mnt
mount -t proc proc /proc
echo 'root:x:0:0::/root:/bin/sh
tester:x:1234:1234::/mnt/home:/bin/sh' >/mnt/passwd
echo 'root:x:0:
tester:x:1234:
helpers:x:77:tester' >/mnt/group
mkdir -m 755 /mnt/home
mount --bind /mnt/passwd /etc/passwd
mount --bind /mnt/group /etc/group
echo up
exec setpriv --bounding-set=-sys_admin,-net_admin,-net_raw cat`)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	if err := cmd.Start(); err != nil {
		t.Skipf("no namespaces here: %v", err)
	}
	c := &container{cmd, in}
	t.Cleanup(c.destroy)
	if b := make([]byte, 3); func() bool { _, err := io.ReadFull(out, b); return err != nil }() {
		t.Skip("cannot set up a container here")
	}
	// setpriv has executed cat once the bounding set is the smaller one.
	eventually(t, "init", func() bool {
		b, _ := os.ReadFile("/proc/" + strconv.Itoa(c.pid()) + "/comm")
		return string(b) == "cat\n"
	})
	return c
}

func (c *container) pid() int { return c.init.Process.Pid }

func (c *container) destroy() {
	c.init.Process.Kill()
	c.stdin.Close()
	c.init.Wait()
}

func enterContainer(t *testing.T) (*box, *container) {
	t.Helper()
	c := newContainer(t)
	b := serve(t, agent.NewContainerSpace())
	if err := b.Enter(t.Context(), guest.Container{InitPID: c.pid(), WorkingDir: "/mnt/new/work"}); err != nil {
		t.Fatal(err)
	}
	if pid, err := b.Init(t.Context()); err != nil || pid != c.pid() {
		t.Fatalf("init %d: %v", pid, err)
	}
	return b, c
}

func TestProcessesRunInsideTheContainer(t *testing.T) {
	b, c := enterContainer(t)
	r := b.sh(t, "e1", `echo $$; pwd; readlink /proc/self/ns/mnt; id -u; echo $HOME $USER; grep CapBnd /proc/self/status`)
	f := strings.Fields(r.stdout.String())
	if len(f) != 8 {
		t.Fatalf("%q %q", r.stdout.String(), r.stderr.String())
	}
	ns, _ := os.Readlink("/proc/" + strconv.Itoa(c.pid()) + "/ns/mnt")
	if f[0] != strconv.Itoa(r.started.PID) || r.started.PID > 1000 || f[1] != "/mnt/new/work" || f[2] != ns || f[3] != "0" || f[4] != "/root" || f[5] != "root" {
		t.Errorf("%q, pid %d", f, r.started.PID)
	}
	bnd, _ := strconv.ParseUint(f[7], 16, 64)
	const sysAdmin, netAdmin, netRaw, sysBoot, sysPtrace, chown = 21, 12, 13, 22, 19, 0
	if bnd&(1<<netAdmin|1<<netRaw|1<<sysBoot) != 0 || bnd&(1<<chown) == 0 || bnd&(1<<sysAdmin) == 0 || bnd&(1<<sysPtrace) == 0 {
		t.Errorf("capabilities %s", f[7])
	}
	if _, err := os.Stat("/mnt/new/work"); err == nil {
		t.Error("the working directory was made outside")
	}
}

func TestProcessesRunAsTheUserOfTheContainersPasswd(t *testing.T) {
	b, _ := enterContainer(t)
	for user, want := range map[string]string{
		"tester":       "uid=1234 gid=1234 groups=1234,77 home=/mnt/home user=tester",
		"1234":         "uid=1234 gid=1234 groups=1234,77 home=/mnt/home user=tester",
		"tester:77":    "uid=1234 gid=77 groups=77 home=/mnt/home user=tester",
		"tester:root":  "uid=1234 gid=0 groups=0 home=/mnt/home user=tester",
		"555:666":      "uid=555 gid=666 groups=666 home=/ user=",
		"root:helpers": "uid=0 gid=77 groups=77 home=/root user=root",
	} {
		r := b.sh(t, "as-"+user, `echo uid=$(id -u) gid=$(id -g) groups=$(id -G | tr ' ' ,) home=$HOME user=$USER`, func(s *sandbox.ProcessSpec) { s.User = user; s.Cwd = "/" })
		if strings.TrimSpace(r.stdout.String()) != want {
			t.Errorf("%s: %q %q", user, r.stdout.String(), r.stderr.String())
		}
	}
	for _, user := range []string{"nobody-here", "tester:nogroup", ":", "-1", "4294967295"} {
		if _, err := b.start(t, sandbox.ProcessSpec{ExecID: "bad" + strings.ReplaceAll(user, ":", "."), Command: "id", User: user}, 0); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", user, err)
		}
	}
	r := b.sh(t, "caps", `grep CapEff /proc/self/status`, func(s *sandbox.ProcessSpec) { s.User = "tester"; s.Cwd = "/" })
	if !strings.Contains(r.stdout.String(), "0000000000000000") {
		t.Errorf("%q", r.stdout.String())
	}
	info, err := b.WriteFile(t.Context(), "/mnt/home/mine", []byte("x"), sandbox.WriteOptions{User: "tester"})
	if err != nil || info.UID != 1234 || info.GID != 1234 || info.Owner != "tester" {
		t.Errorf("%v %+v", err, info)
	}
}

func TestFilesAreThoseOfTheContainer(t *testing.T) {
	b, c := enterContainer(t)
	ctx := t.Context()
	if _, err := b.WriteFile(ctx, "/mnt/a/b/file", []byte("inside"), sandbox.WriteOptions{Parents: true, Atomic: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/mnt/a"); err == nil {
		t.Fatal("written outside")
	}
	if r := b.sh(t, "cat", "cat /mnt/a/b/file"); r.stdout.String() != "inside" {
		t.Errorf("%q", r.stdout.String())
	}
	if files, _, err := b.List(ctx, "/mnt", sandbox.ListOptions{Depth: 3}); err != nil || len(files) < 3 {
		t.Errorf("%v %v", err, files)
	}
	if err := b.Chmod(ctx, "/mnt/a", 0o700, true); err != nil {
		t.Error(err)
	}
	seen := errors.New("seen")
	err := b.Watch(ctx, "/mnt/a", true, func(ch sandbox.FileChange) error {
		if ch.Op == "ready" {
			b.sh(t, "touch", "touch /mnt/a/b/new")
		}
		if ch.Path == "/mnt/a/b/new" && ch.Op == "create" {
			return seen
		}
		return nil
	})
	if err != seen {
		t.Error(err)
	}
	var out strings.Builder
	if err := agent.RunBulk(agent.NewContainerSpace(), guest.BulkOp{Kind: "read", InitPID: c.pid(), Path: "/mnt/a/b/file"}, nil, &out); err != nil || out.String() != "inside" {
		t.Errorf("%v %q", err, out.String())
	}
	if err := b.Remove(ctx, "/mnt/a", true); err != nil {
		t.Error(err)
	}
	for _, p := range []string{"/proc", "/mnt"} { // mount points, both full
		if err := b.Remove(ctx, p, true); !errors.Is(err, sandbox.ErrPrecondition) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if _, err := b.Stat(ctx, "/mnt/passwd"); err != nil {
		t.Errorf("a refused removal removed: %v", err)
	}
}

func TestTheListShowsTheContainerAndNotTheAgent(t *testing.T) {
	b, _ := enterContainer(t)
	_, done := b.background(t, sandbox.ProcessSpec{ExecID: "live", Command: `setsid sleep 300 & echo ready; wait`})
	eventually(t, "listed", func() bool {
		_, tasks, err := b.Processes(t.Context())
		must(t, err)
		var init, sleep bool
		for _, k := range tasks {
			if strings.Contains(k.Command, "agent.test") {
				t.Fatalf("the agent is listed: %+v", k)
			}
			init = init || k.PID == 1 && k.Command == "cat"
			sleep = sleep || k.Command == "sleep 300" && k.ExecID == "live" && k.PID < 1000 && k.PPID > 1
		}
		return init && sleep
	})
	must(t, b.Signal(t.Context(), "live", "", false))
	if r := <-done; r.end.Cause != sandbox.KilledByUser {
		t.Errorf("%+v", r.end)
	}
}

func TestKillingEverythingInsideHurtsOnlyTheInside(t *testing.T) {
	b, _ := enterContainer(t)
	_, live := b.background(t, sandbox.ProcessSpec{ExecID: "live", Command: `sleep 300`})
	b.sh(t, "massacre", `kill -9 -1; echo alive`)
	if r := <-live; r.end.Cause != sandbox.Signalled || r.end.Signal != "SIGKILL" {
		t.Errorf("%+v", r.end)
	}
	if r := b.sh(t, "after", `echo fine`); r.stdout.String() != "fine\n" {
		t.Errorf("%q", r.stdout.String())
	}
}

func TestTheEndOfInitIsTheCauseOfTheOthers(t *testing.T) {
	c := newContainer(t)
	b := serve(t, agent.NewContainerSpace())
	b.agent.SetInitGrace(time.Minute) // the kernel needs longer for it on a loaded machine
	must(t, b.Enter(t.Context(), guest.Container{InitPID: c.pid()}))
	_, last := b.background(t, sandbox.ProcessSpec{ExecID: "last", Command: `sleep 300`})
	waited := make(chan error, 1)
	go func() { waited <- b.WaitInit(t.Context()) }()
	must(t, syscall.Kill(c.pid(), syscall.SIGKILL))
	if r := <-last; r.end.Cause != sandbox.InitKilled {
		t.Errorf("%+v", r.end)
	}
	must(t, <-waited)
	must(t, b.Ping(t.Context()))
}

func TestAResetMovesTheAgentToANewContainer(t *testing.T) {
	b, old := enterContainer(t)
	_, live := b.background(t, sandbox.ProcessSpec{ExecID: "one", Command: `sleep 300`})
	b.sh(t, "mark", `touch /mnt/old`)
	must(t, b.Leave(t.Context()))
	if r := <-live; r.end.Cause != sandbox.ResetCause {
		t.Errorf("%+v", r.end)
	}
	// No thread of ours may keep the old mounts alive.
	ns, _ := os.Readlink("/proc/" + strconv.Itoa(old.pid()) + "/ns/mnt")
	eventually(t, "no thread is inside", func() bool {
		for _, p := range globs(t, "/proc/self/task/*/ns/mnt") {
			if l, _ := os.Readlink(p); l == ns {
				return false
			}
		}
		return true
	})
	old.destroy()
	fresh := newContainer(t)
	if err := b.Enter(t.Context(), guest.Container{InitPID: fresh.pid()}); err != nil {
		t.Fatal(err)
	}
	if r := b.sh(t, "one", `test -e /mnt/old || echo pristine`); r.stdout.String() != "pristine\n" || r.started.Replayed {
		t.Errorf("%q %+v", r.stdout.String(), r.started)
	}
}

func globs(t *testing.T, pattern string) []string {
	m, err := filepath.Glob(pattern)
	must(t, err)
	return m
}

func TestATerminalInsideTheContainer(t *testing.T) {
	b, _ := enterContainer(t)
	r := b.sh(t, "tty", `test -t 1 && tty >/dev/null && stty size`, func(s *sandbox.ProcessSpec) {
		s.PTY = &sandbox.TermSize{Rows: 11, Cols: 22}
		s.User = "tester"
		s.Cwd = "/"
	})
	if r.stdout.String() != "11 22\r\n" || r.end.ExitCode != 0 {
		t.Errorf("%q %+v", r.stdout.String(), r.end)
	}
}

// A child that is stopped between fork and execve holds up the thread that
// forks; it must come free, or go when the container does.
func TestCodeThatStopsEveryNewProcessHoldsNobodyForLong(t *testing.T) {
	b, _ := enterContainer(t)
	_, stopper := b.background(t, sandbox.ProcessSpec{ExecID: "stopper", Command: `while :; do kill -STOP -1; done`})
	var victims []<-chan *result
	for i := range 20 {
		done := make(chan *result, 1)
		go func() {
			r := &result{}
			if err := b.Start(context.Background(), sandbox.ProcessSpec{ExecID: "v" + strconv.Itoa(i), Command: `echo through`}, 0, func(ev sandbox.ProcessEvent) error { r.take(t, ev); return nil }); err != nil && !errors.Is(err, sandbox.ErrPrecondition) {
				t.Error(err)
			}
			done <- r
		}()
		victims = append(victims, done)
	}
	if _, err := b.Stat(t.Context(), "/"); err != nil {
		t.Error(err)
	}
	must(t, b.Signal(t.Context(), "stopper", "", false))
	<-stopper
	eventually(t, "all have started", func() bool {
		procs, _, err := b.Processes(t.Context())
		must(t, err)
		return len(procs) == 21
	})
	must(t, b.Leave(t.Context()))
	for _, v := range victims {
		<-v
	}
}
