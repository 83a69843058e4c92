package agent

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

// session is one authenticated connection. One goroutine reads frames, so that
// a peer that leaves is noticed while a request streams; the other runs one
// request after another.
type session struct {
	agent  *Agent
	conn   *wire.Conn
	frames chan frame
	sink   atomic.Pointer[frameSink] // takes frames instead, once it is there
	ctx    context.Context           // ends when no more frames come
	answer *answer                   // of the request that runs, if it must not run twice; else nil
}

// frameSink takes a frame in the goroutine that read it; false ends the session.
type frameSink func(frame) bool

type frame struct {
	kind wire.Kind
	data []byte
}

// errGone is a connection that ended in the middle of a request.
var errGone = errors.New("connection ended")

func (s *session) serve() {
	ctx, cancel := context.WithCancel(context.Background())
	s.ctx, s.frames = ctx, make(chan frame)
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer cancel()
		for {
			k, p, err := s.conn.ReadFrame(wire.MaxFrame)
			if err != nil {
				return
			}
			if sink := s.sink.Load(); sink != nil {
				if !(*sink)(frame{k, p}) {
					return
				}
				continue
			}
			select {
			case s.frames <- frame{k, p}:
			case <-ctx.Done():
				return
			}
		}
	}()
	for s.next() == nil {
	}
	cancel()
	s.conn.Close()
	<-read
}

func (s *session) frame() (frame, error) {
	select {
	case f := <-s.frames:
		return f, nil
	case <-s.ctx.Done():
		return frame{}, errGone
	}
}

// next runs one request. An error means that the connection is of no use any
// more; what went wrong with the request itself was answered.
func (s *session) next() error {
	f, err := s.frame()
	if err != nil {
		return err
	}
	if f.kind != wire.Request {
		return errGone
	}
	var r wire.Req
	if err := json.Unmarshal(f.data, &r); err != nil {
		return errGone
	}
	f.data = nil
	if r.Content < 0 || r.Header < 0 || r.Header > min(r.Content, wire.MaxHeader) || r.Content-r.Header > wire.MaxContent {
		return errGone
	}
	body := &content{s: s, left: r.Content, credit: r.Content > wire.Window}
	if r.Header > 0 {
		if r, err = body.header(r.Header); err != nil {
			return errGone
		}
	}
	if r.ID != "" {
		err = s.once(r, body)
	} else {
		err = s.dispatch(r, body)
	}
	s.agent.busy()
	if errors.Is(err, errGone) {
		return err
	}
	if derr := body.skip(); derr != nil {
		return derr
	}
	if err != nil {
		return s.conn.WriteError(sandbox.WithOp("guest."+r.Op, err))
	}
	return nil
}

// content is the body of a request.
type content struct {
	s      *session
	left   int64
	credit bool // the client waits to hear what was taken
	over   []byte
}

// header takes the true header off the front.
func (c *content) header(n int64) (r wire.Req, err error) {
	var h []byte
	for int64(len(h)) < n {
		p, err := c.next()
		if err != nil {
			return r, err
		}
		h = append(h, p...)
		if err := c.took(len(p)); err != nil {
			return r, err
		}
	}
	h, c.over = h[:n], h[n:]
	return r, json.Unmarshal(h, &r)
}

func (c *content) next() ([]byte, error) {
	fr, err := c.s.frame()
	if err != nil {
		return nil, err
	}
	if fr.kind != wire.Data || int64(len(fr.data)) > c.left || len(fr.data) == 0 {
		return nil, errGone
	}
	c.left -= int64(len(fr.data))
	return fr.data, nil
}

func (c *content) took(n int) error {
	if c.credit && c.left > 0 && c.s.conn.WriteCredit(n) != nil {
		return errGone
	}
	return nil
}

// each hands every piece to f; after an error of f the rest is still taken, so
// that the connection stays in step.
func (c *content) each(f func([]byte) error) error {
	var ferr error
	if len(c.over) > 0 {
		ferr = f(c.over)
		c.over = nil
	}
	for c.left > 0 {
		p, err := c.next()
		if err != nil {
			return err
		}
		if ferr == nil {
			ferr = f(p)
		}
		if err := c.took(len(p)); err != nil {
			return err
		}
	}
	return ferr
}

// whole is all of it, which is at most so much.
func (c *content) whole(most int64) ([]byte, error) {
	if c.left+int64(len(c.over)) > most {
		return nil, sandbox.Errorf(sandbox.TooLarge, "", "at most %s are accepted", sandbox.FormatSize(most))
	}
	all := make([]byte, 0, c.left+int64(len(c.over)))
	err := c.each(func(b []byte) error { all = append(all, b...); return nil })
	return all, err
}

