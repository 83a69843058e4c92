package sandbox

import (
	"fmt"
	"time"
)

// Cause is why a process or a sandbox ended. Every end has exactly one, and it
// stays readable after deletion.
type Cause string

const (
	Exited       Cause = "exited"         // the process returned; ExitCode
	Signalled    Cause = "signalled"      // a signal from inside ended it; Signal
	Deadline     Cause = "deadline"       // its own timeout passed, the tree was killed
	OOM          Cause = "oom"            // over the memory limit
	NoDisk       Cause = "disk_full"      // could not go on without disk space
	KilledByUser Cause = "killed_by_user" // Kill, Signal or KillByLabel by an API caller
	LeaseExpired Cause = "lease_expired"  // the heartbeat of its run or lease stopped
	ClientEnded  Cause = "client_ended"   // its client ended the run or lease, as one does that is through
	TTL          Cause = "ttl"            // the sandbox's timeout passed
	Idle         Cause = "idle"           // the sandbox's idle timeout passed
	Evicted      Cause = "evicted"        // the node needed the room
	NodeLost     Cause = "node_lost"      // the machine went away or restarted
	InitKilled   Cause = "init_killed"    // code inside killed the container's init
	ResetCause   Cause = "reset"          // the process's episode was reset
	EgressDenied Cause = "egress_denied"  // informative: the network policy refused something
	Infra        Cause = "infra"          // a fault of ours or of the host; Detail says which
)

// Causes lists every cause once, in documentation order.
var Causes = []Cause{Exited, Signalled, Deadline, OOM, NoDisk, KilledByUser, LeaseExpired, ClientEnded, TTL, Idle,
	Evicted, NodeLost, InitKilled, ResetCause, EgressDenied, Infra}

// End is how a process or sandbox ended.
type End struct {
	Cause    Cause     `json:"cause"`
	ExitCode int       `json:"exit_code,omitempty"` // for Exited; 128+signal for Signalled, as shells do
	Signal   string    `json:"signal,omitempty"`    // "SIGKILL"
	Detail   string    `json:"detail,omitempty"`
	At       time.Time `json:"at,omitzero"`
	Usage    *Usage    `json:"usage,omitempty"` // of a sandbox of a run, where it could still be seen
}

func (e End) String() string {
	switch e.Cause {
	case Exited:
		return fmt.Sprintf("exited with %d", e.ExitCode)
	case Signalled:
		return "signalled by " + e.Signal
	}
	if e.Detail != "" {
		return string(e.Cause) + ": " + e.Detail
	}
	return string(e.Cause)
}
