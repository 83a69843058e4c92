package image

import (
	"sync"

	"github.com/cove-sandbox/cove/sandbox"
)

// reportEvery bounds how often bytes are reported: about a hundred times for a
// typical image.
const reportEvery = 2 * mib

// reporter turns bytes counted by several goroutines into ordered reports; the
// receiver is never called twice at once.
type reporter struct {
	send func(sandbox.Progress) // called under mu

	mu struct {
		sync.Mutex
		now      sandbox.Progress
		reported int64
	}
}

func newReporter(send func(sandbox.Progress)) *reporter {
	if send == nil {
		send = func(sandbox.Progress) {}
	}
	return &reporter{send: send}
}

// step begins a new step.
func (r *reporter) step(name string, done, total int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.now = sandbox.Progress{Step: name, Done: done, Total: total}
	r.mu.reported = done
	r.send(r.mu.now)
}

// add counts bytes of the current step; negative when work is thrown away.
func (r *reporter) add(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.now.Done += n
	if d := r.mu.now.Done - r.mu.reported; d >= reportEvery || d < 0 || r.mu.now.Done == r.mu.now.Total {
		r.mu.reported = r.mu.now.Done
		r.send(r.mu.now)
	}
}
