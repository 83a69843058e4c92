package main

// limitsEdits show the limits of a sandbox where programs look for those of a
// container, and keep what a restore lost.
var limitsEdits = []edit{
	{file: "pkg/sentry/kernel/limits_shown.go", add: "limits_kernel.go.in"},
	{file: "pkg/sentry/fsimpl/sys/limits.go", add: "limits_sys.go.in"},
	{file: "runsc/boot/limits_mount.go", add: "limits_boot.go.in"},
	{
		file: "runsc/boot/vfs.go",
		old: `		if mnt != nil && mnt.ReadOnly() {
			// Switch to ReadWrite while we setup submounts.
`,
		new: `		if submount.mount.Type == sys.Name && specutils.SpecContainerType(spec) == specutils.ContainerTypeContainer {
			if err := c.mountLimits(ctx, creds, mns, submount.mount.Destination); err != nil {
				return err
			}
		}
		if mnt != nil && mnt.ReadOnly() {
			// Switch to ReadWrite while we setup submounts.
`,
	},
	// The JDK asks here which controllers there are. gVisor lists those of
	// version 1, of which there are none.
	{
		file: "pkg/sentry/fsimpl/proc/tasks_files.go",
		old: `func (*cgroupsData) Generate(ctx context.Context, buf *bytes.Buffer) error {
`,
		new: `func (*cgroupsData) Generate(ctx context.Context, buf *bytes.Buffer) error {
	if kernel.PIDNamespaceFromContext(ctx) != kernel.KernelFromContext(ctx).RootPIDNamespace() {
		buf.WriteString("#subsys_name\thierarchy\tnum_cgroups\tenabled\n")
		for _, name := range []string{"cpuset", "cpu", "cpuacct", "memory", "pids"} {
			fmt.Fprintf(buf, "%s\t0\t1\t1\n", name)
		}
		return nil
	}
`,
	},

	// The cores of now, not of when /proc was mounted.
	{file: "pkg/sentry/fsimpl/proc/cpuinfo.go", add: "cpuinfo_proc.go.in"},
	{
		file: "pkg/sentry/fsimpl/proc/tasks.go",
		old: `fs.newInode(ctx, root, 0444, newStaticFileSetStat(cpuInfoData(k))),
`,
		new: `fs.newInode(ctx, root, 0444, &cpuInfo{}),
`,
	},

	// Files end where there is no memory for them; see pgalloc.MakeFile.
	{
		file: tmpFS,
		old: `	if err := create(parentDir, name); err != nil {
		return err
	}

	ev`,
		new: `	if err := pgalloc.MakeFile(ctx); err != nil {
		return err
	}
	if err := create(parentDir, name); err != nil {
		return err
	}

	ev`,
	},
	{
		file: tmpFS,
		old: `		// Create and open the child.
		creds := rp.Credentials()
`,
		new: `		if err := pgalloc.MakeFile(ctx); err != nil {
			return nil, err
		}
		// Create and open the child.
		creds := rp.Credentials()
`,
	},
	{
		file: tmpFS,
		old: `// unaccountInode decreases the inodesUsed in the filesystem struct by 1.
func (fs *filesystem) unaccountInode() {
`,
		new: `// unaccountInode decreases the inodesUsed in the filesystem struct by 1.
func (fs *filesystem) unaccountInode() {
	pgalloc.FileRemoved()
`,
	},
	{
		file: tmpFS,
		old: `	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
`,
		new: `	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
`,
	},
	{
		file: overlayFS,
		old: `	return vfsObj.MknodAt(ctx, creds, pop, &vfs.MknodOptions{
		Mode:     linux.S_IFCHR | linux.WHITEOUT_MODE,
`,
		new: `	return vfsObj.MknodAt(pgalloc.Always(ctx), creds, pop, &vfs.MknodOptions{
		Mode:     linux.S_IFCHR | linux.WHITEOUT_MODE,
`,
	},
	{
		file: overlayFS,
		old: `	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
`,
		new: `	"gvisor.dev/gvisor/pkg/sentry/kernel/auth"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
`,
	},

	// Who has most of it is who ends: pages that were touched, and buffers of pipes,
	// which are of the sentry's heap.
	{file: "pkg/sentry/mm/committed.go", add: "committed_mm.go.in"},
	{file: "pkg/sentry/kernel/pipe/held.go", add: "held_pipe.go.in"},
	{
		file: "pkg/sentry/kernel/pipe/pipe.go",
		old: `		newBuf := make([]byte, newCap)
`,
		new: `		if err := pgalloc.GrowHeap(uint64(newCap)); err != nil {
			return 0, err
		}
		newBuf := make([]byte, newCap)
`,
	},
	{
		file: "pkg/sentry/kernel/pipe/pipe.go",
		old: `	"gvisor.dev/gvisor/pkg/safemem"
`,
		new: `	"gvisor.dev/gvisor/pkg/safemem"
	"gvisor.dev/gvisor/pkg/sentry/pgalloc"
`,
	},

	// How many processes ended for want of memory, across a checkpoint.
	{
		file: "runsc/boot/restore.go",
		old: `	saveOpts.Metadata[VersionKey] = version.Version()
`,
		new: `	saveOpts.Metadata[VersionKey] = version.Version()
	saveOpts.Metadata[kernel.OutOfMemoryKey] = kernel.SaveOutOfMemory()
`,
	},
	{
		file: "runsc/boot/controller.go",
		old: `	cm.restorer.totalContainers = count
`,
		new: `	cm.restorer.totalContainers = count
	kernel.LoadOutOfMemory(cm.restorer.metadata[kernel.OutOfMemoryKey])
`,
	},
}
