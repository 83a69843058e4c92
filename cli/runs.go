package cli

import (
	"context"
	"encoding/base64"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

type runJSON struct {
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	State      string            `json:"state"`
	Labels     map[string]string `json:"labels,omitempty"`
	TTLS       float64           `json:"ttl_s"`
	Keep       bool              `json:"keep"`
	Output     string            `json:"output"`
	Details    []string          `json:"step_details,omitempty"`
	CreatedAt  time.Time         `json:"created_at,omitzero"`
	ExpiresAt  time.Time         `json:"expires_at,omitzero"`
	End        *endJSON          `json:"end,omitempty"`
	Sandboxes  int32             `json:"sandboxes"`
	Steps      int64             `json:"steps"`
	Resumed    int32             `json:"resumed,omitempty"`
	Checkpoint int64             `json:"checkpoint,omitempty"`
}

func toRunJSON(r *covev1.Run) runJSON {
	return runJSON{ID: r.GetId(), Name: r.GetName(), State: r.GetState(), Labels: r.GetLabels(), TTLS: r.GetTtl().AsDuration().Seconds(), Keep: r.GetKeep(),
		Output: r.GetOutput(), Details: r.GetStepDetails(), CreatedAt: timeOf(r.GetCreatedAt()), ExpiresAt: timeOf(r.GetExpiresAt()), End: toEndJSON(r.GetEnd()), Sandboxes: r.GetSandboxes(),
		Steps: r.GetSteps(), Resumed: r.GetResumed(), Checkpoint: r.GetCheckpoint()}
}

func (a *app) runsCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "runs",
		Short: "Jobs of trainers, their sandboxes and steps",
		Long: `A run is a job of a trainer. It lasts as long as its client says that it is
there; when it has not for its ttl, the sandboxes of the run end. What was done
in them, step by step, stays until the run is removed. See docs/rl.md.`,
		Example: `  cove runs create grpo-7 --ttl 10m
  cove runs group create grpo-7 --count 8
  cove runs show grpo-7
  cove runs steps grpo-7 --follow --json
  cove runs export grpo-7 --format parquet -o out
  cove runs reap grpo-7       # end it and all of its sandboxes
  cove runs rm grpo-7         # and forget it, with its steps`,
	}
	cmd.AddCommand(a.runsCreateCmd(), a.runsHeartbeatCmd(), a.runsLsCmd(), a.runsShowCmd(), a.runsStepsCmd(), a.runsExportCmd(), a.runsGroupCmd(), a.runsPlanCmd(), a.runsCheckpointCmd(),
		a.runsReapCmd(), a.runsRmCmd())
	return cmd
}

