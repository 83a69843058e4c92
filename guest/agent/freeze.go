package agent

import (
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// execClock is the time that counts for the processes of an episode: it stands
// still from freeze to thaw. The kernel's own monotonic clock does not, while a
// kernel is paused: at the resume every timer that should have fired meanwhile
// fires at once, before anyone could tell the agent how long it was away. So
// deadlines are taken down before the pause and put up again after it.
type execClock struct {
	mu struct {
		sync.Mutex
		frozen time.Time // zero while it runs
		still  time.Duration
		live   map[*deadline]struct{}
	}
}

// deadline is when an exec is killed.
type deadline struct {
	f     func()
	timer *time.Timer
	at    time.Time
	left  time.Duration // while the clock stands
}

// deadline runs f after d of this clock.
func (c *execClock) deadline(d time.Duration, f func()) *deadline {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &deadline{f: f, left: d}
	if c.mu.live == nil {
		c.mu.live = map[*deadline]struct{}{}
	}
	c.mu.live[t] = struct{}{}
	if c.mu.frozen.IsZero() {
		t.start()
	}
	return t
}

func (t *deadline) start() {
	t.at = time.Now().Add(t.left)
	t.timer = time.AfterFunc(t.left, t.f)
}

// drop takes a deadline away; nil is none.
func (c *execClock) drop(t *deadline) {
	if t == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.live, t)
	if t.timer != nil {
		t.timer.Stop()
	}
}

func (c *execClock) freeze() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.mu.frozen.IsZero() {
		return
	}
	c.mu.frozen = time.Now()
	for t := range c.mu.live {
		if t.timer.Stop() {
			t.left, t.timer = time.Until(t.at), nil
		} else {
			delete(c.mu.live, t) // it has fired
		}
	}
}

func (c *execClock) thaw() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.frozen.IsZero() {
		return
	}
	c.mu.still += time.Since(c.mu.frozen)
	c.mu.frozen = time.Time{}
	for t := range c.mu.live {
		t.start()
	}
}

// stood is how long the clock has stood still so far.
func (c *execClock) stood() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.frozen.IsZero() {
		return c.mu.still
	}
	return c.mu.still + time.Since(c.mu.frozen)
}

// freeze readies the agent for a pause or a checkpoint.
func (a *Agent) freeze() {
	a.entering.Lock()
	a.space.rest()
	a.entering.Unlock()
	a.callbacks.clock.freeze()
	a.visitors.clock.freeze()
	if ep, err := a.current(); err == nil {
		ep.clock.freeze()
	}
}

// thaw ends a freeze; without one it does nothing.
func (a *Agent) thaw() {
	a.callbacks.clock.thaw()
	a.visitors.clock.thaw()
	if ep, err := a.current(); err == nil {
		ep.clock.thaw()
	}
}

// minSecret bytes a secret has at least.
const minSecret = 16

// namedWithin is how long a copy is held for its own name in /etc/hosts and
// /etc/hostname: writing it takes a tenth of a millisecond.
const namedWithin = 100 * time.Millisecond

// rekey makes the agent of a restored kernel one of its own: another secret,
// the environment and the process limit of its sandbox, and a running clock.
// Connections made with the old secret end, but for this one: who has it gave
// the new one.
func (s *session) rekey(r wire.Req) error {
	if len(r.Secret) < minSecret {
		return sandbox.InvalidField("secret", "must have at least %d bytes, has %d", minSecret, len(r.Secret))
	}
	a, named := s.agent, make(chan struct{})
	if ep, err := a.current(); err != nil {
		close(named)
	} else {
		if err := ep.space.processes().limit(r.Pids); err != nil {
			return sandbox.Errorf(sandbox.Unavailable, "guest.rekey", "pids limit: %w", err)
		}
		if !r.Stay {
			ep.setEnv(r.Env)
		}
		if err := setHostname(ep.space, r.Hostname); err != nil {
			a.log.Warn("hostname", "err", err)
		}
		// Code runs inside, which could hold up who writes its files: it is waited for,
		// since a copy begins with its name, but not for long.
		go func() {
			defer close(named)
			if err := nameSelf(ep.space, ep.space.files, r.Hostname); err != nil {
				a.log.Warn("hostname", "err", err)
			}
		}()
	}
	if !r.Flag && !r.Stay {
		a.callbacks.forsake()
		a.visitors.hangUp() // whoever is outside talks to the sandbox that this was
	}
	if !r.Stay { // it is somebody's from now on
		a.thaw()
	}
	a.resecret(s, r.Secret)
	timer := time.NewTimer(namedWithin)
	defer timer.Stop()
	select {
	case <-named:
	case <-timer.C:
	}
	if ep, err := a.current(); err == nil && r.Stay && r.Spec != nil {
		if err := ep.rehearse(r.Spec); err != nil {
			return err
		}
	}
	return s.reply(wire.Res{}, nil)
}

// rehearsalMost bounds what takes 20 ms. Nothing of the container's runs meanwhile, but
// what the container's files are its code has decided.
const rehearsalMost = 5 * time.Second

// rehearse runs a process that no list ever shows, so that the next is not the first.
func (ep *episode) rehearse(spec *sandbox.ProcessSpec) error {
	ex := &exec{mark: markKey + "=" + ep.token + ":", ep: ep, log: &outlog{budget: ep.budget}}
	c, err := ep.spawn(spec, ex.mark, ex.log)
	if err != nil {
		return err
	}
	late := time.AfterFunc(rehearsalMost, func() { _ = c.group.kill() })
	status, _ := ex.reap(c)
	inTime := late.Stop()
	for _, p := range c.pumps {
		p.finish()
	}
	for _, p := range c.pumps {
		<-p.drained
		p.close()
	}
	c.pidfd.Close()
	ex.log.close()
	ep.budget.forget(ex.log)
	c.group.remove()
	if !inTime || status != 0 {
		return sandbox.Errorf(sandbox.Unavailable, "guest.rehearse", "the process ended with status %d", status)
	}
	return nil
}

// resecret replaces the secret, and ends every connection but that of a session.
func (a *Agent) resecret(but *session, secret []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.secret = secret
	for c := range a.mu.open {
		if c != but.conn.Conn {
			c.Close()
		}
	}
}

// setEnv replaces the environment that processes start from; nil leaves it.
func (ep *episode) setEnv(env []string) {
	if env == nil {
		return
	}
	ep.mu.Lock()
	defer ep.mu.Unlock()
	ep.mu.env = env
}

func (ep *episode) baseEnv() []string {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	return ep.mu.env
}
