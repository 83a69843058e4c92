package agent

import "time"

// SetInitGrace is for episodes that begin after it.
func (a *Agent) SetInitGrace(d time.Duration) { a.initGrace = d }

// Visitors is how many connections from outside there are.
func (a *Agent) Visitors() int {
	a.visitors.mu.Lock()
	defer a.visitors.mu.Unlock()
	return len(a.visitors.mu.all)
}
