package sandbox

import (
	"slices"
	"strings"
	"time"
)

// Recording is the HTTP traffic of a sandbox, kept to be replayed. It outlives
// the sandbox and belongs to its tenant.
type Recording struct {
	ID         string         `json:"id"`
	Name       string         `json:"name,omitempty"` // unique within the tenant; "" = it is called by its id
	Tenant     string         `json:"tenant,omitempty"`
	Sandbox    string         `json:"sandbox,omitempty"` // that was recorded; "" = imported
	Node       string         `json:"node,omitempty"`
	State      RecordingState `json:"state"`
	CreatedAt  time.Time      `json:"created_at"`
	FinishedAt time.Time      `json:"finished_at,omitzero"`
	Exchanges  int64          `json:"exchanges"` // complete ones
	Bytes      int64          `json:"bytes"`     // on disk
	// Truncated exchanges have a body that was too long for the recording. They are
	// answered with replay_truncated.
	Truncated int64 `json:"truncated,omitempty"`
	// Dropped are exchanges that are not on the recording because it was full or
	// could not be written.
	Dropped int64 `json:"dropped,omitempty"`
}

// RecordingState says whether more can come.
type RecordingState string

const (
	RecordingMaking      RecordingState = "making"   // it is being imported; users do not see it yet
	RecordingDeleting    RecordingState = "deleting" // users do not see it any more
	RecordingOpen        RecordingState = "recording"
	RecordingFinished    RecordingState = "finished"
	RecordingInterrupted RecordingState = "interrupted" // the server died; all that was complete by then is there
)

// NetworkRecord asks for a recording of all HTTP and HTTPS of a sandbox.
type NetworkRecord struct {
	ID   string `json:"id,omitempty"` // of the recording; the server's to choose
	Name string `json:"name,omitempty"`
}

// NetworkReplay answers all HTTP and HTTPS of a sandbox out of a recording.
// Nothing leaves.
type NetworkReplay struct {
	Recording string `json:"recording"` // id; in a request the name too
	// RepeatLast answers with the last of equal requests again where there were
	// more of them than recorded. Else that is a miss.
	RepeatLast bool `json:"repeat_last,omitempty"`
	// IgnoreQuery names parameters that may differ; "*" = all of them.
	IgnoreQuery []string `json:"ignore_query,omitempty"`
	// IgnoreBody lets bodies of requests differ.
	IgnoreBody bool `json:"ignore_body,omitempty"`
	// MatchHeaders names headers of requests that must be equal. None are
	// compared else, but Range.
	MatchHeaders []string `json:"match_headers,omitempty"`
}

// RecordedExchange is one request and what came of it.
type RecordedExchange struct {
	Number    int64         `json:"number"`
	At        time.Time     `json:"at"`
	Took      time.Duration `json:"took"`
	Method    string        `json:"method"`
	URL       string        `json:"url"`
	Status    int           `json:"status,omitempty"` // 0 = there was no answer
	Failed    string        `json:"failed,omitempty"` // why not
	Sent      int64         `json:"sent"`             // bytes of the bodies
	Received  int64         `json:"received"`
	Truncated bool          `json:"truncated,omitempty"` // it cannot be replayed
}

// ReplayMiss is a request that a replay had no answer for.
type ReplayMiss struct {
	At     time.Time `json:"at"`
	Method string    `json:"method"`
	URL    string    `json:"url"`
	Reason string    `json:"reason"` // replay_miss or replay_truncated
	Hint   string    `json:"hint,omitempty"`
}

// ReplayStatus is how far a replay is.
type ReplayStatus struct {
	Recording string       `json:"recording"`
	Answered  int64        `json:"answered"`
	Missed    int64        `json:"missed"`
	Unused    int64        `json:"unused"`           // recorded and not yet asked for
	Misses    []ReplayMiss `json:"misses,omitempty"` // the last ones, oldest first
}

// UsesRecording says whether requests go through a recording.
func (n Network) UsesRecording() bool { return n.Record != nil || n.Replay != nil }

// Intercepted says whether requests of a sandbox are looked into, and so whether it
// must trust an authority.
func (s Spec) Intercepted() bool {
	return len(s.Secrets) > 0 || len(s.Network.Headers) > 0 || s.Network.UsesRecording()
}

// WithAuthority is the spec of a sandbox with the authority it is to trust, if
// its requests are looked into: what it has from its ancestors, or its own.
func (s Spec) WithAuthority(id string) Spec {
	if s.Authority == "" && s.Intercepted() {
		s.Authority = id
	}
	return s
}

var recordingName = pattern(`^[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}$`)

// ValidateRecordingName checks a name; every id is one too.
func ValidateRecordingName(field, name string) error {
	if !recordingName().MatchString(name) {
		return InvalidField(field, "%.140q; 1 to 128 letters, digits, '.', '_' and '-' are accepted, the first a letter or digit", name)
	}
	return nil
}

// ValidateRecording checks what a network says of recordings. n has its mode.
func (n Network) ValidateRecording(field string) error {
	if n.Record != nil {
		if n.Record.Name != "" {
			if err := ValidateRecordingName(field+".record.name", n.Record.Name); err != nil {
				return err
			}
		}
		switch {
		case n.Replay != nil:
			return InvalidField(field+".record", "a replay cannot be recorded")
		case n.Mode == NetworkNone:
			return InvalidField(field+".record", "the network is off: there is nothing to record").WithHint("with network public, or rules")
		}
	}
	r := n.Replay
	if r == nil {
		return nil
	}
	if err := ValidateRecordingName(field+".replay.recording", r.Recording); err != nil {
		return err
	}
	if n.Mode != NetworkNone {
		return InvalidField(field+".replay", "mode is %s; in a replay nothing leaves the sandbox: mode none is accepted, or none at all", n.Mode)
	}
	if len(r.IgnoreQuery) > 64 || len(r.MatchHeaders) > 64 {
		return InvalidField(field+".replay", "more than 64 names to ignore or to match")
	}
	for _, h := range r.MatchHeaders {
		if h == "" || strings.ContainsFunc(h, func(c rune) bool { return c <= ' ' || c > '~' || c == ':' }) {
			return InvalidField(field+".replay.match_headers", "%.80q is no header", h)
		}
	}
	if i := slices.IndexFunc(r.IgnoreQuery, func(q string) bool { return q == "" || len(q) > 256 }); i >= 0 {
		return InvalidField(field+".replay.ignore_query", "%.80q is no parameter", r.IgnoreQuery[i])
	}
	return nil
}
