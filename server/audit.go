package server

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/internal/notify"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// auditor writes down who did what. Entries are in the store, beside what they
// are about: one backup has both, the database's own transactions keep the chain
// whole, and a tenant reads its own by an index. A file of its own would be one
// more thing to rotate, to back up and to lose.
//
// Entries of ordinary calls are written together a moment later: an fsync per
// exec would cost as much as the exec. Those about keys and tenants are written
// before the call returns. A server that is killed loses at most auditDelay of
// the former. When the store cannot keep up, calls wait: no entry is dropped.
type auditor struct {
	store store.Audit
	clock func() time.Time
	log   *slog.Logger

	nudge chan struct{} // buffered

	mu struct {
		sync.Mutex
		pending []sandbox.AuditEntry
		once    map[string]struct{} // what was noted of oncePerProcess operations
		changed notify.Change       // entries were written
	}

	writing sync.Mutex // one writer at a time, so that entries keep their order
}

const (
	auditDelay = 200 * time.Millisecond
	auditBatch = 512    // entries of one transaction
	auditMost  = 16_384 // that wait in memory before calls do
	auditOnce  = 4096   // processes whose input is remembered as noted
)

func (a *auditor) init(st store.Audit, clock func() time.Time, log *slog.Logger) {
	a.store, a.clock, a.log, a.mu.once = st, clock, log, map[string]struct{}{}
	a.nudge = make(chan struct{}, 1)
}

// note adds an entry. Things are ids and names; nothing of a request's content,
// environment or secret ever gets here.
func (a *auditor) note(ctx context.Context, op Operation, things []thing, err error) {
	when := operations[op].audit
	if when == ifRefused && err == nil {
		return
	}
	c := callerOf(ctx)
	e := sandbox.AuditEntry{At: a.clock().UTC(), Tenant: c.key.Tenant, Key: c.key.ID, KeyName: c.key.Name, Remote: c.remote, Op: string(op), Outcome: "ok"}
	for _, t := range things {
		if t.value != "" && len(e.Things) < maxThings {
			e.Things = append(e.Things, t.noun+":"+clip(t.value))
		}
	}
	if err != nil {
		e.Outcome = string(sandbox.AsError(outcome(ctx, op, err)).Class) // a caller that left is no defect
	}
	a.mu.Lock()
	if when == oncePerProcess && !a.firstLocked(e) {
		a.mu.Unlock()
		return
	}
	a.mu.pending = append(a.mu.pending, e)
	full := len(a.mu.pending) >= auditMost
	a.mu.Unlock()
	if full || when == durably {
		a.flush(context.WithoutCancel(ctx))
		return
	}
	select {
	case a.nudge <- struct{}{}:
	default:
	}
}

// firstLocked says whether an entry says anything new.
func (a *auditor) firstLocked(e sandbox.AuditEntry) bool {
	things := slices.Sorted(slices.Values(e.Things)) // a message's fields come in any order
	what := strings.Join(append(things, e.Op, e.Key, e.Remote, e.Outcome), " ")
	if _, seen := a.mu.once[what]; seen {
		return false
	}
	if len(a.mu.once) >= auditOnce {
		clear(a.mu.once) // some are noted again
	}
	a.mu.once[what] = struct{}{}
	return true
}

// run writes entries until ctx ends.
func (a *auditor) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.nudge:
		}
		pause := time.NewTimer(auditDelay)
		select {
		case <-ctx.Done():
			pause.Stop()
			return
		case <-pause.C:
		}
		if !a.flush(ctx) {
			select { // the store is ill; the next look is a moment away
			case a.nudge <- struct{}{}:
			default:
			}
		}
	}
}

// flush writes what there is and says whether it is written.
func (a *auditor) flush(ctx context.Context) bool {
	a.writing.Lock()
	defer a.writing.Unlock()
	for {
		a.mu.Lock()
		n := min(len(a.mu.pending), auditBatch)
		batch := a.mu.pending[:n:n]
		a.mu.Unlock()
		if n == 0 {
			return true
		}
		if err := a.store.AppendAudit(asServer(ctx), batch); err != nil {
			a.log.Error("cannot write the audit log; it will be tried again", "entries", n, "err", err)
			return false
		}
		a.mu.Lock()
		a.mu.pending = a.mu.pending[n:]
		a.mu.changed.Tell()
		a.mu.Unlock()
	}
}

func (a *auditor) watch() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.changed.Next()
}

// forget drops entries that are older than the retention.
func (a *auditor) forget(ctx context.Context, retention time.Duration) {
	const batch = 5000
	for {
		n, err := a.store.ForgetAudit(asServer(ctx), a.clock().Add(-retention), batch)
		if err != nil && ctx.Err() == nil {
			a.log.Warn("cannot drop old audit entries", "err", err)
		}
		if err != nil || n < batch {
			return
		}
	}
}

// AuditQuery says which entries of the audit log are asked for.
type AuditQuery struct {
	All    bool      // of every tenant
	After  int64     // a sequence number
	Since  time.Time // zero = the beginning
	Follow bool      // those to come too
}

// ReadAudit gives the log to a sink, some entries at a time. What is not written
// yet is written first, so that a caller sees what it did before. A follower is
// given none at once: it learns that it is served before there is anything to say.
func (s *Server) ReadAudit(ctx context.Context, q AuditQuery, sink func([]sandbox.AuditEntry) error) (err error) {
	ctx, call, err := s.begin(ctx, "system.audit")
	if err != nil {
		return err
	}
	defer call.end(&err)
	const page = 500
	if q.All {
		if !isRoot(ctx) {
			return notRoot("all")
		}
		ctx = asServer(ctx)
	}
	if q.After < 0 {
		return sandbox.InvalidField("after", "%d is not accepted; a sequence number is", q.After)
	}
	s.audit.flush(ctx)
	if q.Follow {
		if err := sink(nil); err != nil {
			return err
		}
	}
	for after := q.After; ; {
		changed := s.audit.watch()
		entries, err := s.audit.store.ListAudit(ctx, after, q.Since, page)
		if err != nil {
			return err
		}
		if len(entries) > 0 {
			if err := sink(entries); err != nil {
				return err
			}
			after = entries[len(entries)-1].Seq
		}
		switch {
		case len(entries) == page:
			continue
		case !q.Follow:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// maxThings and maxThing bound what one entry holds of what a caller wrote.
const (
	maxThings = 32
	maxThing  = 128
)

func clip(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > maxThing {
		s = strings.ToValidUTF8(s[:maxThing], "") + "…"
	}
	return s
}
