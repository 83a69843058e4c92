package agent

// Visitors is how many connections from outside there are.
func (a *Agent) Visitors() int {
	a.visitors.mu.Lock()
	defer a.visitors.mu.Unlock()
	return len(a.visitors.all)
}
