package main

// edit of one place: old, which is there once, becomes new; or a file of ours
// (see add) is put there.
type edit struct {
	file     string
	old, new string
	add      string
}

var edits = []edit{
	// Objects are read from the stream and decoded by two goroutines instead of
	// one after the other. Each is about half of the work.
	{file: "pkg/state/ahead.go", add: "ahead.go.in"},
	{
		file: "pkg/state/decode.go",
		old:  "\t\tods     *objectDecodeState\n\t\tid      objectID\n\t)\n",
		new:  "\t\tods     *objectDecodeState\n\t\tid      objectID\n\t)\n\tahead := readAhead(&ds.r, numObjects)\n\tdefer ahead.end()\n",
	},
	{
		file: "pkg/state/decode.go",
		old:  "\t\t\tencoded = wire.Load(&ds.r)\n\t\t\tswitch",
		new:  "\t\t\tencoded = ahead.next()\n\t\t\tswitch",
	},
	{
		file: "pkg/state/decode.go",
		old:  "\t\t\t\tencoded = wire.Load(&ds.r)\n",
		new:  "\t\t\t\tencoded = ahead.next()\n",
	},

	// Bytes are one string, not an object each. The registers of a thread are
	// 11 KiB where the CPU has AMX: 88,000 objects of eight threads, 12 ms of CPU
	// in a restore. What was written before is read as before.
	{
		file: "pkg/state/encode.go",
		old:  "\tl := obj.Len()\n\ta := &wire.Array{\n",
		new: "\tl := obj.Len()\n" +
			"\tif l > 0 && obj.Type().Elem().Kind() == reflect.Uint8 && obj.CanAddr() {\n" +
			"\t\ts := wire.String(obj.Bytes())\n" +
			"\t\t*dest = &s\n" +
			"\t\treturn\n" +
			"\t}\n" +
			"\ta := &wire.Array{\n",
	},
	{
		file: "pkg/state/decode.go",
		old:  "\tcase *wire.String:\n",
		new: "\tcase *wire.String:\n" +
			"\t\tif obj.Kind() == reflect.Array {\n" +
			"\t\t\tif len(*x) != obj.Len() {\n" +
			"\t\t\t\tFailf(\"mismatching array length expect=%d, actual=%d\", obj.Len(), len(*x))\n" +
			"\t\t\t}\n" +
			"\t\t\tcopy(obj.Bytes(), *x)\n" +
			"\t\t\treturn\n" +
			"\t\t}\n",
	},
	// 2,048 counters that nothing uses.
	{
		file: "pkg/tcpip/network/ipv4/ipv4.go",
		old:  "\tids := make([]atomicbitops.Uint32, buckets)\n",
		new:  "\tvar ids []atomicbitops.Uint32\n",
	},

	// The clock is read twice for each object, for a table that only the debug
	// log shows: a tenth of decoding, and of encoding.
	{file: "pkg/state/decode.go", old: "\t\tds.stats.start(ods.typ)\n\t\tdefer ds.stats.done()\n"},
	{file: "pkg/state/decode.go", old: "\tds.stats.start(ods.typ)\n\tdefer ds.stats.done()\n"},
	{file: "pkg/state/encode.go", old: "\tes.stats.start(te.ID)\n\tdefer es.stats.done()\n"},

	// A timeline is drawn for a log that drops it: 1.7 ms while the first request
	// is being answered.
	{
		file: "pkg/timing/timing.go",
		old:  "\tt.End()\n\ttype pointType int\n",
		new:  "\tt.End()\n\tif !log.IsLogging(log.Debug) {\n\t\treturn\n\t}\n\ttype pointType int\n",
	},

	// Pages are read and written by as many workers as there are cores, not by
	// 128, for each of which GOMAXPROCS is raised by one: the threads alone took
	// 15 ms on two cores. Two at least, for one may wait for the disk.
	{
		file: "pkg/sentry/state/stateio/pagesfile.go",
		old:  "\tpagesFileFDDefaultMaxParallel = 128\n)\n",
		new:  ")\n\nvar pagesFileFDDefaultMaxParallel = min(max(runtime.NumCPU(), 2), 16)\n",
	},
	{
		file: "pkg/sentry/state/stateio/pagesfile.go",
		old:  "import (\n",
		new:  "import (\n\t\"runtime\"\n\n",
	},

	{file: "pkg/aio/aio.go", old: "\tgomaxprocs.Add(workers)\n"},
	{file: "pkg/aio/aio.go", old: "\tgomaxprocs.Add(-q.numWorkers)\n"},
	{file: "pkg/aio/aio.go", old: "\t\"gvisor.dev/gvisor/pkg/gomaxprocs\"\n"},

	{file: "runsc/boot/collector.go", add: "collector.go.in"},
	{
		file: "runsc/boot/restore.go",
		old:  "\tlog.Infof(\"Starting to restore %d containers\", len(r.containers))\n",
		new:  "\tlog.Infof(\"Starting to restore %d containers\", len(r.containers))\n\tdefer restCollector()()\n",
	},

	// The clocks of a restored kernel are calibrated at once.
	{file: "runsc/boot/clocks.go", add: "clocks.go.in"},
	{
		file: "runsc/boot/loader.go",
		old:  "type Loader struct {\n",
		new:  "type Loader struct {\n\tfirstClocks firstClocks\n\n",
	},
	{
		file: "runsc/boot/loader.go",
		old:  "\targs.StartupTimer.Reached(\"timekeeper configured\")\n",
		new:  "\tl.firstClocks = lookAtClocks(shouldEnableClockMonotonicRaw(args.Spec, args.Conf))\n\targs.StartupTimer.Reached(\"timekeeper configured\")\n",
	},
	{
		file: "runsc/boot/restore.go",
		old:  "\tclocks := time.NewCalibratedClocks(shouldEnableClockMonotonicRaw(l.root.spec, l.root.conf))\n",
		new:  "\tclocks := l.firstClocks.or(time.NewCalibratedClocks(shouldEnableClockMonotonicRaw(l.root.spec, l.root.conf)))\n",
	},

	// Processes to hold address spaces are made with the first platform, ahead
	// of need, and wait where gVisor keeps those that were used: 2 ms less for
	// each of the first processes of a kernel, restored or not.
	{
		file: "pkg/sentry/platform/systrap/systrap.go",
		old:  "\t\tinitSeccompNotify()\n\t})\n",
		new: "\t\tinitSeccompNotify()\n\n" +
			"\t\tvar ahead [3]*subprocess\n" +
			"\t\tfor i := range ahead {\n" +
			"\t\t\tif ahead[i], stubErr = newSubprocess(source.createStub, mf, true); stubErr != nil {\n" +
			"\t\t\t\treturn\n" +
			"\t\t\t}\n" +
			"\t\t}\n" +
			"\t\tfor _, sp := range ahead {\n" +
			"\t\t\tsp.Release()\n" +
			"\t\t}\n" +
			"\t})\n",
	},
}
