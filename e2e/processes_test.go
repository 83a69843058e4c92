package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

var processTricks = []scenario{
	{"kill everything", killEverything},
	{"kill init", killInit},
	{"close every descriptor", closeDescriptors},
	{"stopped child holds the pipes", stoppedChild},
	{"the deadline finds a daemon", deadlineFindsDaemon},
	{"a signal finds a daemon", signalFindsDaemon},
	{"the deadline of a process that ignores signals", ignoresSignals},
	{"1 MiB of arguments", longArguments},
	{"50 MiB of stdin", longStdin},
	{"stdin nobody reads", unreadStdin},
	{"zombies", zombies},
}

func killEverything(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	bystander := make(chan world.Result, 1)
	go func() {
		r, _ := b.TryExec(t.Context(), sandbox.ProcessSpec{ExecID: "bystander", Command: "sleep 1000", User: "root"})
		bystander <- r
	}()
	world.Eventually(t, time.Minute, "the bystander runs", func() bool {
		ps, _ := b.Tasks(t)
		return len(ps) == 1
	})
	r := b.Root(t, "kill -9 -1; echo survived")
	r.WantCause(t, sandbox.Exited, sandbox.Signalled)
	if r := <-bystander; r.End.Cause != sandbox.Signalled || r.End.Signal != "SIGKILL" {
		t.Errorf("the bystander ended by %v, want a SIGKILL from inside", r.End.End)
	}
	b.WantRunning(t)
	if got := b.Must(t, "echo alive"); got != "alive" {
		t.Errorf("got %q", got)
	}
}

func killInit(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{Command: "kill -9 1; sleep 1000", User: "root", Timeout: time.Minute})
	b.WantEnd(t, time.Minute, sandbox.InitKilled)
	switch {
	case err == nil:
		r.WantCause(t, sandbox.InitKilled, sandbox.Signalled)
	case !errors.Is(err, sandbox.ErrEnded):
		t.Errorf("the exec that killed init got %v, want %s", err, sandbox.Ended)
	}
}

func closeDescriptors(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	b.Python(t, `
import os, time
os.closerange(0, 1 << 16)
time.sleep(0.5)
os._exit(7)
`, time.Minute).WantExit(t, 7)
	b.Must(t, "echo alive")
}

// An exec ends when its main process does, whoever holds its pipes.
func stoppedChild(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	r := b.Exec(t, sandbox.ProcessSpec{User: "root", Timeout: time.Minute,
		Command: "sleep 1000 & kill -STOP $!; (trap '' TERM HUP INT; while :; do sleep 1; done) & echo done; exit 3"})
	r.WantExit(t, 3)
	if string(r.Out) != "done\n" {
		t.Errorf("printed %q", r.Out)
	}
}

const daemon = `
import os, sys, time
if os.fork(): time.sleep(1000)
os.setsid()
if os.fork(): os._exit(0)
os.setsid()
for fd in range(3): os.close(fd)
open('/daemon.pid', 'w').write(str(os.getpid()))
os.execve('/usr/bin/sleep', ['sleep', '1000'], {})
`

func daemonPID(t *testing.T, b *world.Box) string {
	var pid string
	world.Eventually(t, time.Minute, "the daemon runs", func() bool {
		data, _, err := b.Read(t.Context(), "/daemon.pid")
		pid = string(data)
		return err == nil && pid != ""
	})
	return pid
}

// A grandchild that has left the session, the process group, its parent, its
// descriptors and its environment still belongs to the exec.
func deadlineFindsDaemon(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	r := b.Python(t, daemon, 4*time.Second)
	r.WantCause(t, sandbox.Deadline)
	pid := daemonPID(t, b)
	if got := b.Must(t, "kill -0 "+pid+" 2>/dev/null && echo alive || echo dead"); got != "dead" {
		t.Errorf("the daemon is %s after the deadline", got)
	}
}

func signalFindsDaemon(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	done := make(chan world.Result, 1)
	go func() {
		r, _ := b.TryExec(t.Context(), sandbox.ProcessSpec{ExecID: "d", Args: []string{"python3", "-c", daemon}, User: "root"})
		done <- r
	}()
	pid := daemonPID(t, b)
	_, err := w.Client().Processes.Signal(t.Context(), connect.NewRequest(&covev1.SignalRequest{SandboxId: b.ID, ExecId: "d"}))
	if err != nil {
		t.Fatal(err)
	}
	r := <-done
	r.WantCause(t, sandbox.KilledByUser)
	if got := b.Must(t, "kill -0 "+pid+" 2>/dev/null && echo alive || echo dead"); got != "dead" {
		t.Errorf("the daemon is %s after the signal", got)
	}
}

