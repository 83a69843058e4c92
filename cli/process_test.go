package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/term"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

type send = func(*covev1.ProcessEvent) error

func sendAll(send send, evs ...*covev1.ProcessEvent) error {
	for _, ev := range evs {
		if err := send(ev); err != nil {
			return err
		}
	}
	return nil
}

// only returns the one process that was started.
func (f *fakeAPI) only(t *testing.T) *fakeProcess {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.started) != 1 {
		t.Fatalf("%d processes were started", len(f.started))
	}
	for _, p := range f.started {
		return p
	}
	return nil
}

func TestRunEndsWithTheCommandsCodeAndRemovesTheSandbox(t *testing.T) {
	for _, c := range []struct {
		end    *covev1.End
		code   int
		stderr []string
	}{
		{&covev1.End{Cause: "exited"}, 0, nil},
		{&covev1.End{Cause: "exited", ExitCode: 3}, 3, nil},
		{&covev1.End{Cause: "signalled", Signal: "SIGSEGV", ExitCode: 139}, 139, nil},
		{&covev1.End{Cause: "deadline"}, 124, []string{"timeout passed"}},
		{&covev1.End{Cause: "oom"}, 137, []string{"over the sandbox's memory limit"}},
		{&covev1.End{Cause: "node_lost"}, 125, []string{"did not finish: node_lost"}},
		{&covev1.End{Cause: "a_new_one", Detail: "x"}, 125, []string{"a_new_one: x"}},
	} {
		f := newFakeAPI(t)
		f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
			return sendAll(send, startedEvent(p.spec.GetExecId()), outEvent(0, "out"), errEvent(3, "err"), endEvent(c.end))
		}
		got := f.cove(t, settings{}, "run", "--", "x")
		if got.code != c.code || got.stdout != "out" || !strings.HasPrefix(got.stderr, "err") {
			t.Errorf("%v: %+v", c.end, got)
		}
		for _, s := range c.stderr {
			if !strings.Contains(got.stderr, s) {
				t.Errorf("%v: stderr %q lacks %q", c.end, got.stderr, s)
			}
		}
		if len(f.killed) != 1 {
			t.Errorf("%v: killed %v", c.end, f.killed)
		}
	}
}

// What the policy refused shows inside as a reset or a name that is not there;
// it is told behind the output, and never on stdout.
func TestWhatTheNetworkDeniedIsTold(t *testing.T) {
	ending := func(end *covev1.ProcessEnd) *fakeAPI {
		f := newFakeAPI(t)
		f.addSandbox("abc", nil)
		f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
			return sendAll(send, startedEvent(p.spec.GetExecId()), outEvent(0, "out"), &covev1.ProcessEvent{Event: &covev1.ProcessEvent_End{End: end}})
		}
		return f
	}
	f := ending(&covev1.ProcessEnd{End: &covev1.End{Cause: "exited", ExitCode: 7}, EgressDenied: 2, ReplayMissed: 1})
	denied, missed := "cove: 2 connections or lookups were denied by the network policy (", "cove: 1 request has no answer on the recording ("
	for args, want := range map[string]string{
		"exec abc -- x":     denied + "'cove net flows --denied abc' lists them)\n" + missed + "'cove net get abc' lists them)\n",
		"run -- x":          denied + "with --keep, 'cove net flows --denied sb1' lists them)\n" + missed + "with --keep, 'cove net get sb1' lists them)\n",
		"exec -d abc -- x":  "",
		"exec --json abc x": "",
	} {
		got := f.cove(t, settings{}, strings.Fields(args)...)
		if got.stderr != want {
			t.Errorf("%s: stderr\n%swant\n%s", args, got.stderr, want)
		}
		if strings.Contains(got.stdout, "denied by") {
			t.Errorf("%s: stdout %s", args, got.stdout)
		}
	}
	ending(&covev1.ProcessEnd{End: &covev1.End{Cause: "exited", ExitCode: 7}}).cove(t, settings{}, "exec", "abc", "--", "x").want(t, 7, "out")
}

