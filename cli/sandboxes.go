package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
)

func (a *app) lsCmd() *cobra.Command {
	var labels keyValues
	var all, asJSON, quiet bool
	cmd := &cobra.Command{
		Use:               "ls",
		Aliases:           []string{"list"},
		Short:             "List sandboxes, newest first",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &covev1.ListSandboxesRequest{Labels: labels.m}
			if all {
				req.States = []covev1.SandboxState{covev1.SandboxState_SANDBOX_STATE_CREATING, covev1.SandboxState_SANDBOX_STATE_RUNNING,
					covev1.SandboxState_SANDBOX_STATE_ENDING, covev1.SandboxState_SANDBOX_STATE_ENDED}
			}
			var sbs []*covev1.Sandbox
			if err := a.eachSandbox(cmd.Context(), req, func(s *covev1.Sandbox) bool { sbs = append(sbs, s); return true }); err != nil {
				return err
			}
			switch {
			case asJSON:
				return a.printJSON(each(sbs, toSandboxJSON))
			case quiet:
				for _, s := range sbs {
					fmt.Fprintln(a.Stdout, s.GetId())
				}
				return nil
			}
			t := &table{}
			t.row("ID", "IMAGE", "STATE", "AGE", "CPU", "MEMORY", "EXPIRES", "LABELS")
			now := time.Now()
			for _, s := range sbs {
				state := stateName(s.GetState())
				if s.GetEnd() != nil {
					state += " (" + cut(endText(s.GetEnd()), 40) + ")"
				}
				if s.GetStandby() != "" {
					state = "paused (" + s.GetStandby() + ")"
				}
				expires := lifeText(s, now)
				r := s.GetSpec().GetResources()
				t.row(s.GetId(), cut(s.GetSpec().GetImage(), 40), state, age(timeOf(s.GetCreatedAt())),
					fmt.Sprintf("%g", r.GetCpu()), formatSize(r.GetMemory()), expires, cut(formatLabels(s.GetSpec().GetLabels()), 60))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().VarP(&labels, "label", "l", "only those with this label (repeatable: all must match)")
	cmd.Flags().BoolVarP(&all, "all", "a", false, "ended ones too")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	return cmd
}

// lifeText is what will end a sandbox: "in 5m", "idle 5m", "lease abcd", and
// more than one of them where there are.
func lifeText(s *covev1.Sandbox, now time.Time) string {
	if s.GetEnd() != nil {
		return ""
	}
	var parts []string
	if s.GetExpiresAt() != nil {
		parts = append(parts, "in "+formatDuration(timeOf(s.GetExpiresAt()).Sub(now)))
	}
	if idle := s.GetSpec().GetIdleTimeout().AsDuration(); idle > 0 && s.GetSpec().GetOnIdle() != "pause" { // a pause is no end
		parts = append(parts, "idle "+formatDuration(idle))
	}
	if l := s.GetSpec().GetLease(); l != "" {
		parts = append(parts, "lease "+l)
	}
	if len(parts) == 0 {
		return "never"
	}
	return strings.Join(parts, ", ")
}

func (a *app) inspectCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "inspect ID...",
		Short:             "Show all that is known of a sandbox, ended or not, as JSON",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.liveIDs(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			out := []sandboxJSON{}
			failed := a.forEach(cmd.Context(), args, func(arg string) error {
				s, err := a.resolve(cmd.Context(), arg)
				if err != nil {
					return err
				}
				out = append(out, toSandboxJSON(s))
				return nil
			})
			return printDone(a, out, failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "the only format there is")
	return cmd
}

func (a *app) resetCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "reset ID...",
		Short: "Give a sandbox a pristine container: no file, process or variable of before is left",
		Args:  cobra.MinimumNArgs(1), ValidArgsFunction: a.liveIDs(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			out := []sandboxJSON{}
			failed := a.forEach(cmd.Context(), args, func(arg string) error {
				id, err := a.resolveID(cmd.Context(), arg)
				if err != nil {
					return err
				}
				resp, err := api.Sandboxes.Reset(cmd.Context(), connect.NewRequest(&covev1.ResetRequest{Id: id}))
				if err != nil {
					return err
				}
				j := toSandboxJSON(resp.Msg.GetSandbox())
				j.NodeTimeS = resp.Msg.GetNodeTime().AsDuration().Seconds()
				out = append(out, j)
				if !asJSON {
					fmt.Fprintln(a.Stdout, id)
					fmt.Fprintf(a.Stderr, "episode %d, %s\n", j.Episode, formatDuration(resp.Msg.GetNodeTime().AsDuration()))
				}
				return nil
			})
			if asJSON {
				return printDone(a, out, failed)
			}
			return failed
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of the sandboxes")
	return cmd
}

func (a *app) timeoutCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "timeout ID DURATION",
		Short: "Set a sandbox to end this long from now; none = never",
		Args:  cobra.ExactArgs(2), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var d lifetime
			if err := d.Set(args[1]); err != nil {
				return usage(cmd, err)
			}
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Sandboxes.SetTimeout(cmd.Context(), connect.NewRequest(&covev1.SetTimeoutRequest{Id: id, Timeout: d.proto()}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toSandboxJSON(resp.Msg.GetSandbox()))
			}
			at := "never"
			if t := timeOf(resp.Msg.GetSandbox().GetExpiresAt()); !t.IsZero() {
				at = t.Local().Format(time.RFC3339)
			}
			_, err = fmt.Fprintln(a.Stdout, at)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandbox as JSON")
	return cmd
}

func (a *app) rmCmd() *cobra.Command {
	var labels keyValues
	var all, asJSON bool
	cmd := &cobra.Command{
		Use:     "rm ID... | --label K=V | --all",
		Aliases: []string{"kill"},
		Short:   "End sandboxes and remove all they held",
		Long: `End sandboxes and remove all they held. Returns when nothing is left of them;
removing one that has ended succeeds. Prints the ids removed. One that cannot be
removed keeps no other from it.`,
		ValidArgsFunction: a.liveIDs(0),
		Args: func(cmd *cobra.Command, args []string) error {
			ways := 0
			for _, used := range []bool{len(args) > 0, len(labels.m) > 0, all} {
				if used {
					ways++
				}
			}
			if ways != 1 {
				return errors.New("name sandboxes, or give --label, or --all")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			api, err := a.client()
			if err != nil {
				return err
			}
			var ids []string
			if len(labels.m) > 0 {
				resp, err := api.Sandboxes.KillByLabel(ctx, connect.NewRequest(&covev1.KillByLabelRequest{Labels: labels.m}))
				if err != nil {
					return err
				}
				return a.printIDs(resp.Msg.GetIds(), asJSON)
			}
			if all {
				err := a.eachSandbox(ctx, &covev1.ListSandboxesRequest{}, func(s *covev1.Sandbox) bool { ids = append(ids, s.GetId()); return true })
				if err != nil {
					return err
				}
			}
			unknown := a.forEach(ctx, args, func(arg string) error {
				id, err := a.resolveID(ctx, arg)
				if err == nil {
					ids = append(ids, id)
				}
				return err
			})
			removed, failed := a.killAll(ctx, ids)
			return a.printGone(removed, asJSON, failed.and(unknown))
		},
	}
	cmd.Flags().VarP(&labels, "label", "l", "every live sandbox with this label (repeatable: all must match)")
	cmd.Flags().BoolVar(&all, "all", false, "every live sandbox")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of ids")
	return cmd
}

// killAll removes sandboxes, eight at a time: a teardown is a few milliseconds
// of kernel work, so more at once gains nothing. All are tried, as by forEach.
func (a *app) killAll(ctx context.Context, ids []string) (removed []string, failed failures) {
	errs := make([]error, len(ids))
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	for i, id := range ids {
		slots <- struct{}{}
		wg.Go(func() {
			_, errs[i] = a.api.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: id}))
			<-slots
		})
	}
	wg.Wait()
	for i, e := range errs {
		if e == nil {
			removed = append(removed, ids[i])
		} else {
			failed = append(failed, failure{ids[i], e})
		}
	}
	return removed, failed
}

