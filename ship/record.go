// Package ship carries records of runs out of the platform: what a record is, how
// it is written (JSON lines, Parquet, ATIF), when a batch is due, and the sinks that
// take batches. It knows no server and no log: a cursor and a batch come in, a
// delivery or an error comes out.
//
// Delivery is at least once. Every record has an id that is the same each time it is
// delivered, and a batch that is delivered again is the same batch.
package ship

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/cove-sandbox/cove/sandbox"
)

// Schema is the version of records. Fields may be added to one version; what is
// there never changes its meaning.
const Schema = 1

// Kinds of records.
const (
	KindStep    = "step"    // an exec has ended
	KindEpisode = "episode" // a sandbox was reset, or has ended
	KindGrade   = "grade"   // a grade has come to its verdict
)

// Record is one line of what is shipped. docs/trajectories.md has its fields.
type Record struct {
	Schema  int    `json:"schema"`
	Kind    string `json:"kind"`
	ID      string `json:"id"` // of the record; equal ids are the same record
	Tenant  string `json:"tenant"`
	Run     string `json:"run"`
	Group   string `json:"group,omitempty"`
	Episode string `json:"episode,omitempty"` // the caller's name
	Sandbox string `json:"sandbox"`
	Reset   int64  `json:"reset,omitempty"` // which episode of the sandbox: 1, 2, …

	StartedAt time.Time `json:"started_at,omitzero"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
	Cause     string    `json:"cause,omitempty"`
	ExitCode  *int      `json:"exit_code,omitempty"` // where something exited, or was signalled
	Signal    string    `json:"signal,omitempty"`
	Detail    string    `json:"detail,omitempty"`
	DurationS float64   `json:"duration_s,omitempty"`
	CPUTimeS  float64   `json:"cpu_time_s,omitempty"`

	// Of a step.
	Seq          int64    `json:"seq,omitempty"`
	ExecID       string   `json:"exec_id,omitempty"`
	Args         []string `json:"args,omitempty"`
	Command      string   `json:"command,omitempty"`
	Cwd          string   `json:"cwd,omitempty"`
	User         string   `json:"user,omitempty"`
	PeakMemory   int64    `json:"peak_memory,omitempty"`
	BytesIn      int64    `json:"bytes_in,omitempty"`
	BytesOut     int64    `json:"bytes_out,omitempty"`
	EgressDenied int64    `json:"egress_denied,omitempty"`
	ReplayMissed int64    `json:"replay_missed,omitempty"`
	EgressSent   int64    `json:"egress_sent,omitempty"` // bytes
	EgressRecv   int64    `json:"egress_received,omitempty"`
	Stdout       *Output  `json:"stdout,omitempty"`
	Stderr       *Output  `json:"stderr,omitempty"`
	// Where the run asks for them.
	Files  *sandbox.StepFiles  `json:"files,omitempty"`
	Egress *sandbox.StepEgress `json:"egress,omitempty"`

	// Of a grade.
	Grade    string               `json:"grade,omitempty"`
	State    string               `json:"state,omitempty"`
	Reward   *float64             `json:"reward,omitempty"`
	Rewards  map[string]float64   `json:"rewards,omitempty"`
	Reason   string               `json:"reason,omitempty"`
	Digest   string               `json:"digest,omitempty"`
	Tests    []sandbox.TestResult `json:"tests,omitempty"`
	Findings []sandbox.Finding    `json:"findings,omitempty"`
	Log      string               `json:"log,omitempty"`

	// Cursor is the place after the record, where it is read and not shipped.
	Cursor string `json:"cursor,omitempty"`
}

// Output is what was kept of a stream: head, Dropped bytes, tail.
type Output sandbox.StepOutput

// outputJSON is text where it is UTF-8, and bytes where not.
type outputJSON struct {
	Head       string `json:"head,omitempty"`
	HeadBase64 string `json:"head_base64,omitempty"`
	Dropped    int64  `json:"dropped,omitempty"`
	Tail       string `json:"tail,omitempty"`
	TailBase64 string `json:"tail_base64,omitempty"`
}

// MarshalJSON implements json.Marshaler.
func (o Output) MarshalJSON() ([]byte, error) {
	j := outputJSON{Dropped: o.Dropped}
	put := func(b []byte, text, raw *string) {
		if utf8.Valid(b) {
			*text = string(b)
		} else {
			*raw = base64.StdEncoding.EncodeToString(b)
		}
	}
	put(o.Head, &j.Head, &j.HeadBase64)
	put(o.Tail, &j.Tail, &j.TailBase64)
	return json.Marshal(j)
}

// UnmarshalJSON implements json.Unmarshaler.
func (o *Output) UnmarshalJSON(b []byte) (err error) {
	var j outputJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	take := func(text, raw string) []byte {
		if raw == "" {
			return []byte(text)
		}
		decoded, derr := base64.StdEncoding.DecodeString(raw)
		if derr != nil {
			err = derr
		}
		return decoded
	}
	*o = Output{Head: take(j.Head, j.HeadBase64), Dropped: j.Dropped, Tail: take(j.Tail, j.TailBase64)}
	return err
}

// Text is what was kept, for people and models.
func (o *Output) Text() string {
	if o == nil {
		return ""
	}
	s := string(o.Head)
	if o.Dropped > 0 {
		s += "\n[" + strconv.FormatInt(o.Dropped, 10) + " bytes are not kept]\n"
	}
	return s + string(o.Tail)
}

func (r *Record) setEnd(e sandbox.End) {
	r.Cause, r.Signal, r.Detail = string(e.Cause), e.Signal, e.Detail
	if e.Cause == sandbox.Exited || e.Cause == sandbox.Signalled {
		r.ExitCode = &e.ExitCode
	}
	if !e.At.IsZero() {
		r.EndedAt = e.At.UTC()
	}
	if e.Usage != nil {
		r.CPUTimeS = e.Usage.CPUTime.Seconds()
	}
}

func (r *Record) setRollout(of sandbox.Rollout) {
	r.Run, r.Group, r.Episode = of.Run, of.Group, of.Episode
}

// StepRecord is the record of a step that has ended.
func StepRecord(tenant string, st sandbox.Step) Record {
	r := Record{Schema: Schema, Kind: KindStep, ID: "step:" + st.ID, Tenant: tenant, Sandbox: st.Sandbox, Reset: st.Reset, StartedAt: st.StartedAt, Seq: st.Seq, ExecID: st.ExecID,
		Args: st.Args, Command: st.Command, Cwd: st.Cwd, User: st.User, PeakMemory: st.PeakMemory, BytesIn: st.BytesIn, BytesOut: st.BytesOut,
		EgressDenied: st.EgressDenied, ReplayMissed: st.ReplayMissed, EgressSent: st.EgressSent, EgressRecv: st.EgressReceived, Files: st.Files, Egress: st.Egress}
	r.setRollout(st.Rollout)
	if st.End != nil {
		r.setEnd(*st.End)
	}
	r.EndedAt, r.DurationS, r.CPUTimeS = st.EndedAt, st.Duration.Seconds(), st.CPUTime.Seconds()
	for _, s := range []struct {
		from sandbox.StepOutput
		to   **Output
	}{{st.Stdout, &r.Stdout}, {st.Stderr, &r.Stderr}} {
		if len(s.from.Head) > 0 || s.from.Dropped > 0 {
			o := Output(s.from)
			*s.to = &o
		}
	}
	return r
}

// EpisodeRecord is the record of the end of a sandbox's episode.
func EpisodeRecord(tenant string, e Episode) Record {
	r := Record{Schema: Schema, Kind: KindEpisode, ID: fmt.Sprintf("episode:%s.%d", e.Sandbox, e.Reset), Tenant: tenant, Sandbox: e.Sandbox, Reset: e.Reset, StartedAt: e.StartedAt}
	r.setRollout(e.Rollout)
	r.setEnd(e.End)
	return r
}

// Episode is the end of one, as a log has it.
type Episode struct {
	sandbox.Rollout
	Sandbox   string      `json:"sandbox"`
	Reset     int64       `json:"reset"`
	StartedAt time.Time   `json:"started_at,omitzero"` // of the sandbox, in its first episode
	End       sandbox.End `json:"end"`
	Last      bool        `json:"last,omitempty"` // the sandbox has ended
}

// GradeRecord is the record of a grade that has ended. One that failed by a fault of
// ours and was graded again has another: a verdict is named with its time.
func GradeRecord(tenant string, g sandbox.Grade) Record {
	v := g.Verdict
	r := Record{Schema: Schema, Kind: KindGrade, ID: fmt.Sprintf("grade:%s.%d", g.ID, g.FinishedAt.UnixNano()), Tenant: tenant, Sandbox: g.Spec.Sandbox,
		StartedAt: g.CreatedAt, EndedAt: g.FinishedAt, Reset: g.Reset, Grade: g.ID, State: string(g.State), Reward: v.Reward, Rewards: v.Rewards, Reason: v.Reason, Digest: v.Digest,
		Tests: v.Tests, Findings: v.Findings, Log: v.Log, DurationS: g.FinishedAt.Sub(g.CreatedAt).Seconds()}
	r.setRollout(g.Rollout)
	return r
}

// AppendJSON adds a record as a line.
func (r Record) AppendJSON(b []byte) ([]byte, error) {
	j, err := json.Marshal(r)
	if err != nil { // a reward that is no number is refused where it is read
		return b, &sandbox.Error{Class: sandbox.Internal, Op: "ship.encode", Msg: "record " + r.ID, Err: err}
	}
	return append(append(b, j...), '\n'), nil
}
