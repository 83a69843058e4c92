package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/interpreter"
	"github.com/cove-sandbox/cove/sandbox"
	"github.com/cove-sandbox/cove/wire"
)

func (a *app) codeSetupCmd() *cobra.Command {
	s := &codeSetup{app: a, memory: 1 << 30}
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "setup",
		Short: "Make the template " + interpreter.Template + ", with Jupyter kernels up and warm",
		Long: `Make the template that sandboxes with a code interpreter are created of. The
packages (ipykernel, numpy, pandas, matplotlib, Deno, …) are installed in a
sandbox without a network: this program fetches them from PyPI for it, by the
way this machine has there (HTTPS_PROXY, PIP_INDEX_URL). Then the interpreter is
started and frozen with its kernel up. A second call finds all of it done.`,
		Example: `  cove code setup
  cove run --template code-interpreter-v1 -- python3 -c 'import pandas'`,
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := a.client(); err != nil {
				return err
			}
			tpl, err := s.run(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(toTemplateJSON(tpl))
			}
			_, err = fmt.Fprintln(a.Stdout, templateRef(tpl))
			return err
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&s.name, "name", interpreter.Template, "name of the template; E2B's SDKs ask for the default")
	fs.StringVar(&s.image, "image", "", "image to install it into: Debian or Ubuntu with Python 3.10 or later and pip (default: the server's)")
	fs.StringVar(&s.index, "index", "", "package index (default: $PIP_INDEX_URL, else https://pypi.org/simple)")
	fs.StringSliceVar(&s.packages, "package", nil, "package to install besides, as pip names it (repeatable)")
	fs.StringSliceVar(&s.warm, "warm", []string{"python"}, "languages whose kernels are up in the template; others start when they are first used")
	fs.Float64Var(&s.cpu, "cpu", 0, "cores of its sandboxes (server default 1)")
	fs.Var(&s.memory, "memory", "memory of its sandboxes")
	fs.BoolVar(&s.force, "force", false, "make it anew even if it is there")
	fs.BoolVar(&asJSON, "json", false, "print the template as JSON")
	return cmd
}

// codeSetup makes the template of the code interpreter.
type codeSetup struct {
	*app
	name, image, index string
	packages, warm     []string
	cpu                float64
	memory             size
	force              bool
}

// start is the template's start command. That it names the recipe is how a template
// of another one is told.
func (s *codeSetup) start() string {
	return strings.Join(append([]string{interpreter.Start}, s.warm...), " ") + " # " + s.recipe()
}

// recipe names what is installed, and into what.
func (s *codeSetup) recipe() string {
	if len(s.packages) == 0 && s.image == "" {
		return interpreter.Recipe()
	}
	return interpreter.Recipe() + " " + strings.Join(append([]string{s.image}, s.packages...), " ")
}

func (s *codeSetup) run(ctx context.Context) (*covev1.Template, error) {
	for _, l := range s.warm {
		if !isWord(l) {
			return nil, usagef("python, javascript, typescript and bash are", "--warm: %q is no language", l)
		}
	}
	for _, p := range s.packages {
		if strings.ContainsAny(p, "'\n\x00") || strings.HasPrefix(p, "-") {
			return nil, usagef("write it like pandas==2.2", "--package: %q is no package", p)
		}
	}
	if !s.force {
		tpl, err := s.existing(ctx)
		if err != nil || tpl != nil {
			return tpl, err
		}
	}
	snap, err := s.installed(ctx)
	if err != nil {
		return nil, err
	}
	tpl, err := s.buildTemplate(ctx, &covev1.BuildTemplateRequest{Name: s.name, Start: s.start(), ReadyPort: interpreter.Port, ReadyTimeout: duration(3 * time.Minute).proto(),
		Spec: &covev1.SandboxSpec{Snapshot: snap, Resources: &covev1.Resources{Cpu: s.cpu, Memory: int64(s.memory)}}})
	if err != nil {
		return nil, err
	}
	return tpl, s.check(ctx, templateRef(tpl))
}

