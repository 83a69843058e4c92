package agent

import (
	"testing"
	"time"
)

// What a reset killed may take a while to be gone where others have the CPU.
func TestResetWaitsForTheDying(t *testing.T) {
	gone := make(chan struct{})
	c := &containerSpace{}
	c.mu.dying = &inside{gone: gone}
	time.AfterFunc(leaveGrace+500*time.Millisecond, func() { close(gone) })
	if err := c.awaitDead(); err != nil {
		t.Error(err)
	}
}
