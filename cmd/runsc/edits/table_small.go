package main

// smallEdits make a kernel smaller.
var smallEdits = []edit{
	// What is written first of a private mapping is copied with up to 2 MiB around it, but
	// no farther than the mapping goes: neighbours in one file are one segment of memory
	// here whatever may be done with them. The constants of a program came to be copied
	// with its variables, 1.9 MiB of them for the guest of each kernel, and could be
	// written from then on.
	{
		file: "pkg/sentry/mm/pma.go",
		old: `						copyAR = pseg.Range().Intersect(hugeMaskAR)
					}
					// Get internal mappings`,
		new: `						copyAR = pseg.Range().Intersect(hugeMaskAR).Intersect(vseg.Range())
					}
					// Get internal mappings`,
	},
	// A sentry has as many threads of Go code at a time as its sandbox has cores, and one
	// more, not as the machine has: see add/cores.go.in.
	{
		file: "runsc/boot/loader.go",
		old: `	gomaxprocs.SetBase(args.NumCPU)
`,
		new: `	gomaxprocs.SetBase(min(args.NumCPU, kernel.LeastThreads))
`,
	},
	{
		file: "pkg/sentry/platform/systrap/systrap.go",
		old: `		maxSysmsgThreads = runtime.GOMAXPROCS(0)
`,
		new: `		maxSysmsgThreads = runtime.NumCPU()
`,
	},
	// Calls that gVisor does not have are counted together, not for each of 2,000 numbers, in a
	// table that nobody here reads: 0.35 MiB of each sentry, and 6,000 objects of its start.
	{
		file: "pkg/sentry/kernel/syscalls.go",
		old: `		allowedValues := make([]*metric.FieldValue, sentry.MaxSyscallNum+2)
		unimplementedSyscallNumbers = make(map[uintptr][]*metric.FieldValue, len(allowedValues))
		for i := uintptr(0); i <= sentry.MaxSyscallNum; i++ {
			s := &metric.FieldValue{strconv.Itoa(int(i))}
			allowedValues[i] = s
			unimplementedSyscallNumbers[i] = []*metric.FieldValue{s}
		}
		allowedValues[len(allowedValues)-1] = outOfRangeSyscallNumber[0]
`,
		new: `		allowedValues := outOfRangeSyscallNumber
`,
	},
	{
		file: "pkg/sentry/kernel/syscalls.go",
		old: `	"strconv"
`,
	},
	// A table of neighbours grows with them; each of a kernel's devices has two, made for 512. A sandbox has
	// one neighbour, its gate.
	{
		file: "pkg/tcpip/stack/neighbor_cache.go",
		old: `	n.mu.cache = make(map[tcpip.Address]*neighborEntry, NeighborCacheSize)
`,
		new: `	n.mu.cache = make(map[tcpip.Address]*neighborEntry)
`,
	},
}
