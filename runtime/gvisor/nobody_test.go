package gvisor_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cove-sandbox/cove/internal/testbin"
	"github.com/cove-sandbox/cove/runtime"
	"github.com/cove-sandbox/cove/runtime/gvisor"
)

// A sentry that has booted is nobody in every thread: one that kept a user or a capability would
// be a way out for whoever subverts it. It becomes so by itself (cmd/runsc/edits/table_start.go).
func TestSentryIsNobody(t *testing.T) {
	d, err := gvisor.Open(t.Context(), gvisor.Config{Dir: t.TempDir(), RunscPath: testbin.Runsc(t), GuestPath: testbin.Guest(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	k, err := d.Boot(t.Context(), "nobody", runtime.Class{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := k.Destroy(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	var of struct{ PID, UID int }
	if err := json.Unmarshal(k.Handle().Data, &of); err != nil {
		t.Fatal(err)
	}
	proc := fmt.Sprintf("/proc/%d", of.PID)
	threads, err := filepath.Glob(proc + "/task/*/status")
	if err != nil || len(threads) < 3 || of.UID == 0 {
		t.Fatalf("threads %v of user %d, %v", threads, of.UID, err)
	}
	none, id := "0000000000000000", fmt.Sprint(of.UID)
	for _, path := range threads {
		b, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			continue // it has ended
		} else if err != nil {
			t.Fatal(err)
		}
		has := map[string]string{}
		for line := range strings.Lines(string(b)) {
			key, value, _ := strings.Cut(line, ":")
			has[key] = strings.Join(strings.Fields(value), " ")
		}
		for key, want := range map[string]string{
			"Uid": strings.Join([]string{id, id, id, id}, " "), "Gid": strings.Join([]string{id, id, id, id}, " "),
			"CapInh": none, "CapPrm": none, "CapEff": none, "CapAmb": none, "NoNewPrivs": "1", "Seccomp": "2",
		} {
			if has[key] != want {
				t.Errorf("%s: %s is %q, not %q", path, key, has[key], want)
			}
		}
	}
	// What unmounted /proc for it has done so, and is gone.
	if left, err := os.ReadDir(proc + "/root/proc"); err != nil || len(left) > 0 {
		t.Errorf("the sentry has a /proc: %d entries, %v", len(left), err)
	}
	mounts, err := os.ReadFile(proc + "/mountinfo")
	if err != nil || strings.Contains(string(mounts), " - proc ") {
		t.Errorf("the sentry's mounts (%v):\n%s", err, mounts)
	}
}