func (a *app) runsLsCmd() *cobra.Command {
	var asJSON, all bool
	var labels keyValues
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List runs, newest first",
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Runs.List(cmd.Context(), connect.NewRequest(&covev1.ListRunsRequest{Ended: all, Labels: labels.m}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetRuns(), toRunJSON))
			}
			t := &table{}
			t.row("NAME", "ID", "STATE", "SANDBOXES", "STEPS", "EXPIRES", "AGE")
			now := time.Now()
			for _, r := range resp.Msg.GetRuns() {
				expires := ""
				if r.GetExpiresAt() != nil {
					expires = "in " + formatDuration(timeOf(r.GetExpiresAt()).Sub(now))
				}
				t.row(cut(r.GetName(), 40), r.GetId(), r.GetState(), fmt.Sprint(r.GetSandboxes()), fmt.Sprint(r.GetSteps()), expires, age(timeOf(r.GetCreatedAt())))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "those that have ended too")
	cmd.Flags().VarP(&labels, "label", "l", "only those with this label (repeatable: all must match)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) runsShowCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show RUN...", Aliases: []string{"get"}, Short: "Show runs, by name or id",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			runs := []runJSON{}
			failed := a.forEach(cmd.Context(), args, func(name string) error {
				resp, err := api.Runs.Get(cmd.Context(), connect.NewRequest(&covev1.GetRunRequest{Run: name}))
				if err == nil {
					runs = append(runs, toRunJSON(resp.Msg.GetRun()))
				}
				return err
			})
			if len(runs) == 0 && failed != nil {
				return failed
			}
			if asJSON {
				err = a.printJSON(runs)
			}
			for _, r := range runs {
				if asJSON {
					break
				}
				t := &table{}
				t.row("name", r.Name)
				t.row("id", r.ID)
				t.row("state", r.State)
				t.row("sandboxes", fmt.Sprint(r.Sandboxes))
				t.row("steps", fmt.Sprint(r.Steps))
				t.row("ttl", formatDuration(time.Duration(r.TTLS*float64(time.Second))))
				if !r.ExpiresAt.IsZero() {
					t.row("expires", "in "+formatDuration(time.Until(r.ExpiresAt)))
				}
				if r.End != nil {
					t.row("end", strings.TrimSuffix(r.End.Cause+": "+r.End.Detail, ": "))
				}
				if r.Checkpoint > 0 {
					t.row("checkpoint", fmt.Sprint(r.Checkpoint))
				}
				if err = t.print(a.Stdout); err != nil {
					break
				}
			}
			if err != nil {
				return err
			}
			return failed
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) runsReapCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "reap RUN...", Short: "End runs with all of their sandboxes, whose ids are printed",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			var gone []string
			failed := a.forEach(cmd.Context(), args, func(name string) error {
				resp, err := api.Runs.Reap(cmd.Context(), connect.NewRequest(&covev1.ReapRunRequest{Run: name}))
				if err == nil {
					gone = append(gone, resp.Msg.GetIds()...)
				}
				return err
			})
			return a.printGone(gone, asJSON, failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of ids")
	return cmd
}

func (a *app) runsRmCmd() *cobra.Command {
	var asJSON, force bool
	cmd := &cobra.Command{
		Use: "rm RUN...", Aliases: []string{"delete"}, Short: "Forget runs that have ended, with their steps and checkpoints",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			var gone []string
			failed := a.forEach(cmd.Context(), args, func(name string) error {
				resp, err := api.Runs.Get(cmd.Context(), connect.NewRequest(&covev1.GetRunRequest{Run: name})) // a typo is an error
				if err == nil && force {
					_, err = api.Runs.Reap(cmd.Context(), connect.NewRequest(&covev1.ReapRunRequest{Run: name}))
				}
				if err == nil {
					_, err = api.Runs.Delete(cmd.Context(), connect.NewRequest(&covev1.DeleteRunRequest{Run: resp.Msg.GetRun().GetId()}))
				}
				if err == nil {
					gone = append(gone, resp.Msg.GetRun().GetName())
				}
				return err
			})
			return a.printGone(gone, asJSON, failed)
		},
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "reap those that are active first")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of names")
	return cmd
}

type stepJSON struct {
	ID           string          `json:"id"`
	Seq          int64           `json:"seq"`
	Run          string          `json:"run"`
	Group        string          `json:"group,omitempty"`
	Episode      string          `json:"episode,omitempty"`
	Sandbox      string          `json:"sandbox"`
	Reset        int64           `json:"reset"`
	ExecID       string          `json:"exec_id"`
	Args         []string        `json:"args,omitempty"`
	Command      string          `json:"command,omitempty"`
	Cwd          string          `json:"cwd,omitempty"`
	User         string          `json:"user,omitempty"`
	StartedAt    time.Time       `json:"started_at,omitzero"`
	EndedAt      time.Time       `json:"ended_at,omitzero"`
	End          *endJSON        `json:"end,omitempty"`
	DurationS    float64         `json:"duration_s,omitempty"`
	CPUTimeS     float64         `json:"cpu_time_s,omitempty"`
	PeakMemory   int64           `json:"peak_memory,omitempty"`
	BytesIn      int64           `json:"bytes_in,omitempty"`
	BytesOut     int64           `json:"bytes_out,omitempty"`
	Stdout       *stepOutputJSON `json:"stdout,omitempty"`
	Stderr       *stepOutputJSON `json:"stderr,omitempty"`
	EgressDenied int64           `json:"egress_denied,omitempty"`
	ReplayMissed int64           `json:"replay_missed,omitempty"`
	EgressSent   int64           `json:"egress_sent,omitempty"`
	EgressRecv   int64           `json:"egress_received,omitempty"`
	Files        *stepFilesJSON  `json:"files,omitempty"`
	Egress       *stepEgressJSON `json:"egress,omitempty"`
	Env          []string        `json:"env,omitempty"`
	NotKept      []string        `json:"not_kept,omitempty"`
	Cursor       string          `json:"cursor,omitempty"`
}

