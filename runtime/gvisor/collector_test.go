package gvisor_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/runtime"
)

// The collector of a sentry rests through its boot, and then gives back what that left: for as long as it
// rests a sentry has the most memory that it ever had, which it would have for minutes.
func TestBootGivesMemoryBack(t *testing.T) {
	d := open(t, t.TempDir())
	defer d.Close()
	k, err := d.Boot(t.Context(), "k", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Destroy(context.Background())
	const least = 512 // KiB; it is 1,400
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		var most, now int
		for line := range strings.Lines(string(readFile(fmt.Sprintf("/proc/%d/status", sentryPID(t, k))))) {
			_, _ = fmt.Sscanf(line, "VmHWM: %d", &most)
			_, _ = fmt.Sscanf(line, "VmRSS: %d", &now)
		}
		if now == 0 {
			t.Fatal("its memory is not known")
		}
		if most-now >= least {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("a sentry that does nothing has %d KiB of the %d that it had at most", now, most)
		}
	}
}
