package world

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/internal/seal"
	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/internal/testport"
	"github.com/cove-sandbox/cove/wire"
)

const (
	// startWithin bounds a start on a machine that is busy with other tests;
	// on a quiet one it takes a fraction of a second.
	startWithin = 90 * time.Second
	// stopWithin is more than the server gives its own drain.
	stopWithin = 90 * time.Second
)

// Options of a world; the zero value works.
type Options struct {
	Flags []string      // for serve, after the ones every world has
	Env   []string      // for the server, over the test's own
	Empty bool          // start without the base image
	Keys  *seal.Keyring // with what the flags have state encrypted, to read it
	In    string        // directory to make the world in; "" is the one for temporary files

	Origin Origin // of sandboxes; instead of Fresh and Mixed it is what COVE_ORIGIN says, if that is set
}

// World is one server with its data directory. The methods are for the test's
// own goroutine, except Client, URL, Key, Box methods and Logs.
type World struct {
	Dir string // data directory of the server

	bin    string // directory of the binaries
	opts   Options
	port   int
	lock   *os.File
	before Host

	checkpoints struct {
		sync.Mutex
		of map[string]string // snapshots by spec
	}

	client *wire.Client
	key    string
	out    *os.File // the server's stdout and stderr, over all its starts

	mu struct {
		sync.Mutex
		proc *process
	}
}

// process is one start of the server.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has been waited for
}

// New opens a world and starts its server. At the end of the test the server
// is drained and the host compared with what it was before.
func New(t testing.TB, o Options) *World {
	t.Helper()
	o.Origin = o.origin(t)
	w := &World{bin: filepath.Dir(testbin.Cove(t)), opts: o}
	testbin.Runsc(t)
	testbin.Guest(t)
	w.sweepDead(t)

	dir, err := os.MkdirTemp(o.In, dirPrefix)
	if err != nil {
		t.Fatal(err)
	}
	w.Dir = filepath.Join(dir, "d")
	if err := os.Mkdir(w.Dir, 0o711); err != nil {
		t.Fatal(err)
	}
	// The sentry runs as nobody and must be able to walk to its own files.
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	if w.lock, err = lockDir(dir); err != nil {
		t.Fatal(err)
	}
	if w.out, err = os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600); err != nil {
		t.Fatal(err)
	}
	w.before = HostNow(w.Dir)
	t.Cleanup(func() { w.close(t, dir) })
	if !o.Empty {
		w.seedImages(t)
	}
	w.port = testport.Free(t, "127.0.0.1")
	w.Start(t)
	return w
}

// close drains the server, demands a clean host, and only then removes what a
// failed test left, so that a leak is seen before it is wiped.
func (w *World) close(t testing.TB, dir string) {
	w.mu.Lock()
	running := w.mu.proc != nil
	w.mu.Unlock()
	if !running && !t.Failed() {
		w.Start(t) // what a crash test left is the server's to remove, not ours
	}
	if w.serverAlive() {
		w.killAll(t)
		w.Stop(t)
	}
	w.AssertHostClean(t)
	w.client.Close()
	if t.Failed() {
		t.Logf("server log of %s:\n%s", w.Dir, tail(w.Logs(), 16<<10))
	}
	w.reap(t)
	if left := cgroupParents(filepath.Join(w.Dir, "gvisor")); len(left) > 0 {
		t.Errorf("left after a reap: %v", left)
	}
	w.out.Close()
	w.lock.Close()
	if err := os.RemoveAll(dir); err != nil {
		t.Errorf("removing the world: %v", err)
	}
}

func (w *World) serverAlive() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.proc == nil {
		return false
	}
	select {
	case <-w.mu.proc.done:
		return false
	default:
		return true
	}
}

// Start starts the server and returns when it answers.
func (w *World) Start(t testing.TB) {
	t.Helper()
	w.Launch(t)
	w.ready(t)
}

// Launch starts the server and does not wait for it.
func (w *World) Launch(t testing.TB) {
	t.Helper()
	args := append([]string{"serve", "--data", w.Dir, "--listen", fmt.Sprintf("127.0.0.1:%d", w.port)}, w.opts.Flags...)
	cmd := exec.Command(filepath.Join(w.bin, "cove"), args...)
	cmd.Env = append(w.environ(), w.opts.Env...)
	cmd.Stdout, cmd.Stderr = w.out, w.out
	cmd.Dir = filepath.Dir(w.Dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig watches the thread that forked, not the process: it must
		// live as long as the server.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // the exit code is in cmd.ProcessState
		close(p.done)
	}()
	if err := <-started; err != nil {
		t.Fatalf("starting the server: %v", err)
	}
	w.mu.Lock()
	w.mu.proc = p
	w.mu.Unlock()
}

