package spawn

import (
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

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// The test binary is the spawner of its own tests, as runsc is the driver's.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == Command {
		err := Serve(func(cmd *exec.Cmd, nss []specs.LinuxNamespace) error { return cmd.Start() })
		if err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func spawner(t *testing.T, apart string) *Spawner {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := New(self, apart)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// shell is a script whose output comes by descriptor 3.
func shell(t *testing.T, script string) (cmd *exec.Cmd, out io.Reader, started func()) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return &exec.Cmd{Path: "/bin/sh", Args: []string{"sh", "-c", script}, Env: []string{"A=b"}, Dir: "/tmp", ExtraFiles: []*os.File{w}}, r, func() { w.Close() }
}

func read(t *testing.T, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func TestAProcessHasWhatItWasGiven(t *testing.T) {
	s := spawner(t, "")
	cmd, out, started := shell(t, `cat /proc/self/uid_map >&3; echo $A $PWD $PPID >&3; ls /proc/$$/fd >&3`)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: []syscall.SysProcIDMap{{ContainerID: 7, HostID: os.Getuid(), Size: 1}}}
	if err := s.Start(cmd, nil); err != nil {
		t.Fatal(err)
	}
	started()
	lines := strings.Split(read(t, out), "\n")
	if f := strings.Fields(lines[0]); len(f) != 3 || f[0] != "7" {
		t.Errorf("its users are %q", lines[0])
	}
	if f := strings.Fields(lines[1]); len(f) != 3 || f[0] != "b" || f[1] != "/tmp" || f[2] == "0" {
		t.Errorf("environment, directory and parent are %q", lines[1])
	}
	// As many as if it had been started here: one more is one that leaked.
	plain, out, started := shell(t, `ls /proc/$$/fd >&3`)
	if err := plain.Start(); err != nil {
		t.Fatal(err)
	}
	started()
	want := read(t, out)
	if err := plain.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(lines[2:], "\n"); got != want {
		t.Errorf("it holds the descriptors %s, want %s", got, want)
	}
}

func TestEndsAreTold(t *testing.T) {
	s := spawner(t, "")
	for script, want := range map[string]string{"exit 0": "", "exit 3": "exit status 3", "kill -9 $$": "signal: killed"} {
		cmd, _, _ := shell(t, script)
		wait, err := s.StartWaited(cmd)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if err := wait(); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q ended with %q, want %q", script, got, want)
		}
	}
	if _, err := s.StartWaited(&exec.Cmd{Path: "/nonexistent", Args: []string{"x"}}); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("a program that is not there: %v", err)
	}
}

// A runsc of another build: one that ends at a command that it does not know, and
// one that speaks otherwise.
func TestAProgramThatIsNoSpawner(t *testing.T) {
	for name, script := range map[string]string{"ends": "exit 2", "says something else": `echo "cove-spawner 0" >&3; sleep 60`} {
		path := filepath.Join(t.TempDir(), "runsc")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		s := New(path, "")
		for range 2 { // the next one does not take it for a spawner either
			err := s.Start(&exec.Cmd{Path: "/bin/true", Args: []string{"true"}}, nil)
			var typed *sandbox.Error
			if !errors.As(err, &typed) || typed.Class != sandbox.Precondition || !strings.Contains(err.Error(), path) || !strings.Contains(typed.Hint, "make build") {
				t.Errorf("one that %s: %v", name, err)
			}
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// What was started lives on when the spawner dies, and the next start has a new one.
func TestASpawnerThatDies(t *testing.T) {
	s := spawner(t, "")
	cmd, out, started := shell(t, `read x <&4; echo $x >&3`)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	cmd.ExtraFiles = append(cmd.ExtraFiles, r)
	wait, err := s.StartWaited(cmd)
	if err != nil {
		t.Fatal(err)
	}
	started()
	r.Close()
	if err := s.mu.proc.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := wait(); err == nil {
		t.Error("the end of a process is known that nobody watches")
	}
	if _, err := w.WriteString("alive\n"); err != nil {
		t.Fatal(err)
	}
	if got := read(t, out); got != "alive" {
		t.Errorf("what it had started said %q", got)
	}
	for deadline := time.Now().Add(10 * time.Second); ; { // the socket is closed when the kernel has taken it down
		cmd, out, started := shell(t, `echo again >&3`)
		if err = s.Start(cmd, nil); err == nil {
			started()
			if got := read(t, out); got != "again" {
				t.Errorf("the next one said %q", got)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func TestManyAtOnceAndNoZombies(t *testing.T) {
	s := spawner(t, "")
	done := make(chan error)
	const many = 64
	for range many {
		go func() {
			wait, err := s.StartWaited(&exec.Cmd{Path: "/bin/true", Args: []string{"true"}})
			if err == nil {
				err = wait()
			}
			done <- err
		}()
	}
	for range many {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	kids, err := os.ReadFile("/proc/" + strconv.Itoa(s.mu.proc.Process.Pid) + "/task/" + strconv.Itoa(s.mu.proc.Process.Pid) + "/children")
	if err == nil && len(strings.Fields(string(kids))) > 0 {
		t.Errorf("children left: %s", kids)
	}
}

// The end of a process that never came to be is not told of another that has its
// number later.
func TestEndsOfNobodyAreForgotten(t *testing.T) {
	p := parent{start: func(cmd *exec.Cmd, _ []specs.LinuxNamespace) error { return os.ErrPermission }}
	p.mu.children, p.mu.early = map[int]*os.File{}, map[int]string{}
	reads, writes, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reads.Close()
	p.ended(4711, "exit status 1") // collected before its start was known to have failed
	p.serve([]byte(`{}`), []*os.File{writes})
	if len(p.mu.early) != 0 || p.mu.starting != 0 {
		t.Errorf("kept: %v, %d starting", p.mu.early, p.mu.starting)
	}
}
