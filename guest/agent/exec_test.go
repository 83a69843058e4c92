package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

func TestACommandRunsAndReportsBothStreams(t *testing.T) {
	b := newBox(t)
	r := b.sh(t, "e1", `echo out; echo err >&2; echo $COLOUR $SIZE; pwd; exit 3`, func(s *sandbox.ProcessSpec) { s.Env = map[string]string{"SIZE": "big"} })
	if want := "out\ngreen big\n" + b.root + "/work\n"; r.stdout.String() != want || r.stderr.String() != "err\n" {
		t.Errorf("stdout %q, stderr %q", r.stdout.String(), r.stderr.String())
	}
	if r.end.Cause != sandbox.Exited || r.end.ExitCode != 3 || r.end.OutputBytes != r.next || r.end.At.IsZero() || r.end.Duration <= 0 {
		t.Errorf("end %+v", r.end)
	}
	if r.started.PID == 0 || r.started.ExecID != "e1" || r.started.Replayed {
		t.Errorf("started %+v", r.started)
	}
}

func TestArgsAreLookedUpInTheEffectivePath(t *testing.T) {
	b := newBox(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "hello"), []byte("#!/bin/sh\necho hello $1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	r, err := b.start(t, sandbox.ProcessSpec{ExecID: "e", Args: []string{"hello", "you"}, Env: map[string]string{"PATH": dir + ":/bin"}}, 0)
	if err != nil || r.stdout.String() != "hello you\n" {
		t.Fatalf("%v %q", err, r.stdout.String())
	}
}

func notExecutable(c sandbox.Class) error {
	return &sandbox.Error{Class: c, Reason: sandbox.NotExecutable}
}

func TestWrongSpecsAreRefusedByFieldAndRemembered(t *testing.T) {
	b := newBox(t)
	os.WriteFile(filepath.Join(b.root, "work/noexec"), []byte("x"), 0o644)
	os.WriteFile(filepath.Join(b.root, "work/script"), []byte("#!/no/such/interpreter\n"), 0o755)
	os.WriteFile(filepath.Join(b.root, "work/data"), []byte("\x00\x01\x02garbage"), 0o755)
	for _, c := range []struct {
		name  string
		spec  sandbox.ProcessSpec
		want  error
		field string
	}{
		{"nothing to run", sandbox.ProcessSpec{}, sandbox.ErrInvalid, "args"},
		{"both", sandbox.ProcessSpec{Args: []string{"a"}, Command: "b"}, sandbox.ErrInvalid, "args"},
		{"no such command", sandbox.ProcessSpec{Args: []string{"no-such-command-here"}}, sandbox.ErrCommandNotFound, "args"},
		{"no such path", sandbox.ProcessSpec{Args: []string{"/no/such"}}, sandbox.ErrCommandNotFound, "args"},
		{"no such cwd", sandbox.ProcessSpec{Args: []string{"true"}, Cwd: "/no/such"}, sandbox.ErrInvalid, "cwd"},
		{"relative cwd", sandbox.ProcessSpec{Args: []string{"true"}, Cwd: "work"}, sandbox.ErrInvalid, "cwd"},
		{"cwd is a file", sandbox.ProcessSpec{Args: []string{"true"}, Cwd: "/work/noexec"}, sandbox.ErrInvalid, "cwd"},
		{"not executable", sandbox.ProcessSpec{Args: []string{"./noexec"}}, notExecutable(sandbox.Denied), "args"},
		{"not executable in PATH", sandbox.ProcessSpec{Args: []string{"noexec"}, Env: map[string]string{"PATH": filepath.Join(b.root, "work")}}, notExecutable(sandbox.Denied), "args"},
		{"a file for a directory", sandbox.ProcessSpec{Args: []string{"./noexec/x"}}, sandbox.ErrCommandNotFound, "args"},
		{"missing interpreter", sandbox.ProcessSpec{Args: []string{"./script"}}, notExecutable(sandbox.Invalid), "args"},
		{"no program", sandbox.ProcessSpec{Args: []string{"./data"}}, notExecutable(sandbox.Invalid), "args"},
		{"bad env", sandbox.ProcessSpec{Args: []string{"true"}, Env: map[string]string{"A=B": "c"}}, sandbox.ErrInvalid, "env"},
		{"NUL", sandbox.ProcessSpec{Args: []string{"echo", "a\x00b"}}, sandbox.ErrInvalid, "args"},
		{"negative timeout", sandbox.ProcessSpec{Args: []string{"true"}, Timeout: -1}, sandbox.ErrInvalid, "timeout"},
		{"argument too long", sandbox.ProcessSpec{Args: []string{"true", strings.Repeat("x", 1<<20)}}, sandbox.ErrTooLarge, "args"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.spec.ExecID = strings.ReplaceAll(c.name, " ", "-")
			for range 2 { // the same id gives the same answer
				_, err := b.start(t, c.spec, 0)
				var e *sandbox.Error
				if !errors.Is(err, c.want) || !errors.As(err, &e) || e.Field != c.field || e.Op == "" {
					t.Fatalf("%v (field %q)", err, e.Field)
				}
			}
		})
	}
	for _, id := range []string{"", strings.Repeat("x", 200), "a b", "a\nb"} {
		if _, err := b.start(t, sandbox.ProcessSpec{ExecID: id, Args: []string{"true"}}, 0); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("exec_id %q: %v", id, err)
		}
	}
}

