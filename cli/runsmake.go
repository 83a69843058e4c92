package cli

import (
	"context"
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (a *app) runsCreateCmd() *cobra.Command {
	req := &covev1.CreateRunRequest{}
	var ttl duration
	var labels keyValues
	var asJSON bool
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Begin a run and print its id",
		Long: `Begin a run. It is over, and its sandboxes are gone, when nobody has said for
--ttl that its client is there: "cove runs heartbeat NAME" does.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			req.Name, req.Ttl, req.Labels, req.IdempotencyKey = args[0], ttl.proto(), labels.m, newKey()
			var run *covev1.Run
			err = a.again(cmd.Context(), func() error {
				resp, err := api.Runs.Create(cmd.Context(), connect.NewRequest(req))
				if err == nil {
					run = resp.Msg.GetRun()
				}
				return err
			})
			if err != nil {
				return err
			}
			return a.printRun(run, asJSON)
		},
	}
	fs := cmd.Flags()
	fs.Var(&ttl, "ttl", "how long it lasts without a heartbeat (default 5m)")
	fs.VarP(&labels, "label", "l", "label to find it by (repeatable)")
	fs.BoolVar(&req.Keep, "keep", false, "its sandboxes outlive it")
	fs.StringVar(&req.Output, "output", "", "what steps keep of output: head_tail (default), whole or none")
	fs.BoolVar(&req.Resume, "resume", false, "go on with a run of that name, or join it if it is active")
	fs.BoolVar(&asJSON, "json", false, "print the run as JSON")
	return cmd
}

func (a *app) runsHeartbeatCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "heartbeat RUN", Short: "Say that the client of a run is there: it has its whole time again",
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Runs.Heartbeat(cmd.Context(), connect.NewRequest(&covev1.HeartbeatRunRequest{Run: args[0]}))
			if err != nil {
				return err
			}
			return a.printRun(resp.Msg.GetRun(), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the run as JSON")
	return cmd
}

func (a *app) printRun(run *covev1.Run, asJSON bool) error {
	if asJSON {
		return a.printJSON(toRunJSON(run))
	}
	_, err := fmt.Fprintln(a.Stdout, run.GetId())
	return err
}

func (a *app) runsGroupCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "group", Short: "Sandboxes of a run that are made together"}
	cmd.AddCommand(a.runsGroupCreateCmd())
	return cmd
}

func (a *app) runsGroupCreateCmd() *cobra.Command {
	var f specFlags
	var count, atLeast int32
	var name, source string
	var wait duration
	var asJSON bool
	cmd := &cobra.Command{
		Use: "create RUN --count N", Short: "Make sandboxes alike at once and print their ids",
		Long: `Make sandboxes alike: of an image, a template, a snapshot, or copies of a running
sandbox (--sandbox). All of them stand, or at least --at-least; with fewer none
is left. On a full server it waits its turn, at most --max-wait. Ctrl-C leaves
nothing behind. With the same --idempotency-key it is the same group.`,
		Example: `  cove runs group create grpo-7 --count 8 --name prompt-3 --memory 64MiB
  cove runs group create grpo-7 --count 4 --sandbox $id --at-least 3 --json`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if _, err = a.client(); err != nil {
				return err
			}
			made := f.request()
			req := &covev1.GroupRequest{Spec: made.Spec, Count: count, AtLeast: atLeast, IdempotencyKey: made.IdempotencyKey, MaxWait: wait.proto()}
			if req.IdempotencyKey == "" {
				req.IdempotencyKey = newKey()
			}
			if source != "" {
				if req.Sandbox, err = a.resolveID(cmd.Context(), source); err != nil {
					return err
				}
			}
			req.Spec.Rollout = &covev1.Rollout{Run: args[0], Group: name}
			last, err := a.makeGroup(cmd.Context(), req)
			if err != nil {
				return err
			}
			return a.printGroup(last, asJSON)
		},
	}
	a.addSpecFlags(cmd, &f)
	fs := cmd.Flags()
	fs.Int32Var(&count, "count", 0, "how many")
	fs.Int32Var(&atLeast, "at-least", 0, "fewer than these are none (default: all)")
	fs.StringVar(&name, "name", "", "of the group (default: one that no other has)")
	fs.StringVar(&source, "sandbox", "", "make copies of this running sandbox")
	fs.Var(&wait, "max-wait", "how long to wait for room on a full server (default: the server's --queue-wait)")
	fs.BoolVar(&asJSON, "json", false, "print a JSON array, a sandbox or an error for each")
	_ = cmd.MarkFlagRequired("count")
	return cmd
}

// makeGroup makes a group and says on stderr how far it is.
func (a *app) makeGroup(ctx context.Context, req *covev1.GroupRequest) (last *covev1.GroupEvent, err error) {
	_, tty := terminal(a.Stderr)
	err = a.again(ctx, func() error {
		s, err := a.api.Runs.Group(ctx, connect.NewRequest(req))
		if err != nil {
			return err
		}
		defer s.Close()
		for s.Receive() {
			last = s.Msg()
			switch {
			case !tty:
			case last.GetState() == "queued":
				fmt.Fprintf(a.Stderr, "\r\x1b[Kwaiting for room, %d before it", last.GetPosition())
			default:
				fmt.Fprintf(a.Stderr, "\r\x1b[K%d of %d sandboxes", last.GetReady(), last.GetCount())
			}
		}
		if tty {
			fmt.Fprintln(a.Stderr)
		}
		if err := s.Err(); err != nil {
			return err
		}
		if last.GetState() != "done" {
			return &sandbox.Error{Class: sandbox.Unavailable, Op: "run.group", Msg: "the server went away before the group stood"}
		}
		return nil
	})
	return last, err
}

// printGroup prints what stands; what does not is said on stderr.
func (a *app) printGroup(ev *covev1.GroupEvent, asJSON bool) error {
	if asJSON {
		return a.printJSON(each(ev.GetResults(), toForkJSON))
	}
	for _, r := range ev.GetResults() {
		if r.GetSandbox() == nil {
			a.warnf("one does not stand: %s", r.GetMessage())
			continue
		}
		if _, err := fmt.Fprintln(a.Stdout, r.GetSandbox().GetId()); err != nil {
			return err
		}
	}
	return nil
}
