package server

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
	"github.com/cove-sandbox/cove/wire"
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

	mu      sync.Mutex
	pending []sandbox.AuditEntry
	once    map[string]struct{} // what was noted of oncePerProcess
	changed chan struct{}       // closed and replaced when entries were written
	nudge   chan struct{}       // buffered

	writing sync.Mutex // one writer at a time, so that entries keep their order
}

const (
	auditDelay = 200 * time.Millisecond
	auditBatch = 512    // entries of one transaction
	auditMost  = 16_384 // that wait in memory before calls do
	auditOnce  = 4096   // processes whose input is remembered as noted
)

// The log only grows, so nothing that code inside can have a client do is an
// entry each time. Reading is none; of the rest there are these:
var (
	// answering is what a client does because code inside asked. That it serves
	// at all was its decision, and is noted with its beginning and its end.
	answering = map[string]bool{"callback.answer": true}
	// beating says that a client is still there, every few seconds for days.
	beating = map[string]bool{"lease.heartbeat": true}
	// oncePerProcess is noted when a key first does it to a process. A terminal
	// answers by itself when it is asked where its cursor is, and takes the size
	// it is told.
	oncePerProcess = map[string]bool{"process.send_input": true, "process.resize": true}
)

func (a *auditor) init(st store.Audit, clock func() time.Time, log *slog.Logger) {
	a.store, a.clock, a.log, a.once = st, clock, log, map[string]struct{}{}
	a.changed, a.nudge = make(chan struct{}), make(chan struct{}, 1)
}

// note adds an entry. Things are ids and names; nothing of a request's content,
// environment or secret ever gets here.
func (a *auditor) note(ctx context.Context, op string, things []string, err error) {
	if beating[op] && err == nil {
		return
	}
	c := callerOf(ctx)
	e := sandbox.AuditEntry{At: a.clock().UTC(), Tenant: c.key.Tenant, Key: c.key.ID, KeyName: c.key.Name, Remote: c.remote, Op: op, Things: things, Outcome: "ok"}
	if err != nil {
		told, _ := wire.ErrorDetail(outcome(ctx, op, err)) // a caller that left is no defect
		e.Outcome = told.GetCode()
	}
	a.mu.Lock()
	if oncePerProcess[op] && !a.firstLocked(e) {
		a.mu.Unlock()
		return
	}
	a.pending = append(a.pending, e)
	full := len(a.pending) >= auditMost
	a.mu.Unlock()
	if full || strings.HasPrefix(op, "key.") || strings.HasPrefix(op, "tenant.") {
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
	if _, seen := a.once[what]; seen {
		return false
	}
	if len(a.once) >= auditOnce {
		clear(a.once) // some are noted again
	}
	a.once[what] = struct{}{}
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
		n := min(len(a.pending), auditBatch)
		batch := a.pending[:n:n]
		a.mu.Unlock()
		if n == 0 {
			return true
		}
		if err := a.store.AppendAudit(asServer(ctx), batch); err != nil {
			a.log.Error("cannot write the audit log; it will be tried again", "entries", n, "err", err)
			return false
		}
		a.mu.Lock()
		a.pending = a.pending[n:]
		close(a.changed)
		a.changed = make(chan struct{})
		a.mu.Unlock()
	}
}

func (a *auditor) watch() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
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

