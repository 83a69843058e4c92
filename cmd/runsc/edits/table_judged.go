package main

// judgedEdits are what the work may not do in a grader, where a judge has nothing else
// to hold on to: see judged_auth.go.in.
var judgedEdits = []edit{
	{file: "pkg/sentry/kernel/auth/judged.go", add: "judged_auth.go.in"},
	{
		file: "pkg/sentry/fsimpl/overlay/filesystem.go",
		old: `	if child.isSymlink() && rp.ShouldFollowSymlink() {
`,
		new: `	if child.isSymlink() && rp.ShouldFollowSymlink() {
		if !rp.Credentials().Follows(auth.KUID(child.uid.Load())) {
			return nil, lookupLayerNone, false, linuxerr.EACCES
		}
`,
	},
	{
		file: "pkg/sentry/fsimpl/tmpfs/filesystem.go",
		old: `	if symlink, ok := child.inode.impl.(*symlink); ok && rp.ShouldFollowSymlink() {
`,
		new: `	if symlink, ok := child.inode.impl.(*symlink); ok && rp.ShouldFollowSymlink() {
		if !rp.Credentials().Follows(auth.KUID(child.inode.uid.Load())) {
			return nil, false, linuxerr.EACCES
		}
`,
	},
	// The work traces what it started itself, and not the shell that started it: who
	// sets the registers of that has it exit with 0.
	{
		file: "pkg/sentry/kernel/ptrace.go",
		old: `	if attach && t.k.YAMAPtraceScope.Load() == linux.YAMA_SCOPE_RELATIONAL {
		t.tg.`,
		new: `	if attach && t.tracesItsOwn() {
		t.tg.`,
	},
	{
		file: "pkg/sentry/kernel/ptrace.go",
		old: `	if attach && t.k.YAMAPtraceScope.Load() == linux.YAMA_SCOPE_RELATIONAL {
		if `,
		new: `	if attach && t.tracesItsOwn() {
		if `,
	},
	{
		file: "pkg/sentry/kernel/ptrace.go",
		old:  `// canTraceLocked is the same as`,
		new: `// tracesItsOwn says whether t attaches to its descendants only.
func (t *Task) tracesItsOwn() bool {
	return t.k.YAMAPtraceScope.Load() == linux.YAMA_SCOPE_RELATIONAL || t.Credentials().Judged()
}

// canTraceLocked is the same as`,
	},
}
