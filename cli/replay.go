package cli

import (
	"encoding/base64"
	"errors"
	"fmt"
	"unicode/utf8"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

type replayedJSON struct {
	Run           string           `json:"run"`
	Sandbox       string           `json:"sandbox"`
	Reset         int64            `json:"reset"`
	StartedFrom   string           `json:"started_from"`
	Steps         int64            `json:"steps"`
	Replayed      int64            `json:"replayed"`
	Same          bool             `json:"same"`
	Differences   []differenceJSON `json:"differences"`
	Gaps          []gapJSON        `json:"gaps"`
	Kept          string           `json:"kept,omitempty"`
	Deterministic bool             `json:"deterministic"`
	NotFixed      []string         `json:"not_fixed,omitempty"`
	TookS         float64          `json:"took_s"`
}

type differenceJSON struct {
	Step           int64  `json:"step"`
	ID             string `json:"id"`
	What           string `json:"what"`
	Offset         *int64 `json:"offset,omitempty"`
	Expected       string `json:"expected,omitempty"`
	ExpectedBase64 string `json:"expected_base64,omitempty"`
	Actual         string `json:"actual,omitempty"`
	ActualBase64   string `json:"actual_base64,omitempty"`
	Command        string `json:"command"`
	Detail         string `json:"detail,omitempty"`
}

type gapJSON struct {
	AfterStep int64  `json:"after_step"`
	What      string `json:"what"`
	Detail    string `json:"detail,omitempty"`
}

func toReplayedJSON(r *covev1.Replayed) replayedJSON {
	return replayedJSON{Run: r.GetRun(), Sandbox: r.GetSandbox(), Reset: r.GetReset_(), StartedFrom: r.GetStartedFrom(), Steps: r.GetSteps(), Replayed: r.GetReplayed(), Same: r.GetSame(),
		Differences: each(r.GetDifferences(), toDifferenceJSON), Gaps: each(r.GetGaps(), func(g *covev1.ReplayGap) gapJSON { return gapJSON{g.GetAfterStep(), g.GetWhat(), g.GetDetail()} }),
		Kept: r.GetKept(), Deterministic: r.GetDeterministic(), NotFixed: r.GetNotFixed(), TookS: r.GetTook().AsDuration().Seconds()}
}

func toDifferenceJSON(d *covev1.StepDifference) differenceJSON {
	j := differenceJSON{Step: d.GetStep(), ID: d.GetId(), What: d.GetWhat(), Command: d.GetCommand(), Detail: d.GetDetail()}
	if at := d.GetOffset(); at >= 0 {
		j.Offset = &at
	}
	put := func(b []byte, text, bytes *string) {
		if utf8.Valid(b) {
			*text = string(b)
		} else {
			*bytes = base64.StdEncoding.EncodeToString(b)
		}
	}
	put(d.GetExpected(), &j.Expected, &j.ExpectedBase64)
	put(d.GetActual(), &j.Actual, &j.ActualBase64)
	return j
}

func (a *app) replayCmd() *cobra.Command {
	var asJSON bool
	var req covev1.ReplayRequest
	cmd := &cobra.Command{
		Use:   "replay EPISODE|SANDBOX",
		Short: "Run the steps of an episode again and show the first observation that differs",
		Long: `Run the steps of an episode again, in a fresh sandbox of what it began with, and
show the first observation that differs: of which step, in which stream, where. The
episode is that of a sandbox, by its id, or the one of a run that has this name (with
--run). Exit code 0: all was the same; 1: something differed. See docs/rl.md.`,
		Example: `  cove replay $id
  cove replay rollout-3 --run grpo-7 --json
  cove replay $id --keep          # and leaves the sandbox to look around in`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if req.Sandbox, req.Episode = args[0], ""; req.Run != "" {
				// Of one that is forgotten there is nothing but its name in the run.
				found, err := a.resolveID(cmd.Context(), args[0])
				if err == nil {
					req.Sandbox = found
				}
				if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrInvalid) {
					req.Sandbox, req.Episode = "", args[0]
				}
			} else if found, err := a.resolveID(cmd.Context(), args[0]); err == nil {
				req.Sandbox = found
			} else if !errors.Is(err, sandbox.ErrNotFound) {
				return err
			}
			return a.replay(cmd, &req, asJSON)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&req.Run, "run", "", "the run that the episode is of, by name or id (default: that of the sandbox)")
	fs.Int64Var(&req.Reset_, "reset", 0, "which episode of the sandbox: 1, 2, … (default: the last with steps)")
	fs.BoolVar(&req.Keep, "keep", false, "leave the sandbox, and print its id")
	fs.BoolVar(&req.All, "all", false, "go on after a difference, and show the first of each step")
	fs.BoolVar(&asJSON, "json", false, "print as JSON")
	return cmd
}

func (a *app) replay(cmd *cobra.Command, req *covev1.ReplayRequest, asJSON bool) error {
	api, err := a.client()
	if err != nil {
		return err
	}
	stream, err := api.Runs.Replay(cmd.Context(), connect.NewRequest(req))
	if err != nil {
		return err
	}
	defer stream.Close()
	var result *covev1.Replayed
	for stream.Receive() {
		result = stream.Msg().GetResult()
	}
	if err := stream.Err(); err != nil {
		return err
	}
	if result == nil {
		return &sandbox.Error{Class: sandbox.Unavailable, Op: "run.replay", Msg: "the answer ended before the result"}
	}
	if asJSON {
		err = a.printJSON(toReplayedJSON(result))
	} else {
		err = a.printReplayed(result)
	}
	if err == nil && !result.GetSame() {
		err = &ExitError{Code: 1}
	}
	return err
}

func (a *app) printReplayed(r *covev1.Replayed) error {
	for _, d := range r.GetDifferences() {
		where := d.GetWhat()
		if d.GetOffset() >= 0 {
			where += fmt.Sprintf(" at byte %d", d.GetOffset())
		}
		fmt.Fprintf(a.Stdout, "step %d differs in %s: %s\n", d.GetStep(), where, escape(cut(d.GetCommand(), 100)))
		if d.GetDetail() != "" {
			fmt.Fprintf(a.Stdout, "  %s\n", escape(d.GetDetail()))
		}
		fmt.Fprintf(a.Stdout, "  then: %q\n  now:  %q\n", d.GetExpected(), d.GetActual())
	}
	for _, g := range r.GetGaps() {
		fmt.Fprintf(a.Stderr, "not replayed, after step %d: %s%s\n", g.GetAfterStep(), g.GetWhat(), prefixed(" ", escape(g.GetDetail())))
	}
	if !r.GetSame() {
		for _, n := range r.GetNotFixed() {
			fmt.Fprintf(a.Stderr, "can differ all the same: %s\n", n)
		}
	}
	verdict := "all was the same"
	if !r.GetSame() {
		verdict = "something differed"
	}
	fmt.Fprintf(a.Stderr, "%d of %d steps run again from %s: %s\n", r.GetReplayed(), r.GetSteps(), r.GetStartedFrom(), verdict)
	if r.GetKept() != "" {
		_, err := fmt.Fprintln(a.Stdout, r.GetKept())
		return err
	}
	return nil
}
