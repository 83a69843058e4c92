package ship

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ATIF is the Agent Trajectory Interchange Format of Harbor's RFC 0001. It refuses
// fields that it does not know, so all that is Cove's is in extra. Prompts, tokens and
// what a model thought are the trainer's, and not here.

// ATIFSchema is the version that is written. 1.7 is the first with extra on calls and
// results.
const ATIFSchema = "ATIF-v1.7"

// Trajectory is one episode.
type Trajectory struct {
	SchemaVersion string         `json:"schema_version"`
	SessionID     string         `json:"session_id"`
	TrajectoryID  string         `json:"trajectory_id"`
	Agent         atifAgent      `json:"agent"`
	Steps         []atifStep     `json:"steps"`
	FinalMetrics  *atifMetrics   `json:"final_metrics,omitempty"`
	Extra         map[string]any `json:"extra,omitempty"`
}

type atifAgent struct {
	Name    string         `json:"name"`
	Version string         `json:"version"`
	Extra   map[string]any `json:"extra,omitempty"`
}

type atifStep struct {
	StepID      int              `json:"step_id"`
	Timestamp   string           `json:"timestamp,omitempty"`
	Source      string           `json:"source"`
	Message     string           `json:"message"`
	ToolCalls   []atifCall       `json:"tool_calls,omitempty"`
	Observation *atifObservation `json:"observation,omitempty"`
	Extra       map[string]any   `json:"extra,omitempty"`
}

type atifCall struct {
	ID        string         `json:"tool_call_id"`
	Function  string         `json:"function_name"`
	Arguments map[string]any `json:"arguments"`
}

type atifObservation struct {
	Results []atifResult `json:"results"`
}

type atifResult struct {
	SourceCallID string         `json:"source_call_id,omitempty"`
	Content      string         `json:"content"`
	Extra        map[string]any `json:"extra,omitempty"`
}

type atifMetrics struct {
	TotalSteps int            `json:"total_steps"`
	Extra      map[string]any `json:"extra,omitempty"`
}

// EpisodeKey tells episodes apart.
type EpisodeKey struct {
	Sandbox string
	Reset   int64
}

// Key is the episode that a record is of.
func (r Record) Key() EpisodeKey { return EpisodeKey{r.Sandbox, r.Reset} }

// NewTrajectory makes one of all records of an episode. Its steps are in the order of
// their starts; a grade is a step of the system's and the reward among the metrics. ok
// false = nothing happened in it, and ATIF has no empty trajectories.
func NewTrajectory(version string, key EpisodeKey, records []Record) (t Trajectory, ok bool) {
	records = slices.Clone(records)
	slices.SortStableFunc(records, func(a, b Record) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Seq, b.Seq), a.EndedAt.Compare(b.EndedAt))
	})
	t = Trajectory{SchemaVersion: ATIFSchema, TrajectoryID: key.Sandbox + "." + strconv.FormatInt(key.Reset, 10),
		Agent: atifAgent{Name: "cove", Version: cmp.Or(version, "unknown"), Extra: map[string]any{"note": "as seen from the sandbox; messages and tokens are the trainer's"}}}
	metrics := map[string]any{}
	extra := map[string]any{"schema": Schema, "sandbox": key.Sandbox, "reset": key.Reset}
	var cpu, seconds float64
	steps := 0
	for _, r := range records {
		t.SessionID = cmp.Or(t.SessionID, r.Run)
		put(extra, "tenant", r.Tenant)
		put(extra, "group", r.Group)
		put(extra, "episode", r.Episode)
		switch r.Kind {
		case KindStep:
			steps++
			cpu, seconds = cpu+r.CPUTimeS, seconds+r.DurationS
			t.Steps = append(t.Steps, stepOf(r))
		case KindGrade:
			if r.Reward != nil {
				metrics["reward"] = *r.Reward
			}
			if len(r.Rewards) > 0 {
				metrics["rewards"] = r.Rewards
			}
			t.Steps = append(t.Steps, gradeOf(r))
		case KindEpisode:
			extra["end"] = endOf(r)
		}
	}
	for i := range t.Steps {
		t.Steps[i].StepID = i + 1
	}
	metrics["execs"], metrics["cpu_time_s"], metrics["duration_s"] = steps, cpu, seconds
	t.Extra, t.FinalMetrics = extra, &atifMetrics{TotalSteps: len(t.Steps), Extra: metrics}
	return t, len(t.Steps) > 0
}

// rank puts what an agent did before what was said of it.
func rank(r Record) int { return slices.Index([]string{KindStep, KindGrade, KindEpisode}, r.Kind) }

func stepOf(r Record) atifStep {
	arguments := map[string]any{}
	if r.Command != "" {
		arguments["command"] = r.Command
	}
	if len(r.Args) > 0 {
		arguments["args"] = r.Args
	}
	put(arguments, "cwd", r.Cwd)
	put(arguments, "user", r.User)
	content := r.Stdout.Text() + r.Stderr.Text()
	facts := endOf(r)
	facts["duration_s"], facts["cpu_time_s"], facts["peak_memory"] = r.DurationS, r.CPUTimeS, r.PeakMemory
	facts["bytes_out"] = r.BytesOut
	if r.Files != nil {
		facts["files"] = r.Files
	}
	if r.Egress != nil {
		facts["egress"] = r.Egress
	}
	put(facts, "stderr", strings.ToValidUTF8(r.Stderr.Text(), "\uFFFD"))
	return atifStep{Timestamp: stamp(r.StartedAt), Source: "agent",
		ToolCalls:   []atifCall{{ID: r.ID, Function: "exec", Arguments: arguments}},
		Observation: &atifObservation{Results: []atifResult{{SourceCallID: r.ID, Content: strings.ToValidUTF8(content, "\uFFFD"), Extra: facts}}},
		Extra:       map[string]any{"record": r.ID, "seq": r.Seq, "exec_id": r.ExecID}}
}

func gradeOf(r Record) atifStep {
	extra := map[string]any{"record": r.ID, "grade": r.Grade, "state": r.State}
	if r.Reward != nil {
		extra["reward"] = *r.Reward
	}
	if len(r.Rewards) > 0 {
		extra["rewards"] = r.Rewards
	}
	if len(r.Findings) > 0 {
		extra["findings"] = r.Findings
	}
	put(extra, "digest", r.Digest)
	return atifStep{Timestamp: stamp(r.EndedAt), Source: "system", Message: "graded: " + cmp.Or(r.Reason, r.State), Extra: extra}
}

func endOf(r Record) map[string]any {
	m := map[string]any{}
	put(m, "cause", r.Cause)
	put(m, "signal", r.Signal)
	put(m, "detail", r.Detail)
	if r.ExitCode != nil {
		m["exit_code"] = *r.ExitCode
	}
	return m
}

func put(m map[string]any, key, value string) {
	if value != "" {
		m[key] = value
	}
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02T15:04:05.000000Z07:00")
}
