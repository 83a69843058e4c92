package server

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// maxPage is the most sandboxes one List returns.
const maxPage = 1000

func validID(field, id string) error {
	if !sandbox.ValidID(id) {
		return sandbox.InvalidField(field, "%.80q is no sandbox id; lower-case letters and digits are accepted", id)
	}
	return nil
}

// GetSandbox finds a sandbox, an ended one too as long as it is remembered.
func (s *Server) GetSandbox(ctx context.Context, id string) (sb sandbox.Sandbox, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.get", about("id", id))
	if err != nil {
		return sb, err
	}
	defer call.end(&err)
	if sb, err = s.get(ctx, id); err != nil {
		return sb, err
	}
	return s.asItIs(ctx, sb), nil
}

func (s *Server) get(ctx context.Context, id string) (sandbox.Sandbox, error) {
	if err := validID("id", id); err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := s.store.GetSandbox(ctx, id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return sb, noSandbox(id)
	}
	return sb, err
}

func noSandbox(id string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.NoSandbox, Msg: "no sandbox '" + id + "'",
		Hint: `"cove ls" lists the live ones; ended ones are forgotten after a while`}
}

// ListSandboxes lists one page, and where the next one begins: "" after the last.
func (s *Server) ListSandboxes(ctx context.Context, f store.Filter) (page []sandbox.Sandbox, next string, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.list")
	if err != nil {
		return nil, "", err
	}
	defer call.end(&err)
	if err := firstError(validPage(f.PageSize), sandbox.ValidateLabels("labels", f.Labels)); err != nil {
		return nil, "", err
	}
	if f.Run != "" {
		run, err := s.run(ctx, f.Run)
		if err != nil {
			return nil, "", err
		}
		f.Run = run.ID
	}
	if page, next, err = s.store.ListSandboxes(ctx, f); err != nil {
		return nil, "", wrongToken(f.PageToken, err)
	}
	standby := s.standby(ctx)
	for i := range page {
		page[i].Standby = standby[page[i].ID]
	}
	return page, next, nil
}

func validPage(size int) error {
	if size < 0 || size > maxPage {
		return sandbox.InvalidField("page_size", "%d is not accepted; 1 to %d is, or 0 for 100", size, maxPage)
	}
	return nil
}

// wrongToken says of a list that was refused that it was for its token.
func wrongToken(token string, err error) error {
	if token != "" && errors.Is(err, sandbox.ErrInvalid) {
		return sandbox.InvalidField("page_token", "not one of ours; the next_page_token of a List with the same filter is accepted")
	}
	return err
}

// SetTimeout ends a sandbox so long from now; 0 = never. It writes to the store
// first: Reconcile takes its word about expiry.
func (s *Server) SetTimeout(ctx context.Context, id string, timeout time.Duration) (sb sandbox.Sandbox, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.set_timeout", about("id", id), about("sandbox", id))
	if err != nil {
		return sb, err
	}
	defer call.end(&err)
	if err := firstError(sandbox.ValidateTimeout("timeout", timeout, s.cfg.Limits.MaxTimeout), validID("id", id)); err != nil {
		return sb, err
	}
	var at time.Time
	if timeout > 0 {
		at = s.cfg.Clock().UTC().Add(timeout)
	}
	sb, err = s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
		sb.Spec.Timeout, sb.Spec.NoTimeout, sb.ExpiresAt = timeout, timeout == 0, at
		return nil
	})
	if err == nil {
		err = s.setExpiry(ctx, id, at)
	}
	if err != nil {
		return sb, s.explain(ctx, id, err)
	}
	return s.asItIs(ctx, sb), nil
}

