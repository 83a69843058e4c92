package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/cli"
	"github.com/cove-sandbox/cove/cli/doctor"
	"github.com/cove-sandbox/cove/internal/testport"
	"github.com/cove-sandbox/cove/sandbox"
)

// instance is a server in this process, on the fake runtime.
type instance struct {
	t    *testing.T
	data string
	url  string
	stop context.CancelFunc
	done chan error
}

func start(t *testing.T, data string) *instance {
	t.Helper()
	addr := fmt.Sprint("127.0.0.1:", testport.Free(t, "127.0.0.1"))
	ctx, stop := context.WithCancel(context.Background())
	s := &instance{t: t, data: data, url: "http://" + addr, stop: stop, done: make(chan error, 1)}
	go func() {
		s.done <- serve(ctx, cli.ServeConfig{Data: data, Listen: addr, Runtime: "fake", LogLevel: "error"}, "test")
	}()
	t.Cleanup(func() { s.end() })
	if out, code := s.cove("health", "--wait", "60s"); code != 0 {
		t.Fatalf("no health: %s", out)
	}
	return s
}

// end stops the server and returns what it said.
func (s *instance) end() error {
	s.stop()
	err := <-s.done
	s.done <- err
	return err
}

// cove runs a command line against the instance, with the key it left on disk.
func (s *instance) cove(args ...string) (string, int) {
	var out bytes.Buffer
	env := map[string]string{"COVE_URL": s.url, "COVE_DATA": s.data}
	code := cli.Main(context.Background(), cli.Deps{Stdin: strings.NewReader(""), Stdout: &out, Stderr: &out, Probes: doctor.System(),
		Getenv: func(k string) string { return env[k] }}, args)
	return out.String(), code
}

// must runs a command line that has to succeed.
func (s *instance) must(args ...string) string {
	s.t.Helper()
	out, code := s.cove(args...)
	if code != 0 {
		s.t.Fatalf("cove %s: exit %d\n%s", strings.Join(args, " "), code, out)
	}
	return strings.TrimSpace(out)
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

func TestServeFromNothingAndAgain(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	// Before the first start, as "make start" does; twice makes it once.
	var ids [2]string
	for i := range ids {
		img, err := bootstrap(t.Context(), cli.ServeConfig{Data: data, Runtime: "fake"}, func(sandbox.Progress) {})
		if err != nil {
			t.Fatal(err)
		}
		ids[i] = img.ID
	}
	if ids[0] == "" || ids[0] != ids[1] {
		t.Errorf("bootstrapped %v", ids)
	}
	first := start(t, data)
	if fi, err := os.Stat(filepath.Join(data, "key")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("key: %v %v", fi, err)
	}
	key, _ := os.ReadFile(filepath.Join(data, "key"))
	id := first.must("create", "--label", "a=b")
	if out := first.must("exec", id, "--", "echo", "hello"); out != "hello" {
		t.Errorf("exec: %q", out)
	}
	if !exists(filepath.Join(data, "pid")) {
		t.Error("no pid file")
	}
	if err := first.end(); err != nil {
		t.Fatalf("stop: %v", err)
	}
	if exists(filepath.Join(data, "pid")) {
		t.Error("the pid file was left behind")
	}

	second := start(t, data)
	again, _ := os.ReadFile(filepath.Join(data, "key"))
	if !bytes.Equal(key, again) {
		t.Error("a second start made another key")
	}
	// The fake's kernels died with the process that held them: that must be known.
	if out := second.must("inspect", id); !strings.Contains(out, `"ended"`) || !strings.Contains(out, `"cause"`) {
		t.Errorf("the old sandbox: %s", out)
	}
	if out := second.must("ls", "-q"); out != "" {
		t.Errorf("alive: %s", out)
	}
}

// A crash between making the first key and writing it down must not lock the
// owner out; a key that was used is never replaced behind its user's back.
func TestALostKeyFile(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	s := start(t, data) // health needs no key, so it is unused
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(data, "key")); err != nil {
		t.Fatal(err)
	}
	s = start(t, data)
	if out := s.must("key", "ls", "--json"); strings.Count(out, `"id"`) != 1 {
		t.Errorf("keys: %s", out)
	}
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(data, "key")); err != nil {
		t.Fatal(err)
	}
	s = start(t, data)
	if exists(filepath.Join(data, "key")) {
		t.Error("a used key was replaced")
	}
	if out, code := s.cove("ls"); code != 1 || !strings.Contains(out, "no API key") {
		t.Errorf("%d %s", code, out)
	}
}

