package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// ReplayRequest names an episode: by its sandbox, of which it is the last with steps
// unless Reset says which, or by the name that one sandbox of the run has.
type ReplayRequest struct {
	Run     string // id or name; "" where Sandbox is on record
	Sandbox string
	Episode string
	Reset   int64
	Keep    bool // the sandbox stays
	All     bool // goes on after a difference
}

// ReplayProgress is how far a replay is.
type ReplayProgress struct {
	State string // creating, running
	Step  int64  // the last that ended, by its seq
	Steps int64
	Same  int64
}

// replayMark is the template that the sandbox of a replay carries, so that one whose
// server died is removed: see isBuild.
const replayMark = "replay" + buildMark

// Bounds of an episode that is replayed: it is held in memory.
const (
	maxReplaySteps = 20_000
	maxReplayBytes = 512 << 20
)

// Replay runs the steps of an episode again, from what it began with, and says which
// observation is the first that differs. Who leaves leaves nothing.
func (s *Server) Replay(ctx context.Context, r ReplayRequest, tell func(ReplayProgress)) (out sandbox.Replayed, err error) {
	ctx, call, err := s.begin(ctx, "run.replay", about("run", r.Run), about("id", r.Sandbox))
	if err != nil {
		return out, err
	}
	defer call.end(&err)
	if err := call.needs(writes("", "sandboxes")); err != nil {
		return out, err
	}
	began := time.Now()
	ep, err := s.findEpisode(ctx, r)
	if err != nil {
		return out, err
	}
	out = sandbox.Replayed{Run: ep.run.ID, Sandbox: ep.begun.Sandbox, Reset: ep.begun.Reset, Steps: ep.steps, Gaps: ep.gaps, Same: true,
		Deterministic: ep.begun.Spec.Deterministic != nil, NotFixed: ep.begun.Spec.Deterministic.NotFixed()}
	p, from, release, err := s.replayPlan(ctx, ep, &out)
	if err != nil {
		return out, err
	}
	out.StartedFrom = from
	if err := call.needs(partsOfSpec(p.spec)...); err != nil {
		release()
		return out, err
	}
	tell(ReplayProgress{State: "creating", Steps: ep.steps})
	p.wanted = ctx
	making, cancel := context.WithTimeout(context.WithoutCancel(ctx), lineTimeout)
	box, _, err := s.makeSandbox(making, p, store.Idempotency{})
	cancel()
	release()
	if err != nil {
		return out, s.byWhom(ctx, err)
	}
	call.concerns("sandbox", box.ID)
	defer func() {
		if err != nil || !r.Keep {
			s.takeBack(box.ID)
		}
	}()
	if err = (&replaying{Server: s, ep: ep, box: box.ID, all: r.All, out: &out, tell: tell}).run(ctx); err != nil {
		return out, err
	}
	out.Took = time.Since(began)
	if r.Keep {
		if _, err = s.keepReplay(ctx, box.ID); err == nil {
			out.Kept = box.ID
		}
	}
	return out, err
}

// keepReplay makes the sandbox of a replay one like any other.
func (s *Server) keepReplay(ctx context.Context, id string) (sandbox.Sandbox, error) {
	var at time.Time
	sb, err := s.store.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error {
		sb.Spec.Template = ""
		sb.Spec = sb.Spec.WithEnd(s.cfg.Defaults)
		if at = (time.Time{}); sb.Spec.Timeout > 0 {
			at = s.cfg.Clock().UTC().Add(sb.Spec.Timeout)
		}
		sb.ExpiresAt = at
		return nil
	})
	if err == nil {
		err = s.setExpiry(ctx, id, at)
	}
	return sb, err
}

// episode is one that was recorded.
type episode struct {
	run    sandbox.Run
	begun  episodeRecord
	events []stepEvent
	size   int // of the events on record
	steps  int64
	gaps   []sandbox.ReplayGap
}

// stepEvent is a step that begins, or that ends, or something that was done beside them.
type stepEvent struct {
	step    sandbox.Step
	begin   bool
	outside *gapRecord
}

// notReplayable is the refusal of an episode of which not all is known.
func notReplayable(format string, args ...any) *sandbox.Error {
	return &sandbox.Error{Class: sandbox.Precondition, Reason: sandbox.NotReplayable, Msg: fmt.Sprintf(format, args...)}
}