func (c *content) skip() error { return c.each(func([]byte) error { return nil }) }

// reply ends a request that succeeded.
func (s *session) reply(res wire.Res, err error) error {
	if s.answer != nil {
		s.answer.set, s.answer.res, s.answer.err = true, res, err
	}
	if err != nil {
		return err
	}
	if err := s.conn.WriteJSON(wire.Reply, res); err != nil {
		return errGone
	}
	return nil
}

// dispatch runs a request to its last frame, or returns the error to answer.
func (s *session) dispatch(r wire.Req, body *content) error {
	switch r.Op {
	case wire.OpPing:
		return s.reply(wire.Res{}, nil)
	case wire.OpProgress:
		return s.reply(wire.Res{Progress: s.agent.progress(r.Token)}, nil)
	case wire.OpEnter:
		return s.reply(wire.Res{}, s.agent.enter(r))
	case wire.OpPrepare:
		return s.reply(wire.Res{}, s.agent.prepare(r))
	case wire.OpLeave:
		// Who leaves enters the next, or ends us; who died in between does neither.
		over := s.agent.swap()
		context.AfterFunc(s.ctx, func() { time.AfterFunc(swapGrace, over) })
		s.agent.leave()
		return s.reply(wire.Res{}, nil)
	case wire.OpScrub:
		return s.reply(wire.Res{}, s.agent.scrub())
	case wire.OpFreeze:
		s.agent.freeze()
		return s.reply(wire.Res{}, nil)
	case wire.OpThaw:
		s.agent.thaw()
		return s.reply(wire.Res{}, nil)
	case wire.OpRekey:
		return s.rekey(r)
	case wire.OpUnlisten:
		s.agent.callbacks.stop(r.Token)
		return s.reply(wire.Res{}, nil)
	case wire.OpAccept:
		return s.accept(r)
	case wire.OpCallRead, wire.OpCallWrite, wire.OpCallClose:
		return s.call(r, body)
	}
	if r.Op == wire.OpInit { // who asks wants to know of a reset that was cut off
		var res wire.Res
		if ep, err := s.agent.current(); err == nil {
			res.InitPID = ep.initPID
		}
		return s.reply(res, nil)
	}
	ep, err := s.agent.next(s.ctx, nil)
	if err != nil {
		return err
	}
	err = s.within(ep, r, body)
	for errors.Is(err, errBetween) && r.Content == 0 { // it met a reset before anything of it was done
		if ep, err = s.agent.next(s.ctx, ep); err != nil {
			return err
		}
		err = s.within(ep, r, body)
	}
	return err
}

// within runs a request in an episode.
func (s *session) within(ep *episode, r wire.Req, body *content) error {
	switch r.Op {
	case wire.OpSetEnv:
		ep.setEnv(append([]string{}, r.Env...)) // none is an environment too
		return s.reply(wire.Res{}, nil)
	case wire.OpWaitInit:
		select {
		case <-ep.initGone:
			select {
			case <-ep.over: // the agent itself ended it
				return errNoContainer()
			default:
			}
			return s.reply(wire.Res{}, nil)
		case <-ep.over:
			return errNoContainer()
		case <-s.ctx.Done():
			return errGone
		}
	case wire.OpStart:
		return s.start(ep, r, body)
	case wire.OpAttach:
		ex, err := ep.find(r.ExecID)
		if err != nil {
			return err
		}
		return s.stream(ex, ex.log.attach(r.Offset), true)
	case wire.OpInput, wire.OpCloseInput, wire.OpSignal, wire.OpResize, wire.OpWait:
		ex, err := ep.find(r.ExecID)
		if err != nil {
			return err
		}
		return s.control(ex, r, body)
	case wire.OpProcesses:
		res := wire.Res{Tasks: listTasks(ep.space, ep)}
		if ep.space.contained() {
			res.OOMKills = outOfMemory().total
		}
		for _, ex := range ep.all() {
			if p, ok := ex.process(); ok {
				res.Processes = append(res.Processes, p)
			}
		}
		return s.reply(res, nil)
	case wire.OpWatch:
		return s.watch(ep, r)
	case wire.OpConnect:
		return s.connect(ep, r)
	case wire.OpListen:
		return s.reply(wire.Res{}, s.agent.listen(ep, r))
	case wire.OpMount:
		return s.reply(wire.Res{}, ep.mount(r))
	}
	return s.file(ep, r, body)
}