func TestServeSaysWhyItCannotStart(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	s := start(t, data)
	addr := strings.TrimPrefix(s.url, "http://")
	for name, c := range map[string]struct {
		cfg  cli.ServeConfig
		want string
	}{
		"taken port":      {cli.ServeConfig{Data: t.TempDir(), Listen: addr, Runtime: "fake"}, addr + " is in use"},
		"taken directory": {cli.ServeConfig{Data: data, Listen: "127.0.0.1:0", Runtime: "fake"}, " is in use by "},
		"no such address": {cli.ServeConfig{Data: t.TempDir(), Listen: "nonsense", Runtime: "fake"}, "listen"},
		"no such runtime": {cli.ServeConfig{Data: t.TempDir(), Listen: "127.0.0.1:0", Runtime: "docker"}, "runtime"},
		"no such level":   {cli.ServeConfig{Data: t.TempDir(), Listen: "127.0.0.1:0", Runtime: "fake", LogLevel: "loud"}, "log-level"},
		"no runsc":        {cli.ServeConfig{Data: t.TempDir(), Listen: "127.0.0.1:0", Runtime: "gvisor", RunscPath: "/nope"}, "/nope"},
	} {
		err := serve(t.Context(), c.cfg, "test")
		var e *sandbox.Error
		if err == nil || !strings.Contains(err.Error(), c.want) || !errors.As(err, &e) {
			t.Errorf("%s: %v", name, err)
		}
		if c.cfg.Data != data && exists(filepath.Join(c.cfg.Data, "pid")) {
			t.Errorf("%s: a pid file was left", name)
		}
	}
	// The one that runs is unharmed.
	if !exists(filepath.Join(data, "pid")) {
		t.Error("the running server's pid file is gone")
	}
	s.must("ls")
}

func TestReapRefusesARunningServersKernels(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	s := start(t, data)
	cfg := cli.ServeConfig{Data: data, Runtime: "fake"}
	if _, err := reap(t.Context(), cfg); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("reap under a running server: %v", err)
	}
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	if _, err := reap(t.Context(), cfg); err != nil {
		t.Error(err)
	}
	if _, err := reap(t.Context(), cli.ServeConfig{Data: t.TempDir(), Runtime: "fake"}); err != nil {
		t.Errorf("nothing to reap: %v", err)
	}
}

func TestLocalURL(t *testing.T) {
	for in, want := range map[string]string{"0.0.0.0:7": "http://127.0.0.1:7", "[::]:7": "http://127.0.0.1:7", "127.0.0.1:7": "http://127.0.0.1:7", "[::1]:7": "http://[::1]:7"} {
		a, err := net.ResolveTCPAddr("tcp", in)
		if err != nil {
			t.Fatal(err)
		}
		if got := localURL(a); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

// A server that was killed holds its socket until its last thread has ended, and a
// child that it was forking holds it for a moment longer. It may be a zombie then.
func TestListenAfterACrash(t *testing.T) {
	held, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	addr := held.Addr().String()
	at := places{t.TempDir()}
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	pid := filepath.Join(at.dir, "pid")
	if err := os.WriteFile(pid, []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listen(t.Context(), addr, at); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("beside a living server: %v", err)
	}
	if err := os.WriteFile(pid, []byte(strconv.Itoa(cmd.Process.Pid)), 0o600); err != nil {
		t.Fatal(err)
	}
	if !at.crashed() {
		t.Error("a zombie is taken for a server")
	}
	got := make(chan error, 1)
	go func() {
		ln, err := listen(t.Context(), addr, at)
		if err == nil {
			ln.Close()
		}
		got <- err
	}()
	held.Close()
	if err := <-got; err != nil {
		t.Errorf("after a crash: %v", err)
	}
}