// removeEach removes one after another and prints those that went.
func (a *app) removeEach(ctx context.Context, names []string, asJSON bool, remove func(name string) error) error {
	var gone []string
	failed := a.forEach(ctx, names, func(n string) error {
		err := remove(n)
		if err == nil {
			gone = append(gone, n)
		}
		return err
	})
	return a.printGone(gone, asJSON, failed)
}

// printGone is printDone of things that are no more.
func (a *app) printGone(gone []string, asJSON bool, failed error) error {
	if len(gone) == 0 && failed != nil {
		return failed
	}
	return cmp.Or(a.printIDs(gone, asJSON), failed)
}

func (a *app) printIDs(ids []string, asJSON bool) error {
	if asJSON {
		return a.printJSON(each(ids, func(s string) string { return s }))
	}
	if len(ids) > 0 {
		fmt.Fprintln(a.Stdout, strings.Join(ids, "\n"))
	}
	return nil
}

func (a *app) statsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "stats [ID...]",
		Short: "Show what sandboxes use now, counted by the host (default: all live ones)",
		Args:  cobra.ArbitraryArgs, ValidArgsFunction: a.liveIDs(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			api, err := a.client()
			if err != nil {
				return err
			}
			ids := args
			if len(args) == 0 {
				err := a.eachSandbox(ctx, &covev1.ListSandboxesRequest{States: []covev1.SandboxState{covev1.SandboxState_SANDBOX_STATE_RUNNING}},
					func(s *covev1.Sandbox) bool { ids = append(ids, s.GetId()); return true })
				if err != nil {
					return err
				}
			}
			t, out := &table{}, []statsJSON{}
			t.row("ID", "CPU TIME", "MEMORY", "PEAK", "DISK", "PROCESSES", "OOM KILLS")
			failed := a.forEach(ctx, ids, func(arg string) error {
				id := arg
				if len(args) > 0 {
					var err error
					if id, err = a.resolveID(ctx, arg); err != nil {
						return err
					}
				}
				resp, err := api.Sandboxes.Stats(ctx, connect.NewRequest(&covev1.StatsRequest{Id: id}))
				if err != nil {
					return err
				}
				s := resp.Msg
				out = append(out, toStatsJSON(id, s))
				peak := ""
				if s.GetMemoryPeak() > 0 {
					peak = formatSize(s.GetMemoryPeak())
				}
				t.row(id, formatDuration(s.GetCpuTime().AsDuration()), formatSize(s.GetMemory()), peak, formatSize(s.GetDiskUsed()), fmt.Sprint(s.GetProcesses()), fmt.Sprint(s.GetOomKills()))
				return nil
			})
			if asJSON {
				return printDone(a, out, failed)
			}
			return cmp.Or(t.print(a.Stdout), failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) psCmd() *cobra.Command {
	var all, asJSON bool
	cmd := &cobra.Command{
		Use:   "ps ID",
		Short: "List the processes of a sandbox",
		Long: `List every process inside a sandbox as its kernel sees it; EXEC names the API
process whose tree it belongs to. --all lists the processes started through
the API instead, ended ones included.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Processes.List(cmd.Context(), connect.NewRequest(&covev1.ListProcessesRequest{SandboxId: id}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(psJSON{
					Processes: each(resp.Msg.GetProcesses(), toProcessJSON),
					Tasks: each(resp.Msg.GetTasks(), func(t *covev1.Task) taskJSON {
						return taskJSON{PID: t.GetPid(), PPID: t.GetPpid(), UID: t.GetUid(), State: t.GetState(), Command: t.GetCommand(), ExecID: t.GetExecId()}
					}),
				})
			}
			t := &table{}
			if all {
				t.row("EXEC", "PID", "USER", "STATUS", "AGE", "COMMAND")
				for _, p := range resp.Msg.GetProcesses() {
					status := "running"
					if p.GetEnd() != nil {
						status = cut(endText(p.GetEnd().GetEnd()), 40)
					}
					t.row(p.GetExecId(), fmt.Sprint(p.GetPid()), p.GetUser(), status,
						age(timeOf(p.GetStartedAt())), cut(strings.Join(p.GetArgs(), " "), 80))
				}
				return t.print(a.Stdout)
			}
			t.row("PID", "PPID", "UID", "STATE", "EXEC", "COMMAND")
			for _, p := range resp.Msg.GetTasks() {
				t.row(fmt.Sprint(p.GetPid()), fmt.Sprint(p.GetPpid()), fmt.Sprint(p.GetUid()), p.GetState(), p.GetExecId(), cut(p.GetCommand(), 80))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "processes started through the API, ended ones too")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON with processes and tasks")
	return cmd
}
