package sandbox

import "time"

// ProcessSpec asks for one process in a sandbox.
type ProcessSpec struct {
	ExecID  string            `json:"exec_id"`           // chosen by the caller; the same id never runs twice in one sandbox
	Args    []string          `json:"args,omitempty"`    // argv; Args[0] is looked up in PATH inside
	Command string            `json:"command,omitempty"` // instead of Args: a line for the sandbox's shell (bash if there, else sh)
	Cwd     string            `json:"cwd,omitempty"`     // "" = the image's WorkingDir
	Env     map[string]string `json:"env,omitempty"`     // over the image's and the sandbox's
	User    string            `json:"user,omitempty"`    // name, uid, name:group or uid:gid; "" = the image's User
	Stdin   bool              `json:"stdin,omitempty"`   // keep stdin open for SendInput; otherwise it is /dev/null
	Input   []byte            `json:"input,omitempty"`   // written to stdin right after start, which then closes unless Stdin is set
	PTY     *TermSize         `json:"pty,omitempty"`     // run on a terminal of this size
	Timeout time.Duration     `json:"timeout,omitempty"` // 0 = none; at the deadline the whole tree is killed
}

// TermSize is a terminal's size in characters.
type TermSize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Stream says where an output byte came from.
type Stream uint8

const (
	Stdout Stream = 1
	Stderr Stream = 2
	PTYOut Stream = 3
)

// ProcessEvent is one thing that happened to a process; exactly one field is
// set. A reader sees Started first, then output in order of offset, then End.
// Standby may come at any time: from Hot or Cold to Awake the process stands still.
type ProcessEvent struct {
	Started *ProcessStarted
	Output  *Output
	Lost    *Lost
	End     *ProcessEnd
	Standby *Standby
}

// ProcessStarted says the process exists. Replayed is set when the exec_id had
// been started before and this call attached to it.
type ProcessStarted struct {
	ExecID   string `json:"exec_id"`
	PID      int    `json:"pid"` // as code inside sees it
	Replayed bool   `json:"replayed,omitempty"`
}

// Output is a run of bytes of one stream. Offsets count the bytes of all
// streams of the process together, in the order the guest read them, so one
// number is enough to come back to.
type Output struct {
	Stream Stream
	Offset int64
	Data   []byte
}

// Lost says the bytes [From, To) are no longer held: the reader was away for
// longer than the buffer lasts. Never silent.
type Lost struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

// ProcessEnd is the last event.
type ProcessEnd struct {
	End
	OutputBytes int64         `json:"output_bytes"` // total produced, held or not
	Duration    time.Duration `json:"duration"`

	// CPUTime is what the sandbox used while it ran, as the host counts, if nothing
	// else was run beside it; else what its own processes did, as the kernel inside
	// counts, to 10 ms. 0 = not measured.
	CPUTime    time.Duration `json:"cpu_time,omitempty"`
	PeakMemory int64         `json:"peak_memory,omitempty"` // bytes, of its largest process

	// EgressDenied counts what the network policy denied the sandbox while the
	// process was followed. Informative.
	EgressDenied int64 `json:"egress_denied,omitempty"`
	// EgressSent and EgressReceived are the bytes of its network meanwhile.
	EgressSent     int64 `json:"egress_sent,omitempty"`
	EgressReceived int64 `json:"egress_received,omitempty"`
	// ReplayMissed counts the requests that its replay had no answer for meanwhile.
	ReplayMissed int64 `json:"replay_missed,omitempty"`
}

// Process is one entry of the list of processes started through the API.
type Process struct {
	ExecID    string      `json:"exec_id"`
	PID       int         `json:"pid"`
	Args      []string    `json:"args,omitempty"`
	User      string      `json:"user,omitempty"`
	Cwd       string      `json:"cwd,omitempty"`
	PTY       bool        `json:"pty,omitempty"`
	StartedAt time.Time   `json:"started_at"`
	End       *ProcessEnd `json:"end,omitempty"` // nil while running
}

// Task is one process inside the sandbox, started through the API or not, as
// the kernel lists it.
type Task struct {
	PID     int    `json:"pid"`
	PPID    int    `json:"ppid"`
	UID     int    `json:"uid"`
	State   string `json:"state"` // one letter, as ps shows
	Command string `json:"command"`
	ExecID  string `json:"exec_id,omitempty"` // the API process whose tree it belongs to, where known
}
