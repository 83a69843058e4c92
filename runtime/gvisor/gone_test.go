package gvisor

import (
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// A sentry that was killed stays in /proc until somebody waits for it. What it
// leaves there must not pass for a kernel that lives and has lost its program:
// that a kernel died is told as its end, not as a state nothing restores.
func TestASentryNobodyWaitedForIsGone(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Wait() })
	k := &Kernel{id: "k1", done: make(chan struct{})}
	k.saved.PID = cmd.Process.Pid
	k.saved.StartTime = processStart(k.saved.PID)
	if k.gone() {
		t.Fatal("a living process is gone")
	}
	if err := killAndWait(k.saved.PID, time.Now().Add(10*time.Second)); err != nil {
		t.Fatal(err)
	}
	if processStart(k.saved.PID) != k.saved.StartTime {
		t.Fatal("somebody waited for it: this test shows nothing")
	}
	if !k.gone() {
		t.Error("a killed process is not gone")
	}
	err := k.asKeepError("gvisor.checkpoint", unix.ENOENT)
	if sandbox.ClassOf(err) != sandbox.Unavailable {
		t.Errorf("%v (%s), want unavailable: the node waits for the end then", err, sandbox.ClassOf(err))
	}
}
