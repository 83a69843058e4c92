package server

import (
	"context"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// follower is one reader of a process.
type follower struct {
	sandbox, exec string
	kill          bool // the process is not to outlive its readers
}

func (f follower) process() [2]string { return [2]string{f.sandbox, f.exec} }

// strayBook knows the processes that are read now, and those whose last reader
// left and wanted them killed then. A reader whose connection broke comes back,
// so they are given a while. It is in memory: a server that stops kills nothing.
type strayBook struct {
	mu struct {
		sync.Mutex
		readers map[[2]string]int
		strays  map[[2]string]*time.Timer
		stopped bool
	}
	life  context.Context // of what kills
	end   context.CancelFunc
	kills sync.WaitGroup // grows under mu, while not stopped
}

func (b *strayBook) init() {
	b.life, b.end = context.WithCancel(asServer(context.Background()))
	b.mu.readers, b.mu.strays = map[[2]string]int{}, map[[2]string]*time.Timer{}
}

func (b *strayBook) joined(f follower) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.readers[f.process()]++
	b.forgiveLocked(f.process())
}

func (b *strayBook) forgiveLocked(p [2]string) {
	if t := b.mu.strays[p]; t != nil {
		t.Stop()
		delete(b.mu.strays, p)
	}
}

// gone ends what joined began; stray says to kill the process after grace if it
// has no reader by then.
func (b *strayBook) gone(f follower, stray bool, grace time.Duration, kill func(context.Context)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := f.process()
	if b.mu.readers[p]--; b.mu.readers[p] > 0 {
		return
	}
	delete(b.mu.readers, p)
	if !stray || b.mu.stopped {
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(grace, func() {
		b.mu.Lock()
		mine := b.mu.strays[p] == timer
		if mine {
			delete(b.mu.strays, p)
			b.kills.Add(1)
		}
		b.mu.Unlock()
		if !mine {
			return
		}
		defer b.kills.Done()
		ctx, cancel := context.WithTimeout(b.life, undoTimeout)
		defer cancel()
		kill(ctx)
	})
	b.mu.strays[p] = timer
}

func (b *strayBook) stop() {
	b.mu.Lock()
	b.mu.stopped = true
	for p := range b.mu.strays {
		b.forgiveLocked(p)
	}
	b.mu.Unlock()
	b.end()
	b.kills.Wait()
}

// left is called when a stream is over; open says that the process was running
// as far as the stream knows.
func (s *Server) left(ctx context.Context, who follower, open bool) {
	ours := context.Cause(ctx) == context.Cause(s.calls.cut) && ctx.Err() != nil // cut off by this server, which is stopping
	tenant := store.ScopeOf(ctx)
	s.strays.gone(who, who.kill && open && !ours, s.cfg.CancelGrace, func(ctx context.Context) {
		err := s.inside(ctx, who.sandbox, func() error { return s.node.Signal(ctx, who.sandbox, who.exec, "SIGKILL", false) })
		if err != nil && sandbox.ClassOf(err) != sandbox.NotFound && sandbox.ClassOf(err) != sandbox.Precondition && sandbox.ClassOf(err) != sandbox.Ended {
			s.log.Warn("a process whose caller left could not be killed", "sandbox", who.sandbox, "exec", who.exec, "tenant", tenant.Tenant(), "err", err)
		}
	})
}