func TestTheExecEndsWithItsMainProcessWhileChildrenHoldThePipe(t *testing.T) {
	b := newBox(t)
	for name, line := range map[string]string{
		"background": `sleep 300 & echo $!; echo main`,
		"stopped":    `sh -c 'kill -STOP $$' & echo $!; echo main`,
		"daemon":     `setsid sh -c 'echo $$; exec sleep 300' & sleep 0.2; echo main`,
		"writer":     `(while :; do echo noise; sleep 0.001; done) & echo $! >pid; echo main`,
	} {
		t.Run(name, func(t *testing.T) {
			r := b.sh(t, name, line)
			if r.end.Cause != sandbox.Exited || r.end.ExitCode != 0 || !strings.Contains(r.stdout.String(), "main\n") {
				t.Errorf("%+v %q", r.end, r.stdout.String())
			}
		})
	}
}

func TestAChildLeftBehindIsNotKilledByItsNextOutput(t *testing.T) {
	b := newBox(t)
	b.sh(t, "e1", `(while [ ! -e go ]; do sleep 0.01; done; echo one; echo two; touch survived) & echo main`)
	os.WriteFile(filepath.Join(b.root, "work/go"), nil, 0o644)
	eventually(t, "the child wrote on", func() bool { _, err := os.Stat(filepath.Join(b.root, "work/survived")); return err == nil })
}

func TestADeadlineKillsTheWholeTreeAndKeepsOutput(t *testing.T) {
	b := newBox(t)
	line := `echo partial
sleep 300 & echo $! >>pids
setsid sh -c 'echo $$ >>pids; sleep 300' &
(setsid sh -c 'echo $$ >>pids; trap "" TERM HUP; sleep 300 & echo $! >>pids; wait' &)
while [ $(wc -l <pids) -lt 4 ]; do sleep 0.01; done; echo ready; trap "" TERM; sleep 300`
	r := b.sh(t, "e1", line, func(s *sandbox.ProcessSpec) { s.Timeout = 1500 * time.Millisecond })
	if r.end.Cause != sandbox.Deadline || !strings.HasPrefix(r.stdout.String(), "partial\n") {
		t.Errorf("%+v %q", r.end, r.stdout.String())
	}
	pids, _ := os.ReadFile(filepath.Join(b.root, "work/pids"))
	if n := len(strings.Fields(string(pids))); n != 4 {
		t.Fatalf("%d pids: the box is too slow for this deadline: %q", n, r.stdout.String())
	}
	for _, pid := range strings.Fields(string(pids)) {
		if alive(pid) {
			t.Errorf("%s survived the deadline", pid)
		}
	}
}

