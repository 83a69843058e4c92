package gvisor

import (
	"testing"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// An init that is killed before anybody watches it is noticed when somebody does. The timer is held up
// until it is dead, however slow the machine is.
func TestInitKilledUnwatched(t *testing.T) {
	k, c := volumeKernel(t)
	for {
		k.mu.Lock()
		held := k.mu.initTimer.Stop()
		k.mu.Unlock()
		if held {
			break
		}
		if err := k.Reset(t.Context(), c); err != nil { // it was late: another container, another timer
			t.Fatal(err)
		}
	}
	var end sandbox.ProcessEnd
	err := k.Guest().Start(t.Context(), sandbox.ProcessSpec{ExecID: "killer", Args: []string{"sh", "-c", "kill -9 1; sleep 1000"}, User: "root"}, 0, func(e sandbox.ProcessEvent) error {
		if e.End != nil {
			end = *e.End
		}
		return nil
	})
	if err != nil || end.Cause != sandbox.InitKilled {
		t.Errorf("the killer, which dies with init: %+v, %v", end, err)
	}
	if isClosed(k.done) {
		t.Fatalf("somebody watched: %+v", k.exit)
	}
	k.mu.initTimer.Reset(0)
	select {
	case <-k.Done():
	case <-time.After(time.Minute):
		t.Fatal("nobody notices")
	}
	if x := k.Exit(); x.Cause != sandbox.InitKilled {
		t.Errorf("it ended by %+v", x)
	}
}
