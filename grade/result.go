package grade

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/cove-sandbox/cove/sandbox"
)

// Judge is the program that runs pytest and tells what came of it.
//
//go:embed judge.py
var Judge []byte

// MaxReport bounds what is read of a report.
const MaxReport = 16 << 20

// maxTests of a report are in a verdict, with maxMessage of each.
const (
	maxTests   = 5000
	maxMessage = 1000
)

// JudgeInput is what Judge reads from its stdin.
type JudgeInput struct {
	UID   int               `json:"uid"` // of the work
	Tests string            `json:"tests"`
	Args  []string          `json:"args"`
	Paths []string          `json:"paths"` // where the work's modules are found, after all others
	Cwd   string            `json:"cwd"`
	Env   map[string]string `json:"env"`
}

// Outcome is what a report is worth. Err says that there is no verdict in it.
type Outcome struct {
	Reward  float64
	Rewards map[string]float64
	Reason  string
	Tests   []sandbox.TestResult
	Err     *sandbox.Error
}

func failed(format string, args ...any) Outcome {
	return Outcome{Err: &sandbox.Error{Class: sandbox.Precondition, Op: "grade", Msg: fmt.Sprintf(format, args...)}}
}

// judged is what Judge writes.
type judged struct {
	Expected []string `json:"expected"`
	Broken   []string `json:"broken"`
	Reports  []struct {
		Kind    string  `json:"kind"`
		ID      string  `json:"id"`
		When    string  `json:"when"`
		Outcome string  `json:"outcome"`
		Seconds float64 `json:"seconds"`
		Marked  bool    `json:"marked"`
		Text    string  `json:"text"`
	} `json:"reports"`
	Patched  []string `json:"patched"`
	Ready    bool     `json:"ready"` // pytest was there, and the work not yet
	Ends     int      `json:"ends"`
	Noise    int      `json:"noise"`
	Canaries int      `json:"canaries"`
	Caught   int      `json:"caught"`
	Signal   int      `json:"signal"`
	Code     int      `json:"code"`
}

// Pytest weighs what Judge wrote. A test counts as passed if it ran to its end and
// nothing of it failed; what the tests themselves skip (a mark) does not count at
// all, what the work skips has failed. expected are the ids that must have passed,
// instead of those that the source of the tests names.
//
// The reward is 1 if all passed and the run can be believed. It cannot if the run
// did not come to its end, if a test that must fail did not, or if a function of
// the test framework was replaced: the work shares its process.
func Pytest(data []byte, expected []string) Outcome {
	var j judged
	if err := json.Unmarshal(data, &j); err != nil {
		return failed("the judge wrote no report: %v", err)
	}
	if !j.Ready {
		return failed("the tests could not be run; the log says why")
	}
	if len(j.Broken) > 0 {
		return failed("a file of the tests cannot be read: %s", clip(j.Broken[0]))
	}
	named := len(expected) > 0
	if named {
		j.Expected = expected
	}
	if len(j.Expected) == 0 {
		return failed("there are no tests")
	}
	byID, order := map[string]*sandbox.TestResult{}, []string{}
	for _, r := range j.Reports {
		t := byID[r.ID]
		if t == nil {
			t = &sandbox.TestResult{ID: clip(r.ID)}
			byID[r.ID] = t
			order = append(order, r.ID)
		}
		t.Duration += seconds(r.Seconds)
		outcome := r.Outcome
		switch {
		case r.Kind == "collect":
			outcome = "error"
		case outcome == "skipped" && r.Marked:
			outcome = "skipped"
		case outcome == "skipped":
			outcome, r.Text = "failed", "skipped by what it ran, and not by a mark of its own: "+r.Text
		case outcome == "failed" && r.When != "call":
			outcome = "error"
		case outcome != "passed":
			outcome = "failed"
		}
		if rank[outcome] > rank[t.Outcome] {
			t.Outcome, t.Message = outcome, message(r.Text)
		}
	}
	var tests []sandbox.TestResult
	for _, id := range order {
		tests = append(tests, *byID[id])
	}
	out := among(tests, j.Expected, named)
	switch {
	case j.Signal != 0:
		out.spoil("the tests were ended by signal %d before they were done", j.Signal)
	case j.Ends != 1 || j.Code != 0:
		out.spoil("the tests did not come to their end: their process left before it had reported")
	case j.Caught != j.Canaries:
		out.spoil("%d of %d checks that must fail did not: what the tests say cannot be believed", j.Canaries-j.Caught, j.Canaries)
	case len(j.Patched) > 0:
		out.spoil("the test framework was changed while the tests ran: %s", clip(strings.Join(j.Patched, ", ")))
	case j.Noise > 0:
		out.spoil("something else wrote into the tests' report")
	}
	return out
}

// rank orders outcomes of the parts of one test: the worst counts.
var rank = map[string]int{"": 0, "passed": 1, "skipped": 2, "missing": 3, "failed": 4, "error": 5}

// base is the id of a test without its parameters.
func base(id string) string {
	if i := strings.IndexByte(id, '['); i >= 0 {
		return id[:i]
	}
	return id
}

