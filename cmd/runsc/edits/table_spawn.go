package main

// spawnEdits let somebody else fork.
var spawnEdits = []edit{
	// A process in a new user namespace is started by a real fork, of all the
	// memory of who drives the sandboxes: see runtime/gvisor/spawn.
	{
		file: "runsc/sandbox/sandbox.go",
		old: `	if err := specutils.StartInNS(cmd, nss); err != nil {
		err := fmt.Errorf("starting sandbox: %v", err)
`,
		new: `	start := specutils.StartInNS
	if args.Start != nil {
		start = args.Start
	}
	if err := start(cmd, nss); err != nil {
		err := fmt.Errorf("starting sandbox: %v", err)
`,
	},
	{
		file: "runsc/sandbox/sandbox.go",
		old: `	s.child = true
	s.Pid.Store(cmd.Process.Pid)`,
		new: `	s.child = args.Start == nil
	s.Pid.Store(cmd.Process.Pid)`,
	},
	{
		file: "runsc/sandbox/sandbox.go",
		old:  `	// CloneIntoCgroupFD, when non-nil`,
		new: `	// Start starts the sandbox process in namespaces, if it is set, in place of
	// specutils.StartInNS; the process need not be a child of this one.
	Start func(cmd *exec.Cmd, nss []specs.LinuxNamespace) error

	// CloneIntoCgroupFD, when non-nil`,
	},
}
