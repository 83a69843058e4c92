package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/internal/testport"
	"github.com/cove-sandbox/cove/sandbox"
)

// typist is at the terminal of a program of this machine.
type typist struct {
	*os.File
	mu struct {
		sync.Mutex
		text string
		news chan struct{} // closed, and replaced, when there is more
		over bool
	}
}

func newTypist(t *testing.T, c *exec.Cmd, rows, cols uint16) *typist {
	t.Helper()
	f, err := pty.StartWithSize(c, &pty.Winsize{Rows: rows, Cols: cols})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	s := &typist{File: f}
	s.mu.news = make(chan struct{})
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := f.Read(buf)
			s.mu.Lock()
			s.mu.text += string(buf[:n])
			s.mu.over = err != nil
			close(s.mu.news)
			s.mu.news = make(chan struct{})
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return s
}

// enter types a line.
func (s *typist) enter(t *testing.T, line string) {
	t.Helper()
	if _, err := io.WriteString(s, line+"\n"); err != nil {
		t.Fatal(err)
	}
}

// await returns when the text has come, in a minute at most.
func (s *typist) await(t *testing.T, want string) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		s.mu.Lock()
		text, news, over := s.mu.text, s.mu.news, s.mu.over
		s.mu.Unlock()
		if strings.Contains(text, want) {
			return
		}
		if over {
			t.Fatalf("ended without %q:\n%s", want, text)
		}
		select {
		case <-news:
		case <-deadline:
			t.Fatalf("no %q in\n%s", want, text)
		}
	}
}

// sshForward is "ssh -L" to a port of a sandbox, once it takes connections.
func sshForward(t *testing.T, config, id string, port int) (addr string, stop func()) {
	t.Helper()
	addr = fmt.Sprint("127.0.0.1:", testport.Free(t, "127.0.0.1"))
	ctx, cancel := context.WithCancel(t.Context())
	c := exec.CommandContext(ctx, "ssh", "-F", config, "-o", "ExitOnForwardFailure=yes", "-N", "-L", addr+":localhost:"+strconv.Itoa(port), id)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	world.Eventually(t, time.Minute, "ssh listens", func() bool {
		nc, err := net.Dial("tcp", addr)
		if err == nil {
			nc.Close()
		}
		return err == nil
	})
	return addr, func() { cancel(); _ = c.Wait() }
}

