package server

import (
	"log/slog"
	"sync"
	"time"
)

// phases are when the parts of a grade were over, counted from its request: what is
// slow about one is seen in its line of the log. bench.py reads them there.
type phases struct {
	began time.Time

	mu struct {
		sync.Mutex
		over []any // of slog
	}
}

func (p *phases) reached(name string) {
	at := time.Since(p.began)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.over = append(p.mu.over, slog.Float64(name, float64(at.Microseconds())/1000))
}

func (p *phases) group() slog.Attr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slog.Group("ms", p.mu.over...)
}
