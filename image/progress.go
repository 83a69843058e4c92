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
	mu       sync.Mutex
	send     func(sandbox.Progress)
	now      sandbox.Progress
	reported int64
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
	r.now = sandbox.Progress{Step: name, Done: done, Total: total}
	r.reported = done
	r.send(r.now)
}

// add counts bytes of the current step; negative when work is thrown away.
func (r *reporter) add(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now.Done += n
	if d := r.now.Done - r.reported; d >= reportEvery || d < 0 || r.now.Done == r.now.Total {
		r.reported = r.now.Done
		r.send(r.now)
	}
}
