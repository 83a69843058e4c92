package agent_test

import (
	"errors"
	"testing"
	"time"

	"github.com/cove-sandbox/cove/guest"
	"github.com/cove-sandbox/cove/sandbox"
)

// A host that dies amid a reset has left an episode and enters no other. The next
// one is told so, well before it takes the guest for sick: it then finishes the
// reset.
func TestAHostThatDiedAmidAResetIsNotWaitedFor(t *testing.T) {
	b := newBox(t)
	dead := guest.NewClient(dialer(b.addr), secret)
	if err := dead.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	dead.Close()
	began := time.Now()
	_, _, err := b.Processes(t.Context())
	if took := time.Since(began); !errors.Is(err, sandbox.ErrPrecondition) || took > 8*time.Second {
		t.Errorf("%v after %s", err, took)
	}
	if err := b.Enter(t.Context(), guest.Container{WorkingDir: "/work"}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Processes(t.Context()); err != nil {
		t.Error(err)
	}
}
