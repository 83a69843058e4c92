package main

import "slices"

// edit of one place: old, which is there once, becomes new; or a file of ours
// (see add) is put there.
type edit struct {
	file     string
	old, new string
	add      string
}

// edits are all of them, by what they are for, in the order they are made.
var edits = slices.Concat(restoreEdits, callsEdits, carryEdits, insideEdits, zeroEdits, limitsEdits, unreadEdits, tarEdits, meetEdits, netEdits, rootEdits, judgedEdits, answerEdits, suiteEdits, spawnEdits, pagesEdits, sinceEdits, upperEdits, realtimeEdits, startEdits, smallEdits, unpackEdits, holdEdits)

// restoreEdits make a restore, and a boot, faster.
var restoreEdits = []edit{
	// Objects are read from the stream and decoded by two goroutines instead of
	// one after the other. Each is about half of the work.
	{file: "pkg/state/ahead.go", add: "ahead.go.in"},
	{
		file: "pkg/state/decode.go",
		old: `		ods     *objectDecodeState
		id      objectID
	)
`,
		new: `		ods     *objectDecodeState
		id      objectID
	)
	ahead := readAhead(&ds.r, numObjects)
	defer ahead.end()
`,
	},
	{
		file: "pkg/state/decode.go",
		old: `			encoded = wire.Load(&ds.r)
			switch`,
		new: `			encoded = ahead.next()
			switch`,
	},
	{
		file: "pkg/state/decode.go",
		old: `				encoded = wire.Load(&ds.r)
`,
		new: `				encoded = ahead.next()
`,
	},

	// Bytes are one string, not an object each. The registers of a thread are
	// 11 KiB where the CPU has AMX: 88,000 objects of eight threads, 12 ms of CPU
	// in a restore. What was written before is read as before.
	{
		file: "pkg/state/encode.go",
		old: `	l := obj.Len()
	a := &wire.Array{
`,
		new: `	l := obj.Len()
	if l > 0 && obj.Type().Elem().Kind() == reflect.Uint8 && obj.CanAddr() {
		s := wire.String(obj.Bytes())
		*dest = &s
		return
	}
	a := &wire.Array{
`,
	},
	{
		file: "pkg/state/decode.go",
		old: `	case *wire.String:
`,
		new: `	case *wire.String:
		if obj.Kind() == reflect.Array {
			if len(*x) != obj.Len() {
				Failf("mismatching array length expect=%d, actual=%d", obj.Len(), len(*x))
			}
			copy(obj.Bytes(), *x)
			return
		}
`,
	},
	// 2,048 counters that nothing uses.
	{
		file: "pkg/tcpip/network/ipv4/ipv4.go",
		old: `	ids := make([]atomicbitops.Uint32, buckets)
`,
		new: `	var ids []atomicbitops.Uint32
`,
	},

	// The clock is read twice for each object, for a table that only the debug
	// log shows: a tenth of decoding, and of encoding.
	{file: "pkg/state/decode.go", old: `		ds.stats.start(ods.typ)
		defer ds.stats.done()
`},
	{file: "pkg/state/decode.go", old: `	ds.stats.start(ods.typ)
	defer ds.stats.done()
`},
	{file: "pkg/state/encode.go", old: `	es.stats.start(te.ID)
	defer es.stats.done()
`},

	// A timeline is drawn for a log that drops it: 1.7 ms while the first request
	// is being answered.
	{
		file: "pkg/timing/timing.go",
		old: `	t.End()
	type pointType int
`,
		new: `	t.End()
	if !log.IsLogging(log.Debug) {
		return
	}
	type pointType int
`,
	},

	// Pages are read and written by as many workers as there are cores, not by
	// 128, for each of which GOMAXPROCS is raised by one: the threads alone took
	// 15 ms on two cores. Two at least, for one may wait for the disk.
	{
		file: "pkg/sentry/state/stateio/pagesfile.go",
		old: `	pagesFileFDDefaultMaxParallel = 128
)
`,
		new: `)

var pagesFileFDDefaultMaxParallel = min(max(runtime.NumCPU(), 2), 16)
`,
	},
	{
		file: "pkg/sentry/state/stateio/pagesfile.go",
		old: `import (
`,
		new: `import (
	"runtime"

`,
	},

	{file: "pkg/aio/aio.go", old: `	gomaxprocs.Add(workers)
`},
	{file: "pkg/aio/aio.go", old: `	gomaxprocs.Add(-q.numWorkers)
`},
	{file: "pkg/aio/aio.go", old: `	"gvisor.dev/gvisor/pkg/gomaxprocs"
`},

	{file: "runsc/boot/collector.go", add: "collector.go.in"},
	{
		file: "runsc/boot/restore.go",
		old: `	log.Infof("Starting to restore %d containers", len(r.containers))
`,
		new: `	log.Infof("Starting to restore %d containers", len(r.containers))
	defer restCollector()()
`,
	},

	// The clocks of a restored kernel are calibrated at once.
	{file: "runsc/boot/clocks.go", add: "clocks.go.in"},
	{
		file: "runsc/boot/loader.go",
		old: `type Loader struct {
`,
		new: `type Loader struct {
	firstClocks firstClocks

`,
	},
	{
		file: "runsc/boot/loader.go",
		old: `	args.StartupTimer.Reached("timekeeper configured")
`,
		new: `	l.firstClocks = lookAtClocks(shouldEnableClockMonotonicRaw(args.Spec, args.Conf))
	args.StartupTimer.Reached("timekeeper configured")
`,
	},
	{
		file: "runsc/boot/restore.go",
		old: `	clocks := time.NewCalibratedClocks(shouldEnableClockMonotonicRaw(l.root.spec, l.root.conf))
`,
		new: `	clocks := l.firstClocks.or(time.NewCalibratedClocks(shouldEnableClockMonotonicRaw(l.root.spec, l.root.conf)))
`,
	},

	// Processes to hold address spaces are made with the first platform, ahead
	// of need, and wait where gVisor keeps those that were used: 2 ms less for
	// each of the first processes of a kernel, restored or not.
	{
		file: "pkg/sentry/platform/systrap/systrap.go",
		old: `		initSeccompNotify()
	})
`,
		new: `		initSeccompNotify()

		var ahead [3]*subprocess
		for i := range ahead {
			if ahead[i], stubErr = newSubprocess(source.createStub, mf, true); stubErr != nil {
				return
			}
		}
		for _, sp := range ahead {
			sp.Release()
		}
	})
`,
	},
}
