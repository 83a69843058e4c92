package main

// sysctlWrite seals the Write of a file in /proc/sys; see sealed.
func sysctlWrite(file, receiver string) edit {
	const args = `(ctx context.Context, _ *vfs.FileDescription, src usermem.IOSequence, offset int64) (int64, error) {
`
	head := "func (" + receiver + ") Write" + args
	return edit{file: "pkg/sentry/fsimpl/proc/" + file, old: head, new: head + `	if err := sealed(ctx); err != nil {
		return 0, err
	}
`}
}

// notInside takes a file system from those that mount(2) knows.
func notInside(pkg string) edit {
	const allowed = `		AllowUserMount: true,
		AllowUserList:  true,
`
	head := "	vfsObj.MustRegisterFilesystemType(" + pkg + ".Name, &" + pkg + ".FilesystemType{}, &vfs.RegisterFilesystemTypeOptions{\n"
	return edit{file: "runsc/boot/vfs.go", old: head + allowed, new: head + `		AllowUserList: true,
`}
}

// rootEdits are what lets root inside have more of what root has, without
// reaching the guest, its own limits or the next episode. All of them take
// something away, in places where gVisor takes one kernel for one container
// (or, for the last one, for one user) and we do not. docs/security-boundary.md has
// the whole list of what a container can touch.
var rootEdits = []edit{
	// A process that the guest starts shares the guest's memory, and has its
	// descriptors, until it executes: nobody may look into it who does not see
	// the guest. From before it can be seen, so that there is no moment at
	// which it can be attached to. And the init of a container is not charged to
	// the container's limits: who could make it act would have none.
	{
		file: "pkg/sentry/kernel/ptrace.go",
		old: `	callerCreds := t.Credentials()
	targetCreds := target.Credentials()
	if callerCreds.HasCapabilityIn(`,
		new: `	if p := target.vforkParent.Load(); p != nil && !t.tg.pidns.holds(p.tg.pidns) {
		return false
	}
	if attach && target.tg.pidns.parent == t.k.tasks.Root && target.tg.pidWithinNS.Load() == int32(initTID) && t.tg.pidns != t.k.tasks.Root {
		return false
	}
	callerCreds := t.Credentials()
	targetCreds := target.Credentials()
	if callerCreds.HasCapabilityIn(`,
	},
	{
		file: "pkg/sentry/kernel/ptrace.go",
		old:  `// canTraceYAMALocked performs`,
		new: `// holds says whether other is ns or below it.
func (ns *PIDNamespace) holds(other *PIDNamespace) bool {
	for ; other != nil; other = other.parent {
		if other == ns {
			return true
		}
	}
	return false
}

// canTraceYAMALocked performs`,
	},
	{
		file: "pkg/sentry/kernel/task_start.go",
		old: `	makePIDFD bool
`,
		new: `	makePIDFD bool

	// used by clone(CLONE_VFORK)
	vfork bool
`,
	},
	{
		file: "pkg/sentry/kernel/task_start.go",
		old: `	if cfg.makePIDFD {
`,
		new: `	if cfg.vfork {
		t.vforkParent.Store(srcT)
	}
	if cfg.makePIDFD {
`,
	},
	{
		file: "pkg/sentry/kernel/task_clone.go",
		old: `		cfg.makePIDFD = true
	}
`,
		new: `		cfg.makePIDFD = true
	}
	cfg.vfork = args.Flags&linux.CLONE_VFORK != 0
`,
	},

	// A cgroup namespace is entered downwards only, as a PID namespace is: each
	// exec has one of its own, and what could go back to that of the
	// container's init, or over to a neighbour's, would leave its exec's group.
	{
		file: "pkg/sentry/kernel/task_clone.go",
		old: `	if nss.cgroupNS != nil {
		if !checkCreds`,
		new: `	if nss.cgroupNS != nil {
		if t.tg.pidns != t.k.tasks.Root && (nss.cgroupNS.Root().Path() == "/" || strings.HasPrefix(nss.cgroupNS.Root().PathFrom(t.cgroupns.Root()), "/..")) {
			return linuxerr.EPERM
		}
		if !checkCreds`,
	},
	{
		file: "pkg/sentry/kernel/task_clone.go",
		old: `import (
`,
		new: `import (
	"strings"

`,
	},
	// The whole hierarchy is the guest's.
	{
		file: "pkg/sentry/fsimpl/cgroup2fs/filesystem.go",
		old:  `	// "nsdelegate" is system wide`,
		new: `	if t := kernel.TaskFromContext(ctx); t != nil && rootD == fs.root && t.PIDNamespace() != k.RootPIDNamespace() {
		rootD.DecRef(ctx)
		return nil, nil, linuxerr.EPERM
	}

	// "nsdelegate" is system wide`,
	},
	// Version 1 takes the controllers away from version 2, the limit of
	// processes with them. There is one devtmpfs per kernel, and files in it
	// stay. And a FUSE server inside could hold the guest's threads in a path
	// for as long as it likes.
	notInside("cgroupfs"), notInside("devtmpfs"), notInside("fuse"),

	// Values of the kernel under /proc/sys.
	{file: "pkg/sentry/fsimpl/proc/sealed.go", add: "sealed.go.in"},
	sysctlWrite("tasks_sys.go", "d *tcpSackData"),
	sysctlWrite("tasks_sys.go", "d *tcpRecoveryData"),
	sysctlWrite("tasks_sys.go", "d *tcpMemData"),
	sysctlWrite("tasks_sys.go", "ipf *ipForwarding"),
	sysctlWrite("tasks_sys.go", "pr *portRange"),
	sysctlWrite("tasks_sys.go", "f *atomicInt32File"),
	sysctlWrite("yama.go", "s *yamaPtraceScope"),
	sysctlWrite("keys.go", "s *maxKeySize"),

	// The containers of a kernel share one UTS and one IPC namespace, which is the
	// guest's as well: the hostname that root set, and all of System V's and
	// POSIX's shared memory, semaphores and queues, were there after a reset.
	{file: "pkg/sentry/kernel/container_namespaces.go", add: "namespaces.go.in"},
	{
		file: "runsc/boot/loader.go",
		old: `	// Create the process arguments.
	procArgs := kernel.CreateProcessArgs{
`,
		new: `	uts, ipc := k.RootUTSNamespace(), k.RootIPCNamespace()
	if pidns != k.RootPIDNamespace() {
		if uts, ipc, err = k.NewContainerNamespaces(spec.Hostname, spec.Domainname, creds); err != nil {
			return kernel.CreateProcessArgs{}, fmt.Errorf("creating namespaces: %w", err)
		}
	}

	// Create the process arguments.
	procArgs := kernel.CreateProcessArgs{
`,
	},
	{
		file: "runsc/boot/loader.go",
		old: `		UTSNamespace:         k.RootUTSNamespace(),
		IPCNamespace:         k.RootIPCNamespace(),
`,
		new: `		UTSNamespace:         uts,
		IPCNamespace:         ipc,
`,
	},
	{
		file: "runsc/boot/loader.go",
		old: `	info.procArgs.FDTable.DecRef(ctx)

	// Install seccomp`,
		new: `	info.procArgs.FDTable.DecRef(ctx)
	if info.procArgs.UTSNamespace != l.k.RootUTSNamespace() { // and on these
		info.procArgs.UTSNamespace.DecRef(ctx)
		info.procArgs.IPCNamespace.DecRef(ctx)
	}

	// Install seccomp`,
	},

	// One set of limits was the guest's and every container's: root inside that
	// lowered init's left the guest without descriptors, and no episode began
	// any more.
	{
		file: "runsc/boot/limits.go",
		old:  `	// Set RLIMIT_MEMLOCK's default value`,
		new: `	ls = ls.GetCopy()
	// Set RLIMIT_MEMLOCK's default value`,
	},
	// And so was devpts, which in Linux (since 4.7) is new with each mount: the
	// terminals of an episode were numbered on in the next, and listed.
	{
		file: "pkg/sentry/fsimpl/devpts/devpts.go",
		old: `	newinstance := false
`,
		new: `	newinstance := true
`,
	},
	// A closed connection keeps its port for 10 ms instead of a minute, which
	// the next episode's server would have to wait for. There is nothing to wait
	// for: all that is reached is on this machine, behind no lossy line.
	{
		file: "runsc/boot/loader.go",
		old: `	// Enable Receive Buffer Auto-Tuning.
	{
`,
		new: `	{
		opt := tcpip.TCPTimeWaitTimeoutOption(10 * gtime.Millisecond)
		if err := s.Stack.SetTransportProtocolOption(tcp.ProtocolNumber, &opt); err != nil {
			return nil, fmt.Errorf("SetTransportProtocolOption(%d, &%T): %s", tcp.ProtocolNumber, opt, err)
		}
	}

	// Enable Receive Buffer Auto-Tuning.
	{
`,
	},

	// Keyrings belong to the user namespace, which is the kernel's, and are
	// never freed: a name joined in one episode would be found in the next, and 200
	// would be all. As under Docker there are none (runc takes ENOSYS for it).
	{
		file: "pkg/sentry/syscalls/linux/linux64.go",
		old: `		250: syscalls.PartiallySupported("keyctl", Keyctl, "Only supports session keyrings with zero keys in them.", nil),
`,
		new: `		250: syscalls.Error("keyctl", linuxerr.ENOSYS, "Keys would outlive the container.", nil),
`,
	},
	{
		file: "pkg/sentry/syscalls/linux/linux64.go",
		old: `		219: syscalls.PartiallySupported("keyctl", Keyctl, "Only supports session keyrings with zero keys in them.", nil),
`,
		new: `		219: syscalls.Error("keyctl", linuxerr.ENOSYS, "Keys would outlive the container.", nil),
`,
	},

	// Debian's kernel lets users trace their own processes, and debuggers
	// count on it.
	{
		file: "pkg/sentry/kernel/kernel.go",
		old: `	k.YAMAPtraceScope = atomicbitops.FromInt32(linux.YAMA_SCOPE_RELATIONAL)
`,
		new: `	k.YAMAPtraceScope = atomicbitops.FromInt32(linux.YAMA_SCOPE_DISABLED)
`,
	},

	// What a restored process may do is in the checkpoint; the spec's word on it
	// is used by nobody, and is more now than it was.
	{
		file: "runsc/specutils/restore.go",
		old: `	if err := validateCapabilities("Capabilities", cName, oldProcess.Capabilities, newProcess.Capabilities); err != nil {
		return err
	}
`,
		new: `	_ = validateCapabilities
`,
	},
}
