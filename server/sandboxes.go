package server

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
)

type sandboxService struct{ *Server }

// maxPage is the most sandboxes one List returns.
const maxPage = 1000

func validID(field, id string) error {
	if !sandbox.ValidID(id) {
		return sandbox.InvalidField(field, "%.80q is no sandbox id; lower-case letters and digits are accepted", id)
	}
	return nil
}

func (s sandboxService) Get(ctx context.Context, r *connect.Request[covev1.GetSandboxRequest]) (*connect.Response[covev1.GetSandboxResponse], error) {
	sb, err := s.get(ctx, r.Msg.Id)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.GetSandboxResponse{Sandbox: wire.Sandbox(s.asItIs(sb))}), nil
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

func (s sandboxService) List(ctx context.Context, r *connect.Request[covev1.ListSandboxesRequest]) (*connect.Response[covev1.ListSandboxesResponse], error) {
	m := r.Msg
	if m.PageSize < 0 || m.PageSize > maxPage {
		return nil, sandbox.InvalidField("page_size", "%d is not accepted; 1 to %d is, or 0 for 100", m.PageSize, maxPage)
	}
	if err := sandbox.ValidateLabels("labels", m.Labels); err != nil {
		return nil, err
	}
	f := store.Filter{Labels: m.Labels, PageSize: int(m.PageSize), PageToken: m.PageToken}
	for _, p := range m.States {
		st, err := wire.StateFrom(p)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(f.States, st) {
			f.States = append(f.States, st)
		}
	}
	sbs, next, err := s.store.ListSandboxes(ctx, f)
	if err != nil {
		if m.PageToken != "" && errors.Is(err, sandbox.ErrInvalid) {
			err = sandbox.InvalidField("page_token", "not one of ours; the next_page_token of a List with the same filter is accepted")
		}
		return nil, err
	}
	out := &covev1.ListSandboxesResponse{NextPageToken: next, Sandboxes: make([]*covev1.Sandbox, len(sbs))}
	standby := s.node.Standby()
	for i, sb := range sbs {
		sb.Standby = standby[sb.ID]
		out.Sandboxes[i] = wire.Sandbox(sb)
	}
	return connect.NewResponse(out), nil
}

// SetTimeout writes to the store first: Reconcile takes its word about expiry.
func (s sandboxService) SetTimeout(ctx context.Context, r *connect.Request[covev1.SetTimeoutRequest]) (*connect.Response[covev1.SetTimeoutResponse], error) {
	timeout, err := wire.DurationFrom("timeout", r.Msg.Timeout)
	if err == nil {
		err = sandbox.ValidateTimeout("timeout", timeout, s.cfg.Limits.MaxTimeout)
	}
	if err == nil {
		err = validID("id", r.Msg.Id)
	}
	if err != nil {
		return nil, err
	}
	var at time.Time
	if timeout > 0 {
		at = s.cfg.Clock().UTC().Add(timeout)
	}
	sb, err := s.store.UpdateSandbox(ctx, r.Msg.Id, func(sb *sandbox.Sandbox) error {
		sb.Spec.Timeout, sb.Spec.NoTimeout, sb.ExpiresAt = timeout, timeout == 0, at
		return nil
	})
	if err == nil {
		err = s.node.SetExpiry(ctx, r.Msg.Id, at)
	}
	if err != nil {
		return nil, s.explain(ctx, r.Msg.Id, err)
	}
	return connect.NewResponse(&covev1.SetTimeoutResponse{Sandbox: wire.Sandbox(s.asItIs(sb))}), nil
}

