package server

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/store"
)

// Every exec in a sandbox of a run is a step. Its beginning is on record before
// the process is started, its end before the caller is told of it. In between
// somebody always follows it: who started it, and when that one has left, the
// server itself. A server that starts goes on with those that have begun and not
// ended.

// stepKey is of one exec: after a reset the same exec id is another's.
type stepKey struct{ sandbox, exec string }

func keyOf(sandbox string, reset int64, exec string) stepKey {
	return stepKey{sandbox, fmt.Sprintf("%d:%s", reset, exec)}
}

// step is one under way.
type step struct {
	of     opened
	resets uint64 // of the sandbox when it began, as endBook counts

	mu struct {
		sync.Mutex
		sandbox.Step
		followers    int
		unknownSince time.Time // when the guest was first asked for it and knew nothing
		offset       int64     // of the output that is captured
		out, errOut  sandbox.StepCapture
		started      bool
		over         bool

		sent   sandbox.StepInput      // what was written to it since it began
		net    *sandbox.NetworkStatus // before it, if its run wants to know
		marked bool                   // its files before it are known
	}
}

type lateEnd struct {
	record []byte
	key    stepKey
}

// Kinds of records. Each begins with its kind, seq, sandbox and exec id, so that
// a log is gone through without reading what is in it.
const (
	stepBegun byte = 'b'
	stepEnded byte = 'e'
	stepVoid  byte = 'v' // it was begun and never ran
	usedUp    byte = 'u' // what a sandbox used, when it has ended

	episodeBegun byte = 'o' // what an episode began with
	doneOutside  byte = 'g' // something was done to its sandbox beside steps
)

func encodeRecord(kind byte, seq int64, key stepKey, body any) ([]byte, error) {
	b := append(make([]byte, 0, 512), kind)
	b = binary.LittleEndian.AppendUint64(b, uint64(seq))
	for _, s := range []string{key.sandbox, key.exec} {
		b = append(b, byte(len(s))) // ids have at most 128 bytes, and a number before them
		b = append(b, s...)
	}
	j, err := json.Marshal(body)
	return append(b, j...), err
}

func decodeRecord(b []byte) (kind byte, seq int64, key stepKey, body []byte, err error) {
	bad := &sandbox.Error{Class: sandbox.Corrupt, Op: "steps.read", Msg: "a record of a step makes no sense"}
	if len(b) < 10 {
		return 0, 0, key, nil, bad
	}
	kind, seq, b = b[0], int64(binary.LittleEndian.Uint64(b[1:])), b[9:]
	for _, s := range []*string{&key.sandbox, &key.exec} {
		if len(b) == 0 || len(b) < 1+int(b[0]) {
			return 0, 0, key, nil, bad
		}
		*s, b = string(b[1:1+b[0]]), b[1+b[0]:]
	}
	return kind, seq, key, b, nil
}

// outputRule is what steps of a run keep.
func (s *Server) outputRule(run string) (rule sandbox.OutputRule) {
	_ = s.leases.see(asServer(context.Background()), run, func(l *heldLease) {
		if l.run != nil {
			rule = l.run.Output
		}
	})
	return rule
}

