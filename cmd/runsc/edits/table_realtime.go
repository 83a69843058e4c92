package main

// realtimeEdits let the clock of day of a kernel be set, for sandboxes that are to see
// the same each time. gVisor's is the host's. The offset is of the sentry: no checkpoint has
// it, who restores one sets it before, and what goes on sees it from the start. What a checkpoint says of when it
// was made stays the host's time, for the monotonic clock goes on by the difference.
var realtimeEdits = []edit{
	{file: "pkg/sentry/kernel/realtime.go", add: "realtime.go.in"},
	{
		file: "pkg/sentry/kernel/timekeeper.go",
		old: `	// monotonicLowerBound is the lowerBound for monotonic time.
`,
		new: `	// lastParams are those on the page. Guarded by updateMu.
	lastParams vdsoParams ` + "`state:\"nosave\"`" + `

	// monotonicLowerBound is the lowerBound for monotonic time.
`,
	},
	{
		file: "pkg/sentry/kernel/timekeeper.go",
		old: `			p.realtimeBaseRef = int64(res.Realtime.BaseRef)
`,
		new: `			p.realtimeBaseRef = int64(res.Realtime.BaseRef) + realtimeOffset.Load()
`,
	},
	{
		file: "pkg/sentry/kernel/timekeeper.go",
		old: `			p.monotonicRawFrequency = res.MonotonicRaw.Frequency
		}
		return p
`,
		new: `			p.monotonicRawFrequency = res.MonotonicRaw.Frequency
		}
		t.lastParams = p
		return p
`,
	},
	{
		file: "pkg/sentry/kernel/timekeeper.go",
		old: `	now, err := t.clocks.GetTime(c)
	if err == nil && c == sentrytime.Monotonic {
`,
		new: `	now, err := t.clocks.GetTime(c)
	if c == sentrytime.Realtime {
		now += realtimeOffset.Load()
	}
	if err == nil && c == sentrytime.Monotonic {
`,
	},
	{
		file: "pkg/sentry/kernel/timekeeper_state.go",
		old:  `t.saveRealtime, err = t.GetTime(time.Realtime)`,
		new:  `t.saveRealtime, err = t.clocks.GetTime(time.Realtime)`,
	},
	// So that the time since then, of /proc/uptime and the starts of processes, is no
	// less and no more for what the clock of day was set to.
	{
		file: "pkg/sentry/kernel/timekeeper.go",
		old: `	return t.bootTime
`,
		new: `	return t.bootTime.Add(time.Duration(realtimeOffset.Load()))
`,
	},
}
