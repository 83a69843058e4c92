package sandbox

import "time"

// Replayed is what came of running the steps of an episode again.
type Replayed struct {
	Run           string
	Sandbox       string // whose steps they were
	Reset         int64
	StartedFrom   string
	Steps         int64 // of the episode
	Replayed      int64
	Same          bool // every observation was
	Differences   []StepDifference
	Gaps          []ReplayGap
	Kept          string // id of the sandbox that stays
	NotFixed      []string
	Deterministic bool
	Took          time.Duration
}

// StepDifference is the first observation of a step that is not what it was: its output
// streams, then how it ended.
type StepDifference struct {
	Step     int64 // seq
	ID       string
	What     string // stdout, stderr, exit_code, cause, signal, did_not_end, did_not_start
	Offset   int64  // of streams: the first byte that differs; -1 = it is in what was not kept
	Expected []byte // about there
	Actual   []byte
	Command  string
	Detail   string
}

// ReplayGap is something that an episode had and its replay has not. A difference may be
// for it.
type ReplayGap struct {
	AfterStep int64 `json:"after_step"` // seq of the last that had begun; 0 = before the first
	// What: an operation that changed the sandbox from outside (file.write …), or "network",
	// "secrets", "volumes".
	What   string `json:"what"`
	Detail string `json:"detail,omitempty"`
}
