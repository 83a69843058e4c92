package cli

import (
	"cmp"
	"errors"
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/snapshot"
	"github.com/cove-sandbox/cove/wire"
)

func (a *app) forkCmd() *cobra.Command {
	var n, ready int32
	var from, key string
	var labels, env keyValues
	var timeout lifetime
	var asJSON bool
	env.bare = func(k string) (string, bool) { v := a.Getenv(k); return v, v != "" }
	cmd := &cobra.Command{
		Use:   "fork ID | --snapshot SNAPSHOT",
		Short: "Make children of a running sandbox, or of a snapshot, and print their ids",
		Long: `Make children of a running sandbox, or of a snapshot: each goes on from where
it was, with its own id, secrets and randomness. All are made, or with
--min-ready at least that many; otherwise none is left and the command fails.
Ctrl-C leaves none either.`,
		Example: `  cove fork $id -n 8 --label trial=1
  cove fork --snapshot warm -n 100 --min-ready 90`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 || (len(args) == 1) == (from != "") {
				return errors.New("name one sandbox, or give --snapshot")
			}
			return nil
		},
		ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			req := &covev1.ForkRequest{Count: n, MinReady: ready, Labels: labels.m, Env: env.m, Timeout: timeout.proto(), IdempotencyKey: cmp.Or(key, newKey())}
			if from != "" {
				if req.Snapshot, err = a.snapshotID(cmd.Context(), from); err != nil {
					return err
				}
			} else if req.Id, err = a.resolveID(cmd.Context(), args[0]); err != nil {
				return err
			}
			var resp *connect.Response[covev1.ForkResponse]
			err = a.again(cmd.Context(), func() (err error) {
				resp, err = api.Sandboxes.Fork(cmd.Context(), connect.NewRequest(req))
				return err
			})
			if key == "" && cmd.Context().Err() != nil { // a key of the user's own may be asked for again
				err = a.takeBack(cmd.Context(), req.IdempotencyKey, err)
			}
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetResults(), toForkJSON))
			}
			made := 0
			for _, r := range resp.Msg.GetResults() {
				if r.GetSandbox() == nil {
					a.warnf("a child failed: %v", wire.ErrorFrom(r.GetError(), r.GetMessage()))
					continue
				}
				made++
				fmt.Fprintln(a.Stdout, r.GetSandbox().GetId())
			}
			if p := resp.Msg.GetPaused().AsDuration(); p > 0 {
				fmt.Fprintf(a.Stderr, "%d of %d, the source stood still for %s\n", made, n, formatDuration(p))
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.Int32VarP(&n, "count", "n", 1, "how many children, up to 256")
	fs.Int32Var(&ready, "min-ready", 0, "how many are enough (default: all)")
	fs.StringVar(&from, "snapshot", "", "of this snapshot instead of a running sandbox: name or id")
	_ = cmd.RegisterFlagCompletionFunc("snapshot", a.snapshotNames(0))
	fs.VarP(&labels, "label", "l", "label over the source's (repeatable)")
	fs.VarP(&env, "env", "e", "variable over the source's, for processes started later (repeatable)")
	fs.Var(&timeout, "timeout", "end the children this long from now, or none (default: as the source)")
	fs.StringVar(&key, "idempotency-key", "", "the same key and command give the same children, however often they are sent")
	fs.BoolVar(&asJSON, "json", false, "print a JSON array with a sandbox or an error for each child")
	return cmd
}

func (a *app) restoreCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "restore ID SNAPSHOT",
		Short:   "Roll a sandbox back to a snapshot in place: it keeps its id",
		Example: "  cove restore $id before-tests",
		Args:    cobra.ExactArgs(2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return a.snapshotNames(0)(cmd, nil, prefix)
			}
			return a.liveIDs(1)(cmd, args, prefix)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			snap, err := a.snapshotID(cmd.Context(), args[1])
			if err != nil {
				return err
			}
			resp, err := a.api.Sandboxes.Restore(cmd.Context(), connect.NewRequest(&covev1.RestoreRequest{Id: id, Snapshot: snap}))
			if err != nil {
				return err
			}
			j := toSandboxJSON(resp.Msg.GetSandbox())
			j.NodeTimeS = resp.Msg.GetNodeTime().AsDuration().Seconds()
			if asJSON {
				return a.printJSON(j)
			}
			fmt.Fprintf(a.Stderr, "episode %d, %s\n", j.Episode, formatDuration(resp.Msg.GetNodeTime().AsDuration()))
			_, err = fmt.Fprintln(a.Stdout, id)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandbox as JSON")
	return cmd
}

