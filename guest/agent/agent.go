package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// maxStrangers is how many connections may be in the handshake at once.
	// Beyond it the oldest is dropped. A stranger costs a descriptor and a few
	// kilobytes for at most wire.HandshakeTimeout.
	maxStrangers = 256

	// strangerTime is what each has for its handshake before it may be dropped,
	// many times what an honest one takes; the next waits in the listener's
	// queue until then. Without it a queue taken in one go, as after a moment
	// without the CPU, would push out whoever is in it.
	strangerTime = 20 * time.Millisecond
)

// stranger is a connection in the handshake.
type stranger struct {
	net.Conn
	since time.Time
}

// Config is what an agent needs. Logger may be nil.
type Config struct {
	Secret []byte
	Space  Space
	Logger *slog.Logger

	// Frugal gives unused memory of the whole process back when no request has
	// come for a while: set where the process is the agent's own.
	Frugal bool
}

const (
	frugalAfter = 2 * time.Second
	// frugalAbove unused bytes it is worth a garbage collection.
	frugalAbove = 4 << 20
)

// Agent serves the guest protocol. Safe for concurrent use.
type Agent struct {
	space  Space
	log    *slog.Logger
	budget *budget
	conns  sync.WaitGroup
	quiet  *time.Timer // nil unless frugal

	initGrace time.Duration // see the constant

	callbacks callbacks
	answers   answers
	visitors  visitors

	// entering serialises enter and leave.
	entering sync.Mutex

	mu struct {
		sync.Mutex
		secret    []byte // replaced, never changed in place
		closed    bool
		listeners map[net.Listener]struct{}
		open      map[net.Conn]struct{}
		strangers []stranger // oldest first
		sessions  map[string]*wire.Conn
		episode   *episode      // nil when no container is served
		swapping  bool          // an episode was left and the next is about to come
		swapped   notify.Change // when it has, or does not
	}
}

// New makes an agent that serves no container yet.
func New(cfg Config) *Agent {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	a := &Agent{space: cfg.Space, log: cfg.Logger, budget: &budget{max: totalLogs}, initGrace: initGrace}
	a.mu.secret, a.mu.listeners, a.mu.open, a.mu.sessions = cfg.Secret, map[net.Listener]struct{}{}, map[net.Conn]struct{}{}, map[string]*wire.Conn{}
	a.callbacks.init(cfg.Logger)
	if cfg.Frugal {
		a.quiet = time.AfterFunc(frugalAfter, giveBack)
	}
	return a
}

// busy puts off giving memory back.
func (a *Agent) busy() {
	if a.quiet != nil {
		a.quiet.Reset(frugalAfter)
	}
}

// giveBack returns what the heap holds and does not use. Go does so by itself,
// but over minutes, and the pages count for the sandbox until then: 50 MiB of
// input stayed 50 MiB for as long as anyone watched.
func giveBack() {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if m.HeapSys-m.HeapReleased > m.HeapInuse+frugalAbove || m.HeapInuse > frugalAbove*2 {
		debug.FreeOSMemory()
	}
}

// Serve accepts connections until ctx ends or Close. It closes l.
func (a *Agent) Serve(ctx context.Context, l net.Listener) error {
	a.mu.Lock()
	if a.mu.closed {
		a.mu.Unlock()
		l.Close()
		return net.ErrClosed
	}
	a.mu.listeners[l] = struct{}{}
	a.mu.Unlock()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	defer func() {
		l.Close()
		a.mu.Lock()
		delete(a.mu.listeners, l)
		a.mu.Unlock()
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			// Out of descriptors, or a peer that left: the next may work.
			a.log.Warn("accept", "err", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if a.admit(c) {
			go a.serve(c)
		}
	}
}

// ServeConn serves one connection to its end and closes it.
func (a *Agent) ServeConn(c net.Conn) {
	if a.admit(c) {
		a.serve(c)
	}
}

// serve is ServeConn of one that was admitted.
func (a *Agent) serve(c net.Conn) {
	defer c.Close()
	defer a.conns.Done()
	defer a.forget(c)
	wc := wire.NewConn(c)
	secret := a.currentSecret()
	if err := wc.AcceptAuth(secret); err != nil {
		return
	}
	if !a.trust(c, wc, secret) {
		return
	}
	defer a.leaves(wc)
	// The proof goes out at once: a client that never saw it knows that its
	// request was not run.
	if wc.Flush() != nil {
		return
	}
	(&session{agent: a, conn: wc}).serve()
}

// admit makes a connection a stranger, as soon as there is room for one more. It
// closes it if the agent is closed.
func (a *Agent) admit(c net.Conn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for !a.mu.closed && len(a.mu.strangers) >= maxStrangers {
		oldest := a.mu.strangers[0]
		if wait := strangerTime - time.Since(oldest.since); wait > 0 {
			a.mu.Unlock()
			time.Sleep(wait)
			a.mu.Lock()
			continue
		}
		oldest.Close()
		a.mu.strangers = a.mu.strangers[1:]
	}
	if a.mu.closed {
		c.Close()
		return false
	}
	a.conns.Add(1)
	a.mu.open[c] = struct{}{}
	a.mu.strangers = append(a.mu.strangers, stranger{c, time.Now()})
	return true
}

// trust takes a connection authenticated with secret out of the strangers;
// false if it was pushed out before, or the secret is another by now.
func (a *Agent) trust(c net.Conn, wc *wire.Conn, secret []byte) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.dropStrangerLocked(c) || !bytes.Equal(secret, a.mu.secret) {
		return false
	}
	a.mu.sessions[wc.ID()] = wc
	return true
}