// stepOutputJSON is text where all of it is UTF-8, and bytes where not.
type stepOutputJSON struct {
	Head       string `json:"head,omitempty"`
	HeadBase64 string `json:"head_base64,omitempty"`
	Dropped    int64  `json:"dropped,omitempty"`
	Tail       string `json:"tail,omitempty"`
	TailBase64 string `json:"tail_base64,omitempty"`
	Digest     string `json:"digest,omitempty"`
}

type stepFilesJSON struct {
	Added     int64        `json:"added"`
	Modified  int64        `json:"modified"`
	Deleted   int64        `json:"deleted"`
	Bytes     int64        `json:"bytes"`
	Changes   []changeJSON `json:"changes"`
	Truncated bool         `json:"truncated,omitempty"`
}

type stepEgressJSON struct {
	Requests int64    `json:"requests"`
	Denied   int64    `json:"denied"`
	Sent     int64    `json:"sent"`
	Received int64    `json:"received"`
	Hosts    []string `json:"hosts"`
}

func toStepOutputJSON(o *covev1.StepOutput) *stepOutputJSON {
	if o == nil {
		return nil
	}
	j := &stepOutputJSON{Dropped: o.GetDropped(), Digest: o.GetDigest()}
	put := func(b []byte, text, bytes *string) {
		if utf8.Valid(b) {
			*text = string(b)
		} else {
			*bytes = base64.StdEncoding.EncodeToString(b)
		}
	}
	put(o.GetHead(), &j.Head, &j.HeadBase64)
	put(o.GetTail(), &j.Tail, &j.TailBase64)
	return j
}

func toStepJSON(s *covev1.Step, cursor string) stepJSON {
	var files *stepFilesJSON
	if f := s.GetFiles(); f != nil {
		files = &stepFilesJSON{f.GetAdded(), f.GetModified(), f.GetDeleted(), f.GetBytes(), each(f.GetChanges(), toChangeJSON), f.GetTruncated()}
	}
	var egress *stepEgressJSON
	if e := s.GetEgress(); e != nil {
		egress = &stepEgressJSON{e.GetRequests(), e.GetDenied(), e.GetSent(), e.GetReceived(), append([]string{}, e.GetHosts()...)}
	}
	return stepJSON{ID: s.GetId(), Seq: s.GetSeq(), Run: s.GetRun(), Group: s.GetGroup(), Episode: s.GetEpisode(), Sandbox: s.GetSandbox(), Reset: s.GetReset_(),
		ExecID: s.GetExecId(), Args: s.GetArgs(), Command: s.GetCommand(), Cwd: s.GetCwd(), User: s.GetUser(), StartedAt: timeOf(s.GetStartedAt()), EndedAt: timeOf(s.GetEndedAt()),
		End: toEndJSON(s.GetEnd()), DurationS: s.GetDuration().AsDuration().Seconds(), CPUTimeS: s.GetCpuTime().AsDuration().Seconds(), PeakMemory: s.GetPeakMemory(),
		BytesIn: s.GetBytesIn(), BytesOut: s.GetBytesOut(), Stdout: toStepOutputJSON(s.GetStdout()), Stderr: toStepOutputJSON(s.GetStderr()),
		EgressDenied: s.GetEgressDenied(), ReplayMissed: s.GetReplayMissed(), EgressSent: s.GetEgressSent(), EgressRecv: s.GetEgressReceived(), Files: files, Egress: egress, Env: s.GetEnv(), NotKept: s.GetNotKept(), Cursor: cursor}
}

