package server

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// replaying runs the steps of an episode in a sandbox.
type replaying struct {
	*Server
	ep   *episode
	box  string
	all  bool
	out  *sandbox.Replayed
	tell func(ReplayProgress)

	running map[string]*stepAgain // by step id
	at      ReplayProgress
}

// stepAgain is a step under way. What is below done is set before it is closed.
type stepAgain struct {
	step    sandbox.Step // as it ended then
	cancel  context.CancelFunc
	started chan struct{} // closed when it has begun, or will not
	done    chan struct{}

	stdout, stderr sandbox.StepOutput
	end            *sandbox.ProcessEnd
	err            error
}

// excerpt is how many bytes about a difference are told, and how many before it.
const (
	excerpt       = 120
	excerptBefore = 40
)

// replaySlack is how much longer than then a step may take, beside twice as long.
const replaySlack = 30 * time.Second

// run goes through the events as they were: a step begins when those have ended that had
// by then. It returns at the first difference, unless all are wanted.
func (r *replaying) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	r.running = map[string]*stepAgain{}
	defer func() {
		cancel()
		for _, a := range r.running {
			<-a.done
		}
	}()
	ends := map[string]sandbox.Step{}
	for _, e := range r.ep.events {
		if !e.begin && e.outside == nil {
			ends[e.step.ID] = e.step
		}
	}
	r.at = ReplayProgress{State: "running", Steps: r.ep.steps}
	for _, e := range r.ep.events {
		if o := e.outside; o != nil {
			if err := r.changeAgain(ctx, r.box, r.ep.run.Tenant, *o); ctx.Err() != nil {
				return ctx.Err()
			} else if err != nil { // what comes of it is seen by the steps
				r.out.Gaps = append(r.out.Gaps, sandbox.ReplayGap{AfterStep: o.AfterStep, What: o.What, Detail: o.Detail + ": " + sandbox.Plain(sandbox.AsError(err))})
			}
			continue
		}
		st := ends[e.step.ID]
		if e.begin {
			if why := fromOutside(st); why != "" {
				r.out.Gaps = append(r.out.Gaps, sandbox.ReplayGap{AfterStep: st.Seq - 1, What: "step", Detail: fmt.Sprintf("step %d is left out: %s", st.Seq, why)})
				continue
			}
			if err := r.begin(ctx, st); err != nil {
				return err
			}
			continue
		}
		a := r.running[st.ID]
		if a == nil {
			continue
		}
		if err := r.await(ctx, a.done); err != nil {
			return err
		}
		delete(r.running, st.ID)
		d, err := a.compare(ctx)
		if err != nil {
			return err
		}
		r.out.Replayed++
		if a.end != nil && a.end.ReplayMissed > 0 {
			r.out.Gaps = append(r.out.Gaps, sandbox.ReplayGap{AfterStep: st.Seq, What: "network", Detail: fmt.Sprintf("%d requests of step %d have no answer in the recording", a.end.ReplayMissed, st.Seq)})
		}
		r.at.Step = st.Seq
		if d == nil {
			r.at.Same++
			r.tell(r.at)
			continue
		}
		r.out.Same = false
		r.out.Differences = append(r.out.Differences, *d)
		r.tell(r.at)
		if !r.all {
			return nil
		}
	}
	return nil
}

// await waits, and says now and then that somebody is there.
func (r *replaying) await(ctx context.Context, done <-chan struct{}) error {
	tick := time.NewTicker(r.cfg.KeepAlive)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			r.tell(r.at)
		}
	}
}

// fromOutside says why the end of a step was not its own doing; "" = it was.
func fromOutside(st sandbox.Step) string {
	if st.End == nil {
		return "nothing is known of its end"
	}
	switch st.End.Cause {
	case sandbox.Exited, sandbox.Signalled, sandbox.Deadline, sandbox.OOM, sandbox.NoDisk, sandbox.EgressDenied:
		return ""
	}
	return "it ended with " + string(st.End.Cause)
}

// begin starts a step and returns when it runs.
func (r *replaying) begin(ctx context.Context, st sandbox.Step) error {
	in, err := r.openInput(st, r.ep.run.Tenant, "input", st.Sealed)
	if err != nil {
		return err
	}
	late, err := r.openInput(st, r.ep.run.Tenant, "late", st.Late)
	if err != nil {
		return err
	}
	p := sandbox.ProcessSpec{ExecID: sandbox.NewID(r.cfg.Rand), Args: st.Args, Command: st.Command, Cwd: st.Cwd, User: st.User, Env: in.Env, Input: in.Input, Stdin: st.Stdin, PTY: st.PTY, Timeout: st.Timeout}
	if in.Command != "" || in.Args != nil {
		p.Command, p.Args = in.Command, in.Args
	}
	a := &stepAgain{step: st, started: make(chan struct{}), done: make(chan struct{})}
	ctx, a.cancel = context.WithTimeout(ctx, 2*st.Duration+st.Timeout+replaySlack)
	r.running[st.ID] = a
	go a.follow(ctx, r.Server, r.box, p)
	if err := r.await(ctx, a.started); err != nil {
		return nil // how it ended is looked at when it had
	}
	if len(late.Input) > 0 {
		if err := r.node.SendInput(ctx, r.box, p.ExecID, late.Input); err != nil {
			r.log.Debug("a step that is replayed took no input", "step", st.ID, "err", err) // it may not have read it then either
		}
	}
	if late.Closed {
		if err := r.node.CloseInput(ctx, r.box, p.ExecID); err != nil {
			r.log.Debug("the input of a step that is replayed was not closed", "step", st.ID, "err", err)
		}
	}
	return nil
}

