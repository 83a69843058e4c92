package agent

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cove-sandbox/cove/guest/wire"
	"github.com/cove-sandbox/cove/sandbox"
)

const (
	maxExecID  = 128
	maxRunning = 4096
	// maxEnded records of ended processes are kept with their output; older
	// ones shrink to a tombstone.
	maxEnded = 512
	// maxIDs is how many exec ids one episode remembers, at about 100 bytes
	// each. At-most-once needs every one of them, so the next start after it
	// is refused, not forgotten.
	maxIDs = 200_000
	// maxLeft pipes of ended processes are read on for the children that hold
	// them; above it the oldest are closed, and their writers get SIGPIPE.
	maxLeft = 256
	// maxArgs bytes of a command line are kept for lists.
	maxArgs = 4 << 10

	totalLogs = 64 << 20
)

// episode is everything between Enter and Leave: one container and the
// processes started in it through the API.
type episode struct {
	space     Space
	initPID   int
	workdir   string
	user      string
	token     string // makes marks unique among agents that share a /proc
	fixed     bool   // marks count execs, and do not name them: of a deterministic sandbox, which has its own /proc
	userDB    userDB
	budget    *budget
	initGone  <-chan struct{} // nil without an init
	initGrace time.Duration
	over      chan struct{}  // closed by leave
	running   sync.WaitGroup // processes not yet reaped
	clock     execClock

	mu struct {
		sync.Mutex
		env    []string // replaced, never changed in place
		left   bool
		execs  map[string]*exec // running and recently ended
		order  []*exec          // of execs, by start
		graves map[grave]tombstone
		live   int
		kept   int // ended ones in execs
		behind []*pump
	}
}

// grave is the hash of an exec id.
type grave [16]byte

// tombstone is what stays of a process when its record is gone.
type tombstone struct {
	at       int64
	duration time.Duration
	bytes    int64
	pid      int32
	code     int16
	cause    sandbox.Cause
	signal   string
}

func graveOf(id string) (g grave) {
	sum := sha256.Sum256([]byte(id))
	copy(g[:], sum[:])
	return g
}

func newEpisode(sp Space, r wire.Req, b *budget) *episode {
	token := make([]byte, 8)
	rand.Read(token)
	ep := &episode{space: sp, initPID: r.InitPID, workdir: r.WorkingDir, user: r.User, token: hex.EncodeToString(token), budget: b,
		initGone: sp.initGone(), over: make(chan struct{})}
	ep.mu.env, ep.mu.execs, ep.mu.graves = r.Env, map[string]*exec{}, map[grave]tombstone{}
	if ep.workdir == "" {
		ep.workdir = "/"
	}
	if ep.fixed = sp.contained() && r.Hostname == sandbox.DeterministicName; ep.fixed {
		ep.token = sandbox.DeterministicName
	}
	return ep
}

// markLocked is the mark of the next exec.
func (ep *episode) markLocked(id string) string {
	if ep.fixed {
		id = strconv.Itoa(len(ep.mu.execs) + len(ep.mu.graves) + 1)
	}
	return markKey + "=" + ep.token + ":" + id
}

func checkExecID(id string) error {
	if id == "" || len(id) > maxExecID {
		return sandbox.InvalidField("exec_id", "must have 1 to %d bytes, has %d", maxExecID, len(id))
	}
	for _, c := range []byte(id) {
		if c <= ' ' || c == 0x7f {
			return sandbox.InvalidField("exec_id", "must not contain spaces or control characters")
		}
	}
	return nil
}