func TestExecAsJSON(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		return sendAll(send, startedEvent(p.spec.GetExecId()), outEvent(0, "a \"b\"\n"), errEvent(6, "\xff\x00"), outEvent(8, "c"),
			&covev1.ProcessEvent{Event: &covev1.ProcessEvent_End{End: &covev1.ProcessEnd{End: &covev1.End{Cause: "exited", ExitCode: 3},
				OutputBytes: 9, Duration: durationpb.New(1500 * time.Millisecond), EgressDenied: 2}}})
	}
	f.cove(t, settings{}, "exec", "--json", "--exec-id", "e1", "abc", "--", "x").want(t, 3, `{
  "sandbox_id": "abc",
  "exec_id": "e1",
  "stdout": "a \"b\"\nc",
  "stderr_base64": "/wA=",
  "end": {
    "cause": "exited",
    "exit_code": 3
  },
  "duration_s": 1.5,
  "output_bytes": 9,
  "egress_denied": 2
}
`)
	f.cove(t, settings{}, "exec", "--json", "-t", "abc", "--", "x").want(t, 125, "", "leave out -t or --json")

	// More than is held: the command ends all the same.
	chunk := strings.Repeat("x", 1<<20)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if err := send(startedEvent(p.spec.GetExecId())); err != nil {
			return err
		}
		for n := int64(0); n <= maxCaptured; n += 1 << 20 {
			if err := send(outEvent(n, chunk)); err != nil {
				return err
			}
		}
		return send(&covev1.ProcessEvent{Event: &covev1.ProcessEvent_End{End: &covev1.ProcessEnd{End: &covev1.End{Cause: "exited"}, OutputBytes: maxCaptured + 1<<20}}})
	}
	var got executedJSON
	out := f.cove(t, settings{}, "exec", "--json", "abc", "--", "x")
	if err := json.Unmarshal([]byte(out.stdout), &got); err != nil || out.code != 0 || !got.Truncated || len(*got.Stdout) != maxCaptured || *got.Stderr != "" {
		t.Errorf("exit %d, truncated %v, %v\n%s", out.code, got.Truncated, err, out.stderr)
	}
}

func TestRunCommandLine(t *testing.T) {
	f := newFakeAPI(t)
	f.images = []*covev1.Image{{Names: []string{"app"}, Entrypoint: []string{"/app"}, Cmd: []string{"serve"}}, {Names: []string{"base"}}}
	for _, c := range []struct {
		args, image, out string
	}{
		{"run -- ls -la", "", "ls -la\n"},
		{"run base -- ls -la", "base", "ls -la\n"},
		{"run base ls -la", "base", "ls -la\n"}, // docker's habit
		{"run --cpu 2 base -- sh -c x -- y", "base", "sh -c x -- y\n"},
		{"run --image app -- ls -la", "app", "ls -la\n"},
		{"run --image app ls -la", "app", "ls -la\n"},
		{"run app", "app", "/app serve\n"},
		{"run --image app", "app", "/app serve\n"},
	} {
		f.created = nil
		f.cove(t, settings{}, strings.Fields(c.args)...).want(t, 0, c.out)
		if len(f.created) != 1 || f.created[0].GetSpec().GetImage() != c.image {
			t.Errorf("%s: created %v", c.args, f.created)
		}
	}
	f.created = nil
	f.cove(t, settings{}, "run", "base").want(t, 125, "", "names no command of its own")
	f.cove(t, settings{}, "run", "base", "--keep", "--", "ls").want(t, 125, "", "flag --keep after the first argument", "before it")
	f.cove(t, settings{}, "run", "--memory", "x", "--", "ls").want(t, 125, "", "is not a size")
	if len(f.created) != 0 {
		t.Errorf("a wrong command line created %v", f.created)
	}
}

