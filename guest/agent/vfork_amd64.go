package agent

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// vfork starts a process from the calling thread. It differs from
// syscall.ForkExec, which does the same, in three ways that matter here:
//
//   - The thread waits for the execve as in any other system call, so Go runs
//     on. ForkExec holds a processor of Go's meanwhile, and garbage collection
//     waits for it: code inside that stops the child before its execve would
//     stop the whole agent.
//   - clone3 resets signal handlers and reports the pid inside; ForkExec makes
//     55 system calls for the one, and /proc is needed for the other.
//   - An error comes back through memory, which the child shares, not a pipe.
//
// It returns ENOSYS where there is no clone3.
func vfork(s *spawnSpec) (spawned, error) {
	a := &vforkArgs{uid: -1, ctty: s.ctty, nofile: childFiles()}
	var err error
	if a.path, err = syscall.BytePtrFromString(s.path); err != nil {
		return spawned{}, err
	}
	argv, err := syscall.SlicePtrFromStrings(s.argv)
	if err != nil {
		return spawned{}, err
	}
	envp, err := syscall.SlicePtrFromStrings(s.env)
	if err != nil {
		return spawned{}, err
	}
	a.dir, a.argv, a.envp, a.files, a.grouped = s.dir, &argv[0], &envp[0], s.files, s.group != 0
	for _, fd := range s.files {
		if fd < 3 { // would be overwritten before it is used
			return spawned{}, unix.ENOSYS
		}
	}
	if s.user != nil {
		a.uid, a.gid, a.ngroups = int(s.user.uid), int(s.user.gid), len(s.user.groups)
		if a.ngroups > 0 {
			a.groups = &s.user.groups[0]
		}
	}
	a.clone = cloneArgs{
		flags: unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_PIDFD | unix.CLONE_CHILD_SETTID | unix.CLONE_CLEAR_SIGHAND,
		pidfd: uint64(uintptr(unsafe.Pointer(&a.pidfd))), childTID: uint64(uintptr(unsafe.Pointer(&a.inner))), exitSignal: uint64(unix.SIGCHLD),
	}
	if s.group != 0 {
		a.clone.flags |= unix.CLONE_INTO_CGROUP
		a.clone.cgroup = uint64(s.group)
	}
	a.all = ^uint64(0)
	pid, errno := vforkExec(a)
	if errno != 0 {
		return spawned{}, syscall.Errno(errno)
	}
	if a.err != 0 {
		unix.Close(int(a.pidfd))
		retryEINTR(func() (int, error) { return unix.Wait4(int(pid), nil, 0, nil) })
		return spawned{}, syscall.Errno(a.err)
	}
	return spawned{pid: int(pid), inner: int(a.inner), pidfd: int(a.pidfd)}, nil
}

// cloneArgs is struct clone_args as of CLONE_INTO_CGROUP.
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// vforkArgs is all the child needs, laid out ahead: it may not allocate, grow
// its stack or take a lock.
type vforkArgs struct {
	clone      cloneArgs
	path       *byte
	dir        int
	argv, envp **byte
	files      [3]int
	uid, gid   int // uid -1: stay who we are
	groups     *uint32
	ngroups    int
	ctty       bool
	grouped    bool // it gets a cgroup namespace, of the group it is started in
	nofile     unix.Rlimit
	all, old   uint64 // signal masks

	pidfd, inner int32
	err          uintptr // of the step that failed in the child
}

//go:linkname entersyscall runtime.entersyscall
func entersyscall()

//go:linkname exitsyscall runtime.exitsyscall
func exitsyscall()

func vforkSyscall(trap, a1, a2 uintptr) (r1, errno uintptr)

// vforkExec forks and executes. The child runs in it on the same stack and in
// the same memory while the parent's thread is suspended, so there must be
// nothing here but system calls. All signals are blocked around the fork and,
// in the child, until their handlers are gone.
//
//go:noinline
//go:norace
//go:nosplit
func vforkExec(a *vforkArgs) (pid, errno uintptr) {
	entersyscall()
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&a.all)), uintptr(unsafe.Pointer(&a.old)), 8, 0, 0)
	pid, errno = vforkSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&a.clone)), unsafe.Sizeof(a.clone))
	if errno != 0 || pid != 0 {
		syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&a.old)), 0, 8, 0, 0)
		exitsyscall()
		return pid, errno
	}

	// The child.
	var e syscall.Errno
	if _, _, e = syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0); e != 0 {
		goto failed
	}
	if a.grouped {
		if _, _, e = syscall.RawSyscall(syscall.SYS_UNSHARE, syscall.CLONE_NEWCGROUP, 0, 0); e != 0 {
			goto failed
		}
	}
	if a.uid >= 0 {
		if _, _, e = syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(a.ngroups), uintptr(unsafe.Pointer(a.groups)), 0); e != 0 {
			goto failed
		}
		if _, _, e = syscall.RawSyscall(syscall.SYS_SETGID, uintptr(a.gid), 0, 0); e != 0 {
			goto failed
		}
		if _, _, e = syscall.RawSyscall(syscall.SYS_SETUID, uintptr(a.uid), 0, 0); e != 0 {
			goto failed
		}
	}
	if _, _, e = syscall.RawSyscall(syscall.SYS_FCHDIR, uintptr(a.dir), 0, 0); e != 0 {
		goto failed
	}
	for i := 0; i < 3; i++ {
		if _, _, e = syscall.RawSyscall(syscall.SYS_DUP3, uintptr(a.files[i]), uintptr(i), 0); e != 0 {
			goto failed
		}
	}
	if a.ctty {
		if _, _, e = syscall.RawSyscall(syscall.SYS_IOCTL, 0, syscall.TIOCSCTTY, 1); e != 0 {
			goto failed
		}
	}
	syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, syscall.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&a.nofile)), 0, 0, 0)
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&a.old)), 0, 8, 0, 0)
	_, _, e = syscall.RawSyscall(syscall.SYS_EXECVE, uintptr(unsafe.Pointer(a.path)), uintptr(unsafe.Pointer(a.argv)), uintptr(unsafe.Pointer(a.envp)))
failed:
	a.err = uintptr(e)
	for {
		syscall.RawSyscall(syscall.SYS_EXIT, 127, 0, 0)
	}
}

// childFiles is the limit of descriptors that processes start with. Go raises
// the agent's own to the hard limit, which breaks programs that close every
// descriptor they may have or still use select.
func childFiles() unix.Rlimit {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return unix.Rlimit{Cur: 1024, Max: 1024}
	}
	l.Cur = min(65536, l.Max)
	return l
}