// follow runs the process and keeps of its output as much as was kept then.
func (a *stepAgain) follow(ctx context.Context, s *Server, box string, p sandbox.ProcessSpec) {
	defer close(a.done)
	defer a.cancel()
	begun := false
	start := func() {
		if !begun {
			begun = true
			close(a.started)
		}
	}
	defer start()
	outs := map[bool]*sandbox.StepCapture{}
	for isErr, was := range map[bool]sandbox.StepOutput{false: a.step.Stdout, true: a.step.Stderr} {
		rule := sandbox.KeepEnds
		if int64(len(was.Head)) > sandbox.StepEnds {
			rule = sandbox.KeepWhole
		}
		c := sandbox.NewStepCapture(rule)
		outs[isErr] = &c
	}
	a.err = s.start(ctx, StartRequest{Sandbox: box, Process: p}, func(evs []sandbox.ProcessEvent, _ bool) error {
		for _, ev := range evs {
			switch {
			case ev.Started != nil:
				start()
			case ev.Output != nil:
				outs[ev.Output.Stream == sandbox.Stderr].Add(ev.Output.Data)
			case ev.Lost != nil:
				outs[false].Lose()
				outs[true].Lose()
			case ev.End != nil:
				end := *ev.End
				a.end = &end
			}
		}
		return nil
	})
	a.stdout, a.stderr = outs[false].Output(), outs[true].Output()
}

// compare is the first difference of a step from what it was; nil = none. An error is of
// the replay itself.
func (a *stepAgain) compare(ctx context.Context) (*sandbox.StepDifference, error) {
	was := a.step
	d := &sandbox.StepDifference{Step: was.Seq, ID: was.ID, Offset: -1, Command: commandOf(was)}
	if a.end == nil {
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case a.err != nil && neverStarted(a.err):
			d.What, d.Detail, d.Expected = "did_not_start", sandbox.Plain(sandbox.AsError(a.err)), []byte(endText(was.End))
			return d, nil
		case sandbox.ClassOf(a.err) == sandbox.DeadlineReached || sandbox.ClassOf(a.err) == sandbox.Canceled:
			d.What, d.Detail, d.Expected = "did_not_end", "it took more than twice as long as then", []byte(endText(was.End))
			return d, nil
		}
		return nil, a.err
	}
	for _, s := range []struct {
		name    string
		was, is sandbox.StepOutput
	}{{"stdout", was.Stdout, a.stdout}, {"stderr", was.Stderr, a.stderr}} {
		if differ(d, s.was, s.is) {
			d.What = s.name
			return d, nil
		}
	}
	is := a.end.End
	switch then := *was.End; {
	case then.Cause != is.Cause:
		d.What, d.Expected, d.Actual = "cause", []byte(endText(&then)), []byte(endText(&is))
	case then.ExitCode != is.ExitCode:
		d.What, d.Expected, d.Actual = "exit_code", fmt.Append(nil, then.ExitCode), fmt.Append(nil, is.ExitCode)
	case then.Signal != is.Signal:
		d.What, d.Expected, d.Actual = "signal", []byte(then.Signal), []byte(is.Signal)
	default:
		return nil, nil
	}
	return d, nil
}

func endText(e *sandbox.End) string {
	if e == nil {
		return ""
	}
	return e.String()
}

func commandOf(st sandbox.Step) string {
	if st.Command != "" {
		return st.Command
	}
	return fmt.Sprintf("%q", st.Args)
}

// differ finds where a stream is not what it was.
func differ(d *sandbox.StepDifference, was, is sandbox.StepOutput) bool {
	total := func(o sandbox.StepOutput) int64 { return int64(len(o.Head)+len(o.Tail)) + o.Dropped }
	if was.Digest != "" && is.Digest != "" && was.Digest == is.Digest || total(was) == 0 && total(is) == 0 {
		return false
	}
	n := min(len(was.Head), len(is.Head))
	at := 0
	for at < n && was.Head[at] == is.Head[at] {
		at++
	}
	known := at < n || at == len(was.Head) && total(was) == int64(at) || at == len(is.Head) && total(is) == int64(at)
	if known && total(was) == total(is) && at == len(was.Head) && at == len(is.Head) {
		return false // one of them has no digest, and all that there is is the same
	}
	if known {
		d.Offset, d.Expected, d.Actual = int64(at), aroundOf(was.Head, at), aroundOf(is.Head, at)
		return true
	}
	if was.Digest == "" && total(was) == total(is) && bytes.Equal(was.Tail, is.Tail) {
		return false // some of it was not seen then; the rest is the same
	}
	d.Expected, d.Actual = aroundOf(was.Tail, 0), aroundOf(is.Tail, 0)
	d.Detail = fmt.Sprintf("%d bytes then, %d now; the first %d are the same, what comes after was kept as a digest and its end", total(was), total(is), at)
	return true
}

// aroundOf is what is told of a place.
func aroundOf(b []byte, at int) []byte {
	from := max(0, at-excerptBefore)
	return slices.Clone(b[min(from, len(b)):min(len(b), from+excerpt)])
}