// TestSSHLivesOn has a shell, scp, sftp and a forwarded port of the OpenSSH client
// under way while the sandbox is snapshotted, forked and put to sleep.
func TestSSHLivesOn(t *testing.T) {
	w := world.New(t, world.Options{Flags: []string{"--ssh", "127.0.0.1:0"}})
	b := withServer(t, w, world.Small())
	dir := t.TempDir()
	ran(w.CLI(t, "ssh", "--write", dir, b.ID)).want(t, 0)
	config := filepath.Join(dir, "config")

	steps := []struct {
		name string
		do   func(t *testing.T)
	}{
		{"snapshot", func(t *testing.T) { b.Snapshot(t, world.Take{Kind: sandbox.MemorySnapshot}) }},
		{"fork", func(t *testing.T) {
			if _, err := b.TryFork(t.Context(), 1, nil); err != nil {
				t.Fatal(err)
			}
		}},
		{"hot", func(t *testing.T) { b.Pause(t, false) }},
		{"cold", func(t *testing.T) { b.Pause(t, true) }},
	}

	t.Run("shell", func(t *testing.T) {
		c := exec.CommandContext(t.Context(), "ssh", "-F", config, "-tt", b.ID)
		f := newTypist(t, c, 24, 80)
		f.enter(t, "n=40; cd /var")
		for i, step := range steps {
			step.do(t)
			f.enter(t, "n=$((n+1)); echo $n in $PWD after "+step.name)
			f.await(t, fmt.Sprintf("%d in /var after %s", 41+i, step.name))
		}
		f.enter(t, "exit 9")
		if _ = c.Wait(); c.ProcessState.ExitCode() != 9 {
			t.Errorf("the shell's code: %d", c.ProcessState.ExitCode())
		}
	})
	t.Run("forward", func(t *testing.T) {
		addr, stop := sshForward(t, config, b.ID, 9090)
		defer stop()
		c := newLineClient(t, addr)
		for _, step := range steps {
			c.ask(t, "before "+step.name)
			step.do(t)
			c.ask(t, "after "+step.name)
		}
	})

	// Slow enough to be met half-way: 4 MiB at 16 Mbit/s are two seconds.
	big := make([]byte, 4<<20)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(big)
	local := filepath.Join(dir, "big")
	if err := os.WriteFile(local, big, 0o600); err != nil {
		t.Fatal(err)
	}
	const rate = "16384"
	for i, step := range steps {
		if !soaking && i%3 != 0 { // snapshot and cold: each is met by some program beside the shell
			continue
		}
		t.Run("scp there, "+step.name, func(t *testing.T) {
			done := background(t, nil, "scp", "-F", config, "-l", rate, local, b.ID+":/tmp/there-"+step.name)
			size := func() int {
				n, err := strconv.Atoi(b.Must(t, "stat -c %s /tmp/there-"+step.name+" 2>/dev/null || echo 0"))
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			world.Eventually(t, time.Minute, "scp writes", func() bool { return size() > 0 })
			step.do(t) // what scp sends next wakes it
			if n := size(); n >= len(big) {
				t.Fatalf("scp was through: %d bytes", n)
			}
			within1m(t, done)
			if got := b.Must(t, "sha256sum < /tmp/there-"+step.name+"; rm /tmp/there-"+step.name); !strings.HasPrefix(got, fmt.Sprintf("%x", sha256.Sum256(big))) {
				t.Errorf("%s", got)
			}
		})
	}
	ran(w.CLI(t, "cp", local, b.ID+":/tmp/big")).want(t, 0)
	fetched := func(t *testing.T, done <-chan error, file string, step func(*testing.T)) {
		size := func() int64 {
			info, err := os.Stat(file)
			if err != nil {
				return 0
			}
			return info.Size()
		}
		world.Eventually(t, time.Minute, "it arrives", func() bool { return size() > 0 })
		step(t)
		if n := size(); n >= int64(len(big)) {
			t.Fatalf("it was through: %d bytes", n)
		}
		if err := b.TryResume(t.Context()); err != nil { // what comes from inside wakes nobody
			t.Fatal(err)
		}
		within1m(t, done)
		if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, big) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}
	for i, step := range steps {
		if soaking || i%3 != 0 { // fork and hot
			t.Run("scp back, "+step.name, func(t *testing.T) {
				file := filepath.Join(dir, "back-"+step.name)
				fetched(t, background(t, nil, "scp", "-F", config, "-l", rate, b.ID+":/tmp/big", file), file, step.do)
			})
		}
		if !soaking && i%2 == 0 { // fork and cold
			continue
		}
		t.Run("sftp, "+step.name, func(t *testing.T) {
			file := filepath.Join(dir, "got-"+step.name)
			batch := "cd /tmp\nget big " + file + "\nput " + local + " again\nrename again moved-" + step.name + "\n"
			fetched(t, background(t, strings.NewReader(batch), "sftp", "-F", config, "-l", rate, "-b", "-", b.ID), file, step.do)
			if got := b.Must(t, "sha256sum < /tmp/moved-"+step.name+"; rm /tmp/moved-"+step.name); !strings.HasPrefix(got, fmt.Sprintf("%x", sha256.Sum256(big))) {
				t.Errorf("%s", got)
			}
		})
	}
}

// background runs a program of this machine; what it says is part of its error.
func background(t *testing.T, stdin io.Reader, name string, args ...string) <-chan error {
	t.Helper()
	var errs bytes.Buffer
	c := exec.CommandContext(t.Context(), name, args...)
	c.Stdin, c.Stderr = stdin, &errs
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		err := c.Wait()
		if err != nil {
			err = errors.Join(err, errors.New(errs.String()))
		}
		done <- err
	}()
	return done
}

func within1m(t *testing.T, done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("still at it after a minute")
	}
}
