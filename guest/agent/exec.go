package agent

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

// initGrace is how long the end of a process that was killed from inside waits
// to learn whether init was killed: the kernel kills the others first.
const initGrace = 100 * time.Millisecond

// exec is one process started through the API, from the request that named its
// id first to the eviction of its record.
type exec struct {
	id   string
	mark string // environment entry that its descendants inherit
	ep   *episode
	log  *outlog

	started  chan struct{} // closed when the start has succeeded or failed
	startErr error         // set before started is closed
	inner    int           // pid inside; set before started is closed
	done     chan struct{} // closed when end is set
	end      sandbox.ProcessEnd

	// What a list shows; set before the record is shared.
	args      []string
	user, cwd string
	pty       bool
	startedAt time.Time
	// stoodAtStart is what the episode's clock had stood still for by then.
	stoodAtStart time.Duration

	interactive bool // a terminal or open stdin: someone waits for every event

	input chan struct{} // holds one token: whose turn it is to write stdin

	killing sync.WaitGroup // trees being killed; the end waits for them

	mu struct {
		sync.Mutex
		child    *child // nil before the start and after the end
		pid      int    // leader of the tree, stays after the end
		reaped   bool   // pid may be another process now
		wanted   sandbox.Cause
		asked    unix.Signal // last signal sent through the API
		deadline *deadline   // nil without one
	}
}

// leader is the pid of the main process in the agent's namespace, 0 before the
// start, and whether it is still that process.
func (ex *exec) leader() (pid int, running bool) {
	ex.mu.Lock()
	defer ex.mu.Unlock()
	return ex.mu.pid, ex.mu.pid != 0 && !ex.mu.reaped
}

// launch starts the process. It is called once, by the request that made the
// record; all others wait for started.
func (ex *exec) launch(spec *sandbox.ProcessSpec, input [][]byte) {
	defer close(ex.started)
	c, err := ex.ep.spawn(spec, ex.mark, ex.log)
	if err != nil {
		ex.startErr = err
		ex.log.close()
		ex.ep.failed(ex)
		return
	}
	ex.inner = c.inner
	ex.mu.Lock()
	ex.mu.child, ex.mu.pid = c, c.pid
	reset := ex.mu.wanted == sandbox.ResetCause
	if spec.Timeout > 0 {
		ex.mu.deadline = ex.ep.clock.deadline(spec.Timeout, func() { ex.kill(sandbox.Deadline) })
	}
	ex.mu.Unlock()
	go ex.wait(c)
	if c.stdin != nil && c.term == nil && !spec.Stdin || len(input) > 0 {
		<-ex.input // taken before anyone can send
		go ex.feed(c, input, !spec.Stdin)
	}
	if reset {
		ex.kill(sandbox.ResetCause)
	}
}

// feed writes the input that came with the start.
func (ex *exec) feed(c *child, input [][]byte, shut bool) {
	defer func() { ex.input <- struct{}{} }()
	for i, b := range input {
		if _, err := c.stdin.Write(b); err != nil {
			return // it has ended or closed its stdin: its right
		}
		input[i] = nil
	}
	if shut {
		ex.closeStdin(c)
	}
}