// findEpisode reads an episode from the log of its run.
func (s *Server) findEpisode(ctx context.Context, r ReplayRequest) (*episode, error) {
	switch {
	case r.Sandbox == "" && r.Episode == "":
		return nil, sandbox.InvalidField("sandbox", "is missing; the id of a sandbox of a run is accepted, or episode with its name")
	case r.Sandbox != "" && r.Episode != "":
		return nil, sandbox.InvalidField("episode", "and sandbox are both set; one of them names the episode")
	case r.Reset < 0:
		return nil, sandbox.InvalidField("reset", "%d is not accepted; 1 and more are, or 0 for the last", r.Reset)
	}
	if r.Sandbox != "" {
		if err := validID("sandbox", r.Sandbox); err != nil {
			return nil, err
		}
	}
	ref := r.Run
	if ref == "" {
		if r.Sandbox == "" {
			return nil, sandbox.InvalidField("run", "is missing; which run the episode is of must be said")
		}
		sb, err := s.get(ctx, r.Sandbox)
		if errors.Is(err, sandbox.ErrNotFound) {
			return nil, sandbox.AsError(err).WithHint("of a sandbox that is forgotten the run must be said too: cove replay %s --run RUN", r.Sandbox)
		}
		if err != nil {
			return nil, err
		}
		if ref = sb.Spec.Rollout.Run; ref == "" {
			return nil, notReplayable("sandbox %s is of no run, and has no steps on record", r.Sandbox).WithHint("create it in a run: run.sandbox(...) in Python, rollout.run in Sandboxes/Create")
		}
	}
	run, err := s.run(ctx, ref)
	if err != nil {
		return nil, err
	}
	steps, err := s.stepsOf(run.Tenant, run.ID)
	if err != nil {
		return nil, err
	}
	which, err := steps.findEpisode(r, run)
	if err != nil {
		return nil, err
	}
	return steps.readEpisode(ctx, run, which)
}

// findEpisode says which episode a request means.
func (r opened) findEpisode(q ReplayRequest, run sandbox.Run) (which stepEpisode, err error) {
	seen := map[string]int64{} // the last episode of each sandbox that fits
	_, err = r.each(0, func(st sandbox.Step, _ int64) bool {
		if (q.Sandbox == "" || st.Sandbox == q.Sandbox) && (q.Episode == "" || st.Episode == q.Episode) && (q.Reset == 0 || st.Reset == q.Reset) {
			seen[st.Sandbox] = max(seen[st.Sandbox], st.Reset)
		}
		return true
	})
	if err != nil {
		return which, err
	}
	if len(seen) > 1 {
		ids := make([]string, 0, len(seen))
		for id := range seen {
			ids = append(ids, id)
		}
		slices.Sort(ids)
		return which, sandbox.InvalidField("episode", "%d sandboxes of run '%s' have an episode '%s'; say which by its id: %s", len(ids), run.Name, q.Episode, strings.Join(ids[:min(len(ids), 5)], ", "))
	}
	for id, reset := range seen {
		return stepEpisode{id, reset}, nil
	}
	what := "sandbox " + q.Sandbox
	if q.Episode != "" {
		what = "episode '" + q.Episode + "'"
	}
	if q.Reset > 0 {
		what += fmt.Sprintf(" (reset %d)", q.Reset)
	}
	return which, &sandbox.Error{Class: sandbox.NotFound, Msg: "run '" + run.Name + "' has no step of " + what, Hint: "cove runs steps " + run.Name + " lists them"}
}

// readEpisode reads the events of an episode in their order, and refuses one that cannot
// be run again.
func (r opened) readEpisode(ctx context.Context, run sandbox.Run, which stepEpisode) (*episode, error) {
	ep := &episode{run: run}
	open := map[string]bool{}
	var bad error
	_, err := r.log.Read(0, func(record []byte, _ int64) bool {
		kind, _, key, body, err := decodeRecord(record)
		if bad = cmp.Or(err, ctx.Err()); bad != nil {
			return false
		}
		if key.sandbox != which.sandbox {
			return true
		}
		switch kind {
		case episodeBegun:
			var e episodeRecord
			if bad = json.Unmarshal(body, &e); bad == nil && e.Reset == which.reset {
				ep.begun = e
			}
		case doneOutside:
			var g gapRecord
			if bad = json.Unmarshal(body, &g); bad != nil || g.Reset != which.reset {
				break
			}
			if g.Sealed == nil {
				ep.gaps = append(ep.gaps, g.ReplayGap)
				break
			}
			ep.events = append(ep.events, stepEvent{outside: &g})
			bad = ep.grows(len(body))
		case stepBegun, stepEnded, stepVoid:
			var st sandbox.Step
			if bad = json.Unmarshal(body, &st); bad != nil || st.Reset != which.reset {
				break
			}
			open[st.ID] = kind == stepBegun
			if kind == stepVoid { // it never ran
				ep.events = slices.DeleteFunc(ep.events, func(e stepEvent) bool { return e.step.ID == st.ID })
				ep.steps--
				break
			}
			if kind == stepBegun {
				ep.steps++
			}
			ep.events = append(ep.events, stepEvent{step: st, begin: kind == stepBegun})
			bad = ep.grows(len(body))
		}
		return bad == nil
	})
	if err := cmp.Or(bad, err); err != nil {
		return nil, err
	}
	if ep.begun.Sandbox == "" {
		return nil, notReplayable("what the episode began with is not on record: its steps are of an earlier version of Cove")
	}
	for id, runs := range open {
		if runs {
			return nil, notReplayable("step %s of the episode still runs", id).WithHint("wait for it, or kill it")
		}
	}
	return ep, ep.check()
}

