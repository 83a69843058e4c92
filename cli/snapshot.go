package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (a *app) snapshotCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "snapshot", Aliases: []string{"snapshots", "snap"}, Short: "Take and manage snapshots"}
	cmd.AddCommand(a.snapshotCreateCmd(), a.snapshotLsCmd(), a.snapshotGetCmd(), a.snapshotRmCmd(), a.snapshotPruneCmd(), a.snapshotMountCmd(),
		a.snapshotVerifyCmd(), a.snapshotExportCmd())
	return cmd
}

// snapshotID turns what the user typed into a name or id the server knows: as
// it is, or the start of exactly one snapshot's id. Of a miss the server's
// answer is the better one: it knows what was meant.
func (a *app) snapshotID(ctx context.Context, arg string) (string, error) {
	api, err := a.client()
	if err != nil {
		return "", err
	}
	resp, err := api.Snapshots.Get(ctx, connect.NewRequest(&covev1.GetSnapshotRequest{Id: arg}))
	if err == nil {
		return resp.Msg.GetSnapshot().GetId(), nil
	}
	if !errors.Is(err, sandbox.ErrNotFound) || !idPattern.MatchString(arg) {
		return "", err
	}
	var hits []string
	lerr := a.eachSnapshot(ctx, &covev1.ListSnapshotsRequest{}, func(s *covev1.Snapshot) bool {
		if strings.HasPrefix(s.GetId(), arg) {
			hits = append(hits, s.GetId())
		}
		return len(hits) < 4
	})
	switch {
	case lerr != nil:
		return "", lerr
	case len(hits) == 1:
		return hits[0], nil
	case len(hits) > 1:
		return "", usagef("write more of it: "+strings.Join(hits, ", "), "%q is the start of more than one snapshot id", arg)
	}
	return "", err
}

// eachSnapshot walks every page until f returns false.
func (a *app) eachSnapshot(ctx context.Context, req *covev1.ListSnapshotsRequest, f func(*covev1.Snapshot) bool) error {
	api, err := a.client()
	if err != nil {
		return err
	}
	req.PageSize = 1000
	for {
		resp, err := api.Snapshots.List(ctx, connect.NewRequest(req))
		if err != nil {
			return err
		}
		for _, s := range resp.Msg.GetSnapshots() {
			if !f(s) {
				return nil
			}
		}
		if req.PageToken = resp.Msg.GetNextPageToken(); req.PageToken == "" {
			return nil
		}
	}
}

