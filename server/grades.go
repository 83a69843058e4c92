package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// gradeBook knows the grades under way.
type gradeBook struct {
	mu struct {
		sync.Mutex
		running map[string]*grading // by grade
	}
}

func (b *gradeBook) init() {
	b.mu.running = map[string]*grading{}
}

// enter makes a grade known, unless one of the same id runs: then that is it.
func (b *gradeBook) enter(g *grading) (other *grading) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if other = b.mu.running[g.grade.ID]; other == nil {
		b.mu.running[g.grade.ID] = g
	}
	return other
}

func (b *gradeBook) leave(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.mu.running, id)
}

func (b *gradeBook) find(id string) *grading {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.running[id]
}

// GradeRequest asks for a grade. Key makes it idempotent: asked again, it is the
// same grade, unless that failed by a fault of ours. Then it is tried again.
type GradeRequest struct {
	Spec sandbox.GradeSpec
	Key  string
}

// CreateGrade begins a grade and returns while it is under way. It goes on whether
// or not its caller is there.
func (s *Server) CreateGrade(ctx context.Context, r GradeRequest) (g sandbox.Grade, err error) {
	ctx, call, err := s.begin(ctx, "grade.create", about("sandbox", r.Spec.Sandbox))
	if err != nil {
		return g, err
	}
	defer call.end(&err)
	hash := gradeHash(r.Spec)
	spec := r.Spec.WithDefaults()
	if err := firstError(call.needs(partsOfGrade(spec)...), sandbox.ValidateIdempotencyKey("idempotency_key", r.Key), spec.Validate(s.cfg.Limits)); err != nil {
		return g, err
	}
	tenant := store.ScopeOf(ctx).Tenant()
	g = sandbox.Grade{ID: sandbox.NewID(s.cfg.Rand), Tenant: tenant, Spec: spec, Hash: hash, State: sandbox.Grading, CreatedAt: s.cfg.Clock().UTC()}
	again := false
	if r.Key != "" {
		sum := sha256.Sum256([]byte("grade\x00" + tenant + "\x00" + r.Key))
		g.ID = sandbox.NewID(bytes.NewReader(sum[:]))
		old, err := s.store.GetGrade(ctx, g.ID)
		switch {
		case errors.Is(err, sandbox.ErrNotFound):
		case err != nil:
			return g, err
		case old.Hash != hash:
			return g, &sandbox.Error{Class: sandbox.AlreadyExists, Field: "idempotency_key", Msg: "'" + r.Key + "' was used for another grade",
				Hint: "repeat the first request exactly, or choose a new key"}
		case old.State != sandbox.GradeInfra:
			return old, nil
		default:
			again = true
		}
	}
	call.concerns("grade", g.ID)
	return s.beginGrade(ctx, g, again)
}

// beginGrade looks whether a grade can be made at all and has it made. Its record
// is written beside the first of the work.
func (s *Server) beginGrade(ctx context.Context, g sandbox.Grade, again bool) (sandbox.Grade, error) {
	base, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	run := &grading{Server: s, grade: g, cancel: stop, recorded: make(chan struct{}), done: make(chan struct{})}
	run.phases.began = time.Now()
	if err := run.look(ctx); err != nil {
		stop(nil)
		return g, err
	}
	g.Rollout, g.Reset = run.sb.Spec.Rollout, run.sb.Episode
	run.grade = g
	if other := s.grades.enter(run); other != nil {
		stop(nil)
		run.release()
		if other.grade.Hash != g.Hash {
			return g, &sandbox.Error{Class: sandbox.Conflict, Field: "idempotency_key", Msg: "another grade with this key is under way", Hint: "choose a new key"}
		}
		return other.grade, nil
	}
	work, _, leave := s.calls.enter(base, callerOf(ctx).key, s.cfg.Clock())
	go func() {
		defer leave()
		defer stop(nil)
		run.run(work)
	}()
	var err error
	if again {
		_, err = s.store.UpdateGrade(ctx, g.ID, func(old *sandbox.Grade) error {
			old.State, old.Verdict, old.FinishedAt, old.Spec = sandbox.Grading, sandbox.Verdict{}, time.Time{}, g.Spec
			old.Rollout, old.Reset = g.Rollout, g.Reset
			return nil
		})
	} else {
		err = s.store.CreateGrade(ctx, g)
	}
	if err != nil {
		run.unrecorded = true
		stop(nil)
	}
	run.phases.reached("recorded")
	close(run.recorded)
	if errors.Is(err, sandbox.ErrAlreadyExists) { // one with the same key was just made
		return s.store.GetGrade(ctx, g.ID)
	}
	return g, err
}

