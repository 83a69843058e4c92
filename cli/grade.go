package cli

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

type gradeJSON struct {
	ID              string             `json:"id"`
	Sandbox         string             `json:"sandbox"`
	State           string             `json:"state"`
	Reward          *float64           `json:"reward"`
	Rewards         map[string]float64 `json:"rewards,omitempty"`
	Reason          string             `json:"reason,omitempty"`
	Error           *errorJSON         `json:"error,omitempty"`
	Tests           []testJSON         `json:"tests,omitempty"`
	Findings        []findingJSON      `json:"findings,omitempty"`
	FindingsDropped int32              `json:"findings_dropped,omitempty"`
	Digest          string             `json:"digest,omitempty"`
	ImageID         string             `json:"image_id,omitempty"`
	Carried         int64              `json:"carried"`
	CarriedBytes    int64              `json:"carried_bytes"`
	Cause           string             `json:"cause,omitempty"`
	ExitCode        int32              `json:"exit_code"`
	Log             string             `json:"log,omitempty"`
	LogDropped      int64              `json:"log_dropped,omitempty"`
	SetupS          float64            `json:"setup_s"`
	PausedS         float64            `json:"paused_s"`
	CreatedAt       time.Time          `json:"created_at,omitzero"`
	FinishedAt      time.Time          `json:"finished_at,omitzero"`
	Labels          map[string]string  `json:"labels,omitempty"`
	Results         string             `json:"results"`
	Separate        bool               `json:"separate,omitempty"`
	Artifacts       []string           `json:"artifacts"`
	TestsSnapshot   string             `json:"tests_snapshot,omitempty"`
}

type testJSON struct {
	ID        string  `json:"id"`
	Outcome   string  `json:"outcome"`
	DurationS float64 `json:"duration_s"`
	Message   string  `json:"message,omitempty"`
}

type findingJSON struct {
	Kind     string `json:"kind"`
	Path     string `json:"path"`
	Detail   string `json:"detail,omitempty"`
	InGrader bool   `json:"in_grader"`
}

func toGradeJSON(g *covev1.Grade) gradeJSON {
	j := gradeJSON{ID: g.GetId(), Sandbox: g.GetSandbox(), State: g.GetState(), Reward: g.Reward, Rewards: g.GetRewards(), Reason: g.GetReason(),
		FindingsDropped: g.GetFindingsDropped(), Digest: g.GetDigest(), ImageID: g.GetImageId(), Carried: g.GetCarried(), CarriedBytes: g.GetCarriedBytes(),
		Cause: g.GetCause(), ExitCode: g.GetExitCode(), Log: g.GetLog(), LogDropped: g.GetLogDropped(), SetupS: g.GetSetup().AsDuration().Seconds(),
		PausedS: g.GetPaused().AsDuration().Seconds(), CreatedAt: timeOf(g.GetCreatedAt()), FinishedAt: timeOf(g.GetFinishedAt()), Labels: g.GetLabels(),
		Results: g.GetResults(), Separate: g.GetSeparate(), Artifacts: g.GetArtifacts(), TestsSnapshot: g.GetTestsSnapshot()}
	if e := g.GetError(); e != nil {
		j.Error = &errorJSON{Code: e.GetCode(), Message: e.GetMessage(), Hint: e.GetHint()}
	}
	for _, t := range g.GetTests() {
		j.Tests = append(j.Tests, testJSON{t.GetId(), t.GetOutcome(), t.GetDuration().AsDuration().Seconds(), t.GetMessage()})
	}
	for _, f := range g.GetFindings() {
		j.Findings = append(j.Findings, findingJSON{f.GetKind(), f.GetPath(), f.GetDetail(), f.GetCarried()})
	}
	return j
}

