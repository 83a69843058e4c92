package cli

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/sandbox"
)

func (a *app) templateCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "template", Aliases: []string{"templates"}, Short: "Build and manage templates: machines frozen with their service up"}
	cmd.AddCommand(a.templateBuildCmd(), a.templateLsCmd(), a.templateGetCmd(), a.templateTagCmd(), a.templateUntagCmd(), a.templateRmCmd())
	return cmd
}

// templateNames completes names of templates.
func (a *app) templateNames(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	var out []string
	if api, err := a.client(); err == nil {
		if resp, err := api.Templates.List(cmd.Context(), connect.NewRequest(&covev1.ListTemplatesRequest{})); err == nil {
			for _, t := range resp.Msg.GetTemplates() {
				if strings.HasPrefix(t.GetName(), prefix) {
					out = append(out, fmt.Sprintf("%s\tversion %d", t.GetName(), t.GetVersion()))
				}
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) templateBuildCmd() *cobra.Command {
	var f specFlags
	var start, readyCommand string
	var readyPort int32
	var readyTimeout duration
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "build NAME",
		Short: "Start a machine, wait until it is ready, and freeze it as the next version",
		Long: `Start a machine from an image or a snapshot, run --start in it, wait until it is
ready, and freeze it. Sandboxes made of the template begin there. What --start
prints is shown on stderr. A failed build leaves nothing, and the version
before goes on being the newest.`,
		Example: `  cove template build web --image python:3.12 --start 'python3 -m http.server 8000' --ready-port 8000
  cove create --template web`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.templateNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := a.client(); err != nil {
				return err
			}
			tpl, err := a.buildTemplate(cmd.Context(), &covev1.BuildTemplateRequest{Name: args[0], Spec: f.request().GetSpec(),
				Start: start, ReadyCommand: readyCommand, ReadyPort: readyPort, ReadyTimeout: readyTimeout.proto()})
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toTemplateJSON(tpl))
			}
			fmt.Fprintf(a.Stderr, "%s in %s\n", formatSize(tpl.GetSize()), formatDuration(tpl.GetBuildTime().AsDuration()))
			_, err = fmt.Fprintln(a.Stdout, templateRef(tpl))
			return err
		},
	}
	a.addMachineFlags(cmd, &f)
	fs := cmd.Flags()
	fs.StringVar(&start, "start", "", "shell command that is kept running")
	fs.StringVar(&readyCommand, "ready-command", "", "shell command run inside until it succeeds")
	fs.Int32Var(&readyPort, "ready-port", 0, "TCP port that something inside listens on when it is ready")
	fs.Var(&readyTimeout, "ready-timeout", "give up after this long (default 1m)")
	fs.BoolVar(&asJSON, "json", false, "print a JSON array of it")
	return cmd
}