func ignoresSignals(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	r := b.Python(t, `
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
print('partial', flush=True)
while True: pass
`, 3*time.Second)
	r.WantCause(t, sandbox.Deadline)
	if string(r.Out) != "partial\n" {
		t.Errorf("kept %q of the output", r.Out)
	}
}

func longArguments(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	args := []string{"python3", "-c", "import sys; print(sum(map(len, sys.argv[1:])))"}
	for range 16 {
		args = append(args, strings.Repeat("x", 64<<10))
	}
	r := b.Exec(t, sandbox.ProcessSpec{Args: args})
	r.WantExit(t, 0)
	if string(r.Out) != "1048576\n" {
		t.Errorf("the program saw %q bytes", r.Out)
	}
	// One argument of a MiB is above what Linux takes (128 KiB): refused by
	// name, or run where the kernel inside takes it. Never a hang.
	r, err := b.TryExec(t.Context(), sandbox.ProcessSpec{Args: []string{"python3", "-c", "import sys; print(len(sys.argv[1]))", strings.Repeat("y", 1<<20)}})
	if err == nil && string(r.Out) != "1048576\n" {
		t.Errorf("one long argument: %q %q %v", r.Out, r.Err, r.End.End)
	}
	if c := sandbox.ClassOf(err); err != nil && c != sandbox.Invalid && c != sandbox.TooLarge {
		t.Errorf("one long argument: %v", err)
	}
	// Above the API's own limit it is the field that is wrong.
	_, err = b.TryExec(t.Context(), sandbox.ProcessSpec{Args: []string{"true", strings.Repeat("z", 3<<20)}})
	wantField(t, err, "process.args")
	b.Must(t, "echo alive")
}

func longStdin(t *testing.T, w *world.World) {
	const size = 50 << 20
	b := w.Create(t, world.Small())
	data := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(data)
	sum := sha256.Sum256(data)
	want := hex.EncodeToString(sum[:])
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	done := make(chan world.Result, 1)
	started := make(chan struct{})
	go func() {
		var r world.Result
		err := b.Start(ctx, sandbox.ProcessSpec{ExecID: "sum", Args: []string{"sha256sum"}, Stdin: true}, 0, func(ev sandbox.ProcessEvent) error {
			if ev.Started != nil {
				close(started)
			}
			if ev.Output != nil {
				r.Out = append(r.Out, ev.Output.Data...)
			}
			if ev.End != nil {
				r.End = *ev.End
			}
			return nil
		})
		if err != nil {
			t.Errorf("the exec: %v", err)
		}
		done <- r
	}()
	<-started
	for off := 0; off < size; off += 4 << 20 {
		chunk := data[off:min(off+4<<20, size)]
		if _, err := w.Client().Processes.SendInput(ctx, connect.NewRequest(&covev1.SendInputRequest{SandboxId: b.ID, ExecId: "sum", Data: chunk})); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Client().Processes.CloseInput(ctx, connect.NewRequest(&covev1.CloseInputRequest{SandboxId: b.ID, ExecId: "sum"})); err != nil {
		t.Fatal(err)
	}
	r := <-done
	r.WantExit(t, 0)
	if got := strings.Fields(string(r.Out)); len(got) == 0 || got[0] != want {
		t.Errorf("the program read %q, want %s", r.Out, want)
	}
}

// Input for a process that never reads holds back its sender, not the others,
// and ends with the process.
func unreadStdin(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	done := make(chan world.Result, 1)
	started := make(chan struct{})
	go func() {
		var r world.Result
		_ = b.Start(ctx, sandbox.ProcessSpec{ExecID: "deaf", Command: "sleep 1000", Stdin: true, Timeout: 5 * time.Second}, 0, func(ev sandbox.ProcessEvent) error {
			if ev.Started != nil {
				close(started)
			}
			if ev.End != nil {
				r.End = *ev.End
			}
			return nil
		})
		done <- r
	}()
	<-started
	sent := make(chan error, 1)
	go func() {
		_, err := w.Client().Processes.SendInput(ctx, connect.NewRequest(&covev1.SendInputRequest{SandboxId: b.ID, ExecId: "deaf", Data: make([]byte, 8<<20)}))
		sent <- err
	}()
	b.Must(t, "echo alive")
	r := <-done
	r.WantCause(t, sandbox.Deadline)
	select {
	case err := <-sent:
		if err == nil {
			t.Error("8 MiB were taken by a process that reads nothing")
		}
	case <-ctx.Done():
		t.Error("the sender still waits after the process has ended")
	}
}

func zombies(t *testing.T, w *world.World) {
	b := w.Create(t, world.Small())
	b.Python(t, `
import os
for i in range(300):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
`, time.Minute).WantExit(t, 0)
	world.Eventually(t, time.Minute, "orphans are reaped", func() bool {
		_, tasks := b.Tasks(t)
		return len(tasks) < 10
	})
}
