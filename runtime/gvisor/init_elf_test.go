package gvisor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The init is plain machine code: run it on the host and look at it.
func TestInitSleepsThroughSignals(t *testing.T) {
	b := initELF()
	if b == nil {
		t.Fatal("no init for this architecture: the suite runs on amd64 only")
	}
	p := filepath.Join(t.TempDir(), "init")
	if err := os.WriteFile(p, b, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(p)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	stat := filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "status")
	for deadline := time.Now().Add(10 * time.Second); ; {
		s, err := os.ReadFile(stat)
		if err != nil {
			t.Fatal(err)
		}
		// SIGCHLD ignored, whatever else whoever runs the tests ignores, and every signal
		// blocked but SIGKILL (9) and SIGSTOP (19).
		_, ignored, _ := strings.Cut(string(s), "SigIgn:\t")
		mask, err := strconv.ParseUint(ignored[:min(16, len(ignored))], 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(s), "State:\tS") && mask>>(unix.SIGCHLD-1)&1 == 1 && strings.Contains(string(s), "SigBlk:\tfffffffffffbfeff") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("init is not asleep with all signals blocked:\n%s", s)
		}
		time.Sleep(time.Millisecond)
	}
}
