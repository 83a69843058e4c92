package server

import (
	"context"
	"encoding/json"
	"errors"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/ship"
	"github.com/cove-sandbox/cove/store"
)

// The log of a run has beside its steps the ends of its episodes and the verdicts of
// its grades, so that one place in it says how far whoever reads it is.

// More kinds of records of a log.
const (
	episodeOver byte = 'x'
	gradeOver   byte = 'g'
)

// isShipped says whether records of a kind leave the platform.
func isShipped(kind byte) bool { return kind == stepEnded || kind == episodeOver || kind == gradeOver }

// shippedRecord is what leaves of a record of a log; ok false = nothing does.
func shippedRecord(tenant string, raw []byte) (r ship.Record, ok bool, err error) {
	kind, _, _, body, err := decodeRecord(raw)
	if err != nil || !isShipped(kind) {
		return r, false, err
	}
	switch kind {
	case stepEnded:
		var st sandbox.Step
		err = json.Unmarshal(body, &st)
		r = ship.StepRecord(tenant, st)
	case episodeOver:
		var e ship.Episode
		err = json.Unmarshal(body, &e)
		r = ship.EpisodeRecord(tenant, e)
	case gradeOver:
		var g sandbox.Grade
		err = json.Unmarshal(body, &g)
		r = ship.GradeRecord(tenant, g)
	}
	if err != nil {
		return r, false, &sandbox.Error{Class: sandbox.Corrupt, Op: "steps.read", Msg: "a record of a run makes no sense", Err: err}
	}
	return r, true, nil
}

// append adds a record that is not a step's, now or, if the disk does not take it,
// with the next: until then no step begins.
func (r opened) append(s *Server, kind byte, key stepKey, body any) {
	record, err := encodeRecord(kind, 0, key, body)
	if err != nil {
		s.log.Error("a record of a run cannot be written", "run", r.run, "err", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mu.late) == 0 {
		if _, err = r.log.Append(record); err == nil {
			return
		}
		if errors.Is(err, sandbox.ErrTooLarge) { // it would never be taken, and every step wait for it
			s.log.Error("a record of a run is too large", "run", r.run, "err", err)
			return
		}
		s.log.Error("a record of a run is not written yet", "run", r.run, "err", err)
	}
	r.mu.late = append(r.mu.late, lateEnd{record, key})
}

// endEpisodes puts the ends of a sandbox's episodes on record, up to one, each once:
// those before it were reset.
func (s *Server) endEpisodes(sb sandbox.Sandbox, upTo int64, end sandbox.End, last bool) {
	r, err := s.stepsOf(sb.Tenant, sb.Spec.Rollout.Run)
	if err != nil {
		return // told where steps are
	}
	r.mu.Lock()
	from := r.mu.over[sb.ID] + 1
	r.mu.over[sb.ID] = max(upTo, from-1)
	r.mu.Unlock()
	for n := from; n <= upTo; n++ {
		e := ship.Episode{Rollout: sb.Spec.Rollout, Sandbox: sb.ID, Reset: n, End: sandbox.End{Cause: sandbox.ResetCause, At: end.At}}
		if n == 1 {
			e.StartedAt = sb.CreatedAt
		}
		if n == upTo {
			e.End, e.Last = end, last
		}
		r.append(s, episodeOver, stepKey{sandbox: sb.ID}, e)
	}
}

// logEpisodes makes up for ends of a run's episodes that a server which died had no
// time to put on record.
func (s *Server) logEpisodes(ctx context.Context, run sandbox.Run) error {
	for token := ""; ; {
		page, next, err := s.store.ListSandboxes(ctx, store.Filter{Run: run.ID, States: sandbox.States, PageSize: maxPage, PageToken: token})
		if err != nil {
			return err
		}
		for _, sb := range page {
			if sb.End != nil {
				s.endEpisodes(sb, sb.Episode, *sb.End, true)
			} else {
				s.endEpisodes(sb, sb.Episode-1, sandbox.End{Cause: sandbox.ResetCause, At: s.cfg.Clock().UTC()}, false)
			}
		}
		if token = next; token == "" {
			return nil
		}
	}
}

// logGrade puts a verdict into the log of its run. The store has it first, with a mark
// that is taken away after: a server that dies in between leaves the mark.
func (s *Server) logGrade(ctx context.Context, g sandbox.Grade) error {
	if !g.Unlogged {
		return nil
	}
	if s.steps.logs.Load() != nil {
		s.runTurn.Lock() // so that the run is not deleted meanwhile: its log would begin anew
		_, err := s.store.GetRun(ctx, g.Run)
		if err == nil {
			var r opened
			if r, err = s.stepsOf(g.Tenant, g.Run); err == nil {
				r.append(s, gradeOver, stepKey{sandbox: g.Spec.Sandbox}, loggedGrade(g))
			}
		}
		s.runTurn.Unlock()
		if err != nil && !errors.Is(err, sandbox.ErrNoRun) {
			return err
		}
	}
	_, err := s.store.UpdateGrade(ctx, g.ID, func(g *sandbox.Grade) error { g.Unlogged = false; return nil })
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil // its tenant is gone
	}
	return err
}

// maxLoggedTests is what a record has of the messages of tests, and of tests: the grade
// itself has all of them.
const (
	maxLoggedTests   = 10_000
	maxLoggedMessage = 256
	maxLoggedVerdict = 4 << 20
)

// loggedGrade is what of a grade goes into the log, where a record has 8 MiB at most.
func loggedGrade(g sandbox.Grade) sandbox.Grade {
	g.Unlogged, g.Hash = false, ""
	g.Spec = sandbox.GradeSpec{Sandbox: g.Spec.Sandbox, Results: g.Spec.Results}
	v := &g.Verdict
	v.Tests = append([]sandbox.TestResult(nil), v.Tests[:min(len(v.Tests), maxLoggedTests)]...)
	for i := range v.Tests {
		t := &v.Tests[i]
		t.ID, t.Message = clipped(t.ID), clipped(t.Message)
	}
	v.Findings = append([]sandbox.Finding(nil), v.Findings...)
	for i := range v.Findings {
		v.Findings[i].Path, v.Findings[i].Detail = clipped(v.Findings[i].Path), clipped(v.Findings[i].Detail)
	}
	// Escapes of JSON make up to six bytes of one. The reward must be there.
	if b, err := json.Marshal(v); err != nil || len(b) > maxLoggedVerdict {
		v.Tests, v.Findings, v.Log = nil, nil, ""
	}
	return g
}

func clipped(s string) string {
	if len(s) <= maxLoggedMessage {
		return s
	}
	return strings.ToValidUTF8(s[:maxLoggedMessage], "") + "…"
}

// logGrades makes up for verdicts that a server which died had no time to log.
func (s *Server) logGrades(ctx context.Context) error {
	for {
		page, _, err := s.store.ListGrades(ctx, store.GradeFilter{Unlogged: true, PageSize: maxPage})
		if err != nil || len(page) == 0 {
			return err
		}
		for _, g := range page {
			if err := s.logGrade(ctx, g); err != nil {
				return err
			}
		}
	}
}