// beginStep puts the beginning of an exec on record, if its sandbox is of a run. A
// second start of the same exec joins it while it runs, and is nothing (nil) after.
func (s *Server) beginStep(ctx context.Context, r StartRequest) (*step, error) {
	m, ok := s.members.get(r.Sandbox)
	if !ok || s.steps.logs.Load() == nil || !store.ScopeOf(ctx).Sees(m.tenant) {
		return nil, nil
	}
	of, err := s.stepsOf(m.tenant, m.Run)
	if err != nil {
		return nil, err
	}
	if err := firstError(s.admitStep(of), s.noteEpisode(ctx, of, r.Sandbox, m.reset)); err != nil {
		return nil, err
	}
	key := keyOf(r.Sandbox, m.reset, r.Process.ExecID)
	if !of.has(key, m.reset) {
		if err := s.ships.admit(ctx, of.tenant, of.run, s.cfg.ShipWait); err != nil {
			return nil, err
		}
	}
	rule := s.outputRule(m.Run) // by the leases, which nobody asks with a run's steps locked
	of.mu.Lock()
	defer of.mu.Unlock()
	if st := of.mu.open[key]; st != nil {
		st.join()
		return st, nil
	}
	box := of.boxLocked(r.Sandbox, m.reset)
	if _, known := box.known[key.exec]; known {
		return nil, nil
	}
	st := &step{of: of, resets: s.ends.resetCount(r.Sandbox)}
	args, command := sandbox.StepCommand(r.Process)
	seq := of.mu.last + 1
	st.mu.Step = sandbox.Step{ID: fmt.Sprintf("%s-%d", m.Run, seq), Seq: seq, Rollout: m.Rollout, Sandbox: r.Sandbox, Reset: m.reset, ExecID: r.Process.ExecID,
		Args: args, Command: command, Cwd: r.Process.Cwd, User: r.Process.User, StartedAt: s.cfg.Clock().UTC(), BytesIn: int64(len(r.Process.Input))}
	st.mu.out, st.mu.errOut, st.mu.followers = sandbox.NewStepCapture(rule), sandbox.NewStepCapture(rule), 1
	if err := s.keepInput(&st.mu.Step, m.tenant, r.Process); err != nil {
		return nil, err
	}
	record, err := encodeRecord(stepBegun, seq, key, &st.mu.Step)
	if err != nil {
		return nil, err
	}
	if _, err := of.log.Append(record); err != nil {
		return nil, err
	}
	of.mu.last = seq
	of.mu.open[key] = st
	box.add(key, seq)
	return st, nil
}

// admitStep refuses a step that there is no room to remember.
func (s *Server) admitStep(of opened) error {
	of.retryLate()
	of.mu.Lock()
	late := len(of.mu.late)
	of.mu.Unlock()
	if late > 0 {
		if err := of.log.Broken(); err != nil {
			return err
		}
	}
	n, err := s.steps.logs.Load().Bytes(of.tenant)
	if err == nil && n >= s.cfg.MaxStepBytes {
		err = &sandbox.Error{Class: sandbox.QuotaExceeded, Msg: "the steps on record of this tenant take " + sandbox.FormatSize(n) + ", as much as they may", RetryAfter: time.Minute,
			Hint: "delete runs that are not needed (cove runs rm), or keep less output: output=\"none\""}
	}
	return err
}

func (st *step) join() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.mu.followers++
}

// tap is a sink that has the step see what passes. The end is on record before
// whoever follows is told of it.
func (st *step) tap(s *Server, sink ProcessSink) ProcessSink {
	return func(evs []sandbox.ProcessEvent, flush bool) error {
		for _, ev := range evs {
			st.take(s, ev)
		}
		return sink(evs, flush)
	}
}

func (st *step) take(s *Server, ev sandbox.ProcessEvent) (over bool) {
	switch {
	case ev.Started != nil:
		st.mu.Lock()
		st.mu.started = true
		st.mu.Unlock()
	case ev.Output != nil:
		st.mu.Lock()
		st.captureLocked(*ev.Output)
		st.mu.Unlock()
	case ev.Lost != nil:
		st.mu.Lock()
		st.mu.offset = max(st.mu.offset, ev.Lost.To) // counted as dropped by the total
		st.mu.out.Lose()
		st.mu.errOut.Lose()
		st.mu.Unlock()
	case ev.End != nil:
		s.endStep(st, stepEnded, *ev.End)
		return true
	}
	return false
}

