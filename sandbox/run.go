package sandbox

import (
	"strconv"
	"time"
)

// Run is a job of a trainer: a lease with a name, and what was made for it. Its
// sandboxes end when it is over, its record, steps and checkpoints stay until it
// is deleted.
type Run struct {
	ID     string            `json:"id"`
	Tenant string            `json:"tenant,omitempty"`
	Name   string            `json:"name"` // one of a tenant's runs has it
	Labels map[string]string `json:"labels,omitempty"`
	TTL    time.Duration     `json:"ttl"`            // it is over when it was not heard of for so long
	Keep   bool              `json:"keep,omitempty"` // its sandboxes outlive it
	// Output is what its steps keep of what processes print.
	Output OutputRule `json:"output,omitempty"`
	// Details are what its steps say besides.
	Details   []StepDetail `json:"details,omitempty"`
	State     RunState     `json:"state"`
	CreatedAt time.Time    `json:"created_at"`
	// Key is the one it was last begun with: a request that is sent again finds it.
	Key       string    `json:"key,omitempty"`
	Resumed   int       `json:"resumed,omitempty"`   // how often it was begun again after its end
	Steps     int64     `json:"steps,omitempty"`     // that had ended by its last end
	End       *End      `json:"end,omitempty"`       // of its last end
	ExpiresAt time.Time `json:"expires_at,omitzero"` // as the server knows it; no record has it
	Plans     int64     `json:"plans,omitempty"`     // how many it has said
	Plan      *Plan     `json:"plan,omitempty"`      // what it starts from next; nil = it has not said, or has ended
}

// RunState is active or ended; an ended run may be begun again.
type RunState string

const (
	RunActive RunState = "active"
	RunEnded  RunState = "ended"
)

// Rollout says what a sandbox is part of.
type Rollout struct {
	Run     string `json:"run,omitempty"`     // id of a run
	Group   string `json:"group,omitempty"`   // of sandboxes made together, such as for one prompt
	Episode string `json:"episode,omitempty"` // the caller's name of this rollout
}

// OutputRule says what a step keeps of what its process printed.
type OutputRule string

const (
	KeepEnds  OutputRule = "head_tail" // the first and the last bytes of each stream: the default
	KeepWhole OutputRule = "whole"     // up to MaxStepOutput
	KeepNone  OutputRule = "none"
)

// Bounds of runs.
const (
	MaxRuns      = 10_000 // of one tenant that are active
	MaxGroup     = 1024   // sandboxes of one group
	maxGroupName = 128
)

// ValidateRun checks what a run is asked for with.
func ValidateRun(r Run) error {
	if r.TTL < MinLease || r.TTL > MaxLease {
		return InvalidField("ttl", "%s is not accepted; %s to %s is, or none for %s", r.TTL, MinLease, MaxLease, DefaultLease)
	}
	switch r.Output {
	case "", KeepEnds, KeepWhole, KeepNone:
	default:
		return InvalidField("output", "%.40q is not accepted; head_tail, whole and none are", r.Output)
	}
	for _, d := range r.Details {
		if d != StepFilesDetail && d != StepEgressDetail {
			return InvalidField("step_details", "%.40q is not accepted; files and egress are", d)
		}
	}
	return first(ValidateName("name", r.Name), ValidateLabels("labels", r.Labels))
}

// validateRollout checks the names of what a sandbox is part of; whether there is
// such a run is the server's to say.
func validateRollout(r Rollout) error {
	for _, f := range []struct{ field, value string }{{"spec.rollout.run", r.Run}, {"spec.rollout.group", r.Group}, {"spec.rollout.episode", r.Episode}} {
		if f.value == "" {
			continue
		}
		if err := ValidateName(f.field, f.value); err != nil {
			return err
		}
		if len(f.value) > maxGroupName {
			return InvalidField(f.field, "has %d bytes; at most %d are accepted", len(f.value), maxGroupName)
		}
	}
	return nil
}

// Lease is the run's sign of life: a lease by the id of the run.
func (r Run) Lease() Lease {
	return Lease{ID: r.ID, Tenant: r.Tenant, Name: "run " + r.Name, TTL: r.TTL, CreatedAt: r.CreatedAt}
}

// LostEnd is the end of a run that was not heard of, and of its sandboxes.
func (r Run) LostEnd(at time.Time) End {
	return End{Cause: LeaseExpired, At: at, Detail: r.text() + " was not heard of for " + r.TTL.String() + ": its client is gone"}
}

// FinishedEnd is the end of a run that its client ended, and of its sandboxes.
func (r Run) FinishedEnd(at time.Time, detail string) End {
	return End{Cause: ClientEnded, At: at, Detail: withDetail(r.text()+" was ended by its client", detail)}
}

// ReapedEnd is the end of a run that somebody else ended.
func (r Run) ReapedEnd(at time.Time) End {
	return End{Cause: KilledByUser, At: at, Detail: r.text() + " was reaped"}
}

func withDetail(text, detail string) string {
	if detail == "" {
		return text
	}
	return text + ": " + detail
}

func (r Run) text() string { return "run " + strconv.Quote(r.Name) + " (" + r.ID + ")" }

// NoSuchRun is the refusal of a run that never was, or was deleted.
func NoSuchRun(field, ref string) *Error {
	return &Error{Class: NotFound, Reason: NoRun, Field: field, Msg: "no run '" + clip(ref) + "'", Hint: `"cove runs ls --all" lists them`}
}

// RunOver is the refusal of a run that has ended.
func RunOver(field string, r Run) *Error {
	e := &Error{Class: Precondition, Reason: NoRun, Field: field, Msg: r.text() + " has ended",
		Hint: "begin it again: resume=True in Python, \"resume\": true in Runs/Create"}
	if r.End != nil {
		e.Msg += ": " + r.End.String()
	}
	return e
}

// Checkpoint is a small document of a run, such as where its controller is. Each
// put makes the next version; the last ones are kept.
type Checkpoint struct {
	Version   int64     `json:"version"` // 1, 2, …
	Doc       []byte    `json:"doc,omitempty"`
	Size      int64     `json:"size"`
	CreatedAt time.Time `json:"created_at"`
}

// Bounds of checkpoints.
const (
	MaxCheckpoint   = 1 * MiB
	KeptCheckpoints = 16 // versions of one run
)

// ValidateCheckpoint checks a document.
func ValidateCheckpoint(doc []byte) error {
	switch {
	case len(doc) == 0:
		return InvalidField("doc", "is empty; a document has content")
	case int64(len(doc)) > MaxCheckpoint:
		return &Error{Class: TooLarge, Field: "doc", Msg: "a checkpoint has at most " + bytesText(MaxCheckpoint) + ", not " + bytesText(int64(len(doc))),
			Hint: "put large state into a volume or a snapshot, and its name here"}
	}
	return nil
}

// WrongVersion is the refusal of a checkpoint that was not put over the version
// its writer had seen.
func WrongVersion(want, have int64) *Error {
	return &Error{Class: Conflict, Field: "if_version", Msg: "the latest checkpoint is version " + strconv.FormatInt(have, 10) + ", not " + strconv.FormatInt(want, 10),
		Hint: "somebody else wrote meanwhile: get the latest and decide again"}
}
