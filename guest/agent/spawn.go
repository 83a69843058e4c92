package agent

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	defaultTerm = "xterm-256color"
	maxPath     = 4096
	maxName     = 255
)

// checkSpec refuses what can be refused without touching the container.
func checkSpec(s *sandbox.ProcessSpec) error {
	switch {
	case len(s.Args) > 0 && s.Command != "":
		return sandbox.InvalidField("args", "exactly one of args and command may be set")
	case len(s.Args) == 0 && s.Command == "":
		return sandbox.InvalidField("args", "one of args and command must be set")
	case len(s.Args) > 0 && s.Args[0] == "":
		return sandbox.InvalidField("args", "the program name is empty")
	case strings.IndexByte(s.Command, 0) >= 0:
		return sandbox.InvalidField("command", "must not contain a NUL byte")
	case s.Timeout < 0:
		return sandbox.InvalidField("timeout", "must not be negative")
	}
	for i, a := range s.Args {
		if strings.IndexByte(a, 0) >= 0 {
			return sandbox.InvalidField("args", "argument %d contains a NUL byte", i)
		}
	}
	for k, v := range s.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
			return sandbox.InvalidField("env", "%q: a name must not be empty or contain '=', and neither name nor value a NUL byte", k)
		}
	}
	if s.Cwd != "" {
		if _, err := cleanPath("cwd", s.Cwd); err != nil {
			return err
		}
	}
	return nil
}

// child is a forked process with the agent's ends of its descriptors.
type child struct {
	pid, inner int
	pidfd      *os.File
	stdin      *os.File // nil without
	pumps      []*pump
	term       *os.File // master side; also in stdin and the only pump
	group      *subgroup
}

// spawn starts the process of spec, all output going to log.
func (ep *episode) spawn(spec *sandbox.ProcessSpec, mark string, log *outlog) (*child, error) {
	fds, err := ep.openStdio(spec)
	if err != nil {
		return nil, resourceError(err)
	}
	defer fds.closeChild()
	group, err := ep.space.processes().sub()
	if err != nil {
		fds.closeOwn()
		return nil, resourceError(err)
	}
	var c *child
	var ferr error
	err = ep.space.spawner(func() {
		select {
		case <-ep.over: // while it waited for its turn
			ferr = errLeft
			return
		default:
		}
		defer ep.unstickEvery(time.Second)()
		c, ferr = ep.fork(spec, mark, fds, group.into())
	})
	if err = errors.Join(err, ferr); err != nil {
		fds.closeOwn()
		group.remove()
		if errors.Is(err, errLeft) {
			return nil, errReset()
		}
		return nil, err
	}
	c.group = group
	group.started()
	switch {
	case !ep.space.contained():
		c.inner = c.pid
	case c.inner == 0:
		rc, _ := c.pidfd.SyscallConn()
		rc.Control(func(fd uintptr) { c.inner, _ = innerPID(int(fd)) })
	}
	c.stdin, c.term = fds.stdin, fds.term
	if fds.term != nil {
		c.stdin = fds.term
		c.pumps = []*pump{newPump(fds.term, sandbox.PTYOut, log)}
	} else {
		c.pumps = []*pump{newPump(fds.stdout, sandbox.Stdout, log), newPump(fds.stderr, sandbox.Stderr, log)}
	}
	return c, nil
}

// stdio is both ends of a process's descriptors.
type stdio struct {
	child                       [3]int // descriptors for the child
	owned                       []int  // of those, the ones to close here
	stdin, stdout, stderr, term *os.File
}

// openStdio makes pipes that live in the kernel, never host descriptors: those
// would not survive a checkpoint. A terminal is opened by fork, inside.
func (ep *episode) openStdio(spec *sandbox.ProcessSpec) (*stdio, error) {
	fds := &stdio{}
	if spec.PTY != nil {
		return fds, nil
	}
	pipe := func(ownRead bool, name string, theirs *int) (*os.File, error) {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return nil, err
		}
		own, other := p[1], p[0]
		if ownRead {
			own, other = other, own
		}
		*theirs = other
		fds.owned = append(fds.owned, other)
		unix.FcntlInt(uintptr(own), unix.F_SETFL, unix.O_NONBLOCK) // a new pipe has no other flags to keep
		return os.NewFile(uintptr(own), name), nil
	}
	var err error
	if fds.stdout, err = pipe(true, "stdout", &fds.child[1]); err == nil {
		fds.stderr, err = pipe(true, "stderr", &fds.child[2])
	}
	if err == nil && (spec.Stdin || len(spec.Input) > 0) {
		fds.stdin, err = pipe(false, "stdin", &fds.child[0])
	} else if err == nil {
		var null *os.File
		if null, err = ep.space.devNull(); err == nil {
			fds.child[0] = int(null.Fd())
		}
	}
	if err != nil {
		fds.closeChild()
		fds.closeOwn()
		return nil, err
	}
	return fds, nil
}

