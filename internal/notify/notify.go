// Package notify tells any number of waiters, each in a select of its own, that
// something changed: a channel that is closed, and another in its place.
package notify

import "sync"

// Change is waited for. Its zero value is ready. Whoever owns it calls both
// methods under the lock that guards what changes: a waiter that looks at the
// state and takes Next in one go misses nothing.
type Change struct{ next chan struct{} }

// Next is closed by the next Tell.
func (c *Change) Next() <-chan struct{} {
	if c.next == nil {
		c.next = make(chan struct{})
	}
	return c.next
}

// Tell wakes those who wait. Without any it costs nothing: the channel is made
// by the first who asks for it.
func (c *Change) Tell() {
	if c.next != nil {
		close(c.next)
		c.next = nil
	}
}

// Latest is the newest of a row of values, such as the progress of long work,
// for those who look now and then and need not see each. Its zero value holds
// the zero value of T. Safe for concurrent use.
type Latest[T any] struct {
	mu struct {
		sync.Mutex
		value   T
		changed Change
	}
}

// Set replaces the value.
func (l *Latest[T]) Set(v T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.value = v
	l.mu.changed.Tell()
}

// Get is the value and what is closed when there is a newer one.
func (l *Latest[T]) Get() (T, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.value, l.mu.changed.Next()
}
