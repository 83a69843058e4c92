package e2e

import (
	"bufio"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/e2e/world"
)

// TestInterruptedCreates sends SIGINT to the CLI at every moment of a create, and
// SIGKILL, after which only the server can clean up.
func TestInterruptedCreates(t *testing.T) {
	// What a shell starts in the background ignores SIGINT, and so do its children,
	// unless it is caught here.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGINT)
	defer signal.Stop(caught)
	w := world.New(t, world.Options{})
	w.CLI(t, "run", "--", "true") // warm
	interrupt := func(sig syscall.Signal, after time.Duration, args ...string) {
		cmd := w.Command(t, args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(after) // the moment that is tried, not a wait for anything
		_ = cmd.Process.Signal(sig)
		_ = cmd.Wait()
	}
	live := func() []string { return strings.Fields(w.CLI(t, "ls", "-q").Stdout) }
	for i := range 34 {
		interrupt(syscall.SIGINT, time.Duration(i)*3*time.Millisecond, "run", "--", "sleep", "60")
	}
	// A create that was cancelled is taken back a moment later.
	world.Eventually(t, 10*time.Second, "cove run leaves nothing", func() bool { return len(live()) == 0 })
	for i := range 20 {
		interrupt(syscall.SIGINT, time.Duration(i)*3*time.Millisecond, "create", "--label", "made=by-create")
	}
	// A create that was done before the signal came has printed its id and is a sandbox.
	w.CLI(t, "rm", "--label", "made=by-create")
	for i := range 10 {
		interrupt(syscall.SIGKILL, time.Duration(i)*3*time.Millisecond, "run", "--lease-ttl", "1s", "--", "true")
	}
	world.Eventually(t, 30*time.Second, "sandboxes of killed clients are gone", func() bool { return len(live()) == 0 })
}

// TestKilledRun: the sandbox of a "cove run" that was killed goes with its lease,
// though its command would go on for ever.
func TestKilledRun(t *testing.T) {
	t.Parallel() // it waits for a lease
	w := world.New(t, world.Options{})
	cmd := w.Command(t, "run", "--lease-ttl", "4s", "--", "sh", "-c", "echo runs; exec sleep infinity")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "runs\n" {
		t.Fatalf("%q, %v", line, err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	world.Eventually(t, time.Minute, "the sandbox is gone with its caller", func() bool { return w.CLI(t, "ls", "-q").Stdout == "" })
}
