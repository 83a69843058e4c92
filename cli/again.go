package cli

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// againFor is how long a call is repeated, as long as the SDK does: a server that
// restarts is back by then.
const againFor = 30 * time.Second

// newKey is an idempotency key, so that a call can be repeated.
func newKey() string { return newExecID() + newExecID() }

// again repeats a call that a key makes repeatable while the server is away.
func (a *app) again(ctx context.Context, ask func() error) error {
	began := time.Now()
	for pause := 200 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := ask()
		var e *sandbox.Error
		if !errors.As(err, &e) || e.Class != sandbox.Unavailable || ctx.Err() != nil {
			return err
		}
		wait := cmp.Or(e.RetryAfter, pause)
		if time.Since(began)+wait > againFor {
			return err
		}
		a.warnf("%v; asking again", err)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}