func TestASignalThroughTheAPIReachesTheTreeAndNamesTheCause(t *testing.T) {
	b := newBox(t)
	_, done := b.background(t, sandbox.ProcessSpec{ExecID: "tree", Command: `setsid sleep 300 & echo $! >pid; wait`})
	pid := ""
	eventually(t, "child", func() bool {
		p, _ := os.ReadFile(filepath.Join(b.root, "work/pid"))
		pid = strings.TrimSpace(string(p))
		return pid != "" && alive(pid)
	})
	if err := b.Signal(t.Context(), "tree", "", false); err != nil {
		t.Fatal(err)
	}
	if r := <-done; r.end.Cause != sandbox.KilledByUser || r.end.Signal != "SIGKILL" || r.end.ExitCode != 137 {
		t.Errorf("%+v", r.end)
	}
	if alive(pid) {
		t.Error("the child survived")
	}

	_, done = b.background(t, sandbox.ProcessSpec{ExecID: "term", Command: `trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.01; done`})
	eventually(t, "up", func() bool {
		up := false
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		b.Attach(ctx, "term", 0, func(ev sandbox.ProcessEvent) error {
			up = ev.Output != nil
			if up {
				return errors.New("seen")
			}
			return nil
		})
		return up
	})
	if err := b.Signal(t.Context(), "term", "TERM", true); err != nil {
		t.Fatal(err)
	}
	if r := <-done; r.end.Cause != sandbox.KilledByUser || r.end.ExitCode != 7 || r.stdout.String() != "up\nbye\n" {
		t.Errorf("%+v %q", r.end, r.stdout.String())
	}

	if r := b.sh(t, "self", `kill -SEGV $$`); r.end.Cause != sandbox.Signalled || r.end.Signal != "SIGSEGV" || r.end.ExitCode != 139 {
		t.Errorf("%+v", r.end)
	}
	if err := b.Signal(t.Context(), "self", "TERM", false); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("signal after the end: %v", err)
	}
	if err := b.Signal(t.Context(), "none", "TERM", false); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("signal to nobody: %v", err)
	}
}

func TestTheSameExecIDRunsOnceAndReplaysByOffset(t *testing.T) {
	b := newBox(t)
	line := `echo x >>ran; printf 0123456789`
	first := b.sh(t, "once", line)
	again, err := b.start(t, sandbox.ProcessSpec{ExecID: "once", Command: line}, 4)
	if err != nil || !again.started.Replayed || again.stdout.String() != "456789" || again.end != first.end || again.started.PID != first.started.PID {
		t.Errorf("%v %+v %q", err, again.started, again.stdout.String())
	}
	beyond, err := b.start(t, sandbox.ProcessSpec{ExecID: "once", Command: line}, 100)
	if err != nil || beyond.stdout.Len() != 0 || beyond.end.OutputBytes != 10 {
		t.Errorf("%v %q", err, beyond.stdout.String())
	}
	if ran, _ := os.ReadFile(filepath.Join(b.root, "work/ran")); string(ran) != "x\n" {
		t.Errorf("ran %q", ran)
	}
	end, err := b.Wait(t.Context(), "once")
	if err != nil || end != first.end {
		t.Errorf("wait: %v %+v", err, end)
	}
}

