package sandbox

// Capacity is what a node has and has given out.
type Capacity struct {
	Runtime                 string
	Total, Used             Resources // Total is what admission gives out, overcommit included; Pids unused. Of memory, what is reserved; of disk, what is really used
	MaxSandboxes, Sandboxes int64     // MaxSandboxes is what the host's tables have room for
	Full                    string    // what nothing more is admitted for now, whatever it asks for; "" = nothing
	WarmKernels, WarmTarget int
	HeldKernels, HeldTarget int             // restored ahead from checkpoints in use
	LostCalls               int64           // that got lost between node and guest and were sent again, since the start
	Classes                 []ClassCapacity // of kernels; the first is the default
}

// ClassCapacity is what a node has of one class of kernels. Memory, CPU and disk
// are the whole node's.
type ClassCapacity struct {
	Name, Runtime           string
	Devices                 []string
	MaxSandboxes, Sandboxes int64 // MaxSandboxes 0: only the node's
	WarmKernels, WarmTarget int
	HeldKernels, HeldTarget int
}
