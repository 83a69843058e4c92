package e2e

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
)

// TestNoCallIsLost reads a file some thousand times. One in about ten thousand
// reads used to hang (cmd/runsc/edits/table_calls.go, where TestThePortForward-
// LosesNoWakeUp shows why every time); "make soak-calls" makes a million.
func TestNoCallIsLost(t *testing.T) {
	w := world.New(t, world.Options{})
	b := w.Create(t, world.Small())
	for i := range 3000 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, err := w.Client().Files.Read(ctx, connect.NewRequest(&covev1.ReadFileRequest{SandboxId: b.ID, Path: "/etc/passwd"}))
		cancel()
		if err != nil {
			t.Fatalf("read %d: %v", i, err)
		}
	}
	info, err := w.Info(t.Context())
	if err != nil || info.LostCalls != 0 {
		t.Errorf("%d calls were lost and sent again (%v)", info.GetLostCalls(), err)
	}
}