// grows counts an event of so many bytes, and refuses what is too much to hold.
func (ep *episode) grows(bytes int) error {
	if ep.size += bytes; len(ep.events) > 2*maxReplaySteps || ep.size > maxReplayBytes {
		return &sandbox.Error{Class: sandbox.TooLarge, Msg: fmt.Sprintf("the episode has more than %d steps, or %s of them", maxReplaySteps, sandbox.FormatSize(maxReplayBytes))}
	}
	return nil
}

// check refuses steps whose input was not kept.
func (ep *episode) check() error {
	for _, e := range ep.events {
		if len(e.step.NotKept) > 0 {
			return notReplayable("step %d cannot be run again: %s", e.step.Seq, strings.Join(e.step.NotKept, "; "))
		}
	}
	return nil
}

// replayPlan is the sandbox that an episode is run again in, and what it is made of in
// words. What the episode had and this has not is added to the gaps.
func (s *Server) replayPlan(ctx context.Context, ep *episode, out *sandbox.Replayed) (p plan, from string, release func(), err error) {
	spec, began := ep.begun.Spec, ep.begun.Origin
	gap := func(what, detail string) {
		out.Gaps = append(out.Gaps, sandbox.ReplayGap{What: what, Detail: detail})
	}
	spec.Snapshot, spec.Template, spec.Rollout, spec.Lease, spec.Reuse = "", replayMark, sandbox.Rollout{}, "", ""
	spec.Timeout, spec.NoTimeout, spec.IdleTimeout, spec.OnIdle, spec.OnTimeout = 0, false, 0, "", ""
	spec.Ingress, spec.Authority = sandbox.Ingress{}, ""
	if len(spec.Volumes) > 0 {
		gap("volumes", "what they held then is not known")
		spec.Volumes = nil
	}
	switch n := spec.Network; {
	case n.Record != nil:
		spec.Network = sandbox.Network{Mode: sandbox.NetworkNone, Headers: n.Headers, Replay: &sandbox.NetworkReplay{Recording: n.Record.ID}}
	case n.Replay != nil: // as it was
	case n.Mode != sandbox.NetworkNone && n.Mode != "":
		gap("network", "it was not recorded, and is off: network.record at create keeps it")
		spec.Network = sandbox.Network{Mode: sandbox.NetworkNone}
	}
	if len(spec.Secrets) > 0 && spec.Network.Replay == nil {
		gap("secrets", "without a network there are none: "+strings.Join(spec.Secrets, ", "))
		spec.Secrets = nil
	}
	if r := spec.Network.Replay; r != nil {
		if _, err := s.store.GetRecording(ctx, r.Recording); errors.Is(err, sandbox.ErrNotFound) {
			return p, "", nil, &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.NotReplayable, Msg: "the recording '" + r.Recording + "' of the episode's network is deleted"}
		} else if err != nil {
			return p, "", nil, err
		}
	}
	var o origin
	switch {
	case began.Fork != "":
		return p, "", nil, notReplayable("sandbox %s is a copy of running sandbox %s, and nothing is kept of what it began with", ep.begun.Sandbox, began.Fork).
			WithHint("make groups of a snapshot: cove snapshot create, then snapshot=... instead of sandbox=...")
	case began.Snapshot != "":
		o, err = s.replaySnapshot(ctx, began)
		from = "snapshot " + began.Snapshot
	default:
		o.img, o.release, err = s.images.acquire(asServer(ctx), ep.begun.ImageID) // the episode is the caller's, and so what it needs
		from = "image " + cmp.Or(spec.Image, ep.begun.ImageID)
		if errors.Is(err, sandbox.ErrImageNotFound) {
			err = &sandbox.Error{Class: sandbox.ImageNotFound, Reason: sandbox.NotReplayable, Msg: "the image '" + spec.Image + "' (" + ep.begun.ImageID + ") that the episode began with is not here any more"}
		}
	}
	if err != nil {
		return p, "", nil, err
	}
	return plan{spec: spec, img: o.img, from: o.from, lineage: o.lineage}, from, o.release, nil
}

// replaySnapshot holds the snapshot that an episode began with.
func (s *Server) replaySnapshot(ctx context.Context, from sandbox.Origin) (o origin, err error) {
	snap, release, err := s.useSnapshot(ctx, from.Snapshot)
	if errors.Is(err, sandbox.ErrNotFound) {
		return o, &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.NotReplayable, Msg: "the snapshot '" + from.Snapshot + "' that the episode began with is deleted",
			Hint: "without it there is nothing to start from; keep the snapshots of episodes that are to be replayed"}
	}
	if err != nil {
		return o, err
	}
	if o, err = s.originOf(ctx, "sandbox", snap); err != nil {
		release()
		return o, err
	}
	image := o.release
	o.release = func() { image(); release() }
	return o, nil
}