func (s *stdio) closeChild() {
	for _, fd := range s.owned {
		unix.Close(fd)
	}
	s.owned = nil
}

func (s *stdio) closeOwn() {
	for _, f := range []*os.File{s.stdin, s.stdout, s.stderr, s.term} {
		if f != nil {
			f.Close()
		}
	}
}

// fork resolves user, directory and program inside and starts the process. It
// runs on the spawner thread: the fork must come from there.
func (ep *episode) fork(spec *sandbox.ProcessSpec, mark string, fds *stdio, group int) (*child, error) {
	id, err := ep.identity(spec.User)
	if err != nil {
		return nil, err
	}
	cwd := spec.Cwd
	if cwd == "" {
		cwd = ep.workdir
	}
	// Opened here and not by its name in the child, which would follow links of
	// /proc to its own descriptors, and those are the agent's.
	dir, err := ep.space.open(cwd, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, sandbox.InvalidField("cwd", "no directory %s in the sandbox", cwd).WithHint("make it first, or leave cwd out to start in %s", ep.workdir)
	}
	defer unix.Close(dir)
	env, searchPath := ep.environ(spec, id, mark)
	argv := spec.Args
	if spec.Command != "" {
		argv = []string{ep.shell(), "-c", spec.Command}
	}
	program, err := ep.lookProgram(argv[0], searchPath, cwd)
	if err != nil {
		return nil, err
	}
	if spec.PTY != nil {
		if err := ep.openTerminal(*spec.PTY, id, fds); err != nil {
			return nil, err
		}
	}
	spawn := &spawnSpec{path: program, argv: argv, env: env, dir: dir, files: fds.child, ctty: spec.PTY != nil, group: group}
	if ep.space.users() && (id.uid != 0 || id.gid != 0 || len(id.groups) > 0) {
		spawn.user = &id
	}
	got, err := vfork(spawn)
	if err == unix.ENOSYS {
		got, err = forkExec(spawn)
	}
	var st unix.Stat_t
	if err == unix.EACCES && unix.Fstat(dir, &st) == nil && !id.mayEnter(&st) {
		return nil, &sandbox.Error{Class: sandbox.Denied, Field: "cwd", Msg: fmt.Sprintf("user %s may not enter %s", cmp.Or(id.name, strconv.Itoa(int(id.uid))), cwd),
			Hint: "set cwd to a directory of that user"}
	}
	if err != nil {
		return nil, startError(argv[0], program, err)
	}
	unix.SetNonblock(got.pidfd, true) // so that os.NewFile waits for it in the poller
	return &child{pid: got.pid, inner: got.inner, pidfd: os.NewFile(uintptr(got.pidfd), "pidfd")}, nil
}

// spawnSpec is a process with everything resolved: a session of its own, and no
// descriptors but these three.
type spawnSpec struct {
	path      string
	dir       int // descriptor of the directory to start in
	argv, env []string
	files     [3]int
	user      *ident // nil = as we are
	ctty      bool   // files[0] is a terminal to control it
	group     int    // descriptor of the cgroup to start in, and to have as the root of those it sees; 0 = ours
}

type spawned struct {
	pid   int
	inner int // pid in its own namespace; 0 = not known
	pidfd int
}

// forkExec is Go's own way to start a process, where vfork does not work.
func forkExec(s *spawnSpec) (spawned, error) {
	got := spawned{pidfd: -1}
	attr := &syscall.ProcAttr{
		Env:   s.env,
		Files: []uintptr{uintptr(s.files[0]), uintptr(s.files[1]), uintptr(s.files[2])},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: s.ctty, PidFD: &got.pidfd, UseCgroupFD: s.group != 0, CgroupFD: s.group},
	}
	if s.user != nil {
		attr.Sys.Credential = &syscall.Credential{Uid: s.user.uid, Gid: s.user.gid, Groups: s.user.groups}
	}
	if s.group != 0 {
		attr.Sys.Unshareflags = syscall.CLONE_NEWCGROUP
	}
	// From where the child starts.
	err := unix.Fchdir(s.dir)
	if err != nil {
		return spawned{}, err
	}
	defer unix.Chdir("/")
	if got.pid, err = syscall.ForkExec(s.path, s.argv, attr); err != nil {
		return spawned{}, err
	}
	if got.pidfd < 0 {
		if got.pidfd, err = unix.PidfdOpen(got.pid, 0); err != nil {
			unix.Kill(got.pid, unix.SIGKILL)
			go syscall.Wait4(got.pid, nil, 0, nil)
			return spawned{}, err
		}
	}
	return got, nil
}

