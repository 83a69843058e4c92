package gvisor

import (
	"context"
	"sync"
)

// gate lets many in, until someone shuts it and waits for all to be out. A
// sync.RWMutex whose waits end with a context. The zero value is open.
type gate struct {
	mu struct {
		sync.Mutex
		inside  int
		opened  chan struct{} // closed by open; nil while it is open
		emptied chan struct{} // closed by the last to leave; nil unless shut waits
	}
}

func (g *gate) enter(ctx context.Context) error {
	for {
		g.mu.Lock()
		opened := g.mu.opened
		if opened == nil {
			g.mu.inside++
			g.mu.Unlock()
			return nil
		}
		g.mu.Unlock()
		select {
		case <-opened:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.inside--; g.mu.inside == 0 && g.mu.emptied != nil {
		close(g.mu.emptied)
		g.mu.emptied = nil
	}
}

// shut keeps everyone out until open. One caller at a time. After an error it
// is open.
func (g *gate) shut(ctx context.Context) error {
	g.mu.Lock()
	g.mu.opened = make(chan struct{})
	var emptied chan struct{}
	if g.mu.inside > 0 {
		emptied = make(chan struct{})
		g.mu.emptied = emptied
	}
	g.mu.Unlock()
	if emptied == nil {
		return nil
	}
	select {
	case <-emptied:
		return nil
	case <-ctx.Done():
		g.open()
		return ctx.Err()
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.mu.opened)
	g.mu.opened, g.mu.emptied = nil, nil
}