func TestRunKeepsOnlyOnRequestAndNeverLeaks(t *testing.T) {
	f := newFakeAPI(t)
	f.cove(t, settings{}, "run", "--keep", "--", "ls").want(t, 0, "ls\n", "sandbox sb1 is kept")
	if len(f.killed) != 0 {
		t.Errorf("killed %v", f.killed)
	}
	if spec := f.created[0].GetSpec(); spec.GetIdleTimeout() != nil || spec.GetLease() != "" {
		t.Errorf("a kept sandbox has an end nobody asked for: %v", spec)
	}
	f.cove(t, settings{}, "run", "--timeout", "5s", "--", "ls")
	spec := f.created[1].GetSpec()
	if spec.GetTimeout().AsDuration() != 65*time.Second || spec.GetLease() != "l2" {
		t.Errorf("the sandbox of a vanished client would stay: %v", spec)
	}
	if len(f.leasesEnded) != 1 || f.leasesEnded[0] != "l2" {
		t.Errorf("leases ended: %v", f.leasesEnded)
	}
	f.cove(t, settings{}, "run", "--lease", "l1", "--", "ls")
	if spec := f.created[2].GetSpec(); spec.GetLease() != "l1" || len(f.leasesEnded) != 1 {
		t.Errorf("a lease of the caller's own: %v, ended %v", spec, f.leasesEnded)
	}
	f.killed = f.killed[:1]
	f.fail["Processes/Start"] = sandbox.InvalidField("process.cwd", "no such directory")
	f.cove(t, settings{}, "run", "--cwd", "/nope", "--", "ls").want(t, 125, "", "process.cwd: no such directory")
	f.fail["Processes/Start"] = &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.CommandNotFound, Msg: "command not found: nope"}
	f.cove(t, settings{}, "run", "--keep", "--", "nope").want(t, 127, "", "command not found: nope")
	f.fail["Processes/Start"] = &sandbox.Error{Class: sandbox.Denied, Reason: sandbox.NotExecutable, Msg: "./x: permission denied"}
	f.cove(t, settings{}, "run", "--keep", "--", "./x").want(t, 126, "", "./x: permission denied")
	if len(f.killed) != 2 {
		t.Errorf("after a failed start: killed %v", f.killed)
	}
	delete(f.fail, "Processes/Start")
	f.fail["Sandboxes/Kill"] = &sandbox.Error{Class: sandbox.Internal, Msg: "broken"}
	f.cove(t, settings{}, "run", "--", "ls").want(t, 125, "ls\n", "could not be removed")
}

// As long as the command runs, its lease is renewed.
func TestRunRenewsItsLease(t *testing.T) {
	f := newFakeAPI(t)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if err := send(startedEvent(p.spec.GetExecId())); err != nil {
			return err
		}
		for beats := 0; beats < 2; time.Sleep(time.Millisecond) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			f.mu.Lock()
			beats = f.beats
			f.mu.Unlock()
		}
		return send(endEvent(&covev1.End{Cause: "exited"}))
	}
	f.cove(t, settings{}, "run", "--lease-ttl", "1s", "--", "ls").want(t, 0, "")
}

func TestCtrlCReachesTheCommand(t *testing.T) {
	f := newFakeAPI(t)
	sigs := make(chan os.Signal, 4)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if err := send(startedEvent(p.spec.GetExecId())); err != nil {
			return err
		}
		sigs <- os.Interrupt
		if s := <-p.signals; s != "SIGINT" {
			return fmt.Errorf("got %s", s)
		}
		return send(endEvent(&covev1.End{Cause: "killed_by_user", Signal: "SIGINT", ExitCode: 130})) // a signal through the API, as any
	}
	f.cove(t, settings{sigs: sigs}, "run", "--", "sleep", "99").want(t, 130, "")
	if len(f.killed) != 1 {
		t.Errorf("killed %v", f.killed)
	}
}

func TestTheSecondCtrlCKillsAndTheThirdLeaves(t *testing.T) {
	f := newFakeAPI(t)
	sigs := make(chan os.Signal, 4)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if err := send(startedEvent(p.spec.GetExecId())); err != nil {
			return err
		}
		sigs <- syscall.SIGTERM
		first := <-p.signals
		sigs <- os.Interrupt
		second := <-p.signals
		if first != "SIGTERM" || second != "SIGKILL" {
			return &sandbox.Error{Class: sandbox.Invalid, Msg: "signals " + first + " " + second}
		}
		sigs <- os.Interrupt
		<-ctx.Done() // deaf to everything
		return ctx.Err()
	}
	f.cove(t, settings{sigs: sigs}, "run", "--", "trap", "all").want(t, 130, "")
	if len(f.killed) != 1 {
		t.Errorf("the sandbox was left behind: %v", f.killed)
	}
}