// reserve returns the record of an exec id: the one there is, or a new one that
// the caller must launch.
func (ep *episode) reserve(spec *sandbox.ProcessSpec) (ex *exec, fresh bool, err error) {
	if err := checkExecID(spec.ExecID); err != nil {
		return nil, false, err
	}
	ep.mu.Lock()
	defer ep.mu.Unlock()
	if ex := ep.findLocked(spec.ExecID); ex != nil {
		return ex, false, nil
	}
	if err := checkSpec(spec); err != nil {
		return nil, false, err
	}
	switch {
	case ep.mu.left:
		return nil, false, errReset()
	case ep.mu.live >= maxRunning:
		return nil, false, &sandbox.Error{Class: sandbox.NoCapacity, Msg: fmt.Sprintf("%d processes started through the API are running, the most there may be", ep.mu.live),
			Hint: "end some first", RetryAfter: time.Second}
	case len(ep.mu.execs)+len(ep.mu.graves) >= maxIDs:
		return nil, false, &sandbox.Error{Class: sandbox.Precondition, Msg: fmt.Sprintf("this episode has run %d processes, the most it can remember", maxIDs),
			Hint: "reset the sandbox or make a new one"}
	}
	ex = &exec{id: spec.ExecID, mark: ep.markLocked(spec.ExecID), ep: ep, log: &outlog{budget: ep.budget},
		started: make(chan struct{}), done: make(chan struct{}), input: make(chan struct{}, 1),
		args: listedArgs(spec), user: spec.User, cwd: spec.Cwd, pty: spec.PTY != nil, interactive: spec.PTY != nil || spec.Stdin, startedAt: time.Now(), stoodAtStart: ep.clock.stood()}
	if ex.user == "" {
		ex.user = ep.user
	}
	if ex.cwd == "" {
		ex.cwd = ep.workdir
	}
	ex.input <- struct{}{}
	ep.mu.execs[ex.id] = ex
	ep.mu.order = append(ep.mu.order, ex)
	ep.mu.live++
	ep.running.Add(1)
	return ex, true, nil
}

func listedArgs(spec *sandbox.ProcessSpec) []string {
	args := spec.Args
	if spec.Command != "" {
		args = []string{"sh", "-c", spec.Command}
	}
	var out []string
	left := maxArgs
	for _, a := range args {
		if left <= 0 {
			return append(out, "…")
		}
		out = append(out, clip(a, left))
		left -= len(a)
	}
	return out
}

// find returns the record of an exec id.
func (ep *episode) find(id string) (*exec, error) {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	if ex := ep.findLocked(id); ex != nil {
		return ex, nil
	}
	return nil, &sandbox.Error{Class: sandbox.NotFound, Msg: fmt.Sprintf("no process with exec_id %q in this episode", clip(id, maxExecID))}
}

func (ep *episode) findLocked(id string) *exec {
	if ex := ep.mu.execs[id]; ex != nil {
		return ex
	}
	t, ok := ep.mu.graves[graveOf(id)]
	if !ok {
		return nil
	}
	return ep.raise(id, t)
}

// raise makes a record of a tombstone, good for one answer: it ended, and its
// output is lost.
func (ep *episode) raise(id string, t tombstone) *exec {
	ex := &exec{id: id, ep: ep, started: make(chan struct{}), done: make(chan struct{}), inner: int(t.pid),
		input: make(chan struct{}, 1), log: &outlog{budget: ep.budget}}
	ex.log.mu.start, ex.log.mu.end, ex.log.mu.closed = t.bytes, t.bytes, true
	ex.mu.reaped = true
	ex.end = sandbox.ProcessEnd{OutputBytes: t.bytes, Duration: t.duration,
		End: sandbox.End{Cause: t.cause, ExitCode: int(t.code), Signal: t.signal, At: time.Unix(0, t.at)}}
	close(ex.started)
	close(ex.done)
	return ex
}

// failed takes back a start that failed. What would fail again the same way is
// remembered; what was short of something may be tried again.
func (ep *episode) failed(ex *exec) {
	defer ep.running.Done()
	ep.mu.Lock()
	defer ep.mu.Unlock()
	ep.mu.live--
	switch sandbox.ClassOf(ex.startErr) {
	case sandbox.Unavailable, sandbox.Internal:
		delete(ep.mu.execs, ex.id)
		for i, e := range ep.mu.order {
			if e == ex {
				ep.mu.order = append(ep.mu.order[:i], ep.mu.order[i+1:]...)
				break
			}
		}
	default:
		ep.mu.kept++
		ep.evictLocked()
	}
}

// ended moves a process to the ended ones.
func (ep *episode) ended(ex *exec) {
	ep.budget.retire(ex.log)
	ep.mu.Lock()
	defer ep.mu.Unlock()
	ep.mu.live--
	ep.mu.kept++
	ep.evictLocked()
}

