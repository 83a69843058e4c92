package main

// holdEdits let a kernel be restored ahead of the sandbox it will be: its guest runs,
// and nothing of the user's does until it is let go. What goes on from a checkpoint
// thereby begins with its own name, size, network and clock, as if it had been restored
// then. The guest is all that is in the root's PID namespace.
var holdEdits = []edit{
	{file: "pkg/sentry/kernel/hold.go", add: "hold_kernel.go.in"},
	{file: "runsc/boot/hold.go", add: "hold_boot.go.in"},
	{
		file: "runsc/boot/restore.go",
		old: `	r.timer.Reached("Starting sandbox")
`,
		new: `	if holdRestored.Load() {
		l.k.HoldContainers()
	}

	r.timer.Reached("Starting sandbox")
`,
	},
}