// Reset counts the episode in the store while the node works: the node's
// number is the truth, and the two only differ after a failure.
func (s sandboxService) Reset(ctx context.Context, r *connect.Request[covev1.ResetRequest]) (*connect.Response[covev1.ResetResponse], error) {
	id := r.Msg.Id
	if err := validID("id", id); err != nil {
		return nil, err
	}
	s.ends.noteReset(id)
	// A caller that leaves does not stop a reset half-way.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()

	type update struct {
		sb  sandbox.Sandbox
		err error
	}
	counted := make(chan update, 1)
	go func() {
		sb, err := s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error { sb.Episode++; return nil })
		counted <- update{sb, err}
	}()
	episode, took, err := s.node.Reset(ctx, id)
	up := <-counted
	if err != nil {
		if up.err == nil {
			s.owe("episode of "+id, func(ctx context.Context) error { return s.setEpisode(ctx, id, up.sb.Episode-1) })
		} else {
			s.ends.forgetResets(id) // no such live sandbox: keep nothing in memory for it
		}
		return nil, s.explain(ctx, id, err)
	}
	if up.err != nil {
		return nil, s.explain(ctx, id, up.err)
	}
	sb := up.sb
	if sb.Episode != episode {
		// Two resets at once, or an earlier failure: what the node says now is at least as new.
		if sb, err = s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
			sb.Episode = max(sb.Episode, episode)
			return nil
		}); err != nil {
			return nil, s.explain(ctx, id, err)
		}
		sb.Episode = episode
	}
	return connect.NewResponse(&covev1.ResetResponse{Sandbox: wire.Sandbox(sb), NodeTime: durationpb.New(took)}), nil
}

func (s *Server) setEpisode(ctx context.Context, id string, episode int64) error {
	_, err := s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error { sb.Episode = episode; return nil })
	if errors.Is(err, sandbox.ErrEnded) || errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	return err
}

func (s sandboxService) Kill(ctx context.Context, r *connect.Request[covev1.KillRequest]) (*connect.Response[covev1.KillResponse], error) {
	id, err := r.Msg.Id, error(nil)
	if key := r.Msg.IdempotencyKey; key != "" {
		if id != "" {
			return nil, sandbox.InvalidField("idempotency_key", "id and idempotency_key are both set; exactly one is accepted")
		}
		if id, err = s.idOfKey(ctx, key); err != nil {
			return nil, err
		}
	}
	sb, err := s.kill(ctx, id)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&covev1.KillResponse{Sandbox: wire.Sandbox(sb)}), nil
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
		return "", &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.NoSandbox, Field: "idempotency_key", Msg: "no sandbox was created with this key"}
	}
	return sb.ID, err
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
		end = sandbox.End{Cause: sandbox.NodeLost, At: end.At, Detail: "node " + s.node.Name() + " no longer had it"}
	}
	sb, err := s.recordEnd(ctx, id, end)
	s.ends.poke() // acknowledges it to the node, and tries the record again if that failed
	return sb, err
}

// killWidth is how many sandboxes KillByLabel ends at once: a destroy is
// mostly waiting for the kernel.
const killWidth = 16

func (s sandboxService) KillByLabel(ctx context.Context, r *connect.Request[covev1.KillByLabelRequest]) (*connect.Response[covev1.KillByLabelResponse], error) {
	if len(r.Msg.Labels) == 0 {
		return nil, sandbox.InvalidField("labels", "at least one label is needed; without any, everything would be killed")
	}
	if err := sandbox.ValidateLabels("labels", r.Msg.Labels); err != nil {
		return nil, err
	}
	var ids []string
	f := store.Filter{Labels: r.Msg.Labels, PageSize: maxPage}
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
	var killed []string
	err := inParallel(ctx, killWidth, ids, func(id string) error {
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
	return connect.NewResponse(&covev1.KillByLabelResponse{Ids: killed}), nil
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

func (s sandboxService) Stats(ctx context.Context, r *connect.Request[covev1.StatsRequest]) (*connect.Response[covev1.StatsResponse], error) {
	if err := validID("id", r.Msg.Id); err != nil {
		return nil, err
	}
	st, err := s.node.Stats(ctx, r.Msg.Id)
	if err != nil {
		return nil, s.explain(ctx, r.Msg.Id, err)
	}
	return connect.NewResponse(wire.Stats(st)), nil
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
