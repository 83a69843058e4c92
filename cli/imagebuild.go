package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/build"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

// maxDockerfile is read of a file; the server refuses that much.
const maxDockerfile = build.MaxDockerfile + 1

type buildFlags struct {
	tags, args, secrets []string
	file, target        string
	progress            string
	noCache, asJSON     bool
	timeout             duration
	memory, disk        size
	net                 networkFlags
}

func (a *app) imageBuildCmd() *cobra.Command {
	var f buildFlags
	cmd := &cobra.Command{
		Use:   "build DIR|-",
		Short: "Build an image of a Dockerfile",
		Long: `Build an image of the Dockerfile in a directory, which is the build context
(less what .dockerignore says), or of a Dockerfile on stdin (-), without one.
Each RUN is a sandbox of its own with the network that is asked for. Steps that
did not change come from the cache. What they print is shown on stderr; stdout has
the id of the image. Ctrl-C ends the build and leaves nothing but the cache.`,
		Example: `  cove image build -t app .
  cove image build -t app:v2 -f docker/Dockerfile --build-arg VERSION=2 --target release .
  cove image build --secret id=npm,src=$HOME/.npmrc -t web . && cove create web
  printf 'FROM base\nRUN pip install requests\n' | cove image build -t req -`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			req, err := a.buildRequest(cmd.Context(), api, &f, args[0])
			if err != nil {
				return err
			}
			err = a.build(cmd.Context(), api, req, f.asJSON)
			if wantsWhole(req, err) {
				if err := a.giveContext(cmd.Context(), api, req, args[0], f.dockerfile(args[0]), true); err != nil {
					return err
				}
				err = a.build(cmd.Context(), api, req, f.asJSON)
			}
			return err
		},
	}
	fs := cmd.Flags()
	fs.StringArrayVarP(&f.tags, "tag", "t", nil, "name to give the image; several are possible")
	fs.StringVarP(&f.file, "file", "f", "", "the Dockerfile (default: Dockerfile in the directory)")
	fs.StringArrayVar(&f.args, "build-arg", nil, "NAME=VALUE of an ARG, or NAME with the value of this environment")
	fs.StringVar(&f.target, "target", "", "stage to build (default: the last)")
	fs.StringArrayVar(&f.secrets, "secret", nil, "id=NAME,src=FILE or id=NAME,env=VARIABLE, for RUN --mount=type=secret")
	fs.BoolVar(&f.noCache, "no-cache", false, "run every step again")
	fs.StringVar(&f.progress, "progress", "auto", "auto or plain; both are lines")
	fs.Var(&f.timeout, "timeout", "of the whole build (default 1h)")
	fs.Var(&f.memory, "memory", "of each RUN (default: the server's, up to 2GiB)")
	fs.Var(&f.disk, "disk", "of each RUN (server default 10GiB)")
	fs.BoolVar(&f.asJSON, "json", false, "print the build with its image as JSON")
	f.net.add(cmd)
	for _, name := range []string{"record", "replay", "replay-ignore-body", "replay-ignore-query", "replay-match-header", "replay-repeat-last"} {
		_ = fs.MarkHidden(name) // of sandboxes: the server refuses them here
	}
	return cmd
}

// buildRequest reads the Dockerfile and gives the server the files it lacks.
func (a *app) buildRequest(ctx context.Context, api *wire.Client, f *buildFlags, dir string) (*covev1.BuildImageRequest, error) {
	if f.progress != "auto" && f.progress != "plain" {
		return nil, usagef("leave it out, or give --progress=plain", "--progress=%s is neither auto nor plain", f.progress)
	}
	req := &covev1.BuildImageRequest{Target: f.target, NoCache: f.noCache, Timeout: f.timeout.proto(), Network: f.net.network(), Args: map[string]string{}}
	if f.memory > 0 || f.disk > 0 {
		req.Resources = &covev1.Resources{Memory: int64(f.memory), Disk: int64(f.disk)}
	}
	if len(f.tags) > 0 {
		req.Name, req.Tags = f.tags[0], f.tags[1:]
	}
	for _, kv := range f.args {
		k, v, ok := strings.Cut(kv, "=")
		if !ok {
			v, ok = os.LookupEnv(k)
		}
		if k == "" || !ok {
			return nil, usagef("give NAME=VALUE, or a NAME of this environment", "--build-arg %s has no value", kv)
		}
		req.Args[k] = v
	}
	var err error
	if req.SecretValues, err = buildSecrets(f.secrets); err != nil {
		return nil, err
	}
	if dir == "-" {
		if f.file != "" {
			return nil, usagef("give a directory beside --file", "the Dockerfile is read from stdin and --file is given")
		}
		text, err := io.ReadAll(io.LimitReader(a.Stdin, maxDockerfile))
		req.Dockerfile = string(text)
		return req, err
	}
	if fi, err := os.Stat(dir); err != nil {
		return nil, err
	} else if !fi.IsDir() {
		return nil, usagef("to build that file: cove image build -f "+dir+" "+filepath.Dir(dir), "%s is no directory", dir)
	}
	file := f.dockerfile(dir)
	text, err := readSome(file, maxDockerfile)
	if errors.Is(err, fs.ErrNotExist) && f.file == "" {
		return nil, usagef("give its name with --file", "there is no Dockerfile in %s", dir)
	}
	if err != nil {
		return nil, err
	}
	req.Dockerfile = string(text)
	return req, a.giveContext(ctx, api, req, dir, file, false)
}