func isWord(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz") == ""
}

// existing is the template, if there is one of this recipe that works: one made with
// other programs of the server's does not go on.
func (s *codeSetup) existing(ctx context.Context) (*covev1.Template, error) {
	resp, err := s.api.Templates.Get(ctx, connect.NewRequest(&covev1.GetTemplateRequest{Name: s.name}))
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	tpl := resp.Msg.GetTemplate()
	if tpl.GetStart() != s.start() {
		return nil, nil
	}
	err = s.check(ctx, templateRef(tpl))
	var e *sandbox.Error
	if errors.As(err, &e) && e.Reason == sandbox.RestoreRefused {
		return nil, nil
	}
	return tpl, err
}

// check creates a sandbox of the template and runs something in it.
func (s *codeSetup) check(ctx context.Context, template string) error {
	began := time.Now()
	resp, err := s.createSandbox(ctx, &covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{Template: template, Timeout: duration(5 * time.Minute).proto(), Network: &covev1.Network{Mode: "none"}}})
	if err != nil {
		return err
	}
	id := resp.Msg.GetSandbox().GetId()
	defer s.remove(ctx, id)
	created := time.Since(began)
	got := ""
	err = s.api.RunCode(ctx, id, wire.CodeRequest{Code: "6 * 7"}, func(ev wire.CodeEvent) error {
		if ev.Type == "result" {
			got = ev.Text
		}
		return nil
	})
	if err != nil {
		return err
	}
	if got != "42" {
		return &sandbox.Error{Class: sandbox.Internal, Msg: fmt.Sprintf("the template %s is there, and 6 * 7 is %q in it", template, got)}
	}
	fmt.Fprintf(s.Stderr, "%s works: created in %s, first result after %s\n", template, formatDuration(created), formatDuration(time.Since(began)))
	return nil
}

func (s *codeSetup) remove(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
	defer cancel()
	if _, err := s.api.Sandboxes.Kill(ctx, connect.NewRequest(&covev1.KillRequest{Id: id})); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		s.warnf("sandbox %s could not be removed: %v", id, err)
	}
}

// installed is the name of a filesystem snapshot with the interpreter in it, which
// is made if it is not there.
func (s *codeSetup) installed(ctx context.Context) (string, error) {
	name := "code-interpreter-" + shortHash(s.recipe())
	if !s.force {
		_, err := s.api.Snapshots.Get(ctx, connect.NewRequest(&covev1.GetSnapshotRequest{Id: name}))
		if err == nil || !errors.Is(err, sandbox.ErrNotFound) {
			return name, err
		}
	}
	// Compiling what is installed takes both cores, and unpacking it memory.
	resp, err := s.createSandbox(ctx, &covev1.CreateSandboxRequest{Spec: &covev1.SandboxSpec{Image: s.image, Timeout: duration(time.Hour).proto(),
		Resources: &covev1.Resources{Cpu: 2, Memory: 1 << 30}, Network: &covev1.Network{Mode: "none"}, Labels: map[string]string{"cove.setup": "code-interpreter"}}})
	if err != nil {
		return "", err
	}
	id := resp.Msg.GetSandbox().GetId()
	defer s.remove(ctx, id)
	if err := s.install(ctx, id); err != nil {
		return "", err
	}
	_, err = s.takeSnapshot(ctx, &covev1.CreateSnapshotRequest{Sandbox: id, Kind: string(sandbox.FilesystemSnapshot), Name: name, IdempotencyKey: newKey()})
	return name, err
}