// scoreTests makes a reward of tests: 1 if every one that counts has passed.
func scoreTests(tests []sandbox.TestResult) Outcome {
	passed, total, why := 0, 0, ""
	for _, t := range tests {
		switch t.Outcome {
		case "skipped":
			continue
		case "passed":
			passed++
		default:
			if why == "" {
				why = fmt.Sprintf("%s: %s", t.Outcome, t.ID)
			}
		}
		total++
	}
	if total == 0 {
		return failed("no test counts: all were skipped")
	}
	out := Outcome{Rewards: map[string]float64{"passed": float64(passed), "total": float64(total), "pass_rate": float64(passed) / float64(total)},
		Reason: fmt.Sprintf("%d of %d tests passed", passed, total), Tests: tests[:min(len(tests), maxTests)]}
	if passed == total {
		out.Reward = 1
	} else {
		out.Reason += "; " + why
	}
	return out
}

// spoil takes the reward of a run that cannot be believed.
func (o *Outcome) spoil(format string, args ...any) {
	if o.Err != nil {
		return
	}
	o.Reward, o.Reason = 0, fmt.Sprintf(format, args...)
	o.Rewards["passed"], o.Rewards["pass_rate"] = 0, 0
}

// Exit is the reward of an exit code.
func Exit(code int) Outcome {
	if code == 0 {
		return Outcome{Reward: 1, Reason: "the command exited with 0"}
	}
	return Outcome{Reason: fmt.Sprintf("the command exited with %d", code)}
}

// Reward reads a number, or an object of numbers: "reward" of it, or the only
// one there is.
func Reward(data []byte) Outcome {
	data = bytes.TrimSpace(data)
	var n float64
	if err := json.Unmarshal(data, &n); err == nil && string(data) != "null" {
		return Outcome{Reward: n, Reason: "the judge's own"}
	}
	var named map[string]*float64 // null is no number, and no 0
	if err := json.Unmarshal(data, &named); err != nil || len(named) == 0 || len(named) > 1000 {
		return failed("$COVE_REWARD holds neither a number nor an object of numbers")
	}
	all := map[string]float64{}
	for k, v := range named {
		if v == nil || len(k) > 200 {
			return failed("$COVE_REWARD holds something that is no reward")
		}
		all[k], n = *v, *v
	}
	if r, ok := all["reward"]; ok {
		n = r
	} else if len(all) > 1 {
		return failed("$COVE_REWARD holds %d numbers and none is called reward", len(all))
	}
	return Outcome{Reward: n, Rewards: all, Reason: "the judge's own"}
}

// PytestJSON reads what the plugin pytest-json-report writes.
func PytestJSON(data []byte, expected []string) Outcome {
	var r struct {
		ExitCode *int `json:"exitcode"`
		Tests    []struct {
			NodeID  string `json:"nodeid"`
			Outcome string `json:"outcome"`
			Call    struct {
				Duration float64 `json:"duration"`
				Crash    struct {
					Message string `json:"message"`
				} `json:"crash"`
			} `json:"call"`
		} `json:"tests"`
	}
	if err := json.Unmarshal(data, &r); err != nil || r.ExitCode == nil {
		return failed("$COVE_RESULTS is no report of pytest-json-report")
	}
	var tests []sandbox.TestResult
	for _, t := range r.Tests {
		tests = append(tests, sandbox.TestResult{ID: clip(t.NodeID), Outcome: known(t.Outcome), Duration: seconds(t.Call.Duration), Message: message(t.Call.Crash.Message)})
	}
	out := among(tests, expected, true)
	if *r.ExitCode != 0 && out.Reward > 0 {
		out.spoil("every test of the report passed, and pytest exited with %d", *r.ExitCode)
	}
	return out
}

// known turns the words of reports into ours.
func known(outcome string) string {
	switch outcome {
	case "passed", "failed", "skipped", "error":
		return outcome
	case "xfailed":
		return "skipped"
	}
	return "failed"
}

// among weighs a report with those that must be in it, and have passed where named:
// one that is skipped then has failed. A report without tests is no verdict.
func among(tests []sandbox.TestResult, expected []string, named bool) Outcome {
	if len(tests)+len(expected) == 0 {
		return failed("the report has no tests")
	}
	ran, wanted := map[string]bool{}, map[string]bool{}
	for _, id := range expected {
		wanted[clip(id)] = true
	}
	for i, t := range tests {
		ran[t.ID], ran[base(t.ID)] = true, true
		if named && t.Outcome == "skipped" && (wanted[t.ID] || wanted[base(t.ID)]) {
			tests[i].Outcome, tests[i].Message = "failed", "skipped, and expected to pass: "+t.Message
		}
	}
	for _, id := range expected {
		if id = clip(id); !ran[id] {
			tests = append(tests, sandbox.TestResult{ID: id, Outcome: "missing"})
		}
	}
	return scoreTests(tests)
}

func seconds(s float64) time.Duration {
	if math.IsNaN(s) || s < 0 || s > 1e7 {
		return 0
	}
	return time.Duration(s * float64(time.Second))
}

func message(s string) string {
	if len(s) > maxMessage {
		s = "…" + s[len(s)-maxMessage:]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// Read takes a report in, up to its bound.
func Read(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, MaxReport+1))
	if err == nil && len(b) > MaxReport {
		err = &sandbox.Error{Class: sandbox.TooLarge, Op: "grade", Msg: "the report has more than " + sandbox.FormatSize(MaxReport)}
	}
	return b, err
}