func (st *step) captureLocked(o sandbox.Output) {
	data := o.Data
	if seen := st.mu.offset - o.Offset; seen > 0 { // by another who follows it
		if seen >= int64(len(data)) {
			return
		}
		data = data[seen:]
	}
	st.mu.offset = o.Offset + int64(len(o.Data))
	if o.Stream == sandbox.Stderr {
		st.mu.errOut.Add(data)
	} else {
		st.mu.out.Add(data)
	}
}

// endStep puts an end on record, once. One that cannot be written is written
// later, and until then no other step begins; should the server die first, the next
// one asks the guest again.
func (s *Server) endStep(st *step, kind byte, end sandbox.ProcessEnd) {
	st.mu.Lock()
	if st.mu.over {
		st.mu.Unlock()
		return
	}
	st.mu.over = true
	e := end.End
	st.mu.End, st.mu.EndedAt = &e, e.At.UTC()
	if e.At.IsZero() {
		st.mu.EndedAt = s.cfg.Clock().UTC()
	}
	st.mu.Duration, st.mu.CPUTime, st.mu.PeakMemory, st.mu.BytesOut = end.Duration, end.CPUTime, end.PeakMemory, max(end.OutputBytes, st.mu.offset)
	st.mu.EgressDenied, st.mu.ReplayMissed = end.EgressDenied, end.ReplayMissed
	st.mu.EgressSent, st.mu.EgressReceived = end.EgressSent, end.EgressReceived
	st.mu.Stdout, st.mu.Stderr = st.mu.out.Output(), st.mu.errOut.Output()
	if sent := st.mu.sent; sent.Closed || len(sent.Input) > 0 {
		late, err := s.sealInput(&st.mu.Step, st.of.tenant, "late", sent)
		if err != nil {
			st.mu.NotKept = append(st.mu.NotKept, "late: "+err.Error())
		}
		st.mu.Late = late
	}
	record, net, marked := st.mu.Step, st.mu.net, st.mu.marked
	st.mu.Unlock()
	if kind == stepEnded {
		s.describe(&record, net, marked)
	}

	key := keyOf(record.Sandbox, record.Reset, record.ExecID)
	b, err := encodeRecord(kind, record.Seq, key, &record)
	if err == nil {
		_, err = st.of.log.Append(b)
	}
	st.of.mu.Lock()
	defer st.of.mu.Unlock()
	if st.of.mu.open[key] == st { // given up, there may be another by now
		delete(st.of.mu.open, key)
	}
	if kind == stepEnded {
		st.of.mu.ended++
	} else {
		delete(st.of.boxLocked(record.Sandbox, record.Reset).known, key.exec) // it may be tried again
	}
	if err != nil {
		s.log.Error("the end of a step is not on record yet", "step", record.ID, "err", err)
		st.of.mu.late = append(st.of.mu.late, lateEnd{b, key})
	}
}

// retryLate writes ends that could not be written.
func (r opened) retryLate() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.mu.late) > 0 {
		if _, err := r.log.Append(r.mu.late[0].record); err != nil {
			return
		}
		r.mu.late = r.mu.late[1:]
	}
}

// stepInput keeps what is written to a process, and that its input was closed.
func (s *Server) stepInput(id, exec string, data []byte, closed bool) {
	m, ok := s.members.get(id)
	if !ok || s.steps.logs.Load() == nil {
		return
	}
	s.steps.mu.Lock()
	r := s.steps.mu.runs[m.Run]
	s.steps.mu.Unlock()
	if r == nil {
		return
	}
	r.mu.Lock()
	st := r.mu.open[keyOf(id, m.reset, exec)]
	r.mu.Unlock()
	if st != nil {
		st.mu.Lock()
		defer st.mu.Unlock()
		st.mu.BytesIn += int64(len(data))
		st.mu.sent.Closed = closed
		if int64(len(st.mu.sent.Input)) <= sandbox.MaxStepInput { // what is beyond is too much, and not kept
			st.mu.sent.Input = append(st.mu.sent.Input, data...)
		}
	}
}