// installation runs as root in the sandbox; $@ are the packages. Fonts are looked
// for once, and here.
const installation = `set -e
python3 -m pip install --quiet --no-cache-dir --root-user-action=ignore --disable-pip-version-check --retries 3 --index-url "$INDEX" --trusted-host cove.internal "$@"
python3 -m compileall -q ` + interpreter.Dir + `
u=$(stat -c %U /home/* 2>/dev/null | grep -vx root | head -n 1)
if [ -n "$u" ] && command -v runuser >/dev/null; then runuser -u "$u" -- python3 -c 'import matplotlib.font_manager' 2>/dev/null; fi
rm -rf /root/.cache
deno --version | head -n 1
python3 -m pip list --disable-pip-version-check 2>/dev/null | grep -iE '^(ipykernel|numpy|pandas|matplotlib) '
`

func (s *codeSetup) install(ctx context.Context, id string) error {
	content, err := interpreter.Tar()
	if err != nil {
		return err
	}
	if err := s.api.UploadTar(ctx, id, interpreter.Dir, "root", bytes.NewReader(content)); err != nil {
		return err
	}
	index, err := url.Parse(cmp.Or(s.index, s.Getenv("PIP_INDEX_URL"), "https://pypi.org/simple"))
	if err != nil || index.Scheme != "http" && index.Scheme != "https" || index.Host == "" {
		return usagef("write it like https://pypi.org/simple", "the package index is no address")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	served, ended := make(chan struct{}), make(chan error, 1)
	proxy := newPackageProxy(index)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { ended <- s.servePackages(ctx, id, proxy, served) })
	select {
	case <-served:
	case err := <-ended:
		return err
	}
	spec := &covev1.ProcessSpec{ExecId: newExecID(), User: "root", Timeout: duration(30 * time.Minute).proto(),
		Args: append([]string{"/bin/sh", "-c", installation, "sh"}, append(interpreter.Packages, s.packages...)...),
		Env:  map[string]string{"INDEX": "http://cove.internal/" + packageName + index.Path + "/", "DEBIAN_FRONTEND": "noninteractive"}}
	lines, show := &lineWriter{app: s.app}, s.steps()
	defer func() { show(sandbox.Progress{}) }()
	var tick sync.WaitGroup
	ticking, stop := context.WithCancel(ctx)
	defer tick.Wait()
	defer stop()
	tick.Go(func() { // the only one that shows until the install is over
		for {
			show(sandbox.Progress{Step: "install packages", Done: proxy.bytes.Load()})
			select {
			case <-ticking.Done():
				return
			case <-time.After(300 * time.Millisecond):
			}
		}
	})
	var tail []byte
	f := &follower{app: s.app, sandbox: id, execID: spec.ExecId, spec: spec, killOnCancel: true, onOutput: func(o *covev1.ProcessOutput) error {
		tail = append(tail, o.GetData()...)
		tail = tail[max(0, len(tail)-4096):]
		return nil
	}}
	end, err := f.run(ctx)
	stop()
	tick.Wait()
	if err != nil {
		return err
	}
	show(sandbox.Progress{})
	lines.write(tail)
	lines.flush()
	if e := end.GetEnd(); sandbox.Cause(e.GetCause()) != sandbox.Exited || e.GetExitCode() != 0 {
		return (&sandbox.Error{Class: sandbox.Precondition, Msg: "the packages could not be installed; what was said is above"}).
			WithHint("the image must have Python 3.10 or later and pip, and this machine must reach %s", index)
	}
	return nil
}

// packageName is what the index is served as inside.
const packageName = "cove-packages"

// servePackages lets pip inside reach the index through this program.
func (s *codeSetup) servePackages(ctx context.Context, id string, proxy *packageProxy, served chan struct{}) error {
	quiet := *s.app
	quiet.Stderr = io.Discard
	f := &forwarder{app: &quiet, id: id, name: packageName, target: &url.URL{Scheme: proxy.index.Scheme, Host: proxy.index.Host},
		client: &http.Client{Transport: proxy, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
	defer proxy.base.CloseIdleConnections()
	f.serving = func() { close(served) }
	return f.run(ctx, &covev1.ServeCallbacksRequest{SandboxId: id, Name: packageName, Owner: newExecID()})
}