// snapshotNames completes snapshots by name, or by id where they have none.
func (a *app) snapshotNames(limit int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if limit > 0 && len(args) >= limit {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var out []string
		_ = a.eachSnapshot(cmd.Context(), &covev1.ListSnapshotsRequest{}, func(s *covev1.Snapshot) bool {
			name := s.GetName()
			if name == "" {
				name = s.GetId()
			}
			if strings.HasPrefix(name, prefix) {
				out = append(out, name+"\t"+escape(s.GetKind()+" of "+s.GetSandbox()))
			}
			return len(out) < 200
		})
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}

func (a *app) snapshotCreateCmd() *cobra.Command {
	var kind, path, name, key string
	var ttl duration
	var memory, filesystem, stop, asJSON bool
	var labels keyValues
	cmd := &cobra.Command{
		Use:   "create ID",
		Short: "Take a snapshot of a sandbox and print its id",
		Long: `Take a snapshot of a sandbox: of everything that runs in it (--memory, the
default), of what changed in its file system (--filesystem), or of one
directory (--path). The sandbox goes on, unless --stop. Where nothing happened
since the last snapshot, that one is printed.`,
		Example: `  cove snapshot create $id --name warm
  cove snapshot create $id --path /work/out --name result
  cove snapshot create $id --ttl 24h`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.liveIDs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ways := map[string]bool{}
			for k, used := range map[string]bool{"memory": memory, "filesystem": filesystem, "directory": path != "", kind: kind != ""} {
				if used {
					ways[k] = true
				}
			}
			if len(ways) > 1 {
				return usagef("one of --memory, --filesystem and --path", "a snapshot is of one kind")
			}
			for k := range ways {
				kind = k
			}
			id, err := a.resolveID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			req := &covev1.CreateSnapshotRequest{Sandbox: id, Kind: kind, Path: path, Name: name, Labels: labels.m, Stop: stop, Ttl: ttl.proto(),
				IdempotencyKey: cmp.Or(key, newKey())}
			var last *covev1.CreateSnapshotEvent
			if err := a.again(cmd.Context(), func() (err error) {
				last, err = a.takeSnapshot(cmd.Context(), req)
				return err
			}); err != nil {
				return err
			}
			snap := last.GetSnapshot()
			if asJSON {
				j := toSnapshotJSON(snap)
				j.Unchanged, j.PausedS = last.GetUnchanged(), last.GetPaused().AsDuration().Seconds()
				return a.printJSON(j)
			}
			if last.GetUnchanged() {
				fmt.Fprintln(a.Stderr, "nothing happened since this snapshot")
			} else {
				fmt.Fprintf(a.Stderr, "%s, %s stored, the sandbox stood still for %s\n", formatSize(snap.GetSize()), formatSize(snap.GetStored()),
					formatDuration(last.GetPaused().AsDuration()))
			}
			_, err = fmt.Fprintln(a.Stdout, snap.GetId())
			return err
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&kind, "kind", "", "memory, filesystem or directory")
	_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions([]string{"memory", "filesystem", "directory"}, cobra.ShellCompDirectiveNoFileComp))
	fs.BoolVar(&memory, "memory", false, "processes, memory, open files and the file system (default)")
	fs.BoolVar(&filesystem, "filesystem", false, "what changed in the file system")
	fs.StringVar(&path, "path", "", "one directory")
	fs.StringVar(&name, "name", "", "name to find it by; a name in use moves to this one")
	fs.VarP(&labels, "label", "l", "label (repeatable)")
	fs.BoolVar(&stop, "stop", false, "end the sandbox with it")
	fs.Var(&ttl, "ttl", "delete it this long from now, e.g. 24h (default: never)")
	fs.StringVar(&key, "idempotency-key", "", "the same key and command give the same snapshot, however often they are sent")
	fs.BoolVar(&asJSON, "json", false, "print the snapshot as JSON")
	return cmd
}