// A stream that breaks in the middle, more than once, with replays that begin
// earlier than asked for: the output is whole and nothing is started again.
func TestABrokenStreamGoesOnWhereItBroke(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	text := strings.Repeat("0123456789", 100)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if err := send(startedEvent(p.spec.GetExecId())); err != nil {
			return err
		}
		from := max(0, off-7) // an overlap
		to := min(from+150, int64(len(text)))
		if err := send(outEvent(from, text[from:to])); err != nil {
			return err
		}
		if to == int64(len(text)) {
			return send(exitEvent(5))
		}
		return &sandbox.Error{Class: sandbox.Unavailable, Msg: "restarting"}
	}
	got := f.cove(t, settings{}, "exec", "abc", "--", "x")
	if got.code != 5 || got.stdout != text {
		t.Errorf("exit %d, %d bytes\n%s", got.code, len(got.stdout), got.stderr)
	}
	p := f.only(t)
	if p.starts != 1 || len(p.attach) != 6 {
		t.Errorf("%d starts, attached at %v", p.starts, p.attach)
	}
}

func TestABrokenStreamIsGivenUpInTheEnd(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	var calls atomic.Int32
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if calls.Add(1) == 1 {
			_ = sendAll(send, startedEvent(p.spec.GetExecId()), outEvent(0, "abc"))
		}
		return &sandbox.Error{Class: sandbox.Unavailable, Msg: "restarting"}
	}
	f.cove(t, settings{}, "exec", "--exec-id", "e1", "abc", "--", "x").want(t, 125, "abc", "restarting", "cove logs abc e1 --follow --offset 3")
	if n := calls.Load(); n != maxBroken+1 {
		t.Errorf("%d calls", n)
	}
	calls.Store(1)
	f.script = func(context.Context, *fakeProcess, bool, int64, send) error {
		calls.Add(1)
		return &sandbox.Error{Class: sandbox.Ended, Msg: "the sandbox ended: ttl"}
	}
	f.cove(t, settings{}, "exec", "abc", "--", "x").want(t, 125, "", "the sandbox ended: ttl")
	if n := calls.Load(); n != 2 {
		t.Errorf("an end was asked for %d times", n-1)
	}
}

// "cove run … | head -1": the command hears of it and the sandbox goes.
func TestAClosedPipeBehindUsEndsTheCommand(t *testing.T) {
	f := newFakeAPI(t)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if err := send(startedEvent(p.spec.GetExecId())); err != nil {
			return err
		}
		for i := int64(0); ; i += 2 {
			if err := send(outEvent(i, "y\n")); err != nil {
				return err
			}
		}
	}
	got := f.cove(t, settings{deps: func(d *Deps) { d.Stdout = closedPipe{} }}, "run", "--", "yes")
	if got.code != 141 || got.stderr != "" || len(f.killed) != 1 {
		t.Errorf("%+v, killed %v", got, f.killed)
	}
	if s := <-f.only(t).signals; s != "SIGPIPE" {
		t.Errorf("the command got %s", s)
	}
}

type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "|1", Err: syscall.EPIPE}
}

func TestLostOutputIsSaid(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		return sendAll(send, startedEvent("e"), &covev1.ProcessEvent{Event: &covev1.ProcessEvent_Lost{Lost: &covev1.ProcessLost{From: 0, To: 100}}},
			&covev1.ProcessEvent{Event: &covev1.ProcessEvent_KeepAlive{}}, outEvent(100, "tail"), exitEvent(0))
	}
	f.cove(t, settings{}, "exec", "abc", "--", "x").want(t, 0, "tail", "100 bytes of output are no longer held")
}