func (a *Agent) leaves(wc *wire.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.mu.sessions, wc.ID())
}

// progress is how far the connection of that name has come; nil if there is none.
func (a *Agent) progress(id string) *wire.Progress {
	a.mu.Lock()
	defer a.mu.Unlock()
	wc := a.mu.sessions[id]
	if wc == nil {
		return nil
	}
	p := wc.Progress()
	return &p
}

func (a *Agent) currentSecret() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.secret
}

func (a *Agent) dropStrangerLocked(c net.Conn) bool {
	for i, s := range a.mu.strangers {
		if s.Conn == c {
			a.mu.strangers = append(a.mu.strangers[:i], a.mu.strangers[i+1:]...)
			return true
		}
	}
	return false
}

func (a *Agent) forget(c net.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.mu.open, c)
	a.dropStrangerLocked(c)
}

// Close leaves the container, ends every connection and waits for them.
func (a *Agent) Close() {
	if a.quiet != nil {
		a.quiet.Stop()
	}
	a.mu.Lock()
	a.mu.closed = true
	for l := range a.mu.listeners {
		l.Close()
	}
	for c := range a.mu.open {
		c.Close()
	}
	a.mu.Unlock()
	a.leave()
	a.callbacks.close()
	a.conns.Wait()
}

// prepare makes an enter with the same request cheap.
func (a *Agent) prepare(r wire.Req) error {
	a.entering.Lock()
	defer a.entering.Unlock()
	if err := a.space.prepare(r.InitPID, r.Pids, r.WorkingDir); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "guest.prepare", "%w", err)
	}
	return nil
}

// enter serves a container from now on, and no other.
func (a *Agent) enter(r wire.Req) error {
	if r.WorkingDir != "" {
		if _, err := cleanPath("working_dir", r.WorkingDir); err != nil {
			return err
		}
	}
	a.entering.Lock()
	defer a.entering.Unlock()
	defer a.swap()()
	a.leaveNow()
	home, err := a.space.enter(r.InitPID, r.Pids, r.WorkingDir)
	if err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "guest.enter", "%w", err)
	}
	if r.Resolv != "" {
		if err := a.space.resolv(r.Resolv); err != nil {
			a.space.leave() // the next enter leaves an episode, and there is none
			return sandbox.Errorf(sandbox.Unavailable, "guest.enter", "resolv.conf: %w", err)
		}
	}
	if a.callbacks.listening() {
		if err := nameHost(a.space, a.space.spawner); err != nil {
			a.log.Warn("/etc/hosts", "err", err)
		}
	}
	if err := errors.Join(setHostname(a.space, r.Hostname), nameSelf(a.space, a.space.spawner, r.Hostname)); err != nil {
		a.log.Warn("hostname", "err", err)
	}
	ep := newEpisode(a.space, r, a.budget)
	ep.initGrace = a.initGrace
	if !home {
		if err := ep.makeWorkdir(); err != nil {
			a.log.Warn("working directory", "path", ep.workdir, "err", err)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.episode = ep
	return nil
}

// swap says that an episode is being replaced, until over is called, or another
// swap is over.
func (a *Agent) swap() (over func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.swapping = true
	until := a.mu.swapped.Next()
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.mu.swapped.Next() != until {
			return
		}
		a.mu.swapping = false
		a.mu.swapped.Tell()
	}
}

func (a *Agent) leave() {
	a.entering.Lock()
	defer a.entering.Unlock()
	a.leaveNow()
}

// scrub leaves the container and forgets all that this agent knows of the sandbox:
// the next container is another's. What a process was killed for the kernel keeps
// counting, and would tell the next.
func (a *Agent) scrub() error {
	a.leave()
	a.callbacks.forget()
	a.answers.forget()
	if n := outOfMemory().total; n > 0 {
		return sandbox.Errorf(sandbox.Precondition, "guest.scrub", "the kernel has ended %d processes over their memory limit and counts them", n)
	}
	return nil
}

// leaveNow is leave under entering.
func (a *Agent) leaveNow() {
	a.mu.Lock()
	ep := a.mu.episode
	a.mu.episode = nil
	a.mu.Unlock()
	if ep != nil {
		a.callbacks.hangUp() // whoever called is about to be killed
		ep.leave()
		a.visitors.hangUp()
		a.space.leave()
	}
}

// swapWait bounds how long a request that came amid a reset waits for the next
// episode, which takes some milliseconds to come, and at most deadGrace.
const swapWait = deadGrace + 10*time.Second

// swapGrace is how long after the end of the connection that left an episode the
// next is still expected: the host may enter on another connection, or be dead.
const swapGrace = time.Second

// next is the episode being served, or the one that is about to be; other than
// the one it is not, which was left. A request that came amid a reset is for the
// new episode: nothing of it has begun.
func (a *Agent) next(ctx context.Context, not *episode) (*episode, error) {
	late := time.NewTimer(swapWait)
	defer late.Stop()
	for {
		a.mu.Lock()
		ep, swapping, swapped := a.mu.episode, a.mu.swapping, a.mu.swapped.Next()
		a.mu.Unlock()
		if ep != nil && ep != not {
			return ep, nil
		}
		if !swapping {
			return nil, errNoContainer()
		}
		select {
		case <-swapped:
		case <-ctx.Done():
			return nil, errGone
		case <-late.C:
			return nil, errNoContainer()
		}
	}
}

// current is the episode being served.
func (a *Agent) current() (*episode, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.episode == nil {
		return nil, errNoContainer()
	}
	return a.mu.episode, nil
}
