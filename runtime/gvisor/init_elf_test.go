package gvisor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The init is plain machine code: run it on the host and look at it.
func TestInitSleepsAndIgnoresSignals(t *testing.T) {
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
		// Every signal but SIGKILL (9) and SIGSTOP (19).
		if strings.Contains(string(s), "State:\tS") && strings.Contains(string(s), "SigIgn:\tfffffffffffbfeff") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("init is not asleep ignoring signals:\n%s", s)
		}
		time.Sleep(time.Millisecond)
	}
}