func (ex *exec) closeStdin(c *child) error {
	if c.term != nil {
		_, err := c.term.Write([]byte{4}) // end of file, as a terminal says it
		return err
	}
	if c.stdin == nil {
		return nil
	}
	if err := c.stdin.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// wait reaps the main process and ends the exec: whatever children hold, its
// end is the exec's end.
func (ex *exec) wait(c *child) {
	defer ex.ep.running.Done()
	status, usage := ex.reap(c)
	at := time.Now()
	for _, p := range c.pumps {
		p.finish()
	}
	for _, p := range c.pumps {
		<-p.drained
	}
	ex.killing.Wait()
	end := sandbox.ProcessEnd{End: ex.cause(status), OutputBytes: ex.log.total(), Duration: at.Sub(ex.startedAt) - (ex.ep.clock.stood() - ex.stoodAtStart),
		CPUTime: time.Duration(usage.Utime.Nano() + usage.Stime.Nano()), PeakMemory: usage.Maxrss << 10}
	end.At = at

	ex.mu.Lock()
	ex.mu.child = nil
	ex.ep.clock.drop(ex.mu.deadline)
	ex.mu.Unlock()
	c.pidfd.Close()
	if c.stdin != nil && c.term == nil {
		c.stdin.Close()
	}
	if c.term != nil {
		c.pumps[0].close() // hangs up what still sits on the terminal
	} else {
		for _, p := range c.pumps {
			ex.ep.leftBehind(p)
		}
	}
	ex.end = end
	ex.log.close()
	close(ex.done)
	ex.ep.ended(ex)
	c.group.remove()
}

// reap waits for the main process without holding a thread: its pidfd becomes
// readable when it has ended.
// What it used includes the children that it waited for.
func (ex *exec) reap(c *child) (unix.WaitStatus, unix.Rusage) {
	var status unix.WaitStatus
	var usage unix.Rusage
	collect := func(flags int) bool {
		ex.mu.Lock()
		defer ex.mu.Unlock()
		n, err := retryEINTR(func() (int, error) { return unix.Wait4(c.pid, &status, flags, &usage) })
		ex.mu.reaped = n == c.pid || err != nil
		return ex.mu.reaped
	}
	if rc, err := c.pidfd.SyscallConn(); err == nil {
		rc.Read(func(fd uintptr) bool {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(p, 0)
			return n > 0 || err != nil && err != unix.EINTR
		})
	}
	// It has ended, but while code inside traces it, its tracer sees it first.
	for pause := time.Millisecond; !collect(unix.WNOHANG); pause = min(2*pause, 100*time.Millisecond) {
		time.Sleep(pause)
	}
	return status, usage
}

// cause says why it ended: the reason we had, else what the kernel reports.
func (ex *exec) cause(ws unix.WaitStatus) sandbox.End {
	end := sandbox.End{Cause: sandbox.Exited}
	switch {
	case ws.Signaled():
		end.Cause, end.Signal, end.ExitCode = sandbox.Signalled, signalName(ws.Signal()), 128+int(ws.Signal())
	default:
		end.ExitCode = ws.ExitStatus()
	}
	ex.mu.Lock()
	wanted, asked := ex.mu.wanted, ex.mu.asked
	ex.mu.Unlock()
	switch {
	case wanted != "":
		end.Cause = wanted
	case end.ExitCode == 128+int(unix.SIGKILL) && ex.ep.space.contained() && outOfMemory().ended(ex.mu.pid, ws.Signaled()):
		end.Cause, end.Detail = sandbox.OOM, "over the memory limit"
	case asked == unix.SIGKILL || asked == unix.SIGTERM || asked != 0 && ws.Signaled() && ws.Signal() == asked:
		end.Cause = sandbox.KilledByUser
	case ws.Signaled() && ws.Signal() == unix.SIGKILL && ex.ep.initGone != nil:
		select {
		case <-ex.ep.initGone:
		case <-time.After(ex.ep.initGrace):
		}
		select { // both, where this process had no CPU for so long
		case <-ex.ep.initGone:
			end.Cause, end.Detail = sandbox.InitKilled, "the container's init was killed"
		default:
		}
	}
	return end
}

// tree is its processes. pid must be set.
func (ex *exec) tree() tree { return tree{leaders: map[int]bool{ex.mu.pid: true}, mark: ex.mark} }

// kill ends it for a reason of ours; the first reason stays. The whole tree
// goes, except at a reset, where leave sees to all trees at once.
func (ex *exec) kill(why sandbox.Cause) {
	ex.mu.Lock()
	if ex.mu.reaped {
		ex.mu.Unlock()
		return
	}
	if ex.mu.wanted == "" {
		ex.mu.wanted = why
	}
	if ex.mu.pid == 0 {
		ex.mu.Unlock()
		return // launch sees wanted
	}
	unix.Kill(-ex.mu.pid, unix.SIGKILL)
	unix.Kill(ex.mu.pid, unix.SIGKILL)
	if why == sandbox.ResetCause {
		ex.mu.Unlock()
		return
	}
	ex.killTreeLocked()
}

// killTreeLocked unlocks mu and kills the tree; an end that comes meanwhile is
// reported after it, so that who sees the end sees no survivors.
func (ex *exec) killTreeLocked() {
	ex.killing.Add(1)
	defer ex.killing.Done()
	c := ex.mu.child
	ex.mu.Unlock()
	if c != nil && c.group != nil && c.group.kill() == nil {
		return
	}
	ex.tree().kill()
}

// signal is a signal through the API, to the tree or to the process alone.
func (ex *exec) signal(sig unix.Signal, processOnly bool) error {
	ex.mu.Lock()
	pid := ex.mu.pid
	if ex.mu.child == nil || ex.mu.reaped {
		ex.mu.Unlock()
		return errEnded(ex.id)
	}
	ex.mu.asked = sig
	err := unix.Kill(pid, sig)
	switch {
	case err != nil && err != unix.ESRCH:
		ex.mu.Unlock()
		return sandbox.Errorf(sandbox.Internal, "", "signal %s to %d: %w", signalName(sig), pid, err)
	case processOnly:
		ex.mu.Unlock()
		return nil
	case sig == unix.SIGKILL:
		ex.killTreeLocked()
		return nil
	}
	ex.mu.Unlock()
	for _, t := range ex.tree().living(allTasks()) {
		if t.pid != pid {
			unix.Kill(t.pid, sig)
		}
	}
	return nil
}

// withStdin calls f with the process's input once it is the caller's turn. f is
// interrupted when ctx ends or the process does.
func (ex *exec) withStdin(ctx context.Context, f func(*child) error) error {
	select {
	case <-ex.input:
	case <-ex.done:
		return errEnded(ex.id)
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { ex.input <- struct{}{} }()
	ex.mu.Lock()
	c := ex.mu.child
	ex.mu.Unlock()
	if c == nil {
		return errEnded(ex.id)
	}
	if c.stdin == nil {
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "process " + ex.id + " has no stdin", Hint: "start it with stdin set"}
	}
	stop := context.AfterFunc(ctx, func() { c.stdin.SetWriteDeadline(time.Unix(1, 0)) })
	err := f(c)
	if !stop() {
		c.stdin.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, os.ErrClosed), errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EIO):
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "process " + ex.id + " no longer takes input"}
	}
	return err
}