// takeSnapshot follows one to its last event, which has the snapshot.
func (a *app) takeSnapshot(ctx context.Context, req *covev1.CreateSnapshotRequest) (last *covev1.CreateSnapshotEvent, err error) {
	s, err := a.api.Snapshots.Create(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	defer s.Close()
	show := a.steps()
	for s.Receive() {
		last = s.Msg()
		if last.GetSnapshot() == nil {
			show(sandbox.Progress{Step: last.GetStep(), Done: last.GetDone(), Total: last.GetTotal()})
		}
	}
	show(sandbox.Progress{})
	if err := s.Err(); err != nil {
		return nil, err
	}
	if last.GetSnapshot() == nil {
		return nil, &sandbox.Error{Class: sandbox.Unavailable, Msg: "the server went away during the snapshot"}
	}
	return last, nil
}

func (a *app) snapshotLsCmd() *cobra.Command {
	var of, kind string
	var labels keyValues
	var asJSON, quiet bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List snapshots, newest first", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &covev1.ListSnapshotsRequest{Labels: labels.m, Kind: kind, Sandbox: of}
			var snaps []*covev1.Snapshot
			if err := a.eachSnapshot(cmd.Context(), req, func(s *covev1.Snapshot) bool { snaps = append(snaps, s); return true }); err != nil {
				return err
			}
			switch {
			case asJSON:
				return a.printJSON(each(snaps, toSnapshotJSON))
			case quiet:
				for _, s := range snaps {
					fmt.Fprintln(a.Stdout, s.GetId())
				}
				return nil
			}
			t := &table{}
			t.row("ID", "NAME", "KIND", "SANDBOX", "SIZE", "STORED", "AGE", "EXPIRES", "LABELS")
			for _, s := range snaps {
				kind := s.GetKind()
				if s.GetPath() != "" {
					kind += " " + cut(s.GetPath(), 40)
				}
				t.row(s.GetId(), s.GetName(), kind, s.GetSandbox(), formatSize(s.GetSize()), formatSize(s.GetStored()), age(timeOf(s.GetCreatedAt())), expiresIn(timeOf(s.GetExpiresAt())),
					cut(formatLabels(s.GetLabels()), 60))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().VarP(&labels, "label", "l", "only those with this label (repeatable: all must match)")
	cmd.Flags().StringVar(&of, "sandbox", "", "only those taken of this sandbox")
	cmd.Flags().StringVar(&kind, "kind", "", "only memory, filesystem or directory")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	return cmd
}

func (a *app) snapshotGetCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "get SNAPSHOT...", Aliases: []string{"inspect"}, Short: "Show all that is known of a snapshot, as JSON", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: a.snapshotNames(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			out := []snapshotJSON{}
			failed := a.forEach(cmd.Context(), args, func(arg string) error {
				id, err := a.snapshotID(cmd.Context(), arg)
				if err != nil {
					return err
				}
				resp, err := a.api.Snapshots.Get(cmd.Context(), connect.NewRequest(&covev1.GetSnapshotRequest{Id: id}))
				if err != nil {
					return err
				}
				out = append(out, toSnapshotJSON(resp.Msg.GetSnapshot()))
				return nil
			})
			return printDone(a, out, failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "the only format there is")
	return cmd
}

func (a *app) snapshotRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm SNAPSHOT...", Short: "Delete snapshots; what was made from them goes on", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.snapshotNames(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			out := []deletedJSON{}
			failed := a.forEach(cmd.Context(), args, func(arg string) error {
				id, err := a.snapshotID(cmd.Context(), arg)
				if err != nil {
					return err
				}
				resp, err := a.api.Snapshots.Delete(cmd.Context(), connect.NewRequest(&covev1.DeleteSnapshotRequest{Id: id}))
				if err != nil {
					return err
				}
				out = append(out, deletedJSON{id, resp.Msg.GetFreed()})
				if !asJSON {
					fmt.Fprintln(a.Stdout, id)
				}
				return nil
			})
			if asJSON {
				return printDone(a, out, failed)
			}
			return failed
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of what was deleted")
	return cmd
}

func (a *app) snapshotPruneCmd() *cobra.Command {
	var last int32
	var labels keyValues
	var bytes size
	var old duration
	var of string
	var dry, asJSON bool
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Delete snapshots that rules do not keep",
		Long: `Delete snapshots that rules do not keep. --keep-last alone deletes all but that
many of each sandbox. With --max-age or --max-bytes, the last ones and those
with a label of --keep-label stay whatever their age, and go last when the
budget asks.`,
		Example: `  cove snapshot prune --keep-last 3 --dry-run
  cove snapshot prune --max-age 30d --keep-label release=yes`,
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Snapshots.Prune(cmd.Context(), connect.NewRequest(&covev1.PruneSnapshotsRequest{KeepLast: last, KeepLabels: labels.m,
				MaxBytes: int64(bytes), MaxAge: old.proto(), Sandbox: of, DryRun: dry}))
			if err != nil {
				return err
			}
			out := prunedJSON{DryRun: dry, Removed: each(resp.Msg.GetRemoved(), func(p *covev1.PrunedSnapshot) prunedSnapshotJSON {
				return prunedSnapshotJSON{p.GetId(), p.GetReason(), p.GetStored()}
			})}
			for _, p := range out.Removed {
				out.Bytes += p.Stored
			}
			if asJSON {
				return a.printJSON(out)
			}
			for _, p := range out.Removed {
				fmt.Fprintf(a.Stdout, "%s\t%s\n", p.ID, p.Reason)
			}
			verb := "deleted"
			if dry {
				verb = "would delete"
			}
			fmt.Fprintf(a.Stderr, "%s %d, %s\n", verb, len(out.Removed), formatSize(out.Bytes))
			return nil
		},
	}
	fs := cmd.Flags()
	fs.Int32Var(&last, "keep-last", 0, "keep this many of each sandbox")
	fs.Var(&labels, "keep-label", "keep those with this label (repeatable: any)")
	fs.Var(&bytes, "max-bytes", "keep the newest up to this size in all")
	fs.Var(&old, "max-age", "delete what is older, e.g. 30d")
	fs.StringVar(&of, "sandbox", "", "only those taken of this sandbox")
	fs.BoolVar(&dry, "dry-run", false, "only say what would go")
	fs.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) snapshotMountCmd() *cobra.Command {
	var path string
	var unpack bool
	cmd := &cobra.Command{
		Use:   "mount SNAPSHOT ID",
		Short: "Put a directory snapshot into a sandbox, read-only, or unpacked as its own files",
		Args:  cobra.ExactArgs(2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return a.snapshotNames(0)(cmd, nil, prefix)
			}
			return a.liveIDs(1)(cmd, args[1:], prefix)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			snap, err := a.snapshotID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			id, err := a.resolveID(cmd.Context(), args[1])
			if err != nil {
				return err
			}
			_, err = a.api.Snapshots.Mount(cmd.Context(), connect.NewRequest(&covev1.MountSnapshotRequest{Sandbox: id, Snapshot: snap, Path: path, Unpack: unpack}))
			return err
		},
	}
	cmd.Flags().StringVar(&path, "path", "", "where (default: where it was taken)")
	cmd.Flags().BoolVar(&unpack, "unpack", false, "as the sandbox's own files, writable")
	return cmd
}

