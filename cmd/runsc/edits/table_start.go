package main

// startEdits make the start of a sentry cheaper: what it does before it has a kernel.
var startEdits = []edit{
	{file: "runsc/cmd/sandboxsetup/nobody.go", add: "nobody.go.in"},
	// A sentry becomes nobody by itself, as the one that keeps capabilities already drops
	// the others by itself. gVisor starts it anew for that: a second start of a program of
	// 80 MB, its packages, flags, CPUID and spec, was 20 ms of CPU of each boot.
	{
		file: "runsc/cmd/sentry/sentrycmd/boot.go",
		old: `	if !b.applyCaps {
		return true // No caps to change but will change UID/GID to ` + "`nobody`" + `.
	}
`,
		new: "",
	},
	{
		file: "runsc/cmd/sentry/sentrycmd/boot.go",
		old: `			if !b.applyCaps {
				// Remove the args`,
		new: `			if !b.applyCaps && !b.willReexec() {
				if err := sandboxsetup.BecomeNobody(timer); err != nil {
					util.Fatalf("becoming nobody: %v", err)
				}
				if b.attached { // which the change of user has ended
					if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
						util.Fatalf("error setting parent death signal: %v", err)
					}
				}
			} else if !b.applyCaps {
				// Remove the args`,
	},
	// What unmounts /proc for it is a small program, not a third start of runsc.
	{file: "runsc/cmd/sandboxsetup/umounter.go", add: "umounter.go.in"},
	{
		file: "runsc/cmd/sandboxsetup/process.go",
		old: `	if err := cmd.Start(); err != nil {
		util.Fatalf("error executing umounter: %v", err)
`,
		new: `	if err := startUmounter(cmd); err != nil {
		util.Fatalf("error executing umounter: %v", err)
`,
	},
	// Points of tracing are for who asked for a trace at the start, which nobody here does: 3.6 ms.
	{
		file: "runsc/boot/loader.go",
		old: `	seccheck.Initialize()
	args`,
		new: `	if args.PodInitConfigFD >= 0 {
		seccheck.Initialize()
	}
	args`,
	},
	// A clock is calibrated by two looks, a second apart; until then each clock_gettime inside is a
	// call into the sentry, and a Go program makes hundreds of them, the guest in its first exec too. The first looks
	// are 10 ms apart, which is right to some 40 parts in a million, and later ones improve on it.
	{file: "pkg/sentry/kernel/clocks_kernel.go", add: "clocks_kernel.go.in"},
	{
		file: "pkg/sentry/kernel/timekeeper.go",
		old: `			t.timer.Reset(sentrytime.ApproxUpdateInterval)
			t.update(false)
`,
		new: `			t.timer.Reset(t.untilNextLook())
			t.update(false)
`,
	},
	{
		file: "pkg/sentry/kernel/timekeeper.go",
		old: `			t.timer.Reset(sentrytime.ApproxUpdateInterval)
			t.update(true)
`,
		new: `			t.timer.Reset(t.untilNextLook())
			t.update(true)
`,
	},
	// Who waits for the other side spins, where that has proved quicker than a futex, and that is tried after 0.8 ms of
	// activity: on two cores all of a short life was such a trial. It is tried after 8 ms, and meanwhile the
	// clock wakes the sentry a tenth as often.
	{
		file: "pkg/sentry/platform/systrap/metrics.go",
		old:  `= 400 * time.Microsecond`,
		new:  `= 4 * time.Millisecond`,
	},
	// The collector rests while a kernel boots, and a second more.
	{
		file: "runsc/boot/loader.go",
		old: `	gomaxprocs.SetBase(args.NumCPU)
`,
		new: `	defer restInBoot()()
	gomaxprocs.SetBase(args.NumCPU)
`,
	},
	// Each CPUID of a virtual machine is an exit to its host, and each of 250 features was asked for by one.
	{file: "pkg/cpuid/asked_amd64.go", add: "asked_amd64.go.in"},
	{
		file: "pkg/cpuid/static_amd64.go",
		old: `	s := make(Static)

	// Save all allowed top-level functions.
`,
		new: `	s := make(Static)
	fs.Function = asked{fs.Function, make(map[In]Out)}

	// Save all allowed top-level functions.
`,
	},
}