func (ex *exec) resize(size sandbox.TermSize) error {
	ex.mu.Lock()
	c := ex.mu.child
	ex.mu.Unlock()
	if c == nil {
		return errEnded(ex.id)
	}
	if c.term == nil {
		return &sandbox.Error{Class: sandbox.Precondition, Msg: "process " + ex.id + " has no terminal", Hint: "start it with pty set"}
	}
	rc, err := c.term.SyscallConn()
	if err != nil {
		return errEnded(ex.id)
	}
	var werr error
	if err := rc.Control(func(fd uintptr) { werr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, winsize(size)) }); err != nil {
		return errEnded(ex.id)
	}
	return werr
}

func errEnded(id string) error {
	return &sandbox.Error{Class: sandbox.Precondition, Msg: "process " + id + " has ended"}
}

// process describes it for a list; false while it is being started and when
// that failed.
func (ex *exec) process() (sandbox.Process, bool) {
	select {
	case <-ex.started:
	default:
		return sandbox.Process{}, false
	}
	if ex.startErr != nil {
		return sandbox.Process{}, false
	}
	p := sandbox.Process{ExecID: ex.id, PID: ex.inner, Args: ex.args, User: ex.user, Cwd: ex.cwd, PTY: ex.pty, StartedAt: ex.startedAt}
	select {
	case <-ex.done:
		end := ex.end
		p.End = &end
	default:
	}
	return p, true
}
