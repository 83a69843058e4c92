package server

import (
	"context"
	"errors"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// call is one operation under way. Every exported operation of a Server begins
// with begin and defers end, so what the table says of it holds in every dialect:
//
//	ctx, call, err := s.begin(ctx, "sandbox.reset", about("id", id))
//	if err != nil {
//		return out, err
//	}
//	defer call.end(&err)
type call struct {
	s       *Server
	ctx     context.Context // the operation's; ends with the caller's, with its key, or when a drain cuts calls off
	op      Operation
	rule    rule
	began   time.Time
	things  []thing
	detail  string // of what was done to a sandbox from outside
	file    *fileChange
	noted   bool // in the audit log, as begun
	open    *openCall
	release func()
}

// thing is something an operation is about, for the audit log: an id or a name,
// never content.
type thing struct{ noun, value string }

// about names a thing.
func about(noun, value string) thing { return thing{noun, value} }

type callContext struct{}

// callOf is the operation that a context is of; nil = none.
func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callContext{}).(*call)
	return c
}

// begin checks that the caller of ctx may do an operation, and counts it among
// those under way. The context it returns is the operation's own.
func (s *Server) begin(ctx context.Context, op Operation, things ...thing) (context.Context, *call, error) {
	if err := s.Permit(ctx, op); err != nil {
		return ctx, nil, err
	}
	c := &call{s: s, op: op, rule: operations[op], began: time.Now(), things: things}
	ctx, c.open, c.release = s.calls.enter(ctx, callerOf(ctx).key, s.cfg.Clock())
	c.ctx = context.WithValue(ctx, callContext{}, c)
	if c.rule.new && s.calls.isDraining() {
		var err error = stopping()
		c.end(&err)
		return c.ctx, nil, err
	}
	return c.ctx, c, nil
}

// Permit says whether the caller of ctx may do an operation at all. Every
// operation asks by itself; a dialect asks before it reads a long request. A
// refusal is in the audit log.
func (s *Server) Permit(ctx context.Context, op Operation) error {
	err := operations[op].allows(callerOf(ctx).key, string(op)) // of an unknown one: the role "", which nobody has
	if err != nil {
		err = sandbox.WithOp("auth", err)
		s.audit.note(ctx, op, nil, err)
	}
	return err
}

// May is what Permit would say, without a word in the audit log: whether to offer
// somebody what they may ask for later.
func (s *Server) May(ctx context.Context, op Operation) bool {
	return operations[op].allows(callerOf(ctx).key, string(op)) == nil
}

// needs refuses what is outside the key's scopes of what a request names.
func (c *call) needs(parts ...part) error {
	return allowsAll(callerOf(c.ctx).key, string(c.op), parts)
}

// concerns adds what an operation turned out to be about.
func (c *call) concerns(noun, value string) { c.things = append(c.things, thing{noun, value}) }

// begun is for streams, which may last for days: they are in the audit log once
// they begin to answer, and again if they then fail.
func (c *call) begun() {
	if !c.noted && c.rule.audit != never {
		c.noted = true
		c.s.audit.note(c.ctx, c.op, c.things, nil)
	}
}

// onFirst is a sink that has the call begun with what it is given first.
func (c *call) onFirst(sink ProcessSink) ProcessSink {
	return func(evs []sandbox.ProcessEvent, flush bool) error {
		c.begun()
		return sink(evs, flush)
	}
}

// end is deferred by every operation. It makes an error of a panic, says in the
// error which operation failed and why the server ended it, if it did, and writes
// what came of it to the log and the audit log.
func (c *call) end(err *error) {
	if p := recover(); p != nil {
		c.s.log.Error("panic in an operation", "op", c.op, "panic", p, "stack", string(debug.Stack()))
		*err = &sandbox.Error{Class: sandbox.Internal, Msg: "the server hit a defect; its log has the stack"}
	}
	defer c.release()
	if *err == nil && outside[c.op] {
		c.noteOutside()
	}
	logCall(c.ctx, c.s.log, c.op, c.began, *err)
	*err = outcome(c.ctx, c.op, *err)
	if c.rule.audit != never && (!c.noted || *err != nil) {
		c.s.audit.note(c.ctx, c.op, c.things, *err)
	}
}

// quotaOf is a tenant's quota, for an operation that says in the table that it
// takes from that one. An operation that does not is a defect, which the first test
// of it finds.
func (s *Server) quotaOf(ctx context.Context, tenant string, from quotas) (sandbox.Quota, error) {
	if c := callOf(ctx); c != nil && c.rule.takes&from == 0 {
		return sandbox.Quota{}, sandbox.Errorf(sandbox.Internal, "server.quota", "%s takes from a quota, and the table does not say so", c.op)
	}
	return s.quotas.of(ctx, tenant)
}

// outcome is the error a caller is told: the reason its context ended, if the
// server ended it, and otherwise what the operation said, with its name.
func outcome(ctx context.Context, op Operation, err error) error {
	var cause *sandbox.Error
	if err != nil && ctx.Err() != nil && errors.As(context.Cause(ctx), &cause) {
		err = cause
	}
	return sandbox.WithOp(string(op), err)
}

func logCall(ctx context.Context, log *slog.Logger, op Operation, began time.Time, err error) {
	if sandbox.ClassOf(err) == sandbox.Internal && ctx.Err() == nil {
		log.Error("a call failed by our fault", "op", op, "err", err)
		return
	}
	if log.Enabled(ctx, slog.LevelDebug) {
		log.Debug("call", "op", op, "took", time.Since(began), "key", callerOf(ctx).key.ID, "err", err)
	}
}