func TestExecPassesStdinOn(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	// upper-cases its stdin until it closes
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if err := send(startedEvent(p.spec.GetExecId())); err != nil {
			return err
		}
		if !p.spec.GetStdin() {
			return send(exitEvent(9))
		}
		var got []byte
		for open := true; open; {
			select {
			case b := <-p.input:
				got = append(got, b...)
			case <-p.closed:
				open = false
				for len(p.input) > 0 {
					got = append(got, <-p.input...)
				}
			}
		}
		for i := 0; i < len(got); i += 1 << 20 {
			if err := send(outEvent(int64(i), strings.ToUpper(string(got[i:min(i+1<<20, len(got))])))); err != nil {
				return err
			}
		}
		return send(exitEvent(0))
	}
	in := strings.Repeat("some input\n", 300_000) // 3.3 MB
	got := f.cove(t, settings{stdin: strings.NewReader(in)}, "exec", "-i", "abc", "--", "tr", "a-z", "A-Z")
	if got.code != 0 || got.stdout != strings.ToUpper(in) || got.stderr != "" {
		t.Errorf("exit %d, %d bytes of %d, %s", got.code, len(got.stdout), len(in), got.stderr)
	}
	f.cove(t, settings{stdin: strings.NewReader(in)}, "exec", "abc", "--", "cat").want(t, 9, "")
}

// A process that ends before it has read its stdin ends the command; the
// reader of a stdin that stays open must not hold it up.
func TestExecDoesNotWaitForStdin(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	r, w := io.Pipe()
	defer w.Close()
	f.cove(t, settings{stdin: r}, "exec", "-i", "abc", "--", "true").want(t, 0, "true\n")
}

func TestExecCommandLine(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.cove(t, settings{}, "exec", "-u", "user", "--cwd", "/w", "-e", "A=b", "--timeout", "3s", "--exec-id", "e1", "abc", "--", "make", "-j2").want(t, 0, "make -j2\n")
	s := f.only(t).spec
	if s.GetUser() != "user" || s.GetCwd() != "/w" || s.GetEnv()["A"] != "b" || s.GetTimeout().AsDuration() != 3*time.Second || s.GetExecId() != "e1" || s.GetPty() != nil {
		t.Errorf("%v", s)
	}
	f.cove(t, settings{}, "exec", "abc", "ls", "-la").want(t, 0, "ls -la\n")
	f.cove(t, settings{}, "exec", "-c", "ls | wc", "abc").want(t, 0, "ls | wc\n")
	f.cove(t, settings{}, "exec", "abc", "-it", "--", "bash").want(t, 125, "", "flag -it after the first argument")
	f.cove(t, settings{}, "exec", "abc").want(t, 125, "", "give a command")
	f.cove(t, settings{}, "exec").want(t, 125, "", "which sandbox?")
	f.cove(t, settings{}, "exec", "-it", "abc", "--", "bash").want(t, 125, "", "stdin is not a terminal", "leave out -t")
	f.cove(t, settings{}, "exec", "zzz", "--", "ls").want(t, 125, "", "no sandbox zzz")
}

func TestExecDetached(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if err := send(startedEvent(p.spec.GetExecId())); err != nil {
			return err
		}
		<-ctx.Done() // would run for ever
		return ctx.Err()
	}
	f.cove(t, settings{}, "exec", "-d", "--exec-id", "web", "abc", "--", "server").want(t, 0, "web\n")
	f.cove(t, settings{}, "exec", "-d", "--json", "--exec-id", "web", "abc", "--", "server").want(t, 0, `{
  "sandbox_id": "abc",
  "exec_id": "web",
  "pid": 42,
  "replayed": false
}
`)
	f.cove(t, settings{}, "exec", "-d", "-i", "abc", "--", "server").want(t, 125, "", "leave out -i")
}