// ResetSandbox takes a sandbox back to its image, and says how long the node took.
// The store counts the episode while the node works: the node's number is the
// truth, and the two only differ after a failure.
func (s *Server) ResetSandbox(ctx context.Context, id string) (sb sandbox.Sandbox, took time.Duration, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.reset", about("id", id), about("sandbox", id))
	if err != nil {
		return sb, 0, err
	}
	defer call.end(&err)
	if err := validID("id", id); err != nil {
		return sb, 0, err
	}
	s.ends.noteReset(id)
	// A caller that leaves does not stop a reset half-way.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	s.lookBeforeReset(ctx, id)

	type update struct {
		sb  sandbox.Sandbox
		err error
	}
	counted := make(chan update, 1)
	go func() {
		sb, err := s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
			sb.Episode++
			if sb.Origin.Kind != sandbox.FilesystemSnapshot {
				sb.Origin = sandbox.Origin{} // the image, without the memory it came with
			}
			return nil
		})
		counted <- update{sb, err}
	}()
	episode, took, err := s.node.Reset(ctx, id)
	up := <-counted
	if err != nil {
		if up.err == nil {
			s.untilDone("episode of "+id, func(ctx context.Context) error { return s.setEpisode(ctx, id, up.sb.Episode-1) })
		} else {
			s.ends.forgetResets(id) // no such live sandbox: keep nothing in memory for it
		}
		return sb, 0, s.explain(ctx, id, err)
	}
	if up.err != nil {
		return sb, 0, s.explain(ctx, id, up.err)
	}
	sb = up.sb
	if sb.Episode != episode {
		// Two resets at once, or an earlier failure: what the node says now is at least as new.
		if sb, err = s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
			sb.Episode = max(sb.Episode, episode)
			return nil
		}); err != nil {
			return sb, 0, s.explain(ctx, id, err)
		}
		sb.Episode = episode
	}
	if sb.Spec.Rollout.Run != "" && s.steps.logs.Load() != nil {
		s.endEpisodes(sb, episode-1, sandbox.End{Cause: sandbox.ResetCause, At: s.cfg.Clock().UTC()}, false)
	}
	return sb, took, nil
}

func (s *Server) setEpisode(ctx context.Context, id string, episode int64) error {
	_, err := s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error { sb.Episode = episode; return nil })
	if errors.Is(err, sandbox.ErrEnded) || errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	return err
}

// KillSandbox ends a sandbox, which is given by its id or by the key it was
// created with, and returns it with its first end. The key of a fork ends all of
// its children; the first is returned.
func (s *Server) KillSandbox(ctx context.Context, id, key string) (sb sandbox.Sandbox, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.kill", about("id", id))
	if err != nil {
		return sb, err
	}
	defer call.end(&err)
	if key != "" {
		if id != "" {
			return sb, sandbox.InvalidField("idempotency_key", "id and idempotency_key are both set; exactly one is accepted")
		}
		if id, err = s.idOfKey(ctx, key); errors.Is(err, sandbox.ErrNotFound) {
			if f := s.forks.keyed(keySlot(ctx, key)); f != nil {
				return s.killFork(ctx, f, call)
			}
		}
		if err != nil {
			return sb, err
		}
	}
	sb, err = s.kill(ctx, id)
	call.concerns("sandbox", sb.ID)
	return sb, err
}