// evictLocked turns the oldest ended records into tombstones. A failed start
// has none: its answer is forgotten, its id is not, and the end says so.
func (ep *episode) evictLocked() {
	for i := 0; ep.mu.kept > maxEnded && i < len(ep.mu.order); {
		ex := ep.mu.order[i]
		var t tombstone
		select {
		case <-ex.started:
		default:
			i++
			continue
		}
		if ex.startErr != nil {
			t = tombstone{cause: sandbox.Exited, code: 127, at: ex.startedAt.UnixNano()}
		} else {
			select {
			case <-ex.done:
			default:
				i++
				continue
			}
			e := ex.end
			t = tombstone{at: e.At.UnixNano(), duration: e.Duration, bytes: e.OutputBytes, pid: int32(ex.inner), code: int16(e.ExitCode), cause: e.Cause, signal: e.Signal}
		}
		ep.mu.graves[graveOf(ex.id)] = t
		delete(ep.mu.execs, ex.id)
		ep.mu.order = append(ep.mu.order[:i], ep.mu.order[i+1:]...)
		ep.mu.kept--
		ep.budget.forget(ex.log)
	}
}

// leftBehind keeps reading a pipe whose process has ended.
func (ep *episode) leftBehind(p *pump) {
	select {
	case <-p.gone:
		return
	default:
	}
	ep.mu.Lock()
	live := ep.mu.behind[:0]
	for _, q := range ep.mu.behind {
		select {
		case <-q.gone:
		default:
			live = append(live, q)
		}
	}
	ep.mu.behind = append(live, p)
	var oldest *pump
	if len(ep.mu.behind) > maxLeft || ep.mu.left {
		oldest = ep.mu.behind[0]
		ep.mu.behind = append([]*pump(nil), ep.mu.behind[1:]...)
	}
	ep.mu.Unlock()
	if oldest != nil {
		oldest.close()
	}
}

// all lists the records that are kept, by start.
func (ep *episode) all() []*exec {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	return append([]*exec(nil), ep.mu.order...)
}

// markedID is the exec a process says it belongs to, "" for none.
func (ep *episode) markedID(pid int) string {
	env, _ := readProc(fmt.Sprintf("/proc/%d/environ", pid), maxEnviron)
	prefix := markKey + "=" + ep.token + ":"
	for kv := range strings.SplitSeq(string(env), "\x00") {
		id, ok := strings.CutPrefix(kv, prefix)
		if ok && ep.fixed {
			return ep.idOf(kv)
		}
		if ok {
			return clip(id, maxExecID)
		}
	}
	return ""
}

// idOf is the exec of a mark that does not name it.
func (ep *episode) idOf(mark string) string {
	for _, ex := range ep.all() {
		if ex.mark == mark {
			return ex.id
		}
	}
	return ""
}

// leaveGrace bounds how long leave waits for killed processes to be reaped.
const leaveGrace = 2 * time.Second

// leave ends every process with cause reset.
func (ep *episode) leave() {
	ep.mu.Lock()
	if ep.mu.left {
		ep.mu.Unlock()
		return
	}
	ep.mu.left = true
	close(ep.over)
	execs := append([]*exec(nil), ep.mu.order...)
	ran := len(ep.mu.execs)+len(ep.mu.graves) > 0
	ep.mu.Unlock()
	leaders := map[int]bool{}
	starting := false
	for _, ex := range execs {
		ex.kill(sandbox.ResetCause)
		select {
		case <-ex.started:
		default:
			starting = true
		}
		if pid, running := ex.leader(); running {
			leaders[pid] = true // of the others the mark is enough, and their pids may be anyone's by now
		}
	}
	// Of what is contained the container is destroyed, which is faster and more thorough. Where
	// nothing ran nothing is left, and all processes of the machine need not be looked at.
	if ran && !ep.space.contained() {
		tree{leaders: leaders, mark: markKey + "=" + ep.token + ":", all: true}.kill()
	}
	if ep.space.contained() && starting {
		ep.unstick() // or leaving would wait for a start that code inside holds up
	}
	reaped := make(chan struct{})
	go func() { ep.running.Wait(); close(reaped) }()
	select {
	case <-reaped:
	case <-time.After(leaveGrace):
	}
	ep.mu.Lock()
	behind := ep.mu.behind
	ep.mu.behind = nil
	ep.mu.Unlock()
	for _, p := range behind {
		p.close()
	}
	for _, ex := range execs {
		ep.budget.forget(ex.log)
	}
}