// Audit streams the log. What is not written yet is written first, so that a
// caller sees what it did before.
func (s systemService) Audit(ctx context.Context, r *connect.Request[covev1.AuditRequest], out *connect.ServerStream[covev1.AuditEntry]) error {
	const page = 500
	if r.Msg.All {
		if !isRoot(ctx) {
			return notRoot("all")
		}
		ctx = asServer(ctx)
	}
	if r.Msg.After < 0 {
		return sandbox.InvalidField("after", "%d is not accepted; a sequence number is", r.Msg.After)
	}
	var since time.Time
	if r.Msg.Since != nil {
		since = r.Msg.Since.AsTime()
	}
	s.audit.flush(ctx)
	if r.Msg.Follow { // the caller learns that it is being served before there is anything to say
		if err := out.Conn().Send(nil); err != nil {
			return err
		}
	}
	for after := r.Msg.After; ; {
		changed := s.audit.watch()
		entries, err := s.audit.store.ListAudit(ctx, after, since, page)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := out.Send(protoAudit(e)); err != nil {
				return err
			}
			after = e.Seq
		}
		switch {
		case len(entries) == page:
			continue
		case !r.Msg.Follow:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func protoAudit(e sandbox.AuditEntry) *covev1.AuditEntry {
	return &covev1.AuditEntry{Seq: e.Seq, At: timestamppb.New(e.At), Tenant: e.Tenant, Key: e.Key, KeyName: e.KeyName, Remote: e.Remote,
		Op: e.Op, Things: e.Things, Outcome: e.Outcome, Prev: e.Prev, Hash: e.Hash}
}

// thingFields are the fields of a request or response that name something.
// Everything else of a message may be content and is never looked at.
var thingFields = map[protoreflect.Name]string{
	"id": "", "sandbox_id": "sandbox", "exec_id": "exec", "name": "name", "new_name": "name", "reference": "image", "tenant": "tenant", "role": "role",
	"sandbox": "sandbox", "lease": "lease", "snapshot": "snapshot", "template": "template", "volume": "volume", "key": "key", "image": "image", "registry": "registry", "ids": "",
}

// maxThings and maxThing bound what one entry holds of what a caller wrote.
const (
	maxThings = 32
	maxThing  = 128
)

// thingsOf is what a message names: its own fields and the ids of what it holds.
func thingsOf(m any) (things []string) {
	msg, ok := m.(proto.Message)
	if !ok {
		return nil
	}
	add := func(noun, value string) {
		if value == "" || len(things) >= maxThings {
			return
		}
		if noun == "" {
			noun = "id"
		}
		things = append(things, noun+":"+clip(value))
	}
	msg.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		noun, known := thingFields[f.Name()]
		switch {
		case !known:
		case f.Kind() == protoreflect.StringKind && f.IsList():
			for i := range v.List().Len() {
				add(noun, v.List().Get(i).String())
			}
		case f.Kind() == protoreflect.StringKind && !f.IsMap():
			add(noun, v.String())
		case f.Kind() == protoreflect.MessageKind && !f.IsList() && !f.IsMap():
			inner := v.Message()
			if id := inner.Descriptor().Fields().ByName("id"); id != nil && id.Kind() == protoreflect.StringKind {
				add(noun, inner.Get(id).String())
			}
		}
		return true
	})
	return things
}

func clip(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > maxThing {
		s = strings.ToValidUTF8(s[:maxThing], "") + "…"
	}
	return s
}

// thingsOfRoute is what a plain request names.
func thingsOfRoute(op string, r *http.Request) (things []string) {
	if id := r.PathValue("id"); id != "" {
		things = append(things, "id:"+clip(id))
	}
	if exec := r.PathValue("exec"); exec != "" {
		things = append(things, "exec:"+clip(exec))
	}
	if name := r.URL.Query().Get("name"); name != "" {
		things = append(things, "name:"+clip(name))
	}
	return things
}

// seenConn keeps what the first message of a stream names, says when the first
// answer is sent, and lets no message through that check refuses.
type seenConn struct {
	connect.StreamingHandlerConn
	check  func(m any) error
	begun  func() // may be nil
	things []string
	seen   bool
	sent   bool
}

func (c *seenConn) Send(m any) error {
	if !c.sent {
		if c.sent = true; c.begun != nil {
			c.begun()
		}
	}
	return c.StreamingHandlerConn.Send(m)
}

func (c *seenConn) Receive(m any) error {
	err := c.StreamingHandlerConn.Receive(m)
	if err == nil && !c.seen {
		c.seen, c.things = true, thingsOf(m)
	}
	if err == nil {
		err = c.check(m)
	}
	return err
}