// buildTemplate follows a build to its end, and shows what it does.
func (a *app) buildTemplate(ctx context.Context, req *covev1.BuildTemplateRequest) (*covev1.Template, error) {
	s, err := a.api.Templates.Build(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var tpl *covev1.Template
	show, lines := a.steps(), &lineWriter{app: a}
	for s.Receive() {
		ev := s.Msg()
		if len(ev.GetOutput()) > 0 {
			show(sandbox.Progress{}) // out of the way of the output
			lines.write(ev.GetOutput())
			continue
		}
		if tpl = ev.GetTemplate(); tpl == nil {
			show(sandbox.Progress{Step: ev.GetStep()})
		}
	}
	show(sandbox.Progress{})
	lines.flush()
	if err := s.Err(); err != nil {
		return nil, err
	}
	if tpl == nil {
		return nil, &sandbox.Error{Class: sandbox.Unavailable, Msg: "the server went away during the build"}
	}
	return tpl, nil
}

// lineWriter shows what code inside prints, line by line and escaped: it is
// progress, not a terminal session.
type lineWriter struct {
	app *app
	buf []byte
}

// maxLine is shown even if it does not end.
const maxLine = 4096

func (l *lineWriter) write(p []byte) {
	l.buf = append(l.buf, p...)
	for {
		i := bytes.IndexByte(l.buf, '\n')
		if i < 0 && len(l.buf) < maxLine {
			return
		}
		if i < 0 {
			i = len(l.buf)
		}
		l.line(l.buf[:i])
		l.buf = l.buf[min(i+1, len(l.buf)):]
	}
}

func (l *lineWriter) line(b []byte) {
	fmt.Fprintf(l.app.Stderr, "  | %s\n", escape(strings.TrimRight(string(b), "\r")))
}

func (l *lineWriter) flush() {
	if len(l.buf) > 0 {
		l.line(l.buf)
		l.buf = nil
	}
}

func (a *app) templateLsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls [NAME]", Aliases: []string{"list"}, Short: "List the newest of each template, or all versions of one", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: a.templateNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			req := &covev1.ListTemplatesRequest{}
			if len(args) == 1 {
				req.Name = args[0]
			}
			resp, err := api.Templates.List(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.printTemplates(resp.Msg.GetTemplates(), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

func (a *app) printTemplates(list []*covev1.Template, asJSON bool) error {
	if asJSON {
		return a.printJSON(each(list, toTemplateJSON))
	}
	t := &table{}
	t.row("TEMPLATE", "TAGS", "IMAGE", "SIZE", "AGE", "START")
	for _, tpl := range list {
		t.row(templateRef(tpl), cmp.Or(strings.Join(tpl.GetTags(), ","), "-"), cut(tpl.GetSpec().GetImage(), 40), formatSize(tpl.GetSize()), age(timeOf(tpl.GetCreatedAt())), cut(tpl.GetStart(), 60))
	}
	return t.print(a.Stdout)
}

func (a *app) templateGetCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "get NAME[@VERSION]...", Aliases: []string{"inspect"}, Short: "Show all that is known of a template, as JSON", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: a.templateNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			out := []templateJSON{}
			failed := a.forEach(cmd.Context(), args, func(arg string) error {
				resp, err := api.Templates.Get(cmd.Context(), connect.NewRequest(&covev1.GetTemplateRequest{Name: arg}))
				if err != nil {
					return err
				}
				out = append(out, toTemplateJSON(resp.Msg.GetTemplate()))
				return nil
			})
			return printDone(a, out, failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "the only format there is")
	return cmd
}

func (a *app) templateRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm NAME[@VERSION|:TAG]...", Short: "Delete one version, or all of a name; sandboxes made of them go on", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: a.templateNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			var gone []string
			failed := a.forEach(cmd.Context(), args, func(arg string) error {
				resp, err := api.Templates.Delete(cmd.Context(), connect.NewRequest(&covev1.DeleteTemplateRequest{Name: arg}))
				if err != nil {
					return err
				}
				name, _, _ := strings.Cut(arg, "@")
				name, _, _ = strings.Cut(name, ":")
				for _, v := range resp.Msg.GetVersions() {
					gone = append(gone, fmt.Sprintf("%s@%d", name, v))
				}
				return nil
			})
			return a.printGone(gone, asJSON, failed)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of the versions deleted")
	return cmd
}

func (a *app) templateTagCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "tag NAME[@VERSION|:TAG] TAG...", Short: "Have a version carry tags, which take them from any other; NAME:TAG then names it", Args: cobra.MinimumNArgs(2),
		Example:           "  cove template tag web@3 stable\n  cove create --template web:stable",
		ValidArgsFunction: a.templateNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			resp, err := api.Templates.Tag(cmd.Context(), connect.NewRequest(&covev1.TagTemplateRequest{Name: args[0], Tags: args[1:]}))
			if err != nil {
				return err
			}
			return a.printTemplates([]*covev1.Template{resp.Msg.GetTemplate()}, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the template as JSON")
	return cmd
}

func (a *app) templateUntagCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "untag NAME TAG...", Short: "Take tags off whichever version of a template carries them", Args: cobra.MinimumNArgs(2),
		ValidArgsFunction: a.templateNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			if _, err := api.Templates.Untag(cmd.Context(), connect.NewRequest(&covev1.UntagTemplateRequest{Name: args[0], Tags: args[1:]})); err != nil {
				return err
			}
			return a.printGone(args[1:], asJSON, nil)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of the tags taken off")
	return cmd
}
