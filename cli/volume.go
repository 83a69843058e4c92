package cli

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

// volumeMounts is a repeated flag of NAME:PATH[:MODE].
type volumeMounts struct{ list []*covev1.VolumeMount }

func (v *volumeMounts) Set(s string) error {
	part := strings.Split(s, ":")
	if len(part) < 2 || len(part) > 3 || part[0] == "" || !strings.HasPrefix(part[1], "/") {
		return fmt.Errorf("%q is not NAME:PATH or NAME:PATH:MODE, as in data:/data:ro", s)
	}
	m := &covev1.VolumeMount{Volume: part[0], Path: part[1]}
	if len(part) == 3 {
		m.Mode = part[2]
	}
	v.list = append(v.list, m)
	return nil
}
func (v *volumeMounts) Type() string { return "NAME:PATH[:MODE]" }
func (v *volumeMounts) String() string {
	return strings.Join(each(v.list, func(m *covev1.VolumeMount) string {
		return strings.TrimSuffix(m.GetVolume()+":"+m.GetPath()+":"+m.GetMode(), ":")
	}), ",")
}

func (a *app) volumeCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "volume", Aliases: []string{"volumes"}, Short: "Manage volumes: storage that survives every sandbox"}
	cmd.AddCommand(a.volumeCreateCmd(), a.volumeLsCmd(), a.volumeGetCmd(), a.volumeRmCmd(), a.volumeResizeCmd(), a.volumeCloneCmd(), a.volumeSnapshotCmd(),
		a.volumePutCmd(), a.volumeCatCmd(), a.volumeFilesCmd(), a.volumeRmFileCmd())
	return cmd
}

// volumeNames completes names of volumes for the first limit arguments; 0 is
// all of them.
func (a *app) volumeNames(limit int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if limit > 0 && len(args) >= limit {
			return nil, cobra.ShellCompDirectiveDefault
		}
		var out []string
		if api, err := a.client(); err == nil {
			if resp, err := api.Volumes.List(cmd.Context(), connect.NewRequest(&covev1.ListVolumesRequest{})); err == nil {
				for _, v := range resp.Msg.GetVolumes() {
					if strings.HasPrefix(v.GetName(), prefix) {
						out = append(out, v.GetName()+"\t"+formatSize(v.GetUsed())+" of "+formatSize(v.GetSize()))
					}
				}
			}
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}

func (a *app) printVolume(v *covev1.Volume, asJSON bool) error {
	if asJSON {
		return a.printJSON(toVolumeJSON(v))
	}
	_, err := fmt.Fprintln(a.Stdout, v.GetName())
	return err
}

func (a *app) volumeCreateCmd() *cobra.Command {
	var bytes size
	var labels keyValues
	var from string
	var asJSON bool
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make a volume", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		Example: "  cove volume create data --size 10GiB\n  cove create --volume data:/data",
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Volumes.Create(cmd.Context(), connect.NewRequest(&covev1.CreateVolumeRequest{Name: args[0], Size: int64(bytes), Labels: labels.m, Snapshot: from}))
			if err != nil {
				return err
			}
			return a.printVolume(resp.Msg.GetVolume(), asJSON)
		},
	}
	cmd.Flags().Var(&bytes, "size", "bytes it may hold (server default 1GiB)")
	cmd.Flags().VarP(&labels, "label", "l", "label (repeatable)")
	cmd.Flags().StringVar(&from, "snapshot", "", "directory snapshot to begin with, by name or id")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the volume as JSON")
	return cmd
}

