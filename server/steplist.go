package server

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// count is how many steps of a run have ended, if this process knows.
func (b *stepBook) count(run string) int64 {
	b.mu.Lock()
	r := b.mu.runs[run]
	b.mu.Unlock()
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.ended
}

// StepFilter chooses steps of a run.
type StepFilter struct {
	Run      string // id or name
	Cursor   string // "" = from the beginning
	PageSize int    // 0 = 100
	Sandbox  string
	Group    string
	Episode  string
	Running  bool // those that have not ended too
}

func (f StepFilter) takes(st sandbox.Step) bool {
	return (f.Sandbox == "" || st.Sandbox == f.Sandbox) && (f.Group == "" || st.Group == f.Group) && (f.Episode == "" || st.Episode == f.Episode)
}

// StepPage is steps that have ended, in the order of their ends.
type StepPage struct {
	Steps   []sandbox.Step
	After   []string // cursor after each
	Next    string   // after all that was looked at
	More    bool     // there are more now
	Running []sandbox.Step
}

// scanMost bounds how much of a log one page goes through where a filter leaves
// most of it out: a caller then asks again from where it got to.
const scanMost = 50_000

// ListSteps is a page of the steps of a run.
func (s *Server) ListSteps(ctx context.Context, f StepFilter) (page StepPage, err error) {
	ctx, call, err := s.begin(ctx, "run.list_steps", about("run", f.Run))
	if err != nil {
		return page, err
	}
	defer call.end(&err)
	if err := validPage(f.PageSize); err != nil {
		return page, err
	}
	r, from, err := s.readSteps(ctx, f.Run, f.Cursor)
	if err != nil {
		return page, err
	}
	size, seen := cmp.Or(f.PageSize, 100), 0
	after, err := r.each(from, func(st sandbox.Step, after int64) bool {
		if f.takes(st) {
			page.Steps, page.After = append(page.Steps, st), append(page.After, cursor(r.run, after))
		}
		seen++
		return len(page.Steps) < size && seen < scanMost
	})
	if err != nil {
		return page, err
	}
	end, _ := r.log.End()
	page.Next, page.More = cursor(r.run, after), after < end
	if f.Running {
		for _, st := range r.running() {
			if f.takes(st) {
				page.Running = append(page.Running, st)
			}
		}
	}
	return page, nil
}

// FollowSteps tells of each step that ends, from a cursor on, until the run is
// over, and now and then of none: the caller is there, and nothing happens.
func (s *Server) FollowSteps(ctx context.Context, run, from string, tell func(st *sandbox.Step, cursor string) error) (err error) {
	ctx, call, err := s.begin(ctx, "run.follow_steps", about("run", run))
	if err != nil {
		return err
	}
	defer call.end(&err)
	r, at, err := s.readSteps(ctx, run, from)
	if err != nil {
		return err
	}
	quiet := time.NewTicker(s.cfg.KeepAlive)
	defer quiet.Stop()
	// A run that ends tells nobody; it is looked at.
	look := time.NewTicker(time.Second)
	defer look.Stop()
	for {
		_, changed := r.log.End()
		lasts := s.leases.seeRun(ctx, r.run, func(*heldLease) {}) || r.busy() > 0 // before reading, so that its last steps are read
		var told error
		if at, err = r.each(at, func(st sandbox.Step, after int64) bool {
			told = tell(&st, cursor(r.run, after))
			return told == nil
		}); err != nil || told != nil {
			return cmp.Or(told, err)
		}
		if !lasts {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-look.C:
		case <-quiet.C:
			if err := tell(nil, cursor(r.run, at)); err != nil {
				return err
			}
		}
	}
}

func (s *Server) readSteps(ctx context.Context, ref, from string) (opened, int64, error) {
	run, err := s.run(ctx, ref)
	if err != nil {
		return opened{}, 0, err
	}
	r, err := s.stepsOf(run.Tenant, run.ID)
	if err != nil {
		return r, 0, err
	}
	at, err := position(run.ID, from)
	return r, at, err
}

// RunCursor names a place in the log of a run.
func RunCursor(run string, at int64) string { return cursor(run, at) }

func cursor(run string, at int64) string { return run + "." + strconv.FormatInt(at, 10) }

func position(run, cursor string) (int64, error) {
	if cursor == "" {
		return 0, nil
	}
	of, at, ok := strings.Cut(cursor, ".")
	n, err := strconv.ParseInt(at, 10, 64)
	if !ok || of != run || err != nil || n < 0 {
		return 0, sandbox.InvalidField("cursor", "it is not one of this run; the next_cursor of an answer is accepted, or none for the beginning")
	}
	return n, nil
}

// each calls f with the steps that ended after a place in the log, until it says
// false, and returns the place it came to.
func (r opened) each(from int64, f func(st sandbox.Step, after int64) bool) (int64, error) {
	var bad error
	at, err := r.log.Read(from, func(record []byte, after int64) bool {
		kind, _, _, body, err := decodeRecord(record)
		if bad = err; bad != nil || kind != stepEnded {
			return bad == nil
		}
		var st sandbox.Step
		if bad = json.Unmarshal(body, &st); bad != nil {
			return false
		}
		return f(st, after)
	})
	return at, cmp.Or(err, bad)
}

// running is the steps that have begun and not ended, in the order of their starts.
func (r *runSteps) running() (out []sandbox.Step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, st := range r.mu.open {
		st.mu.Lock()
		one := st.mu.Step
		one.BytesOut, one.Stdout, one.Stderr = st.mu.offset, st.mu.out.Output(), st.mu.errOut.Output()
		st.mu.Unlock()
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b sandbox.Step) int { return cmp.Compare(a.Seq, b.Seq) })
	return out
}

func (r *runSteps) busy() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.mu.open)
}