// identity resolves a user; without users of its own, a space takes any name.
func (ep *episode) identity(user string) (ident, error) {
	if user == "" {
		user = ep.user
	}
	id, err := ep.userDB.lookup(ep.space, user)
	if err != nil && !ep.space.users() {
		var st unix.Stat_t
		if ep.space.stat("/etc/passwd", &st) != nil {
			name, _, _ := strings.Cut(user, ":")
			return ident{name: name, home: "/"}, nil
		}
	}
	return id, err
}

// environ builds the environment: the container's, the user's, the caller's,
// the mark. A later entry wins.
func (ep *episode) environ(spec *sandbox.ProcessSpec, id ident, mark string) (env []string, searchPath string) {
	base := ep.baseEnv()
	vars := make(map[string]string, len(base)+len(spec.Env)+6)
	vars["PATH"] = defaultPath
	if spec.PTY != nil {
		vars["TERM"] = defaultTerm
	}
	vars["HOME"] = id.home
	if !ep.space.users() {
		vars["HOME"] = ep.space.workdir(id.home)
	}
	if id.name != "" {
		vars["USER"], vars["LOGNAME"] = id.name, id.name
	}
	for _, kv := range base {
		if k, v, ok := strings.Cut(kv, "="); ok && k != "" {
			vars[k] = v
		}
	}
	maps.Copy(vars, spec.Env)
	delete(vars, markKey)
	env = make([]string, 0, len(vars)+1)
	env = append(env, mark)
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		env = append(env, k+"="+vars[k])
	}
	return env, vars["PATH"]
}

// shell is bash where the container has it: what people write in a command
// line is bash more often than they know.
func (ep *episode) shell() string {
	if _, program := lookFile(ep.space.program("/bin/bash")); program {
		return "/bin/bash"
	}
	return "/bin/sh"
}

func lookFile(p string) (exists, program bool) {
	var st unix.Stat_t
	if unix.Stat(p, &st) != nil {
		return false, false
	}
	return true, st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&0o111 != 0
}

// lookProgram finds name as execvp would.
func (ep *episode) lookProgram(name, searchPath, cwd string) (string, error) {
	if strings.Contains(name, "/") {
		p := name
		if !path.IsAbs(name) {
			return ep.space.workdir(path.Join(cwd, name)), nil
		}
		return ep.space.program(p), nil
	}
	found := "" // a file of that name that is no program
	for dir := range strings.SplitSeq(searchPath, ":") {
		p := path.Join(cwd, dir, name)
		if path.IsAbs(dir) {
			p = path.Join(dir, name)
		}
		if len(p) >= maxPath {
			continue
		}
		inside := p
		p = ep.space.program(p)
		exists, program := lookFile(p)
		if program {
			return p, nil
		}
		if found == "" && exists {
			found = inside
		}
	}
	if found != "" {
		return "", &sandbox.Error{Class: sandbox.Denied, Reason: sandbox.NotExecutable, Field: "args", Msg: clip(found, 200) + ": permission denied", Hint: "the file is not executable"}
	}
	return "", commandNotFound(name, "it is in none of the directories of PATH="+clip(searchPath, 500))
}

// openTerminal opens a terminal of the container and makes it the child's
// stdio. The slave side is asked of the master, not opened by a name that code
// inside may have put something else under.
func (ep *episode) openTerminal(size sandbox.TermSize, id ident, fds *stdio) error {
	unsupported := func(what string, err error) error {
		return sandbox.Errorf(sandbox.Unsupported, "", "no terminal: %s: %w", what, err).WithHint("the sandbox needs /dev/ptmx and devpts; run without pty")
	}
	master, err := ep.space.terminal()
	if err != nil {
		return unsupported("/dev/ptmx", err)
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		unix.Close(master)
		return unsupported("unlock", err)
	}
	slave, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, uintptr(unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC))
	if errno != 0 {
		unix.Close(master)
		return unsupported("slave side", errno)
	}
	fds.term = os.NewFile(uintptr(master), "ptmx")
	fds.child = [3]int{int(slave), int(slave), int(slave)}
	fds.owned = append(fds.owned, int(slave))
	if id.uid != 0 && ep.space.users() {
		unix.Fchown(int(slave), int(id.uid), -1)
	}
	return unix.IoctlSetWinsize(master, unix.TIOCSWINSZ, winsize(size))
}

