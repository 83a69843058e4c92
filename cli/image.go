package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

func (a *app) imageCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "image", Aliases: []string{"images"}, Short: "Manage images"}
	cmd.AddCommand(a.imageLsCmd(), a.imageBuildCmd(), a.imagePullCmd(), a.imagePushCmd(), a.imageImportCmd(), a.imageInspectCmd(), a.imageRmCmd(), a.imagePruneCmd(), a.imageBootstrapCmd())
	return cmd
}

func (a *app) imageLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List images", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Images.List(cmd.Context(), connect.NewRequest(&covev1.ListImagesRequest{}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(each(resp.Msg.GetImages(), toImageJSON))
			}
			t := &table{}
			t.row("NAME", "ID", "SIZE", "SOURCE", "AGE")
			for _, i := range resp.Msg.GetImages() {
				t.row(cut(strings.Join(i.GetNames(), ", "), 60), shortID(i.GetId()), formatSize(i.GetSize()), cut(i.GetSource(), 30), age(timeOf(i.GetCreatedAt())))
			}
			return t.print(a.Stdout)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func age(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return formatDuration(max(0, time.Since(t)).Round(time.Second))
}

// expiresIn is how long something has left, "" for ever.
func expiresIn(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return "in " + formatDuration(max(0, time.Until(t)).Round(time.Second))
}

// shortID is enough of a digest for people; every command takes the whole one.
func shortID(id string) string {
	_, hex, ok := strings.Cut(id, ":")
	if ok && len(hex) > 12 {
		return hex[:12]
	}
	return id
}

func (a *app) imagePullCmd() *cobra.Command {
	var name, platform, username string
	var asJSON, passwordStdin bool
	cmd := &cobra.Command{
		Use: "pull REFERENCE", Short: "Fetch an image from its registry", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		Example: "  cove image pull python:3.12\n  cove image pull ghcr.io/org/env:v3 --name env\n  pass show ghcr | cove image pull ghcr.io/org/private:v1 --username me --password-stdin",
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			m := &covev1.PullImageRequest{Reference: args[0], Name: name, Platform: platform, Username: username}
			if (username != "") != passwordStdin {
				return usagef("give both, for example: pass show ghcr | cove image pull REFERENCE --username me --password-stdin", "--username and --password-stdin go together")
			}
			if passwordStdin {
				if m.Password, err = a.readValue(cmd.Context(), secretFlags{}); err != nil {
					return err
				}
			}
			s, err := api.Images.Pull(cmd.Context(), connect.NewRequest(m))
			if err != nil {
				return err
			}
			defer s.Close()
			var img *covev1.Image
			show := a.steps()
			for s.Receive() {
				ev := s.Msg()
				show(sandbox.Progress{Step: ev.GetStep(), Done: ev.GetDone(), Total: ev.GetTotal()})
				if ev.GetImage() != nil {
					img = ev.GetImage()
				}
			}
			show(sandbox.Progress{})
			if err := s.Err(); err != nil {
				return err
			}
			if img == nil {
				return &sandbox.Error{Class: sandbox.Unavailable, Msg: "the server went away during the pull"}
			}
			return a.printImage(img, asJSON)
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "name to give it (default: the reference)")
	cmd.Flags().StringVar(&platform, "platform", "", "like linux/arm64 (default: the node's)")
	cmd.Flags().StringVar(&username, "username", "", "user of a private registry, for this pull alone")
	cmd.Flags().BoolVar(&passwordStdin, "password-stdin", false, "read that user's password or token from stdin")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	return cmd
}

func (a *app) printImage(img *covev1.Image, asJSON bool) error {
	if asJSON {
		return a.printJSON(toImageJSON(img))
	}
	_, err := fmt.Fprintln(a.Stdout, img.GetId())
	return err
}

// steps shows long work on stderr: one rewritten line on a terminal; elsewhere
// a line per step that took a moment, and a sign of life every ten seconds.
// The empty step ends it. Not safe for concurrent use.
func (a *app) steps() func(sandbox.Progress) {
	_, tty := terminal(a.Stderr)
	var last string
	var started, shown time.Time
	say := func(end string) {
		if tty {
			fmt.Fprint(a.Stderr, "\r\x1b[K")
		}
		fmt.Fprintf(a.Stderr, "  %s%s\n", cut(escape(last), 100), end)
	}
	return func(p sandbox.Progress) {
		now := time.Now()
		if p.Step != last {
			if took := now.Sub(started); last != "" && took > 200*time.Millisecond {
				say(" (" + formatDuration(took) + ")")
			}
			last, started, shown = p.Step, now, now
		}
		switch {
		case p.Step == "":
			if tty {
				fmt.Fprint(a.Stderr, "\r\x1b[K")
			}
		case tty && now.Sub(shown) > 100*time.Millisecond || tty && shown == started:
			shown = now
			fmt.Fprintf(a.Stderr, "\r\x1b[K  %s%s", cut(escape(p.Step), 100), amount(p))
		case !tty && now.Sub(shown) > 10*time.Second:
			shown = now
			say(amount(p) + " …")
		}
	}
}

