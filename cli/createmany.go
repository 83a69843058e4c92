package cli

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	mostAtOnce = 10_000
	// createLanes requests are under way at a time: the server has them wait in
	// line, where more would only take its memory.
	createLanes = 128
	// fullPatience is how long a full node is asked again without one more sandbox
	// coming to be.
	fullPatience = time.Minute
)

// createMany makes n sandboxes alike at the same time. Each is printed as it is
// there, so that what was made is known however this ends. A node that is full for
// the moment is asked again; after a refusal of another kind nothing more is begun.
func (a *app) createMany(ctx context.Context, f specFlags, n int, asJSON bool) error {
	if n < 1 || n > mostAtOnce {
		return usagef("", "--count %d is not accepted; 1 to %d are", n, mostAtOnce)
	}
	if f.idem != "" && n > 1 {
		return usagef("", "--idempotency-key names one sandbox, and --count asks for %d", n)
	}
	refused := make(chan struct{}) // closed with the first failure: what is under way goes on, and nothing more begins
	var mu sync.Mutex              // guards what follows
	var failed error
	done, last := 0, time.Now()
	_, tty := terminal(a.Stderr)
	show := func(end string) {
		if tty {
			fmt.Fprintf(a.Stderr, "\r\x1b[K%d of %d sandboxes%s", done, n, end)
		}
	}
	one := func() error {
		for {
			resp, err := a.createSandbox(ctx, f.request())
			mu.Lock()
			if err == nil {
				done, last = done+1, time.Now()
				err = a.printCreated(resp.Msg, asJSON)
				show("")
				mu.Unlock()
				return err
			}
			patient := time.Since(last) < fullPatience
			mu.Unlock()
			var e *sandbox.Error
			wait := 100 * time.Millisecond
			if errors.As(err, &e) {
				wait = max(wait, e.RetryAfter)
			}
			if sandbox.ClassOf(err) != sandbox.NoCapacity || !patient {
				return err
			}
			select {
			case <-time.After(wait):
			case <-refused:
				return err
			case <-ctx.Done():
				return err
			}
		}
	}
	lanes := make(chan struct{}, createLanes)
	var wg sync.WaitGroup
	for range n {
		lanes <- struct{}{}
		if isClosed(refused) || ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-lanes }()
			if err := one(); err != nil {
				mu.Lock()
				defer mu.Unlock()
				if failed == nil {
					failed = err
					close(refused)
				}
			}
		})
	}
	wg.Wait()
	show("\n")
	if failed == nil {
		failed = ctx.Err()
	}
	if failed != nil && done > 0 {
		a.warnf("%d of %d sandboxes were made, and are there", done, n)
	}
	return failed
}

func (a *app) printCreated(r *covev1.CreateSandboxResponse, asJSON bool) error {
	if asJSON {
		return a.printJSON(createdJSON(r))
	}
	_, err := fmt.Fprintln(a.Stdout, r.GetSandbox().GetId())
	return err
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