func (a *app) gradeCmd() *cobra.Command {
	r := &covev1.CreateGradeRequest{}
	var tests string
	var timeout duration
	var memory, disk size
	var cpu float64
	var env, labels keyValues
	var detach, asJSON bool
	cmd := &cobra.Command{
		Use:   "grade SANDBOX --tests DIR --artifact PATH...",
		Short: "Have the work in a sandbox judged in a clean machine, and print its reward",
		Long: `Take the files of a sandbox at one instant, put the artifacts into a fresh machine
of the same image (or --image), without a network, mount the tests there
read-only, and run --command, which is pytest unless told otherwise. The reward
is printed; what else there is to say goes to stderr. The sandbox goes on.

Without a verdict (the grader failed, or the machine did) nothing is printed and
the exit code is 1: that is not a reward of 0. Ctrl-C leaves the grade running.`,
		Example: `  cove grade $id --tests ./tests --artifact /work
  cove grade $id --tests ./tests --artifact /work/out --separate --results reward --command 'python3 -I /tests/judge.py'`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if r.Sandbox, err = a.resolveID(cmd.Context(), args[0]); err != nil {
				return err
			}
			if tests != "" {
				if r.Tests, err = a.sendTests(cmd.Context(), tests); err != nil {
					return err
				}
			}
			r.Timeout, r.Env, r.Labels = timeout.proto(), env.m, labels.m
			if memory != 0 || disk != 0 || cpu != 0 {
				r.Resources = &covev1.Resources{Cpu: cpu, Memory: int64(memory), Disk: int64(disk)}
			}
			if r.IdempotencyKey == "" {
				r.IdempotencyKey = newKey()
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			var g *covev1.Grade
			err = a.again(cmd.Context(), func() error {
				resp, err := api.Grades.Create(cmd.Context(), connect.NewRequest(r))
				if err == nil {
					g = resp.Msg.GetGrade()
				}
				return err
			})
			if err != nil {
				return err
			}
			if !detach {
				if g, err = a.waitGrade(cmd.Context(), g); err != nil {
					return err
				}
			}
			return a.showVerdict(g, asJSON)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&tests, "tests", "", "directory of tests, or the name or id of a directory snapshot")
	fs.StringVar(&r.Command, "command", "", "what judges, for the grader's shell (default pytest)")
	fs.StringArrayVar(&r.Artifacts, "artifact", nil, "absolute path that is carried over; may be repeated")
	fs.StringVar(&r.Results, "results", "", "where the reward comes from: exit, pytest, reward, junit, pytest-json")
	fs.BoolVar(&r.Separate, "separate", false, "the command is root in the grader and runs the work by $COVE_JUDGED, as another user")
	fs.StringArrayVar(&r.Expected, "expect", nil, "id of a test that must have passed; may be repeated")
	fs.StringVar(&r.Image, "image", "", "image to grade on (default: the sandbox's)")
	fs.StringVar(&r.Snapshot, "snapshot", "", "filesystem snapshot to grade on, instead of an image")
	fs.StringVar(&r.TestsPath, "tests-path", "", "where the grader has the tests (default /tests)")
	fs.StringVar(&r.Cwd, "cwd", "", "working directory of the command")
	fs.Var(&timeout, "timeout", "of the command (default 10m)")
	fs.Var(&env, "env", "KEY=VALUE for the command; may be repeated")
	fs.Var(&labels, "label", "KEY=VALUE; may be repeated")
	fs.Float64Var(&cpu, "cpu", 0, "cores of the grader (default: the sandbox's)")
	fs.Var(&memory, "memory", "memory of the grader (default: the sandbox's)")
	fs.Var(&disk, "disk", "disk of the grader (default: the sandbox's)")
	fs.BoolVar(&r.Stop, "stop", false, "end the sandbox once it is graded")
	fs.BoolVarP(&detach, "detach", "d", false, "do not wait for the verdict; 'cove grades show' has it")
	fs.StringVar(&r.IdempotencyKey, "idempotency-key", "", "the same key is the same grade")
	fs.BoolVar(&asJSON, "json", false, "print the grade as JSON")
	return cmd
}

// sendTests makes a snapshot of a directory, or finds one.
func (a *app) sendTests(ctx context.Context, tests string) (string, error) {
	fi, err := os.Stat(tests)
	if err != nil && !strings.ContainsRune(tests, os.PathSeparator) {
		return a.snapshotID(ctx, tests)
	}
	if err != nil {
		return "", &sandbox.Error{Class: sandbox.Invalid, Field: "tests", Msg: "cannot be read", Err: err}
	}
	if !fi.IsDir() {
		return "", usagef("give the directory it is in", "--tests %s is not a directory", tests)
	}
	var b bytes.Buffer
	if err := mktar(&b, tests, nil, func(name, why string) { a.warnf("%s is left out: %s", name, why) }); err != nil {
		return "", err
	}
	api, err := a.client()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b.Bytes())
	return api.PutTests(ctx, hex.EncodeToString(sum[:]), bytes.NewReader(b.Bytes()), int64(b.Len()))
}

// waitGrade waits for a verdict, over restarts of the server.
func (a *app) waitGrade(ctx context.Context, g *covev1.Grade) (*covev1.Grade, error) {
	api, err := a.client()
	if err != nil {
		return nil, err
	}
	for g.GetState() == string(sandbox.Grading) {
		id := g.GetId()
		err := a.again(ctx, func() error {
			resp, err := api.Grades.Wait(ctx, connect.NewRequest(&covev1.WaitGradeRequest{Id: id, MaxWait: durationpb.New(30 * time.Second)}))
			if err == nil {
				g = resp.Msg.GetGrade()
			}
			return err
		})
		if errors.Is(ctx.Err(), context.Canceled) {
			fmt.Fprintf(a.Stderr, "the grade goes on: cove grades show %s\n", id)
		}
		if err != nil {
			return nil, err
		}
	}
	return g, nil
}