func (a *app) volumeLsCmd() *cobra.Command {
	var labels keyValues
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List volumes", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Volumes.List(cmd.Context(), connect.NewRequest(&covev1.ListVolumesRequest{Labels: labels.m}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetVolumes(), toVolumeJSON))
			}
			t := &table{}
			t.row("NAME", "USED", "SIZE", "HELD BY", "AGE", "LABELS")
			for _, v := range resp.Msg.GetVolumes() {
				held := each(v.GetHolders(), func(h *covev1.VolumeHolder) string { return h.GetSandbox() + " (" + h.GetMode() + ")" })
				t.row(v.GetName(), formatSize(v.GetUsed()), formatSize(v.GetSize()), cut(strings.Join(held, ", "), 60), age(timeOf(v.GetCreatedAt())),
					cut(formatLabels(v.GetLabels()), 60))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().VarP(&labels, "label", "l", "only those with this label (repeatable: all must match)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) volumeGetCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "get NAME...", Aliases: []string{"inspect"}, Short: "Show all that is known of a volume, as JSON", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.volumeNames(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			out := []volumeJSON{}
			failed := a.forEach(cmd.Context(), args, func(n string) error {
				resp, err := api.Volumes.Get(cmd.Context(), connect.NewRequest(&covev1.GetVolumeRequest{Name: n}))
				if err != nil {
					return err
				}
				out = append(out, toVolumeJSON(resp.Msg.GetVolume()))
				return nil
			})
			return printDone(a, out, failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "the only format there is")
	return cmd
}

func (a *app) volumeRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Short: "Remove volumes and all they hold", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.volumeNames(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, asJSON, func(n string) error {
				_, err := api.Volumes.Delete(cmd.Context(), connect.NewRequest(&covev1.DeleteVolumeRequest{Name: n}))
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of names")
	return cmd
}

func (a *app) volumeResizeCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "resize NAME SIZE", Short: "Let a volume hold more", Args: cobra.ExactArgs(2), ValidArgsFunction: a.volumeNames(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := parseSize(args[1])
			if err != nil {
				return usage(cmd, err)
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Volumes.Resize(cmd.Context(), connect.NewRequest(&covev1.ResizeVolumeRequest{Name: args[0], Size: n}))
			if err != nil {
				return err
			}
			return a.printVolume(resp.Msg.GetVolume(), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the volume as JSON")
	return cmd
}

func (a *app) volumeCloneCmd() *cobra.Command {
	var labels keyValues
	var asJSON bool
	cmd := &cobra.Command{
		Use: "clone NAME NEW-NAME", Short: "Make a new volume with the content of another as it is now", Args: cobra.ExactArgs(2), ValidArgsFunction: a.volumeNames(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Volumes.Clone(cmd.Context(), connect.NewRequest(&covev1.CloneVolumeRequest{Name: args[0], NewName: args[1], Labels: labels.m}))
			if err != nil {
				return err
			}
			return a.printVolume(resp.Msg.GetVolume(), asJSON)
		},
	}
	cmd.Flags().VarP(&labels, "label", "l", "label of the new one (repeatable)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the volume as JSON")
	return cmd
}

func (a *app) volumeSnapshotCmd() *cobra.Command {
	var labels keyValues
	var name string
	var asJSON bool
	cmd := &cobra.Command{
		Use: "snapshot NAME", Short: "Freeze the content of a volume as it is now", Args: cobra.ExactArgs(1), ValidArgsFunction: a.volumeNames(1),
		Long: `Freeze the content of a volume as it is now, as a snapshot of kind directory:
"cove snapshot mount" puts it into a sandbox, "cove snapshot export" writes it as
a tar, "cove volume create --snapshot" makes a volume of it again.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Volumes.Snapshot(cmd.Context(), connect.NewRequest(&covev1.SnapshotVolumeRequest{Name: args[0], SnapshotName: name, Labels: labels.m}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toSnapshotJSON(resp.Msg.GetSnapshot()))
			}
			_, err = fmt.Fprintln(a.Stdout, resp.Msg.GetSnapshot().GetId())
			return err
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "name of the snapshot")
	cmd.Flags().VarP(&labels, "label", "l", "label of the snapshot (repeatable)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the snapshot as JSON")
	return cmd
}

// inVolume is a path as the API takes it: everything is below the volume's
// root, so a leading / may be left out.
func inVolume(p string) string {
	if strings.HasPrefix(p, "/") {
		return p
	}
	return "/" + p
}

func (a *app) volumePutCmd() *cobra.Command {
	var mode string
	cmd := &cobra.Command{
		Use: "put NAME FILE|- PATH", Short: "Write a local file, or stdin, into a volume", Args: cobra.ExactArgs(3), ValidArgsFunction: a.volumeNames(1),
		Example: "  cove volume put data ./train.jsonl /train.jsonl\n  tar -c dir | cove volume put data - dir.tar",
		RunE: func(cmd *cobra.Command, args []string) error {
			var bits uint64
			if mode != "" {
				var err error
				if bits, err = strconv.ParseUint(mode, 8, 12); err != nil {
					return usagef("like --mode 0644", "%q is no mode", mode)
				}
			}
			api, err := a.client()
			if err != nil {
				return err
			}
			r, n := io.Reader(a.Stdin), int64(-1)
			if args[1] != "-" {
				f, err := os.Open(args[1])
				if err != nil {
					return err
				}
				defer f.Close()
				fi, err := f.Stat()
				if err != nil {
					return err
				}
				if !fi.Mode().IsRegular() {
					return usagef("name a file, or pack a directory: tar -c "+args[1]+" | cove volume put "+args[0]+" - PATH", "%s is no file", args[1])
				}
				r, n = f, fi.Size()
				if mode == "" {
					bits = uint64(fi.Mode().Perm())
				}
			}
			_, err = api.UploadVolumeFile(cmd.Context(), args[0], inVolume(args[2]), (&copier{app: a}).progress(args[1], n, r), n, uint32(bits))
			return err
		},
	}
	cmd.Flags().StringVar(&mode, "mode", "", "permission bits, like 0644 (default: the file's own)")
	return cmd
}

func (a *app) volumeCatCmd() *cobra.Command {
	return &cobra.Command{
		Use: "cat NAME PATH", Short: "Write a file of a volume to stdout", Args: cobra.ExactArgs(2), ValidArgsFunction: a.volumeNames(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			body, n, err := api.DownloadVolumeFile(cmd.Context(), args[0], inVolume(args[1]))
			if err != nil {
				return err
			}
			defer body.Close()
			if _, err := io.Copy(a.Stdout, body); err != nil {
				return &sandbox.Error{Class: sandbox.Unavailable, Msg: fmt.Sprintf("%s broke off before its %s", args[1], formatSize(n)), Err: err}
			}
			return nil
		},
	}
}

func (a *app) volumeFilesCmd() *cobra.Command {
	var depth int32
	var asJSON bool
	cmd := &cobra.Command{
		Use: "files NAME [PATH]", Short: "List files of a volume", Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.volumeNames(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			req := &covev1.ListVolumeFilesRequest{Name: args[0], Depth: depth}
			if len(args) == 2 {
				req.Path = inVolume(args[1])
			}
			resp, err := api.Volumes.ListFiles(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			if resp.Msg.GetTruncated() {
				a.warnf("there are more files than one answer holds; name a directory or lower --depth")
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetFiles(), toFileJSON))
			}
			t := &table{}
			t.row("MODE", "SIZE", "AGE", "PATH")
			for _, f := range resp.Msg.GetFiles() {
				name := f.GetPath()
				switch f.GetType() {
				case "dir":
					name += "/"
				case "symlink":
					name += " -> " + f.GetTarget()
				}
				t.row(fmt.Sprintf("%04o", f.GetMode()), formatSize(f.GetSize()), age(timeOf(f.GetModTime())), name)
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().Int32Var(&depth, "depth", 1, "how many levels")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) volumeRmFileCmd() *cobra.Command {
	var recursive bool
	cmd := &cobra.Command{
		Use: "rmfile NAME PATH...", Short: "Remove files of a volume", Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.volumeNames(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			failed := a.forEach(cmd.Context(), args[1:], func(p string) error {
				if _, err := api.Volumes.RemoveFile(cmd.Context(), connect.NewRequest(&covev1.RemoveVolumeFileRequest{Name: args[0], Path: inVolume(p), Recursive: recursive})); err != nil {
					return err
				}
				fmt.Fprintln(a.Stdout, p)
				return nil
			})
			return failed
		},
	}
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "directories with all they hold")
	return cmd
}
