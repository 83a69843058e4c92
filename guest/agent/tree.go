package agent

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	maxTasks   = 4096    // listed
	maxEnviron = 1 << 20 // of one process that is searched for the mark
	maxCommand = 4096    // bytes of a command line that are listed

	// markKey names the variable that says which exec a process belongs to. A
	// process that has left its session and lost its parent is still found by
	// it. One that also replaced its environment is not: it lives until reset.
	markKey = "COVE_EXEC"
)

// task is one line of /proc, in the agent's own pid namespace. All walks use
// the agent's /proc: the container's belongs to the user.
type task struct {
	pid, ppid, pgrp, sid int
	state                byte
	comm                 string
}

func (t task) alive() bool { return t.state != 'Z' && t.state != 'X' && t.state != 0 }

// allTasks reads every process the agent can see.
func allTasks() []task {
	d, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	names, _ := d.Readdirnames(-1)
	d.Close()
	var ts []task
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil {
			if t, ok := readTask(pid); ok {
				ts = append(ts, t)
			}
		}
	}
	return ts
}

func readTask(pid int) (task, bool) {
	b, err := readProc(fmt.Sprintf("/proc/%d/stat", pid), 4096)
	if err != nil {
		return task{}, false
	}
	// The name is in parentheses and may itself hold any of them.
	open, shut := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || shut < open {
		return task{}, false
	}
	f := strings.Fields(string(b[shut+1:]))
	if len(f) < 4 {
		return task{}, false
	}
	t := task{pid: pid, state: f[0][0], comm: string(b[open+1 : shut])}
	t.ppid, _ = strconv.Atoi(f[1])
	t.pgrp, _ = strconv.Atoi(f[2])
	t.sid, _ = strconv.Atoi(f[3])
	return t, true
}

// readProc reads a file of the agent's own /proc, at most limit bytes of it. It
// is on the path of every start, so it makes three system calls and not the
// seven of os.ReadFile.
func readProc(path string, limit int) ([]byte, error) {
	fd, err := retryEINTR(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	buf := make([]byte, min(limit, 4096))
	n := 0
	for {
		m, err := retryEINTR(func() (int, error) { return unix.Read(fd, buf[n:]) })
		if err != nil {
			return nil, err
		}
		// These files come whole when the buffer has room.
		if n += m; n < len(buf) || n >= limit {
			return buf[:n], nil
		}
		buf = append(buf, make([]byte, min(len(buf), limit-len(buf)))...)
	}
}

// tree says which processes belong to an exec, or to all of an episode.
type tree struct {
	leaders map[int]bool // main processes
	mark    string       // environment entry, or with all set what it starts with
	all     bool
}

// marked says whether a process carries the mark in its environment.
func (tr tree) marked(pid int) bool {
	env, _ := readProc(fmt.Sprintf("/proc/%d/environ", pid), maxEnviron)
	for kv := range strings.SplitSeq(string(env), "\x00") {
		if kv == tr.mark || tr.all && strings.HasPrefix(kv, tr.mark) {
			return true
		}
	}
	return false
}

// living finds the living members among all: the sessions and groups of the
// leaders, their descendants, and whatever carries the mark.
func (tr tree) living(all []task) []task {
	in := map[int]bool{os.Getpid(): false}
	for _, t := range all {
		if _, known := in[t.pid]; !known && (tr.leaders[t.pid] || tr.leaders[t.sid] || tr.leaders[t.pgrp] || tr.marked(t.pid)) {
			in[t.pid] = true
		}
	}
	for grew := true; grew; { // parents may come behind their children
		grew = false
		for _, t := range all {
			if _, known := in[t.pid]; !known && in[t.ppid] {
				in[t.pid], grew = true, true
			}
		}
	}
	var alive []task
	for _, t := range all {
		if in[t.pid] && t.alive() {
			alive = append(alive, t)
		}
	}
	return alive
}

// kill ends a whole tree. Members are stopped before any is killed, so that
// none can fork out of sight between being listed and dying; rounds repeat
// until none is found twice, because a process in the middle of an execve shows
// no environment. It gives up after about five seconds, on a busy machine more:
// what survives that is not a process we can kill.
func (tr tree) kill() {
	empty := 0
	for round := range 260 {
		members := tr.living(allTasks())
		if empty++; len(members) > 0 {
			empty = 0
		}
		if empty == 2 {
			return
		}
		for _, t := range members {
			unix.Kill(t.pid, unix.SIGSTOP)
		}
		for _, t := range members {
			unix.Kill(t.pid, unix.SIGKILL)
		}
		time.Sleep(min(time.Millisecond<<min(round, 5), 20*time.Millisecond))
	}
}

// innerPID is a process's pid as code inside its own pid namespace sees it.
// Linux and gVisor both write it for a pidfd, in the caller's /proc.
func innerPID(pidfd int) (pid, depth int) {
	b, err := readProc(fmt.Sprintf("/proc/self/fdinfo/%d", pidfd), 4096)
	if err != nil {
		return 0, 0
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "NSpid:"); ok {
			f := strings.Fields(v)
			if len(f) == 0 {
				return 0, 0
			}
			pid, _ = strconv.Atoi(f[len(f)-1])
			return max(pid, 0), len(f)
		}
	}
	return 0, 0
}

// listTasks describes what runs inside.
func listTasks(sp Space, ep *episode) []sandbox.Task {
	leaders := map[int]string{}
	for _, ex := range ep.all() {
		if pid, _ := ex.leader(); pid != 0 {
			leaders[pid] = ex.id
		}
	}
	all := allTasks()
	byPID := make(map[int]task, len(all))
	for _, t := range all {
		byPID[t.pid] = t
	}
	ownerOf := func(t task) string {
		for range 64 { // of ancestors; a cycle of reused pids must not hold us
			for _, l := range []int{t.pid, t.sid, t.pgrp} {
				if id, ok := leaders[l]; ok {
					return id
				}
			}
			up, ok := byPID[t.ppid]
			if !ok || t.ppid == t.pid {
				break
			}
			t = up
		}
		return ""
	}
	var out []sandbox.Task
	inner := map[int]int{}
	for _, t := range all {
		if len(out) >= maxTasks {
			break
		}
		id := ownerOf(t)
		if sp.contained() {
			fd, err := unix.PidfdOpen(t.pid, 0)
			if err != nil {
				continue
			}
			pid, depth := innerPID(fd)
			unix.Close(fd)
			if depth < 2 || pid == 0 {
				continue // of the agent's own container
			}
			inner[t.pid] = pid
		} else {
			if id == "" {
				continue
			}
			inner[t.pid] = t.pid
		}
		if id == "" {
			id = ep.markedID(t.pid)
		}
		out = append(out, sandbox.Task{PID: t.pid, PPID: t.ppid, UID: uidOf(t.pid), State: string(t.state), Command: commandOf(t), ExecID: id})
	}
	for i := range out {
		out[i].PID, out[i].PPID = inner[out[i].PID], inner[out[i].PPID] // a parent outside is 0, as inside
	}
	return out
}

func uidOf(pid int) int {
	var st unix.Stat_t
	if unix.Stat(fmt.Sprintf("/proc/%d", pid), &st) != nil {
		return 0
	}
	return int(st.Uid)
}

func commandOf(t task) string {
	b, _ := readProc(fmt.Sprintf("/proc/%d/cmdline", t.pid), maxCommand)
	if s := strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " ")); s != "" {
		return strings.ToValidUTF8(s, "\ufffd")
	}
	return "[" + strings.ToValidUTF8(t.comm, "\ufffd") + "]"
}