func gradeHash(spec sandbox.GradeSpec) string {
	b, err := json.Marshal(spec)
	if err != nil {
		panic(err) // strings and numbers only
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// partsOfGrade is what a grade needs besides the right to grade: it runs a command
// over files of a sandbox.
func partsOfGrade(g sandbox.GradeSpec) []part {
	ps := []part{writes("command", "processes"), reads("artifacts", "files")}
	if g.Tests != "" {
		ps = append(ps, reads("tests", "snapshots"))
	}
	if g.Image != "" {
		ps = append(ps, reads("image", "images"))
	}
	if g.Snapshot != "" {
		ps = append(ps, reads("snapshot", "snapshots"))
	}
	if g.Stop {
		ps = append(ps, writes("stop", "sandboxes"))
	}
	return ps
}

// GetGrade finds a grade, under way or not.
func (s *Server) GetGrade(ctx context.Context, id string) (g sandbox.Grade, err error) {
	ctx, call, err := s.begin(ctx, "grade.get", about("id", id))
	if err != nil {
		return g, err
	}
	defer call.end(&err)
	if err := validGradeID(id); err != nil {
		return g, err
	}
	return s.store.GetGrade(ctx, id)
}

// errGradeCanceled is why a grade ends that somebody cancels.
var errGradeCanceled = &sandbox.Error{Class: sandbox.Canceled, Op: "grade", Msg: "the grade was canceled"}

// CancelGrade ends a grade that is under way, and returns when nothing of it is
// left. One that has ended stays as it is.
func (s *Server) CancelGrade(ctx context.Context, id string) (g sandbox.Grade, err error) {
	ctx, call, err := s.begin(ctx, "grade.cancel", about("id", id))
	if err != nil {
		return g, err
	}
	defer call.end(&err)
	if err := validGradeID(id); err != nil {
		return g, err
	}
	if g, err = s.store.GetGrade(ctx, id); err != nil || g.State != sandbox.Grading {
		return g, err
	}
	if run := s.grades.find(id); run != nil {
		run.cancel(errGradeCanceled)
		select {
		case <-run.done:
		case <-ctx.Done():
			return g, ctx.Err()
		}
	}
	return s.store.GetGrade(ctx, id)
}

// maxGradeWait is the longest one WaitGrade lasts.
const maxGradeWait = time.Hour

// WaitGrade returns a grade when it has ended, or after so long as it is; 0 = a
// minute.
func (s *Server) WaitGrade(ctx context.Context, id string, most time.Duration) (g sandbox.Grade, err error) {
	ctx, call, err := s.begin(ctx, "grade.wait", about("id", id))
	if err != nil {
		return g, err
	}
	defer call.end(&err)
	if most == 0 {
		most = time.Minute
	}
	if most < 0 || most > maxGradeWait {
		return g, sandbox.InvalidField("max_wait", "%s is not accepted; up to %s is", most, maxGradeWait)
	}
	if err := validGradeID(id); err != nil {
		return g, err
	}
	if g, err = s.store.GetGrade(ctx, id); err != nil || g.State != sandbox.Grading {
		return g, err
	}
	run := s.grades.find(id)
	if run == nil { // it has just ended
		return s.store.GetGrade(ctx, id)
	}
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-run.done:
	case <-timer.C:
	case <-s.calls.drained():
	case <-ctx.Done():
		return g, ctx.Err()
	}
	return s.store.GetGrade(ctx, id)
}

func validGradeID(id string) error {
	if !sandbox.ValidID(id) {
		return sandbox.InvalidField("id", "%.80q is no grade id; lower-case letters and digits are accepted", id)
	}
	return nil
}

// ListGrades lists one page, and where the next one begins: "" after the last.
func (s *Server) ListGrades(ctx context.Context, f store.GradeFilter) (page []sandbox.Grade, next string, err error) {
	ctx, call, err := s.begin(ctx, "grade.list", about("sandbox", f.Sandbox))
	if err != nil {
		return nil, "", err
	}
	defer call.end(&err)
	err = validPage(f.PageSize)
	if err == nil && f.Sandbox != "" {
		err = validID("sandbox", f.Sandbox)
	}
	if err == nil && f.State != "" && !slices.Contains(sandbox.GradeStates, f.State) {
		err = sandbox.InvalidField("state", "%.40q is no state of a grade; running, graded, timeout, oom, grader_failed, infra and canceled are accepted", f.State)
	}
	if err != nil {
		return nil, "", err
	}
	page, next, err = s.store.ListGrades(ctx, f)
	return page, next, wrongToken(f.PageToken, err)
}

// endGrades gives the grades that a server was at when it died their verdict:
// nobody knows what they would have come to.
func (s *Server) endGrades(ctx context.Context) error {
	for {
		page, _, err := s.store.ListGrades(ctx, store.GradeFilter{State: sandbox.Grading, PageSize: maxPage})
		if err != nil || len(page) == 0 {
			return err
		}
		err = inParallel(ctx, reconcileWidth, page, func(g sandbox.Grade) error {
			_, err := s.store.UpdateGrade(ctx, g.ID, func(g *sandbox.Grade) error {
				g.State, g.FinishedAt, g.Unlogged = sandbox.GradeInfra, s.cfg.Clock().UTC(), g.Run != ""
				g.Verdict = sandbox.Verdict{Reason: "the server ended while it graded", Error: &sandbox.Error{Class: sandbox.Unavailable, Op: "grade",
					Msg: "the server ended while it graded", Hint: "grade again; with the same idempotency key it is the same grade"}}
				return nil
			})
			return err
		})
		if err != nil {
			return err
		}
	}
}

// forgetGrades deletes verdicts that are older than what the audit log keeps.
func (s *Server) forgetGrades(ctx context.Context) {
	const batch = 500
	for {
		n, err := s.store.ForgetGrades(ctx, s.cfg.Clock().Add(-s.cfg.AuditRetention), batch)
		if err != nil && ctx.Err() == nil {
			s.log.Warn("cannot forget old grades", "err", err)
		}
		if err != nil || n < batch {
			return
		}
	}
}