func TestLogs(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	at := func(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(time.Now().Add(d)) }
	f.processes = []*covev1.Process{
		{ExecId: "build-1", StartedAt: at(-time.Hour), End: &covev1.ProcessEnd{End: &covev1.End{Cause: "exited"}}},
		{ExecId: "serve", StartedAt: at(-time.Minute)},
		{ExecId: "build-2", StartedAt: at(-time.Second * 90), End: &covev1.ProcessEnd{End: &covev1.End{Cause: "exited", ExitCode: 2}}},
	}
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		text := "output of " + p.spec.GetExecId()
		if err := sendAll(send, startedEvent(p.spec.GetExecId()), outEvent(off, text[off:])); err != nil {
			return err
		}
		if p.spec.GetExecId() == "serve" { // still running, and quiet
			<-ctx.Done()
			return ctx.Err()
		}
		return send(exitEvent(0))
	}
	f.cove(t, settings{}, "logs", "abc", "build-1").want(t, 0, "output of build-1")
	f.cove(t, settings{}, "logs", "abc", "build-1", "--offset", "10").want(t, 0, "build-1")
	f.cove(t, settings{}, "logs", "abc").want(t, 0, "output of serve", "3 processes; this is the latest, serve")
	f.cove(t, settings{}, "logs", "abc", "s").want(t, 0, "output of serve")
	f.cove(t, settings{}, "logs", "-f", "abc", "build-2").want(t, 0, "output of build-2")
	f.cove(t, settings{}, "logs", "abc", "b").want(t, 2, "", "more than one exec id")
	f.cove(t, settings{}, "logs", "abc", "x").want(t, 2, "", "no process x in abc")
	f.cove(t, settings{}, "ps", "--all", "abc", "--json")
	if got := f.cove(t, settings{}, "ps", "--all", "abc"); !strings.Contains(got.stdout, "exited with 2") {
		t.Errorf("%s", got.stdout)
	}
}

// On a real terminal: raw while the process runs, its size passed on, changes
// of size too, and all as before afterwards.
func TestExecOnATerminal(t *testing.T) {
	f := newFakeAPI(t)
	f.addSandbox("abc", nil)
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer slave.Close()
	if err := pty.Setsize(master, &pty.Winsize{Rows: 33, Cols: 101}); err != nil {
		t.Fatal(err)
	}
	before, err := term.GetState(int(slave.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	winch := make(chan os.Signal, 1)
	var raw atomic.Bool
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		if err := send(startedEvent(p.spec.GetExecId())); err != nil {
			return err
		}
		now, err := term.GetState(int(slave.Fd()))
		raw.Store(err == nil && fmt.Sprint(*now) != fmt.Sprint(*before))
		if _, err := master.Write([]byte("\x03")); err != nil { // Ctrl-C is a key now
			return err
		}
		if got := <-p.input; string(got) != "\x03" {
			return &sandbox.Error{Class: sandbox.Invalid, Msg: fmt.Sprintf("key %q", got)}
		}
		if err := pty.Setsize(master, &pty.Winsize{Rows: 40, Cols: 120}); err != nil {
			return err
		}
		winch <- syscall.SIGWINCH
		if s := <-p.sizes; s.GetRows() != 40 || s.GetCols() != 120 {
			return &sandbox.Error{Class: sandbox.Invalid, Msg: fmt.Sprint(s)}
		}
		return send(exitEvent(7))
	}
	var out bytes.Buffer
	got := f.cove(t, settings{stdin: slave, env: map[string]string{"TERM": "xterm-256color"}, deps: func(d *Deps) {
		d.Stdout = &out
		d.Notify = func(s ...os.Signal) (<-chan os.Signal, func()) {
			if s[0] == syscall.SIGWINCH {
				return winch, func() {}
			}
			return make(chan os.Signal), func() {}
		}
	}}, "exec", "-it", "abc", "--", "bash")
	if got.code != 7 {
		t.Errorf("exit %d: %s", got.code, got.stderr)
	}
	spec := f.only(t).spec
	if spec.GetPty().GetRows() != 33 || spec.GetPty().GetCols() != 101 || spec.GetEnv()["TERM"] != "xterm-256color" {
		t.Errorf("%v", spec)
	}
	if !raw.Load() {
		t.Error("the terminal was not raw while the process ran")
	}
	if after, err := term.GetState(int(slave.Fd())); err != nil || fmt.Sprint(*after) != fmt.Sprint(*before) {
		t.Error("the terminal was not restored")
	}
}

func TestTour(t *testing.T) {
	f := newFakeAPI(t)
	f.script = func(ctx context.Context, p *fakeProcess, attach bool, off int64, send send) error {
		out := "ok"
		if strings.Contains(p.spec.GetCommand(), "gone") {
			out = "gone"
		}
		return sendAll(send, startedEvent("e"), outEvent(0, out+"\n"), exitEvent(0))
	}
	got := f.cove(t, settings{}, "tour")
	if got.code != 0 || len(f.killed) != 1 || !strings.Contains(got.stdout, "episode 2") {
		t.Errorf("%+v killed %v", got, f.killed)
	}
}