// start runs a new process, or attaches to the one that has its id.
func (s *session) start(ep *episode, r wire.Req, body *content) error {
	if r.Spec == nil {
		return sandbox.InvalidField("process", "must be set")
	}
	// All input first: a client that leaves half-way must not leave a process
	// behind that works on half of it.
	var input [][]byte
	if err := body.each(func(b []byte) error { input = append(input, b); return nil }); err != nil {
		return err
	}
	if len(input) > 0 {
		r.Spec.Input = input[0] // says that stdin is wanted
	}
	for {
		ex, fresh, err := ep.reserve(r.Spec)
		if err == nil {
			rd := ex.log.attach(r.Offset) // before the first byte, so that none is dropped
			if fresh {
				ex.launch(r.Spec, input)
			}
			err = s.stream(ex, rd, !fresh)
		}
		if !errors.Is(err, errBetween) {
			return err
		}
		// Its episode was left before it had begun: it begins in the next.
		if ep, err = s.agent.next(s.ctx, ep); err != nil {
			return err
		}
	}
}

// startedHold is how long the first news of a process that takes no input wait
// for more to say. A short command ends within it (7 ms for true on gVisor) and
// then costs one write and one wake-up of the host instead of two or three,
// which are made while the process itself wants the CPU.
const startedHold = 10 * time.Millisecond

// flushAt is how much output is gathered into one write.
const flushAt = 128 << 10

// stream sends an exec's events to its end, or until the client leaves.
func (s *session) stream(ex *exec, rd *logReader, replayed bool) error {
	defer rd.detach()
	select {
	case <-ex.started:
	case <-s.ctx.Done():
		return errGone
	}
	if ex.startErr != nil {
		return ex.startErr
	}
	c := s.conn
	if err := c.QueueJSON(wire.Started, sandbox.ProcessStarted{ExecID: ex.id, PID: ex.inner, Replayed: replayed}); err != nil {
		return errGone
	}
	queued := 0
	var header [16]byte
	var held <-chan time.Time // nil: nothing is held back
	if !replayed && !ex.interactive {
		hold := time.NewTimer(startedHold)
		defer hold.Stop()
		held = hold.C
	}
	for {
		got, wait := rd.next()
		var err error
		switch {
		case wait != nil:
			if held == nil {
				if err = c.Flush(); err != nil {
					break
				}
				queued = 0
			}
			select {
			case <-wait:
			case <-held:
				held = nil
			case <-s.ctx.Done():
				return errGone
			}
		case got.lost != nil:
			err = c.QueueJSON(wire.Lost, got.lost)
		case got.done:
			<-ex.done
			if err = c.QueueJSON(wire.End, ex.end); err == nil {
				err = c.Flush()
			}
			if err != nil {
				return errGone
			}
			return nil
		default:
			err = c.Queue(wire.Output, wire.AppendOutputHeader(header[:0], got.seg.stream, got.seg.offset), got.seg.data)
			if queued += len(got.seg.data); err == nil && queued >= flushAt {
				err, queued = c.Flush(), 0
			}
		}
		if err != nil {
			return errGone
		}
	}
}

// control runs the requests that act on one process.
func (s *session) control(ex *exec, r wire.Req, body *content) error {
	select {
	case <-ex.started:
	case <-s.ctx.Done():
		return errGone
	}
	if ex.startErr != nil {
		return ex.startErr
	}
	switch r.Op {
	case wire.OpInput:
		err := ex.withStdin(s.ctx, func(c *child) error {
			return body.each(func(b []byte) error { _, err := c.stdin.Write(b); return err })
		})
		if err != nil && s.ctx.Err() != nil {
			return errGone
		}
		return s.reply(wire.Res{}, err)
	case wire.OpCloseInput:
		err := ex.withStdin(s.ctx, ex.closeStdin)
		if s.ctx.Err() != nil {
			return errGone
		}
		return s.reply(wire.Res{}, err)
	case wire.OpSignal:
		sig, err := signalNumber(r.Signal)
		if err != nil {
			return err
		}
		return s.reply(wire.Res{}, ex.signal(sig, r.Flag))
	case wire.OpResize:
		if r.Size == nil {
			return sandbox.InvalidField("size", "must be set")
		}
		return s.reply(wire.Res{}, ex.resize(*r.Size))
	default: // wait
		select {
		case <-ex.done:
			return s.reply(wire.Res{End: &ex.end}, nil)
		case <-s.ctx.Done():
			return errGone
		}
	}
}