func (a *app) snapshotVerifyCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "verify SNAPSHOT...", Short: "Read every byte of snapshots and name what is broken", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.snapshotNames(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			out := []verifiedJSON{}
			failed := a.forEach(cmd.Context(), args, func(arg string) error {
				id, err := a.snapshotID(cmd.Context(), arg)
				if err != nil {
					return err
				}
				resp, err := a.api.Snapshots.Verify(cmd.Context(), connect.NewRequest(&covev1.VerifySnapshotRequest{Id: id}))
				if err != nil {
					return err
				}
				out = append(out, verifiedJSON{id, resp.Msg.GetBytes()})
				if !asJSON {
					fmt.Fprintf(a.Stdout, "%s\t%s whole\n", id, formatSize(resp.Msg.GetBytes()))
				}
				return nil
			})
			if asJSON {
				return printDone(a, out, failed)
			}
			return failed
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) snapshotExportCmd() *cobra.Command {
	return &cobra.Command{
		Use: "export SNAPSHOT", Short: "Write the files of a filesystem or directory snapshot to stdout as a tar", Args: cobra.ExactArgs(1),
		Example:           "  cove snapshot export result | tar -x -C ./out",
		ValidArgsFunction: a.snapshotNames(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, tty := terminal(a.Stdout); tty {
				return usagef("redirect it: cove snapshot export "+args[0]+" > files.tar", "a tar is not for a terminal")
			}
			id, err := a.snapshotID(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			body, err := a.api.SnapshotTar(cmd.Context(), id)
			if err != nil {
				return err
			}
			defer body.Close()
			if _, err = io.Copy(a.Stdout, (&copier{app: a}).progress(args[0], -1, body)); err != nil {
				return fmt.Errorf("the tar broke off: %w", err)
			}
			return nil
		},
	}
}
