package runtimetest

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/sandbox"
)

func (s *suite) testIsolation(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "isolated", d.Capabilities().Isolated)
	t.Setenv("COVE_TEST_HOST_SECRET", "host-secret")
	k, other := s.attached(t, d), s.attached(t, d)

	t.Run("the host's files", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(path, []byte("host-secret"), 0o644); err != nil {
			t.Fatal(err)
		}
		s.fails(t, k, "cat "+path)
		s.fails(t, k, "cat /proc/1/root"+path)
	})
	t.Run("the host's environment", func(t *testing.T) {
		if out := s.sh(t, k, "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'"); strings.Contains(out, "host-secret") {
			t.Error("is visible inside")
		}
	})
	t.Run("processes outside", func(t *testing.T) {
		if out := s.sh(t, k, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); strings.Contains(out, "cove-guest serve") || strings.Contains(out, filepath.Base(os.Args[0])) {
			t.Errorf("the guest or the host is visible: %s", out)
		}
	})
	t.Run("the host's loopback", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		s.fails(t, k, connect(l.Addr().(*net.TCPAddr).Port))
	})
	t.Run("a neighbour's files and ports", func(t *testing.T) {
		s.sh(t, k, "echo mine > /tmp/mine; echo mine > /dev/shm/mine")
		s.sh(t, k, listen(5001))
		s.sh(t, k, connect(5001)) // it does listen
		s.fails(t, other, "cat /tmp/mine")
		s.fails(t, other, "cat /dev/shm/mine")
		s.fails(t, other, connect(5001))
	})
	t.Run("capabilities over the kernel", func(t *testing.T) {
		s.fails(t, k, "mknod /tmp/vda b 254 0 && mount -t ext4 /tmp/vda /mnt")
		s.fails(t, k, "mknod /tmp/sda b 8 0 && cat /tmp/sda")
	})
}

// listen leaves a server on a port of the loopback behind.
func listen(port int) string {
	return fmt.Sprintf(`python3 - <<'E'
import os, socket
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", %d)); s.listen(8)
if os.fork() == 0:
    os.setsid(); os.close(0); os.close(1); os.close(2)
    while True: s.accept()[0].close()
E`, port)
}

func connect(port int) string {
	return fmt.Sprintf(`python3 -c 'import socket; socket.create_connection(("127.0.0.1", %d), 5)'`, port)
}

func (s *suite) testIsolationOfEpisodes(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "isolated", d.Capabilities().Isolated)
	k := s.attached(t, d)
	s.sh(t, k, "echo old | tee /tmp/x /dev/shm/x /etc/x /root/x /var/tmp/x > /x; rm -r /usr/share/doc; echo root::0:0::/:/bin/sh > /etc/passwd")
	s.sh(t, k, "(setsid sleep 54321 >/dev/null 2>&1 &); (trap '' HUP TERM; setsid sleep 54322 > /dev/null 2>&1 &)")
	s.sh(t, k, listen(5002))
	s.sh(t, k, "hostname old-name 2>/dev/null || true")
	if err := k.Reset(deadline(t), s.container(t)); err != nil {
		t.Fatalf("reset: %v", err)
	}
	s.sh(t, k, "for f in /x /tmp/x /dev/shm/x /etc/x /root/x /var/tmp/x; do test -e $f && echo $f is left && exit 1; done; test -d /usr/share/doc && grep -q nobody /etc/passwd")
	s.fails(t, k, connect(5002))
	_, tasks, err := k.Guest().Processes(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		if strings.Contains(task.Command, "5432") || strings.Contains(task.Command, "python") {
			t.Errorf("a process of the old episode is left: %+v", task)
		}
	}
	if got := s.sh(t, k, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); strings.Contains(got, "5432") {
		t.Errorf("a process of the old episode is visible inside: %s", got)
	}
}

func (s *suite) testUsers(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "isolated", d.Capabilities().Isolated)
	k := s.attached(t, d, func(c *runtime.Container) { c.Rootfs.User = "user" })
	for _, c := range []struct{ user, want string }{
		{"", "1000 1000"}, {"root", "0 0"}, {"0", "0 0"}, {"user", "1000 1000"}, {"1000", "1000 1000"},
		{"user:root", "1000 0"}, {"4321:8765", "4321 8765"},
	} {
		spec := shell("echo $(id -u) $(id -g)")
		spec.User = c.user
		if got := strings.TrimSpace(s.exec(t, k, spec).stdout); got != c.want {
			t.Errorf("user %q runs as %q, want %q", c.user, got, c.want)
		}
	}
	spec := shell("true")
	spec.User = "nosuchuser"
	_, err := s.tryExec(deadline(t), k, spec)
	expectClass(t, "a user that is not there", err, sandbox.Invalid)
	spec = shell("cat /etc/shadow")
	spec.User = "user"
	if r := s.exec(t, k, spec); r.end.ExitCode == 0 {
		t.Error("a user reads /etc/shadow")
	}
}

func (s *suite) testInitKilled(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "isolated", d.Capabilities().Isolated)
	k, neighbour := s.attached(t, d), s.attached(t, d)
	_, end := s.background(t, k, shell("kill -9 1; sleep 1000"))
	waitFor(t, "done", k.Done())
	if x := k.Exit(); x.Cause != sandbox.InitKilled {
		t.Errorf("exit %+v", x)
	}
	waitFor(t, "the end of the killer", end)
	s.sh(t, neighbour, "true")
}

func (s *suite) testKillEverything(t *testing.T) {
	d := s.open(t)
	s.need(t, d, "isolated", d.Capabilities().Isolated)
	k := s.attached(t, d)
	started, end := s.background(t, k, shell("sleep 1000"))
	waitFor(t, "the process", started)
	_, killer := s.background(t, k, shell("kill -9 -1; exit 3"))
	waitFor(t, "the end of the killer", killer)
	r := waitFor(t, "the end of the victim", end)
	if isDone(k) { // a kernel whose init dies of it says so
		if x := k.Exit(); x.Cause != sandbox.InitKilled {
			t.Errorf("exit %+v", x)
		}
		return
	}
	if r.end.Cause != sandbox.Signalled {
		t.Errorf("the victim ended as %+v", r.end)
	}
	s.sh(t, k, "true")
}
