package agent

import (
	"errors"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// thread is an OS thread of its own that runs jobs one after another. What
// setup does to the thread (namespaces, capabilities, umask) stays with it,
// and when it ends the thread is destroyed, not given back to Go.
type thread struct {
	jobs chan func()
	done chan struct{} // one value per job run
	gone chan struct{}
}

// newThread starts a thread and returns once setup has succeeded on it.
func newThread(setup func() error) (*thread, error) {
	t := &thread{jobs: make(chan func()), done: make(chan struct{}), gone: make(chan struct{})}
	ready := make(chan error)
	go t.run(setup, ready)
	return t, <-ready
}

func (t *thread) run(setup func() error, ready chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// Go never ends the main thread: entered, it would hold the user's
		// mount namespace for ever. Sit on it until another thread has taken
		// over, so that Go cannot pick it again.
		taken := make(chan struct{})
		go t.run(func() error { close(taken); return setup() }, ready)
		<-taken
		runtime.UnlockOSThread()
		return
	}
	defer close(t.gone) // and end locked, which ends the thread
	err := setup()
	ready <- err
	if err != nil {
		return
	}
	for f := range t.jobs {
		f()
		t.done <- struct{}{}
	}
}

// do runs f on the thread. One caller at a time.
func (t *thread) do(f func()) {
	t.jobs <- f
	<-t.done
}

// end destroys the thread.
func (t *thread) end() {
	close(t.jobs)
	<-t.gone
}

var errLeft = errors.New("the container has been left")

// threadPool runs jobs on up to cap(slots) threads that share a setup. Threads
// are made when needed: entering a container costs two system calls and a
// thread, keeping one costs the thread, so the idle ones end after a while.
type threadPool struct {
	setup func() error  // on a thread with a root of its own
	keep  time.Duration // how long idle threads live; 0 = until close
	slots chan struct{}

	mu struct {
		sync.Mutex
		idle   []*thread
		ahead  *thread // made before it was needed, without its setup; nil = none
		timer  *time.Timer
		closed bool
	}
}

// newThreadPool makes a pool; ahead, with a root of its own, will be its first thread.
func newThreadPool(max int, keep time.Duration, ahead *thread, setup func() error) *threadPool {
	p := &threadPool{setup: setup, keep: keep, slots: make(chan struct{}, max)}
	p.mu.ahead = ahead
	if ahead != nil {
		p.mu.timer = time.AfterFunc(keep, p.trim)
	}
	return p
}

// poolOf is a pool of the one thread that there is.
func poolOf(t *thread) *threadPool {
	p := &threadPool{slots: make(chan struct{}, 1)}
	p.mu.idle = []*thread{t}
	return p
}

// do runs f on one of the threads and returns when it has.
func (p *threadPool) do(f func()) error {
	p.slots <- struct{}{}
	defer func() { <-p.slots }()
	t, err := p.take()
	if err != nil {
		return err
	}
	t.do(f)
	p.give(t)
	return nil
}

func (p *threadPool) take() (*thread, error) {
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return nil, errLeft
	}
	if n := len(p.mu.idle); n > 0 {
		t := p.mu.idle[n-1]
		p.mu.idle = p.mu.idle[:n-1]
		p.mu.Unlock()
		return t, nil
	}
	t := p.mu.ahead
	p.mu.ahead = nil
	p.mu.Unlock()
	if t == nil {
		return newThread(func() error {
			if err := ownRoot(); err != nil {
				return err
			}
			return p.setup()
		})
	}
	var err error
	t.do(func() { err = p.setup() })
	if err != nil {
		t.end()
		return nil, err
	}
	return t, nil
}

// takeAhead is the thread that nobody needed; nil if somebody did.
func (p *threadPool) takeAhead() *thread {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.mu.ahead
	p.mu.ahead = nil
	return t
}

func (p *threadPool) give(t *thread) {
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		t.end()
		return
	}
	p.mu.idle = append(p.mu.idle, t)
	if p.keep > 0 && p.mu.timer == nil {
		p.mu.timer = time.AfterFunc(p.keep, p.trim)
	}
	p.mu.Unlock()
}

// detach takes the thread out of a pool of one, which is closed by that; nil if
// its job does not end in time.
func (p *threadPool) detach(grace time.Duration) *thread {
	select {
	case p.slots <- struct{}{}:
	case <-time.After(grace):
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.closed = true
	if len(p.mu.idle) == 0 {
		return nil
	}
	t := p.mu.idle[0]
	p.mu.idle = nil
	<-p.slots
	return t
}

// trim ends the idle threads. A busy pool loses a thread every now and then,
// which is cheaper than remembering when each was used.
func (p *threadPool) trim() {
	p.mu.Lock()
	idle := p.mu.idle
	if p.mu.ahead != nil {
		idle = append(idle, p.mu.ahead)
	}
	p.mu.idle, p.mu.ahead, p.mu.timer = nil, nil, nil
	p.mu.Unlock()
	for _, t := range idle {
		t.end()
	}
}

// close waits for the jobs under way and ends the threads.
func (p *threadPool) close() {
	p.mu.Lock()
	if p.mu.timer != nil {
		p.mu.timer.Stop()
	}
	p.mu.closed = true
	p.mu.Unlock()
	p.trim()
	for range cap(p.slots) { // every job has gone once all slots are ours
		p.slots <- struct{}{}
	}
	for range cap(p.slots) {
		<-p.slots
	}
}
