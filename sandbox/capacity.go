package sandbox

import "strconv"

// Capacity is what a node has and has given out.
type Capacity struct {
	Runtime                 string
	Total, Used             Resources // Total is what admission gives out, overcommit included; Pids unused. Of memory, what is reserved; of disk, what is really used
	MaxSandboxes, Sandboxes int64     // MaxSandboxes is what the host's tables have room for
	Full                    string    // what nothing more is admitted for now, whatever it asks for; "" = nothing
	FullHint                string    // what would help
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

// NodeFull is the refusal of a node. Every one begins alike, so that who reads it
// knows that it is not a fault of the request. It does not say how much is left: who
// asks may be a tenant, and what others use is not a tenant's to know.
func NodeFull(of, hint string) *Error {
	return &Error{Class: NoCapacity, Msg: "the node is full: " + of, Hint: hint}
}

// NoPlace refuses one more than the sandboxes a node can hold.
func NoPlace(most int64) *Error {
	return NodeFull("it holds its maximum of "+strconv.FormatInt(most, 10)+" sandboxes",
		"kill sandboxes, raise the limit of the host that 'cove doctor' names, or add a machine")
}

// NoMemory refuses memory that would have to be reserved.
func NoMemory(asked int64) *Error {
	return NodeFull("not enough memory left that is not reserved, for "+FormatSize(asked),
		"kill sandboxes that have memory reserved, give --memory without --memory-limit (then little of it is reserved), or add a machine")
}
