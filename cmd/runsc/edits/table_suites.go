package main

const (
	resolvingPath = "pkg/sentry/vfs/resolving_path.go"
	inotifyGo     = "pkg/sentry/vfs/inotify.go"
	callTable     = "pkg/sentry/syscalls/linux/linux64.go"
	schedCalls    = "pkg/sentry/syscalls/linux/sys_sched.go"
)

// suiteEdits are what "make compat" found: calls that the test suites of CPython,
// Go and fsnotify make, and that gVisor answers otherwise than Linux.
var suiteEdits = []edit{
	// O_DIRECTORY with O_NOFOLLOW does not follow a link: ENOTDIR. gVisor took it for
	// a path that ends in a slash, so that what walks a tree and must not leave it
	// (rm -r, Go's os.Root) was led out by a link.
	{
		file: resolvingPath,
		old: `	rpflagsNoXDev                         // same as RESOLVE_NO_XDEV
`,
		new: `	rpflagsNoXDev                         // same as RESOLVE_NO_XDEV
	rpflagsNoFollowDir                    // mustBeDir is no reason to follow the final symlink
`,
	},
	{
		file: resolvingPath,
		old: `!rp.Final() || rp.MustBeDir()
`,
		new: `!rp.Final() || (rp.MustBeDir() && rp.flags&rpflagsNoFollowDir == 0)
`,
	},
	{
		file: "pkg/sentry/vfs/vfs.go",
		old: `	if opts.Flags&linux.O_DIRECTORY != 0 {
		rp.mustBeDir = true
	}
`,
		new: `	if opts.Flags&linux.O_DIRECTORY != 0 {
		if opts.Flags&linux.O_NOFOLLOW != 0 && !rp.mustBeDir {
			rp.flags |= rpflagsNoFollowDir
		}
		rp.mustBeDir = true
	}
`,
	},

	// The overlay has checked who may rename; below it acts by its own right, as on
	// Linux. By the caller's, the whiteout that a removed name leaves, which is
	// root's, could not be replaced in a sticky directory: rotating logs in /tmp
	// ended with EPERM.
	{
		file: overlayFS,
		old:  `vfsObj.RenameAt(ctx, creds, &oldpop, &newpop, &opts)`,
		new:  `vfsObj.RenameAt(ctx, fs.creds, &oldpop, &newpop, &opts)`,
	},

	// There is no process of a negative number: ESRCH.
	{
		file: "pkg/sentry/syscalls/linux/sys_rlimit.go",
		old: `	if tid < 0 {
		return 0, nil, linuxerr.EINVAL
`,
		new: `	if tid < 0 {
		return 0, nil, linuxerr.ESRCH
`,
	},

	// A watch needs the right to read what is watched. Without the check a user
	// learns of every name in a directory that is closed to him.
	{
		file: "pkg/sentry/syscalls/linux/sys_inotify.go",
		old: `	d, err := t.Kernel().VFS().GetDentryAt(t, t.Credentials(), &tpop.pop, &vfs.GetDentryOptions{})
`,
		new: `	if err := t.Kernel().VFS().AccessAt(t, t.Credentials(), vfs.MayRead, &tpop.pop); err != nil {
		return 0, nil, err
	}
	d, err := t.Kernel().VFS().GetDentryAt(t, t.Credentials(), &tpop.pop, &vfs.GetDentryOptions{})
`,
	},

	// A queue that nobody reads ends with IN_Q_OVERFLOW at Linux's default length;
	// gVisor's grew without end, in memory that no process answers for. After a
	// restore the count starts anew: the queue may then become twice as long.
	{
		file: inotifyGo,
		old: `	events eventList
`,
		new: `	events eventList

	// queued counts events. Protected by evMu.
	queued int ` + "`state:\"nosave\"`" + `
`,
	},
	{
		file: inotifyGo,
		old: `		i.events.Remove(event)

		// Buffer has enough space`,
		new: `		i.events.Remove(event)
		i.queued = max(i.queued-1, 0)

		// Buffer has enough space`,
	},
	{
		file: inotifyGo,
		old: `	i.events.PushBack(ev)

	// Release mutex`,
		new: `	const maxQueued = 16384 // fs.inotify.max_queued_events
	if i.queued > maxQueued {
		i.evMu.Unlock()
		return
	}
	if i.queued == maxQueued {
		ev = newEvent(-1, "", linux.IN_Q_OVERFLOW, 0)
	}
	i.queued++
	i.events.PushBack(ev)

	// Release mutex`,
	},

	// A watched file that is replaced by a rename has a link less: IN_ATTRIB, as
	// unlink sends it. Before its last link goes, and its watches with it.
	{
		file: overlayFS,
		old: `	delete(oldParent.children, oldName)
	if replaced != nil {
`,
		new: `	delete(oldParent.children, oldName)
	if replaced != nil {
		replaced.watches.Notify(ctx, "", linux.IN_ATTRIB, 0, vfs.InodeEvent, true /* unlinked */)
`,
	},
	{
		file: tmpFS,
		old: `	if replaced != nil {
		newParentDir.removeChildLocked(replaced)
`,
		new: `	if replaced != nil {
		replaced.inode.watches.Notify(ctx, "", linux.IN_ATTRIB, 0, vfs.InodeEvent, true /* unlinked */)
		newParentDir.removeChildLocked(replaced)
`,
	},

	// SEEK_DATA and SEEK_HOLE: what is written (tmpfs) is known page by page; of
	// an image's file (EROFS) all is data, as Linux says where it does not know.
	{file: "pkg/sentry/fsimpl/tmpfs/holes.go", add: "holes_tmpfs.go.in"},
	{
		file: "pkg/sentry/fsimpl/tmpfs/regular_file.go",
		old: `		offset += int64(fd.inode().impl.(*regularFile).size.Load())
	default:
		return 0, linuxerr.EINVAL
`,
		new: `		offset += int64(fd.inode().impl.(*regularFile).size.Load())
	case linux.SEEK_DATA, linux.SEEK_HOLE:
		var err error
		if offset, err = fd.inode().impl.(*regularFile).seekHole(offset, whence == linux.SEEK_HOLE); err != nil {
			return 0, err
		}
	default:
		return 0, linuxerr.EINVAL
`,
	},
	{
		file: "pkg/sentry/fsimpl/erofs/regular_file.go",
		old: `		offset += int64(fd.inode().Size())
	default:
`,
		new: `		offset += int64(fd.inode().Size())
	case linux.SEEK_DATA, linux.SEEK_HOLE:
		size := int64(fd.inode().Size())
		if offset < 0 || offset >= size {
			return 0, linuxerr.ENXIO
		}
		if whence == linux.SEEK_HOLE {
			offset = size
		}
	default:
`,
	},

	// The cores a process may run on, in its status: psutil, hwloc and the like read
	// them there. The mask is the one of sched_getaffinity.
	{file: "pkg/sentry/fsimpl/proc/cpus.go", add: "cpus_proc.go.in"},
	{
		file: "pkg/sentry/fsimpl/proc/task_files.go",
		old: `	// We unconditionally report a single NUMA node. See
`,
		new: `	writeCPUs(buf, s.task.CPUMask())
	// We unconditionally report a single NUMA node. See
`,
	},

	// vmstat does not start without this file. gVisor does no paging: zeros are true.
	{
		file: "pkg/sentry/fsimpl/proc/tasks.go",
		old: `		"uptime":         fs.newInode(ctx, root, 0444, &uptimeData{}),
`,
		new: `		"uptime":         fs.newInode(ctx, root, 0444, &uptimeData{}),
		"vmstat":         fs.newInode(ctx, root, 0444, newStaticFile("pgpgin 0\npgpgout 0\npswpin 0\npswpout 0\n")),
`,
	},

	// Scheduling: everything has the one priority there is, and may be given it.
	{file: "pkg/sentry/syscalls/linux/sys_sched_one.go", add: "sched_one.go.in"},
	{file: callTable, old: `142: syscalls.CapError("sched_setparam", linux.CAP_SYS_NICE, "", nil),`, new: `142: syscalls.PartiallySupported("sched_setparam", SchedSetparam, "Stub implementation.", nil),`},
	{file: callTable, old: `118: syscalls.CapError("sched_setparam", linux.CAP_SYS_NICE, "", nil),`, new: `118: syscalls.PartiallySupported("sched_setparam", SchedSetparam, "Stub implementation.", nil),`},
	{file: callTable, old: `148: syscalls.ErrorWithEvent("sched_rr_get_interval", linuxerr.EPERM, "", nil),`, new: `148: syscalls.PartiallySupported("sched_rr_get_interval", SchedRRGetInterval, "Stub implementation.", nil),`},
	{file: callTable, old: `127: syscalls.ErrorWithEvent("sched_rr_get_interval", linuxerr.EPERM, "", nil),`, new: `127: syscalls.PartiallySupported("sched_rr_get_interval", SchedRRGetInterval, "Stub implementation.", nil),`},
	{
		file: schedCalls,
		old: `func SchedGetPriorityMax(t *kernel.Task, sysno uintptr, args arch.SyscallArguments) (uintptr, *kernel.SyscallControl, error) {
	return onlyPriority, nil, nil
`,
		new: `func SchedGetPriorityMax(t *kernel.Task, sysno uintptr, args arch.SyscallArguments) (uintptr, *kernel.SyscallControl, error) {
	return onlyPriority, nil, knownPolicy(args[0].Int())
`,
	},
	{
		file: schedCalls,
		old: `func SchedGetPriorityMin(t *kernel.Task, sysno uintptr, args arch.SyscallArguments) (uintptr, *kernel.SyscallControl, error) {
	return onlyPriority, nil, nil
`,
		new: `func SchedGetPriorityMin(t *kernel.Task, sysno uintptr, args arch.SyscallArguments) (uintptr, *kernel.SyscallControl, error) {
	return onlyPriority, nil, knownPolicy(args[0].Int())
`,
	},
}
