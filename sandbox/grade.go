package sandbox

import "time"

// GradeState is how far a grade is, and how it ended. Only Graded, GradeTimeout
// and GradeOOM carry a reward: what a judge that broke, or a machine that did,
// says about the work is nothing.
type GradeState string

const (
	Grading       GradeState = "running"
	Graded        GradeState = "graded"        // the judge came to a verdict
	GradeTimeout  GradeState = "timeout"       // the command had not ended after its time; reward 0
	GradeOOM      GradeState = "oom"           // the command ended over the grader's memory; reward 0
	GraderFailed  GradeState = "grader_failed" // the judge itself did not work: no reward
	GradeInfra    GradeState = "infra"         // a fault of ours or of the host: no reward
	GradeCanceled GradeState = "canceled"      // somebody ended it: no reward
)

// GradeStates lists every state once.
var GradeStates = []GradeState{Grading, Graded, GradeTimeout, GradeOOM, GraderFailed, GradeInfra, GradeCanceled}

// GradeResults is where the reward of a grade comes from.
type GradeResults string

const (
	ExitResults       GradeResults = "exit"        // 1 if the command exits with 0
	PytestResults     GradeResults = "pytest"      // Cove's own runner of pytest, which reports outside of the tests' process
	RewardResults     GradeResults = "reward"      // the file $COVE_REWARD: a number, or an object of numbers
	JUnitResults      GradeResults = "junit"       // the file $COVE_RESULTS as JUnit XML
	PytestJSONResults GradeResults = "pytest-json" // the file $COVE_RESULTS as pytest-json-report writes it
)

// FromFile says whether the reward is read from a file that the command writes.
func (r GradeResults) FromFile() bool {
	return r == RewardResults || r == JUnitResults || r == PytestJSONResults
}

// GradeSpec is what a grade is asked to do.
type GradeSpec struct {
	Sandbox   string            `json:"sandbox"`
	Tests     string            `json:"tests,omitempty"`      // a directory snapshot, by name or id
	TestsPath string            `json:"tests_path,omitempty"` // where it is mounted; "" = /tests
	Command   string            `json:"command,omitempty"`    // a line for the grader's shell
	Args      []string          `json:"args,omitempty"`       // instead of Command; of pytest its own arguments
	Results   GradeResults      `json:"results"`
	Separate  bool              `json:"separate,omitempty"` // the command is root in the grader and runs the work as another user
	Artifacts []string          `json:"artifacts"`          // absolute paths that are carried over
	Expected  []string          `json:"expected,omitempty"` // ids of tests that must have passed
	Image     string            `json:"image,omitempty"`    // to grade on, instead of that of the sandbox
	Snapshot  string            `json:"snapshot,omitempty"` // of files, to grade on
	Resources Resources         `json:"resources,omitzero"` // of the grader; "" = the sandbox's
	Env       map[string]string `json:"env,omitempty"`      // of the command
	Cwd       string            `json:"cwd,omitempty"`      // of the command; "" = the image's
	Timeout   time.Duration     `json:"timeout"`            // of the command
	Stop      bool              `json:"stop,omitempty"`     // the sandbox ends once its files are taken
	Labels    map[string]string `json:"labels,omitempty"`
}

// Grade is one grading and what came of it. It outlives the sandbox.
type Grade struct {
	ID         string     `json:"id"`
	Tenant     string     `json:"tenant,omitempty"`
	Rollout               // what its sandbox is part of
	Reset      int64      `json:"reset,omitempty"` // the episode of the sandbox that was graded
	Spec       GradeSpec  `json:"spec"`
	Hash       string     `json:"hash,omitempty"` // of the request, for its idempotency key
	State      GradeState `json:"state"`
	CreatedAt  time.Time  `json:"created_at"`
	FinishedAt time.Time  `json:"finished_at,omitzero"`
	Verdict    Verdict    `json:"verdict,omitzero"` // zero while it runs
	// Unlogged says that the log of its run does not have the verdict yet.
	Unlogged bool `json:"unlogged,omitempty"`
}

// Verdict is what a grade came to.
type Verdict struct {
	Reward  *float64           `json:"reward,omitempty"` // nil = none: see GradeState
	Rewards map[string]float64 `json:"rewards,omitempty"`
	Reason  string             `json:"reason,omitempty"` // why, in a sentence
	Error   *Error             `json:"error,omitempty"`  // of GraderFailed, GradeInfra and GradeCanceled

	Tests    []TestResult `json:"tests,omitempty"`
	Findings []Finding    `json:"findings,omitempty"` // the tamper report
	// FindingsDropped is how many more there were than the report holds.
	FindingsDropped int `json:"findings_dropped,omitempty"`

	Digest  string `json:"digest,omitempty"`   // of the files that were graded
	ImageID string `json:"image_id,omitempty"` // that they were graded on
	Carried int64  `json:"carried,omitempty"`  // files and directories of the artifacts
	Bytes   int64  `json:"bytes,omitempty"`    // of them

	End *ProcessEnd `json:"end,omitempty"` // of the command
	Log string      `json:"log,omitempty"` // what it printed: the first and last of it
	// LogDropped is how many bytes are missing in the middle of Log.
	LogDropped int64 `json:"log_dropped,omitempty"`

	Setup  time.Duration `json:"setup,omitempty"`  // until the command ran
	Paused time.Duration `json:"paused,omitempty"` // how long the sandbox stood still
}

// TestResult is one test.
type TestResult struct {
	ID       string        `json:"id"`
	Outcome  string        `json:"outcome"` // passed, failed, error, skipped, missing
	Duration time.Duration `json:"duration,omitempty"`
	Message  string        `json:"message,omitempty"`
}

// Finding is something in the sandbox's files that a grader should know of. It
// is no proof of a cheat: it changes no reward.
type Finding struct {
	Kind    string `json:"kind"` // interpreter, preload, python_path, …
	Path    string `json:"path"`
	Detail  string `json:"detail,omitempty"`
	Carried bool   `json:"carried,omitempty"` // it is in the grader
}