// idOfKey is the sandbox that was created with a key: for a caller that does not
// know what came of its create.
func (s *Server) idOfKey(ctx context.Context, key string) (string, error) {
	if err := sandbox.ValidateIdempotencyKey("idempotency_key", key); err != nil {
		return "", err
	}
	if creating := s.creates.keyed(keySlot(ctx, key)); creating != nil {
		select {
		case <-creating:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
	sb, err := s.store.SandboxByKey(ctx, store.Idempotency{Key: key})
	if errors.Is(err, sandbox.ErrNotFound) {
		return "", errNoKey()
	}
	return sb.ID, err
}

func errNoKey() error {
	return &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.NoSandbox, Field: "idempotency_key", Msg: "no sandbox was created with this key"}
}

// kill ends a sandbox and returns its record with the first end it had. It is
// finished once begun, whether or not the caller waits.
func (s *Server) kill(ctx context.Context, id string) (sandbox.Sandbox, error) {
	return s.endWith(ctx, id, sandbox.End{Cause: sandbox.KilledByUser, At: s.cfg.Clock().UTC()})
}

func (s *Server) endWith(ctx context.Context, id string, end sandbox.End) (sandbox.Sandbox, error) {
	if creating := s.creates.pending(id); creating != nil {
		select {
		case <-creating:
		case <-ctx.Done():
			return sandbox.Sandbox{}, ctx.Err()
		}
	}
	sb, err := s.get(ctx, id)
	if err != nil || sb.End != nil {
		return sb, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	err = s.node.Kill(ctx, id, end)
	missing := errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrEnded)
	if err != nil && !missing {
		return sandbox.Sandbox{}, err
	}
	return s.recordKill(ctx, id, end, missing)
}

// recordKill records the end of a sandbox the node has just ended, or no longer
// had (missing).
func (s *Server) recordKill(ctx context.Context, id string, end sandbox.End, missing bool) (sandbox.Sandbox, error) {
	ends, err := s.node.Ends(ctx)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if first, known := ends[id]; known {
		if first.Cause == end.Cause && first.Detail == "" {
			first.Detail = end.Detail
		}
		end = first // it may have ended by itself before we came
	} else if missing {
		end = sandbox.End{Cause: sandbox.NodeLost, At: end.At, Detail: "node " + s.about.Name + " no longer had it"}
	}
	sb, err := s.recordEnd(ctx, id, end)
	s.ends.poke() // acknowledges it to the node, and tries the record again if that failed
	return sb, err
}

// killWidth is how many sandboxes KillByLabel ends at once: a destroy is
// mostly waiting for the kernel.
const killWidth = 16

// KillByLabel ends all sandboxes that have these labels, and says which.
func (s *Server) KillByLabel(ctx context.Context, labels map[string]string) (killed []string, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.kill_by_label")
	if err != nil {
		return nil, err
	}
	defer call.end(&err)
	if len(labels) == 0 {
		return nil, sandbox.InvalidField("labels", "at least one label is needed; without any, everything would be killed")
	}
	if err := sandbox.ValidateLabels("labels", labels); err != nil {
		return nil, err
	}
	var ids []string
	f := store.Filter{Labels: labels, PageSize: maxPage}
	for {
		page, next, err := s.store.ListSandboxes(ctx, f)
		if err != nil {
			return nil, err
		}
		for _, sb := range page {
			ids = append(ids, sb.ID)
		}
		if next == "" {
			break
		}
		f.PageToken = next
	}

	var mu sync.Mutex // guards killed
	err = inParallel(ctx, killWidth, ids, func(id string) error {
		_, err := s.kill(ctx, id)
		if errors.Is(err, sandbox.ErrNotFound) {
			return nil // forgotten meanwhile
		}
		if err == nil {
			mu.Lock()
			killed = append(killed, id)
			mu.Unlock()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	slices.Sort(killed)
	for _, id := range killed {
		call.concerns("id", id)
	}
	return killed, nil
}

// inParallel calls f for each item, width at a time, and waits. All are tried;
// the first error is returned. No more are begun once ctx has ended.
func inParallel[T any](ctx context.Context, width int, items []T, f func(T) error) error {
	var (
		wg    sync.WaitGroup
		work  = make(chan T)
		mu    sync.Mutex // guards first
		first error
	)
	for range min(width, len(items)) {
		wg.Go(func() {
			for item := range work {
				if err := f(item); err != nil {
					mu.Lock()
					first = cmp.Or(first, err)
					mu.Unlock()
				}
			}
		})
	}
	for _, item := range items {
		if ctx.Err() != nil {
			break
		}
		work <- item
	}
	close(work)
	wg.Wait()
	return cmp.Or(first, ctx.Err())
}

// SandboxStats is what a sandbox uses now.
func (s *Server) SandboxStats(ctx context.Context, id string) (st sandbox.Stats, err error) {
	ctx, call, err := s.begin(ctx, "sandbox.stats", about("id", id))
	if err != nil {
		return st, err
	}
	defer call.end(&err)
	if err := validID("id", id); err != nil {
		return st, err
	}
	if st, err = s.node.Stats(ctx, id); err != nil {
		return st, s.explain(ctx, id, err)
	}
	return st, nil
}

// explain makes "the node does not have it" (or the store's "it has ended")
// into what the caller wants to know: that there is no such sandbox, or how it
// ended. Other errors pass, those about a file or a volume that is not there too.
func (s *Server) explain(ctx context.Context, id string, err error) error {
	if !errors.Is(err, sandbox.ErrNoSandbox) && !errors.Is(err, sandbox.ErrEnded) {
		return err
	}
	sb, gerr := s.store.GetSandbox(ctx, id)
	if errors.Is(gerr, sandbox.ErrNotFound) {
		return noSandbox(id)
	}
	if gerr != nil {
		return gerr
	}
	if sb.End == nil {
		if creating := s.creates.pending(id); creating != nil {
			return &sandbox.Error{Class: sandbox.Precondition, Msg: "sandbox " + id + " is still being created", Hint: "try again in a moment"}
		}
		// The node knows an end that the store is about to learn.
		if end, ok := s.awaitEnd(ctx, id, s.cfg.EndWait); ok {
			sb.State, sb.End = sandbox.EndedState, &end
		}
	}
	if e := sb.Usable(); e != nil {
		return e
	}
	return err
}