// showVerdict prints the reward alone on stdout, so that a script can take it.
func (a *app) showVerdict(g *covev1.Grade, asJSON bool) error {
	if asJSON {
		if err := a.printJSON(toGradeJSON(g)); err != nil {
			return err
		}
	} else if g.GetState() == string(sandbox.Grading) {
		_, err := fmt.Fprintln(a.Stdout, g.GetId())
		return err
	} else {
		fmt.Fprintf(a.Stderr, "%s: %s\n", g.GetState(), escape(g.GetReason()))
		for _, t := range g.GetTests() {
			if t.GetOutcome() != "passed" && t.GetOutcome() != "skipped" {
				fmt.Fprintf(a.Stderr, "  %s %s\n", t.GetOutcome(), escape(t.GetId()))
			}
		}
		for _, f := range g.GetFindings() {
			fmt.Fprintf(a.Stderr, "  found %s: %s %s\n", f.GetKind(), escape(f.GetPath()), escape(f.GetDetail()))
		}
		if g.Reward != nil {
			if _, err := fmt.Fprintln(a.Stdout, strconv.FormatFloat(g.GetReward(), 'g', -1, 64)); err != nil {
				return err
			}
		}
	}
	if g.Reward == nil && g.GetState() != string(sandbox.Grading) {
		if h := g.GetError().GetHint(); h != "" && !asJSON {
			fmt.Fprintln(a.Stderr, escape(h))
		}
		return &ExitError{Code: exitFailed}
	}
	return nil
}

func (a *app) gradesCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "grades", Short: "Verdicts of grades, also of sandboxes that are gone"}
	cmd.AddCommand(a.gradesLsCmd(), a.gradesShowCmd(), a.gradesCancelCmd())
	return cmd
}

func (a *app) gradesLsCmd() *cobra.Command {
	req := &covev1.ListGradesRequest{}
	var most int
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List grades, newest first", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			var grades []*covev1.Grade
			for {
				req.PageSize = int32(min(1000, most-len(grades)))
				resp, err := api.Grades.List(cmd.Context(), connect.NewRequest(req))
				if err != nil {
					return err
				}
				grades = append(grades, resp.Msg.GetGrades()...)
				if req.PageToken = resp.Msg.GetNextPageToken(); req.PageToken == "" || len(grades) >= most {
					break
				}
			}
			if asJSON {
				return a.printJSON(each(grades, toGradeJSON))
			}
			t := &table{}
			t.row("ID", "SANDBOX", "STATE", "REWARD", "AGE", "REASON")
			for _, g := range grades {
				reward := "-"
				if g.Reward != nil {
					reward = strconv.FormatFloat(g.GetReward(), 'g', 6, 64)
				}
				t.row(g.GetId(), g.GetSandbox(), g.GetState(), reward, age(timeOf(g.GetCreatedAt())), cut(g.GetReason(), 60))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().StringVar(&req.Sandbox, "sandbox", "", "only of this one")
	cmd.Flags().StringVar(&req.State, "state", "", "running, graded, timeout, oom, grader_failed, infra or canceled")
	cmd.Flags().IntVar(&most, "limit", 100, "the most to list")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) gradesShowCmd() *cobra.Command {
	var log, wait, asJSON bool
	cmd := &cobra.Command{
		Use: "show ID", Aliases: []string{"get"}, Short: "Show all that is known of a grade, as JSON", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Grades.Get(cmd.Context(), connect.NewRequest(&covev1.GetGradeRequest{Id: args[0]}))
			if err != nil {
				return err
			}
			g := resp.Msg.GetGrade()
			if wait {
				if g, err = a.waitGrade(cmd.Context(), g); err != nil {
					return err
				}
			}
			if log {
				_, err := fmt.Fprint(a.Stdout, escapeLines(g.GetLog()))
				return err
			}
			return a.printJSON(toGradeJSON(g))
		},
	}
	cmd.Flags().BoolVar(&log, "log", false, "print what the command printed instead")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait for the verdict")
	cmd.Flags().BoolVar(&asJSON, "json", false, "the only format there is")
	return cmd
}

func (a *app) gradesCancelCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "cancel ID...", Short: "End grades that are under way, without a reward, and print what became of each",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			grades := []gradeJSON{}
			failed := a.forEach(cmd.Context(), args, func(id string) error {
				resp, err := api.Grades.Cancel(cmd.Context(), connect.NewRequest(&covev1.CancelGradeRequest{Id: id}))
				if err != nil {
					return err
				}
				grades = append(grades, toGradeJSON(resp.Msg.GetGrade()))
				if !asJSON {
					_, err = fmt.Fprintf(a.Stdout, "%s %s\n", id, resp.Msg.GetGrade().GetState())
				}
				return err
			})
			if asJSON && (len(grades) > 0 || failed == nil) {
				if err := a.printJSON(grades); err != nil {
					return err
				}
			}
			return failed
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of grades")
	return cmd
}

// escapeLines is escape for text of more than one line.
func escapeLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = escape(lines[i])
	}
	return strings.Join(lines, "\n")
}
