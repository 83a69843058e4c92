package sandbox

// Capacity is what a node has and has given out.
type Capacity struct {
	Runtime                 string
	Total, Used             Resources // Total is what admission gives out, overcommit included; Pids unused
	MaxSandboxes, Sandboxes int64
	WarmKernels, WarmTarget int
	LostCalls               int64 // that got lost between node and guest and were sent again, since the start
}