func (a *app) runsStepsCmd() *cobra.Command {
	var asJSON, follow bool
	var req covev1.ListStepsRequest
	cmd := &cobra.Command{
		Use: "steps RUN", Short: "Show what was run in the sandboxes of a run, in the order of the ends",
		Example: `  cove runs steps grpo-7 --group prompt-3
  cove runs steps grpo-7 --json > steps.jsonl
  cove runs steps grpo-7 --json --follow --cursor "$(tail -1 steps.jsonl | jq -r .cursor)"`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			req.Run = args[0]
			show := a.stepPrinter(asJSON)
			if follow {
				return a.followSteps(cmd.Context(), &req, show)
			}
			req.PageSize, req.Running = 1000, !asJSON
			for {
				resp, err := api.Runs.ListSteps(cmd.Context(), connect.NewRequest(&req))
				if err != nil {
					return err
				}
				steps := resp.Msg.GetSteps()
				for i, s := range steps {
					cursor := ""
					if i == len(steps)-1 {
						cursor = resp.Msg.GetNextCursor()
					}
					if err := show(s, cursor); err != nil {
						return err
					}
				}
				if req.Cursor = resp.Msg.GetNextCursor(); resp.Msg.GetMore() {
					continue
				}
				for _, s := range resp.Msg.GetRunning() {
					if err := show(s, ""); err != nil {
						return err
					}
				}
				return nil
			}
		},
	}
	fs := cmd.Flags()
	fs.BoolVarP(&follow, "follow", "f", false, "go on with each step that ends, until the run is over")
	fs.StringVar(&req.Cursor, "cursor", "", "only what ended after this one")
	fs.StringVar(&req.Sandbox, "sandbox", "", "only of this sandbox")
	fs.StringVar(&req.Group, "group", "", "only of this group")
	fs.StringVar(&req.Episode, "episode", "", "only of this episode")
	fs.BoolVar(&asJSON, "json", false, "print one JSON object a line")
	return cmd
}

func (a *app) followSteps(ctx context.Context, req *covev1.ListStepsRequest, show func(*covev1.Step, string) error) error {
	s, err := a.api.Runs.FollowSteps(ctx, connect.NewRequest(&covev1.FollowStepsRequest{Run: req.Run, Cursor: req.Cursor}))
	if err != nil {
		return err
	}
	defer s.Close()
	for s.Receive() {
		st := s.Msg().GetStep()
		if st == nil || req.Sandbox != "" && st.GetSandbox() != req.Sandbox || req.Group != "" && st.GetGroup() != req.Group || req.Episode != "" && st.GetEpisode() != req.Episode {
			continue
		}
		if err := show(st, s.Msg().GetCursor()); err != nil {
			return err
		}
	}
	return s.Err()
}

// stepPrinter prints steps, a line each.
func (a *app) stepPrinter(asJSON bool) func(*covev1.Step, string) error {
	return func(s *covev1.Step, cursor string) error {
		if asJSON {
			return a.printLine(toStepJSON(s, cursor))
		}
		end := "runs"
		if s.GetEnd() != nil {
			end = endText(s.GetEnd())
		}
		command := s.GetCommand()
		if command == "" {
			command = strings.Join(s.GetArgs(), " ")
		}
		_, err := fmt.Fprintf(a.Stdout, "%-6d %-16s  %-8s %-8s  %-14s  %s\n", s.GetSeq(), s.GetSandbox(), formatDuration(s.GetDuration().AsDuration()),
			formatDuration(s.GetCpuTime().AsDuration()), cut(end, 14), cut(strings.ReplaceAll(command, "\n", " "), 80))
		return err
	}
}