func amount(p sandbox.Progress) string {
	switch {
	case p.Total > 0:
		return " " + formatSize(p.Done) + " of " + formatSize(p.Total)
	case p.Done > 0:
		return " " + formatSize(p.Done)
	}
	return ""
}

func (a *app) imageImportCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "import NAME FILE|DIR|-", Short: "Make an image of a tar (docker save, OCI layout, root file system) or a directory",
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			r, n, closeInput, err := a.importSource(cmd.Context(), args[1])
			if err != nil {
				return err
			}
			img, err := api.ImportImage(cmd.Context(), args[0], (&copier{app: a}).progress(args[1], n, r), n)
			if cerr := closeInput(); err == nil || (cerr != nil && sandbox.ClassOf(err) == sandbox.Unavailable) {
				err = cerr
			}
			if err != nil {
				return err
			}
			return a.printImage(wire.Image(img), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	return cmd
}

// importSource opens what is imported. A directory is packed by tar(1) and not
// by mktar: an image keeps its owners, hard links and extended attributes.
func (a *app) importSource(ctx context.Context, src string) (r io.Reader, size int64, done func() error, err error) {
	if src == "-" {
		return a.Stdin, -1, func() error { return nil }, nil
	}
	fi, err := os.Stat(src)
	if err != nil {
		return nil, 0, nil, err
	}
	if !fi.IsDir() {
		f, err := os.Open(src)
		if err != nil {
			return nil, 0, nil, err
		}
		return f, fi.Size(), f.Close, nil
	}
	tar := exec.CommandContext(ctx, "tar", "--create", "--numeric-owner", "--xattrs", "--one-file-system", "--directory", src, ".")
	tar.Stderr = a.Stderr
	out, err := tar.StdoutPipe()
	if err != nil {
		return nil, 0, nil, err
	}
	if err := tar.Start(); err != nil {
		return nil, 0, nil, err
	}
	return out, -1, func() error {
		out.Close()
		if err := tar.Wait(); err != nil {
			return fmt.Errorf("tar of %s: %w", src, err)
		}
		return nil
	}, nil
}

func (a *app) imageInspectCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "inspect NAME...", Short: "Show all that is known of an image, as JSON", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.imageNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			out := []imageJSON{}
			failed := a.forEach(cmd.Context(), args, func(n string) error {
				resp, err := api.Images.Get(cmd.Context(), connect.NewRequest(&covev1.GetImageRequest{Name: n}))
				if err != nil {
					return err
				}
				out = append(out, toImageJSON(resp.Msg.GetImage()))
				return nil
			})
			return printDone(a, out, failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "the only format there is")
	return cmd
}

func (a *app) imageRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Short: "Forget names; content goes when no name and no sandbox uses it", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.imageNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			return a.removeEach(cmd.Context(), args, asJSON, func(n string) error {
				_, err := api.Images.Remove(cmd.Context(), connect.NewRequest(&covev1.RemoveImageRequest{Name: n}))
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of names")
	return cmd
}

type pruneJSON struct {
	IDs    []string `json:"ids"`
	Bytes  int64    `json:"bytes"`
	DryRun bool     `json:"dry_run"`
}

func (a *app) imagePruneCmd() *cobra.Command {
	var dry, asJSON bool
	cmd := &cobra.Command{
		Use: "prune", Short: "Remove image content nothing refers to", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Images.Prune(cmd.Context(), connect.NewRequest(&covev1.PruneImagesRequest{DryRun: dry}))
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(pruneJSON{IDs: each(resp.Msg.GetIds(), func(s string) string { return s }), Bytes: resp.Msg.GetBytes(), DryRun: dry})
			}
			for _, id := range resp.Msg.GetIds() {
				fmt.Fprintln(a.Stdout, id)
			}
			verb := "freed"
			if dry {
				verb = "would free"
			}
			fmt.Fprintf(a.Stderr, "%s %s\n", verb, formatSize(resp.Msg.GetBytes()))
			return nil
		},
	}
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only say what would go")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) imageBootstrapCmd() *cobra.Command {
	var c ServeConfig
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "bootstrap",
		Short: "Make the base image on this machine, before 'cove serve' first runs",
		Long: `Make the base image (Debian with bash, python3, git, curl, sudo, tmux) with
mmdebstrap from this machine's Debian mirror, in the data directory of a server
that is not running. A running server makes it by itself. Does nothing when
the image is there.`,
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if a.Bootstrap == nil {
				return a.notBuiltIn("image bootstrap")
			}
			show := a.steps()
			img, err := a.Bootstrap(cmd.Context(), c, show)
			show(sandbox.Progress{})
			if err != nil {
				return err
			}
			return a.printImage(wire.Image(img), asJSON)
		},
	}
	cmd.Flags().StringVar(&c.Data, "data", a.dataDir(), "state directory of the server")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	return cmd
}

func (a *app) notBuiltIn(what string) error {
	return (&sandbox.Error{Class: sandbox.Unsupported, Msg: "cove " + what + " is not part of this build"}).
		WithHint("it runs on Linux; this binary is a client only")
}