func TestConcurrentStartsOfOneIDRunOnce(t *testing.T) {
	b := newBox(t)
	var wg sync.WaitGroup
	var fresh sync.Map
	for i := range 16 {
		wg.Go(func() {
			r, err := b.start(t, sandbox.ProcessSpec{ExecID: "once", Command: `echo x >>ran; echo done`}, 0)
			if err != nil || r.stdout.String() != "done\n" {
				t.Errorf("%v %q", err, r.stdout.String())
			}
			if !r.started.Replayed {
				fresh.Store(i, true)
			}
		})
	}
	wg.Wait()
	n := 0
	fresh.Range(func(_, _ any) bool { n++; return true })
	if ran, _ := os.ReadFile(filepath.Join(b.root, "work/ran")); string(ran) != "x\n" || n != 1 {
		t.Errorf("ran %q, %d fresh", ran, n)
	}
}

// counter hashes a stream in order.
type counter struct {
	hash.Hash
	n int64
}

func TestAHundredMegabytesLoseNoByteForAnAttachedReader(t *testing.T) {
	b := newBox(t)
	const size = 100 << 20
	c := counter{Hash: sha256.New()}
	err := b.Start(t.Context(), sandbox.ProcessSpec{ExecID: "big", Command: fmt.Sprintf(`yes 0123456789abcde | head -c %d`, size)}, 0, func(ev sandbox.ProcessEvent) error {
		switch {
		case ev.Lost != nil:
			return fmt.Errorf("lost %+v", *ev.Lost)
		case ev.Output != nil:
			c.Write(ev.Output.Data)
			c.n += int64(len(ev.Output.Data))
			if c.n < 8<<20 {
				time.Sleep(time.Millisecond) // a reader slower than the writer
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := sha256.New()
	line := bytes.Repeat([]byte("0123456789abcde\n"), 1<<16)
	for range size / len(line) {
		want.Write(line)
	}
	if c.n != size || !bytes.Equal(c.Sum(nil), want.Sum(nil)) {
		t.Errorf("%d bytes, or wrong ones", c.n)
	}
}

func TestAReaderThatWasAwayIsToldWhatItLost(t *testing.T) {
	b := newBox(t)
	stop := errors.New("enough")
	err := b.Start(t.Context(), sandbox.ProcessSpec{ExecID: "away", Command: `head -c 1000 /dev/zero; while [ ! -e go ]; do sleep 0.01; done; head -c 20000000 /dev/zero; echo end`}, 0, func(ev sandbox.ProcessEvent) error {
		if ev.Output != nil {
			return stop
		}
		return nil
	})
	if err != stop {
		t.Fatalf("the sink's own error comes back: %v", err)
	}
	os.WriteFile(filepath.Join(b.root, "work/go"), nil, 0o644)
	end, err := b.Wait(t.Context(), "away")
	if err != nil || end.OutputBytes != 20001004 {
		t.Fatalf("%v %+v", err, end)
	}
	r := &result{next: 500}
	if err := b.Attach(t.Context(), "away", 500, func(ev sandbox.ProcessEvent) error { r.take(t, ev); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(r.lost) != 1 || r.lost[0].From != 500 || !strings.HasSuffix(r.stdout.String(), "end\n") || r.stdout.Len() < 2<<20 || r.next != end.OutputBytes {
		t.Errorf("lost %v, %d bytes held, next %d", r.lost, r.stdout.Len(), r.next)
	}
}

func TestFiftyMegabytesOfInput(t *testing.T) {
	b := newBox(t)
	data := bytes.Repeat([]byte("abcdefghij"), 5<<20)
	want := fmt.Sprintf("%x  -\n", sha256.Sum256(data))

	r := b.sh(t, "input", `sha256sum`, func(s *sandbox.ProcessSpec) { s.Input = data })
	if r.stdout.String() != want {
		t.Errorf("as input: %q", r.stdout.String())
	}

	_, done := b.background(t, sandbox.ProcessSpec{ExecID: "sent", Command: `while [ ! -e go ]; do sleep 0.01; done; sha256sum`, Stdin: true})
	sent := make(chan error, 1)
	go func() {
		err := b.SendInput(context.Background(), "sent", data)
		if err == nil {
			err = b.CloseInput(context.Background(), "sent")
		}
		sent <- err
	}()
	// The pipe is full and the sender waits, but nobody else does.
	if r := b.sh(t, "other", `echo quick`); r.stdout.String() != "quick\n" {
		t.Errorf("%q", r.stdout.String())
	}
	select {
	case err := <-sent:
		t.Fatalf("sent although nobody reads: %v", err)
	default:
	}
	os.WriteFile(filepath.Join(b.root, "work/go"), nil, 0o644)
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if r := <-done; r.stdout.String() != want {
		t.Errorf("as sent: %q", r.stdout.String())
	}
}

func TestStdin(t *testing.T) {
	b := newBox(t)
	if r := b.sh(t, "null", `cat; echo end`); r.stdout.String() != "end\n" {
		t.Errorf("without stdin: %q", r.stdout.String())
	}
	if err := b.SendInput(t.Context(), "null", []byte("x")); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("input after the end: %v", err)
	}
	_, done := b.background(t, sandbox.ProcessSpec{ExecID: "cat", Command: `cat`, Stdin: true, Input: []byte("first ")})
	for _, s := range []string{"second ", "third"} {
		if err := b.SendInput(t.Context(), "cat", []byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.CloseInput(t.Context(), "cat"); err != nil {
		t.Fatal(err)
	}
	if r := <-done; r.stdout.String() != "first second third" {
		t.Errorf("%q", r.stdout.String())
	}
	_, done = b.background(t, sandbox.ProcessSpec{ExecID: "deaf", Command: `exec <&-; echo closed; while [ ! -e go ]; do sleep 0.01; done`, Stdin: true})
	eventually(t, "refused", func() bool { return errors.Is(b.SendInput(t.Context(), "deaf", []byte("x")), sandbox.ErrPrecondition) })
	os.WriteFile(filepath.Join(b.root, "work/go"), nil, 0o644)
	<-done
}

func TestATerminalWithResize(t *testing.T) {
	b := newBox(t)
	_, done := b.background(t, sandbox.ProcessSpec{ExecID: "tty", PTY: &sandbox.TermSize{Rows: 30, Cols: 100},
		Command: `test -t 0 && test -t 1 && echo tty; stty size; echo $TERM; read line; echo got $line; stty size; cat`})
	if err := b.Resize(t.Context(), "tty", sandbox.TermSize{Rows: 50, Cols: 132}); err != nil {
		t.Fatal(err)
	}
	if err := b.SendInput(t.Context(), "tty", []byte("hello\n")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "cat reads", func() bool {
		var out bytes.Buffer
		b.Attach(t.Context(), "tty", 0, func(ev sandbox.ProcessEvent) error {
			if ev.Output != nil {
				out.Write(ev.Output.Data)
			}
			if bytes.Contains(out.Bytes(), []byte("50 132")) {
				return errors.New("seen")
			}
			return nil
		})
		return bytes.Contains(out.Bytes(), []byte("50 132"))
	})
	if err := b.CloseInput(t.Context(), "tty"); err != nil {
		t.Fatal(err)
	}
	r := <-done
	out := r.stdout.String()
	for _, want := range []string{"tty\r\n", "xterm-256color\r\n", "got hello\r\n", "50 132\r\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %q", want, out)
		}
	}
	if r.end.Cause != sandbox.Exited || r.end.ExitCode != 0 {
		t.Errorf("%+v", r.end)
	}
	if err := b.Resize(t.Context(), "tty", sandbox.TermSize{}); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("resize after the end: %v", err)
	}
}

func TestLeaveEndsEverythingWithCauseReset(t *testing.T) {
	b := newBox(t)
	_, one := b.background(t, sandbox.ProcessSpec{ExecID: "one", Command: `echo hi; touch said; sleep 300`})
	eventually(t, "it spoke", func() bool { _, err := os.Stat(filepath.Join(b.root, "work/said")); return err == nil })
	b.sh(t, "two", `setsid sleep 300 >/dev/null 2>&1 & echo $! >pid`)
	pid, _ := os.ReadFile(filepath.Join(b.root, "work/pid"))
	if err := b.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := <-one; r.end.Cause != sandbox.ResetCause || r.stdout.String() != "hi\n" {
		t.Errorf("%+v", r.end)
	}
	if alive(string(pid)) {
		t.Error("a daemon survived")
	}
	if _, err := b.start(t, sandbox.ProcessSpec{ExecID: "three", Command: "true"}, 0); !errors.Is(err, sandbox.ErrPrecondition) {
		t.Errorf("start without a container: %v", err)
	}
}

func TestProcessesListsAPIProcessesAndTheirTasks(t *testing.T) {
	b := newBox(t)
	b.sh(t, "done", `exit 4`)
	started, done := b.background(t, sandbox.ProcessSpec{ExecID: "live", Command: `setsid sleep 300 & echo ready; wait`, Cwd: "/", User: "root"})
	eventually(t, "sleep is listed", func() bool {
		procs, tasks, err := b.Processes(t.Context())
		if err != nil || len(procs) != 2 || procs[0].ExecID != "done" || procs[0].End == nil || procs[0].End.ExitCode != 4 {
			t.Fatalf("%v %+v", err, procs)
		}
		if p := procs[1]; p.End != nil || p.PID != started.PID || p.Cwd != "/" || p.User != "root" || p.Args[2] != `setsid sleep 300 & echo ready; wait` {
			t.Fatalf("%+v", p)
		}
		for _, k := range tasks {
			if k.PID == os.Getpid() {
				t.Fatal("the agent lists itself")
			}
			if k.Command == "sleep 300" && k.ExecID == "live" && k.State != "" && k.UID == os.Getuid() {
				return true
			}
		}
		return false
	})
	b.Signal(t.Context(), "live", "KILL", false)
	<-done
}

func TestManyEndedProcessesLeaveTombstones(t *testing.T) {
	b := newBox(t)
	for i := range 520 {
		if _, err := b.start(t, sandbox.ProcessSpec{ExecID: strconv.Itoa(i), Args: []string{"sh", "-c", fmt.Sprintf("echo %d; exit %d", i, i%7)}}, 0); err != nil {
			t.Fatal(err)
		}
	}
	r, err := b.start(t, sandbox.ProcessSpec{ExecID: "3", Args: []string{"echo", "again"}}, 0)
	if err != nil || !r.started.Replayed || r.end.ExitCode != 3 || r.end.OutputBytes != 2 || len(r.lost) != 1 || r.stdout.Len() != 0 {
		t.Errorf("%v %+v %+v lost %v", err, r.started, r.end, r.lost)
	}
	if r, err := b.start(t, sandbox.ProcessSpec{ExecID: "519", Args: []string{"false"}}, 0); err != nil || r.stdout.String() != "519\n" {
		t.Errorf("%v %q", err, r.stdout.String())
	}
}

func TestACommandLineLargerThanAFrame(t *testing.T) {
	b := newBox(t)
	args := []string{"sh", "-c", `echo $#; wc -c`, "sh"}
	for i := range 6000 {
		args = append(args, fmt.Sprintf("%0100d\x01", i))
	}
	input := bytes.Repeat([]byte("x"), 3<<20) // behind the header, in the same content
	r, err := b.start(t, sandbox.ProcessSpec{ExecID: "e", Args: args, Input: input}, 0)
	if err != nil || r.stdout.String() != "6000\n3145728\n" {
		t.Errorf("%v %q", err, r.stdout.String())
	}
	args = append(args, strings.Repeat("\x01", 2<<20)) // 12 MiB as JSON
	if _, err := b.start(t, sandbox.ProcessSpec{ExecID: "f", Args: args}, 0); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Errorf("%v", err)
	}
}