// ready waits for the server to answer.
func (w *World) ready(t testing.TB) {
	t.Helper()
	w.mu.Lock()
	p := w.mu.proc
	w.mu.Unlock()
	deadline := time.After(startWithin)
	for wait := 5 * time.Millisecond; ; wait = min(wait*2, 100*time.Millisecond) {
		if err := w.Healthy(t.Context()); err == nil {
			break
		}
		select {
		case <-p.done:
			t.Fatalf("the server ended at its start: %v\n%s", p.cmd.ProcessState, tail(w.Logs(), 8<<10))
		case <-deadline:
			t.Fatalf("the server does not answer %s after its start\n%s", startWithin, tail(w.Logs(), 8<<10))
		case <-time.After(wait):
		}
	}
	if w.client == nil {
		b, err := os.ReadFile(filepath.Join(w.Dir, "key"))
		if err != nil {
			t.Fatalf("the server wrote no key: %v", err)
		}
		w.key = strings.TrimSpace(string(b))
		w.client = wire.NewClient(w.URL(), w.key, wire.Options{UserAgent: "cove-e2e"})
	}
	if !w.opts.Empty {
		// Named in the background of the first start.
		Eventually(t, startWithin, "the base image is there", func() bool {
			_, err := w.client.Images.Get(t.Context(), connect.NewRequest(&covev1.GetImageRequest{Name: "base"}))
			return err == nil
		})
	}
}

// SetFlags is for the starts to come, instead of those of the options.
func (w *World) SetFlags(flags ...string) { w.opts.Flags = flags }

// Kill ends the server as a crash would: SIGKILL, no goodbye.
func (w *World) Kill(t testing.TB) {
	t.Helper()
	p := w.take(t)
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatalf("killing the server: %v", err)
	}
	<-p.done
}

// Stop drains the server with SIGTERM, as make stop does.
func (w *World) Stop(t testing.TB) {
	t.Helper()
	p := w.take(t)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Errorf("stopping the server: %v", err)
	}
	select {
	case <-p.done:
		if code := p.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("the server ended with %v after SIGTERM, want 0\n%s", p.cmd.ProcessState, tail(w.Logs(), 4<<10))
		}
	case <-time.After(stopWithin):
		t.Errorf("the server did not end within %s of SIGTERM\n%s", stopWithin, tail(w.Logs(), 4<<10))
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// Restart is Kill and Start.
func (w *World) Restart(t testing.TB) {
	t.Helper()
	w.Kill(t)
	w.Start(t)
}

func (w *World) take(t testing.TB) *process {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.mu.proc
	if p == nil {
		t.Fatal("the server is not running")
	}
	w.mu.proc = nil
	return p
}

// PID of the running server.
func (w *World) PID() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.proc.cmd.Process.Pid
}

// Exited is closed when the running server has ended on its own.
func (w *World) Exited() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.proc.done
}

// URL of the server; the same over restarts.
func (w *World) URL() string { return fmt.Sprintf("http://127.0.0.1:%d", w.port) }

// Key is the server's first API key.
func (w *World) Key() string { return w.key }

// Client of the server, with its first key. The same over restarts.
func (w *World) Client() *wire.Client { return w.client }

// ClientWith has another key.
func (w *World) ClientWith(t testing.TB, key string) *wire.Client {
	c := wire.NewClient(w.URL(), key, wire.Options{})
	t.Cleanup(c.Close)
	return c
}

// Healthy asks /healthz.
func (w *World) Healthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.URL()+"/healthz", nil)
	if err != nil {
		return err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("healthz: %s: %s", resp.Status, b)
	}
	return nil
}

// Logs is all the server has printed, over all its starts.
func (w *World) Logs() string {
	b, err := os.ReadFile(w.out.Name())
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// Ran is what a command of the CLI did.
type Ran struct {
	Stdout, Stderr string
	Code           int
}

// CLI runs bin/cove with args against this server.
func (w *World) CLI(t testing.TB, args ...string) Ran {
	t.Helper()
	return w.CLIWith(t, nil, args...)
}

// Command is bin/cove of this world, not started, for tests that end it early. It
// is killed with the test.
func (w *World) Command(t testing.TB, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), filepath.Join(w.bin, "cove"), args...)
	cmd.Env, cmd.Dir = w.cliEnv(), filepath.Dir(w.Dir)
	return cmd
}

// CLIWith is CLI with a stdin.
func (w *World) CLIWith(t testing.TB, stdin io.Reader, args ...string) Ran {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(w.bin, "cove"), args...)
	cmd.Env = w.cliEnv()
	cmd.Dir = filepath.Dir(w.Dir)
	cmd.Stdin = stdin
	var out, errb bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errb
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("cove %s: %v", strings.Join(args, " "), err)
	}
	if ctx.Err() != nil {
		t.Fatalf("cove %s: did not end\n%s", strings.Join(args, " "), errb.String())
	}
	return Ran{out.String(), errb.String(), cmd.ProcessState.ExitCode()}
}

// environ is the test's own without what would lead elsewhere.
func (w *World) environ() []string {
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "COVE_") {
			env = append(env, e)
		}
	}
	return env
}

func (w *World) cliEnv() []string {
	return append(w.environ(), "COVE_URL="+w.URL(), "COVE_KEY="+w.key, "COVE_DATA="+w.Dir)
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}
