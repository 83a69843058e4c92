package main

// insideEdits make what a sandbox sees of itself true, and end a process where
// the host would end the sandbox.
var insideEdits = []edit{
	// The size of a sandbox (SetSize over the control socket): a kernel boots
	// before anybody knows it, gVisor takes it from its flags.
	{file: "runsc/boot/size.go", add: "size.go.in"},
	{file: "pkg/sentry/kernel/cores.go", add: "cores.go.in"},
	{
		file: "pkg/sentry/kernel/kernel.go",
		old: `	if k.useHostCores && initAppCores > k.applicationCores {
		return`,
		new: `	k.showCores()
	if k.useHostCores && initAppCores > k.applicationCores {
		return`,
	},
	// Files that were made when they were mounted, with the cores of then.
	{
		file: "pkg/sentry/fsimpl/sys/sys.go",
		old: `	fmt.Fprintf(buf, "0-%d\n", c.maxCores-1)
`,
		new: `	if n := kernel.KernelFromContext(ctx).ApplicationCores(); n > 1 {
		fmt.Fprintf(buf, "0-%d\n", n-1)
	} else {
		buf.WriteString("0\n")
	}
`,
	},

	// Out of memory: the largest process ends, as on Linux. Without this the
	// host's cgroup ends the sentry, and with it the sandbox.
	{file: "pkg/sentry/pgalloc/limit.go", add: "limit.go.in"},
	{file: "pkg/sentry/kernel/oom.go", add: "oom.go.in"},
	{file: "pkg/sentry/victim/victim.go", add: "victim/victim.go"},
	{
		file: "pkg/sentry/pgalloc/pgalloc.go",
		old: `	alloc := allocState{
		length:     length,
`,
		new: `	if err := f.mayAllocate(length, opts.Kind); err != nil {
		return memmap.FileRange{}, err
	}

	alloc := allocState{
		length:     length,
`,
	},
	{
		file: "pkg/sentry/kernel/task_sched.go",
		old: `		k.cpuClock.Add(linux.ClockTick.Nanoseconds())
`,
		new: `		k.cpuClock.Add(linux.ClockTick.Nanoseconds())

		k.checkMemory()
		if n := int(k.applicationCores); n != len(incTasks) {
			incTasks = make([]*Task, n)
		}
`,
	},
	{
		file: "pkg/sentry/kernel/task_run.go",
		old: `func (app *runApp) execute(t *Task) taskRunState {
	if t.interrupted() {
`,
		new: `func (app *runApp) execute(t *Task) taskRunState {
	if outOfMemory.short.Load() {
		t.awaitMemory()
	}
	if t.interrupted() {
`,
	},
	// Who ended for want of memory, for the root container alone.
	{
		file: "pkg/sentry/fsimpl/proc/tasks_files.go",
		old: `func (*sentryMeminfoData) Generate(ctx context.Context, buf *bytes.Buffer) error {
`,
		new: `func (*sentryMeminfoData) Generate(ctx context.Context, buf *bytes.Buffer) error {
	if k := kernel.KernelFromContext(ctx); kernel.PIDNamespaceFromContext(ctx) == k.RootPIDNamespace() {
		kernel.WriteOutOfMemory(buf)
		return nil
	}
`,
	},

	// A tmpfs has half of the sandbox's memory by default, not of the host's.
	{
		file: "pkg/sentry/fsimpl/tmpfs/tmpfs.go",
		old: `	defaultSizeLimit := totalHostMem / 2
`,
		new: `	defaultSizeLimit := totalHostMem / 2
	if own := usage.MaximumTotalMemoryBytes; own != 0 {
		defaultSizeLimit = own / 2
	}
`,
	},
}