func (f *buildFlags) dockerfile(dir string) string {
	if f.file != "" {
		return f.file
	}
	return filepath.Join(dir, "Dockerfile")
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

func readSome(name string, most int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, most))
}

// buildSecrets reads "id=NAME,src=FILE" and "id=NAME,env=VARIABLE".
func buildSecrets(flags []string) (map[string][]byte, error) {
	out := map[string][]byte{}
	for _, s := range flags {
		var id, src, env string
		for _, part := range strings.Split(s, ",") {
			k, v, _ := strings.Cut(part, "=")
			switch k {
			case "id":
				id = v
			case "src", "source":
				src = v
			case "env":
				env = v
			case "type":
			default:
				return nil, usagef("--secret id=NAME,src=FILE or id=NAME,env=VARIABLE", "--secret %s: %q is not known", s, k)
			}
		}
		switch {
		case id == "":
			return nil, usagef("--secret id=NAME,src=FILE or id=NAME,env=VARIABLE", "--secret %s has no id", s)
		case src != "":
			b, err := readSome(src, 2<<20)
			if err != nil {
				return nil, err
			}
			out[id] = b
		default:
			if env == "" {
				env = id
			}
			v, ok := os.LookupEnv(env)
			if !ok {
				return nil, usagef("give src=FILE, or set the variable", "--secret %s: there is no %s in this environment", s, env)
			}
			out[id] = []byte(v)
		}
	}
	return out, nil
}

// build follows a build to its end.
func (a *app) build(ctx context.Context, api *wire.Client, req *covev1.BuildImageRequest, asJSON bool) error {
	s, err := api.Images.Build(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	defer s.Close()
	var b *covev1.ImageBuild
	for s.Receive() {
		ev := s.Msg()
		if ev.GetBuild() != nil {
			b = ev.GetBuild()
			continue
		}
		a.showBuild(ev)
	}
	if err := s.Err(); err != nil {
		return err
	}
	if b == nil {
		return &sandbox.Error{Class: sandbox.Unavailable, Msg: "the server went away during the build"}
	}
	if asJSON {
		return a.printJSON(toBuildJSON(b))
	}
	return a.printImage(b.GetImage(), false)
}

func (a *app) showBuild(ev *covev1.BuildImageEvent) {
	at := fmt.Sprintf("[%d/%d]", ev.GetStep(), ev.GetTotal())
	switch ev.GetKind() {
	case "step":
		fmt.Fprintf(a.Stderr, "%s %s\n", at, escape(ev.GetText()))
	case "cached":
		fmt.Fprintf(a.Stderr, "%s cached\n", at)
	case "output":
		for line := range strings.Lines(ev.GetText()) {
			fmt.Fprintf(a.Stderr, "  | %s\n", escape(strings.TrimRight(line, "\r\n")))
		}
	case "warning":
		fmt.Fprintf(a.Stderr, "warning: %s\n", escape(ev.GetText()))
	case "progress":
		fmt.Fprintf(a.Stderr, "  %s\n", escape(ev.GetText()))
	case "done":
		if took := ev.GetTook().AsDuration(); took.Milliseconds() >= 100 {
			fmt.Fprintf(a.Stderr, "%s %s\n", at, formatDuration(took))
		}
	}
}

func (a *app) imagePushCmd() *cobra.Command {
	var username string
	var asJSON, passwordStdin bool
	cmd := &cobra.Command{
		Use: "push NAME [REFERENCE]", Short: "Send an image to a registry", Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.imageNames,
		Example: "  cove image push app ghcr.io/org/app:v1\n  cove image push registry.lan:5000/app",
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.client()
			if err != nil {
				return err
			}
			m := &covev1.PushImageRequest{Name: args[0], Username: username}
			if len(args) == 2 {
				m.Reference = args[1]
			}
			if (username != "") != passwordStdin {
				return usagef("give both, for example: pass show ghcr | cove image push NAME REFERENCE --username me --password-stdin", "--username and --password-stdin go together")
			}
			if passwordStdin {
				if m.Password, err = a.readValue(cmd.Context(), secretFlags{}); err != nil {
					return err
				}
			}
			s, err := api.Images.Push(cmd.Context(), connect.NewRequest(m))
			if err != nil {
				return err
			}
			defer s.Close()
			ref := ""
			show := a.steps()
			for s.Receive() {
				ev := s.Msg()
				show(sandbox.Progress{Step: ev.GetStep(), Done: ev.GetDone(), Total: ev.GetTotal()})
				ref = ev.GetReference()
			}
			show(sandbox.Progress{})
			if err := s.Err(); err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(map[string]string{"reference": ref})
			}
			_, err = fmt.Fprintln(a.Stdout, ref)
			return err
		},
	}
	cmd.Flags().StringVar(&username, "username", "", "user of the registry, for this push alone")
	cmd.Flags().BoolVar(&passwordStdin, "password-stdin", false, "read that user's password or token from stdin")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the reference as JSON")
	return cmd
}