func winsize(s sandbox.TermSize) *unix.Winsize {
	w := &unix.Winsize{Row: s.Rows, Col: s.Cols}
	if w.Row == 0 {
		w.Row = 24
	}
	if w.Col == 0 {
		w.Col = 80
	}
	return w
}

func commandNotFound(name, hint string) error {
	return &sandbox.Error{Class: sandbox.NotFound, Reason: sandbox.CommandNotFound, Field: "args", Msg: "command not found: " + clip(name, 200), Hint: hint}
}

// startError explains why a program that was found did not start.
func startError(name, program string, err error) error {
	name = clip(name, 200)
	switch {
	case errors.Is(err, unix.ENOENT):
		var st unix.Stat_t
		if unix.Stat(program, &st) == nil {
			return &sandbox.Error{Class: sandbox.Invalid, Reason: sandbox.NotExecutable, Field: "args", Msg: name + ": its interpreter is missing", Hint: "check the #! line, or that the image has the loader the program was built for"}
		}
		return commandNotFound(name, "check the path")
	case errors.Is(err, unix.E2BIG), errors.Is(err, unix.ENAMETOOLONG) && len(program) < maxName: // the second is gVisor's word for one long argument
		return &sandbox.Error{Class: sandbox.TooLarge, Field: "args", Msg: "arguments and environment together are larger than the kernel takes",
			Hint: "send large content as input or in a file; a single argument may have at most 128 KiB"}
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG):
		return commandNotFound(name, "check the path: "+err.Error())
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return &sandbox.Error{Class: sandbox.Denied, Reason: sandbox.NotExecutable, Field: "args", Msg: name + ": permission denied", Hint: "the user needs execute permission on the program and access to cwd"}
	case errors.Is(err, unix.ENOEXEC):
		return &sandbox.Error{Class: sandbox.Invalid, Reason: sandbox.NotExecutable, Field: "args", Msg: name + ": not a program this machine can run", Hint: "a script needs a #! line"}
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ELIBBAD):
		return &sandbox.Error{Class: sandbox.Invalid, Reason: sandbox.NotExecutable, Field: "args", Msg: name + ": cannot be executed", Err: err}
	}
	return resourceError(err)
}

// resourceError is a start that failed for want of something. It is the one
// kind that is not remembered: the process surely did not run, and may later.
func resourceError(err error) error {
	if e, ok := errors.AsType[*sandbox.Error](err); ok {
		return e
	}
	hint := "try again"
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOMEM) {
		hint = "the sandbox is at its limit of processes or memory; end some and try again"
	}
	return &sandbox.Error{Class: sandbox.Unavailable, Msg: "cannot start a process now", Hint: hint, Err: err}
}

// unstickEvery sees, until the returned function is called, to children that
// were stopped before they executed: the spawner waits for their execve, and
// code inside that stops every new pid would otherwise hold it for ever.
func (ep *episode) unstickEvery(d time.Duration) (stop func()) {
	if !ep.space.contained() {
		return func() {} // the children of this process are not all ours
	}
	var mu sync.Mutex
	var t *time.Timer
	stopped := false
	mu.Lock()
	defer mu.Unlock()
	t = time.AfterFunc(d, func() {
		mu.Lock()
		defer mu.Unlock()
		if !stopped {
			ep.unstick()
			t.Reset(d)
		}
	})
	return func() {
		t.Stop()
		mu.Lock()
		stopped = true
		mu.Unlock()
	}
}

// unstick continues children that were stopped before they executed, or ends
// them when the episode is over and they will not be needed. They are known by
// not being known yet: a start that has succeeded is in the list.
func (ep *episode) unstick() {
	sig := unix.SIGCONT
	select {
	case <-ep.over:
		sig = unix.SIGKILL
	default:
	}
	known := map[int]bool{}
	for _, ex := range ep.all() {
		pid, _ := ex.leader()
		known[pid] = true
	}
	me := os.Getpid()
	for _, t := range allTasks() {
		if t.ppid == me && (t.state == 'T' || t.state == 't') && !known[t.pid] {
			unix.Kill(t.pid, sig)
		}
	}
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + "…"
}
