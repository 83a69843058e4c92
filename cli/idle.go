package cli

import (
	"context"
	"sync/atomic"
	"time"
)

// idleCancel cancels a context that nothing has touched for a while.
type idleCancel struct {
	timer  *time.Timer
	d      time.Duration
	cancel context.CancelFunc
	hit    atomic.Bool
}

func contextWithIdle(ctx context.Context, d time.Duration) (context.Context, *idleCancel) {
	ctx, cancel := context.WithCancel(ctx)
	c := &idleCancel{d: d, cancel: cancel}
	c.timer = time.AfterFunc(d, func() { c.hit.Store(true); cancel() })
	return ctx, c
}

func (c *idleCancel) touch()      { c.timer.Reset(c.d) }
func (c *idleCancel) fired() bool { return c.hit.Load() }
func (c *idleCancel) stop()       { c.timer.Stop(); c.cancel() }