func (a *app) pauseCmd() *cobra.Command {
	var cold, ifIdle, asJSON bool
	cmd := &cobra.Command{
		Use:   "pause ID...",
		Short: "Freeze sandboxes: no CPU, and with --cold no memory and no process either",
		Long: `Freeze sandboxes in memory, or with --cold on disk. Any call that needs a
paused sandbox wakes it. It stays paused for ever unless something does. Who
waits for a process of it is told, and reads on when it wakes.`,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.liveIDs(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.eachID(cmd, args, asJSON, func(id string) (*covev1.Sandbox, float64, error) {
				req := &covev1.PauseRequest{Id: id, Cold: cold}
				if ifIdle {
					req.IfBusy = "refuse"
				}
				resp, err := a.api.Sandboxes.Pause(cmd.Context(), connect.NewRequest(req))
				if err != nil {
					return nil, 0, err
				}
				return resp.Msg.GetSandbox(), 0, nil
			})
		},
	}
	cmd.Flags().BoolVar(&cold, "cold", false, "put them on disk: no process, no memory")
	cmd.Flags().BoolVar(&ifIdle, "if-idle", false, "fail, and name them, if processes started by exec run")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of the sandboxes")
	return cmd
}

func (a *app) resumeCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "resume ID...",
		Short: "Wake paused sandboxes; returns when they run",
		Args:  cobra.MinimumNArgs(1), ValidArgsFunction: a.liveIDs(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.eachID(cmd, args, asJSON, func(id string) (*covev1.Sandbox, float64, error) {
				resp, err := a.api.Sandboxes.Resume(cmd.Context(), connect.NewRequest(&covev1.ResumeRequest{Id: id}))
				if err != nil {
					return nil, 0, err
				}
				return resp.Msg.GetSandbox(), resp.Msg.GetNodeTime().AsDuration().Seconds(), nil
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of the sandboxes")
	return cmd
}

// eachID does something to each sandbox named and prints those it did.
func (a *app) eachID(cmd *cobra.Command, args []string, asJSON bool, do func(id string) (*covev1.Sandbox, float64, error)) error {
	out := []sandboxJSON{}
	failed := a.forEach(cmd.Context(), args, func(arg string) error {
		id, err := a.resolveID(cmd.Context(), arg)
		if err != nil {
			return err
		}
		s, took, err := do(id)
		if err != nil {
			return err
		}
		j := toSandboxJSON(s)
		j.NodeTimeS = took
		out = append(out, j)
		if !asJSON {
			fmt.Fprintln(a.Stdout, id)
		}
		return nil
	})
	if asJSON {
		return printDone(a, out, failed)
	}
	return failed
}

func (a *app) treeCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "tree ID",
		Short: "Show all sandboxes and snapshots that hang together with one",
		Args:  cobra.ExactArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			resp, err := api.Sandboxes.Tree(ctx, connect.NewRequest(&covev1.TreeRequest{Id: args[0]}))
			if errors.Is(err, sandbox.ErrNotFound) {
				// The start of an id, of a sandbox or else of a snapshot.
				id, rerr := a.resolveID(ctx, args[0])
				if errors.Is(rerr, sandbox.ErrNotFound) {
					id, rerr = a.snapshotID(ctx, args[0])
				}
				if errors.Is(rerr, sandbox.ErrNotFound) {
					return err
				}
				if rerr != nil {
					return rerr
				}
				resp, err = api.Sandboxes.Tree(ctx, connect.NewRequest(&covev1.TreeRequest{Id: id}))
			}
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetNodes(), toTreeJSON))
			}
			nodes := each(resp.Msg.GetNodes(), func(n *covev1.TreeNode) snapshot.Node {
				label := n.GetState()
				if n.GetName() != "" {
					label = n.GetName()
				}
				return snapshot.Node{ID: n.GetId(), Parent: n.GetParent(), Kind: snapshot.NodeKind(n.GetKind()), Label: label}
			})
			_, err = fmt.Fprint(a.Stdout, snapshot.Render(snapshot.BuildTree(nodes)))
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array, parents before children")
	return cmd
}
