package build

import (
	"bytes"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/cove-sandbox/cove/sandbox"
)

// State is a stage under way.
type State struct {
	Config sandbox.ImageConfig // as it is after the steps so far

	plan   *Plan
	stage  *Stage
	args   variables
	lex    *shell.Lex
	cmdSet bool // by this Dockerfile
}

// Action is what an instruction has to be done. One that only changes the config
// has neither Run nor Copies.
type Action struct {
	Where string // "dockerfile:7" or "steps[3]", for errors
	Line  int    // 0 = of a list
	Text  string // the instruction, as it is shown
	By    string // for the image's history
	Force bool   // not from the cache
	// Trigger says that it is an ONBUILD of the base.
	Trigger bool

	Run    *Run
	Copies []Copy
}

// UsesContext says whether it reads files of the context.
func (a Action) UsesContext() bool {
	for _, c := range a.Copies {
		if c.Sources != nil && c.Stage == nil && c.Image == "" && c.Files == "" {
			return true
		}
	}
	return a.Run != nil && slices.ContainsFunc(a.Run.Mounts, func(m Mount) bool { return m.Type == "bind" && m.Stage == nil && m.Image == "" })
}

// Run is a command to be run.
type Run struct {
	Args   []string
	Script []byte   // run as Args[0] instead, which is to be its path: a here-document with "#!"
	Env    []string // the config's and the build arguments
	User   string
	Dir    string
	Mounts []Mount
	// Offline says that it asked for no network.
	Offline bool
}

// Mount is something a command has that is no part of the image.
type Mount struct {
	Type     string // bind, cache, tmpfs, secret
	Target   string
	Stage    *Stage // of a bind: where it is from, or
	Image    string // an image, or else the context
	Source   string // path there
	ID       string // of a cache or secret
	Env      string // variable that a secret is given in
	Required bool
	UID, GID uint32
	Mode     uint32 // 0 = its type's default
}

// Copy is files to be put into the image. Where they come from: Stage, or Image,
// or Files (a key; "" = the context), or Inline, or URL. With none of Sources,
// Inline and URL it makes the directory Dest.
type Copy struct {
	Stage    *Stage
	Image    string
	Files    string
	Inline   []sandbox.InlineFile
	URL      string
	Checksum string

	Sources []string
	Dest    string
	Owner   string
	Mode    string
	Unpack  bool
	Parents bool
	Exclude []string
}

// Begin starts a stage on a base with a config.
func (p *Plan) Begin(s *Stage, base sandbox.ImageConfig) (*State, error) {
	st := &State{Config: base, plan: p, stage: s, lex: shell.NewLex('\\')}
	st.Config.OnBuild = nil
	for _, kv := range base.Env { // of a stranger's image
		k, v, _ := strings.Cut(kv, "=")
		if err := checkVariable(k, v); err != nil {
			return nil, fault(s.Line, err)
		}
	}
	var triggers []step
	for _, t := range base.OnBuild {
		one, err := trigger(t)
		if err != nil {
			return nil, fault(s.Line, fmt.Errorf("ONBUILD %s of the base: %w", clip(t), err))
		}
		one.line = s.Line
		triggers = append(triggers, one)
	}
	if len(triggers)+p.Steps() > MaxSteps {
		return nil, tooMany(len(triggers) + p.Steps())
	}
	s.steps = append(triggers, s.steps...)
	return st, nil
}

func trigger(text string) (step, error) {
	ast, err := parser.Parse(strings.NewReader(text))
	if err != nil {
		return step{}, err
	}
	if len(ast.AST.Children) != 1 {
		return step{}, fmt.Errorf("is %d instructions", len(ast.AST.Children))
	}
	c, err := instructions.ParseCommand(ast.AST.Children[0])
	if err != nil {
		return step{}, err
	}
	if len(sourcesOf(c)) > 0 {
		return step{}, fmt.Errorf("copies or mounts from another image")
	}
	return step{cmd: c, text: firstLine("ONBUILD " + text), trigger: true}, nil
}

// Next reads the i-th step of the stage and says what it is to do; the config is
// the one after it.
func (s *State) Next(i int) (a Action, err error) {
	st := s.stage.steps[i]
	a = Action{Where: "dockerfile:" + strconv.Itoa(st.line), Line: st.line, Text: st.text, By: st.text, Trigger: st.trigger}
	if st.one != nil {
		a.Where = "steps[" + strconv.Itoa(st.index) + "]"
		a.Force = st.one.Force
		err = s.listed(&a, *st.one)
	} else {
		err = s.instruction(&a, st.cmd)
	}
	if err == nil && envBytes(s.Config.Env)+envBytes(s.args.list) > maxExpanded {
		err = sandbox.Errorf(sandbox.TooLarge, "", "the environment has more than %d bytes", maxExpanded)
	}
	if err != nil {
		return a, at(a.Where, err)
	}
	return a, nil
}

func envBytes(env []string) (n int) {
	for _, kv := range env {
		n += len(kv) + 1
	}
	return n
}

// env is what words are expanded with and commands run with: what ENV says goes
// over what ARG says.
func (s *State) env() *variables {
	v := variables{list: slices.Clone(s.args.list)}
	for _, kv := range s.Config.Env {
		k, value, _ := strings.Cut(kv, "=")
		v.set(k, value)
	}
	return &v
}

// instruction is one of a Dockerfile.
func (s *State) instruction(a *Action, cmd instructions.Command) error {
	env := s.env()
	if ex, ok := cmd.(instructions.SupportsSingleWordExpansion); ok {
		if _, isArg := cmd.(*instructions.ArgCommand); !isArg {
			if err := ex.Expand(func(w string) (string, error) { return expand(s.lex, w, env) }); err != nil {
				return err
			}
		}
	}
	if ex, ok := cmd.(instructions.SupportsSingleWordExpansionRaw); ok {
		lex := shell.NewLex('\\')
		lex.RawQuotes, lex.RawEscapes = true, true
		if err := ex.ExpandRaw(func(w string) (string, error) { return expand(lex, w, env) }); err != nil {
			return err
		}
	}
	switch c := cmd.(type) {
	case *instructions.EnvCommand:
		for _, kv := range c.Env {
			if err := s.setEnv(kv.Key, kv.Value); err != nil {
				return err
			}
		}
	case *instructions.ArgCommand:
		return s.arg(c)
	case *instructions.LabelCommand:
		for _, kv := range c.Labels {
			s.label(kv.Key, kv.Value)
		}
	case *instructions.MaintainerCommand:
		// The author of an image is in its history alone here.
	case *instructions.WorkdirCommand:
		return s.workdir(a, c.Path)
	case *instructions.UserCommand:
		return s.user(c.User)
	case *instructions.CmdCommand:
		s.cmdSet = true
		s.Config.Cmd = s.shelled(c.ShellDependantCmdLine)
	case *instructions.EntrypointCommand:
		s.Config.Entrypoint = s.shelled(c.ShellDependantCmdLine)
		if !s.cmdSet {
			s.Config.Cmd = nil
		}
	case *instructions.ExposeCommand:
		return s.expose(c.Ports)
	case *instructions.VolumeCommand:
		s.volumes(c.Volumes)
	case *instructions.StopSignalCommand:
		s.Config.StopSignal = c.Signal
	case *instructions.ShellCommand:
		s.Config.Shell = slices.Clone(c.Shell)
	case *instructions.OnbuildCommand:
		if _, err := trigger(c.Expression); err != nil {
			return err
		}
		s.Config.OnBuild = append(slices.Clone(s.Config.OnBuild), c.Expression)
	case *instructions.HealthCheckCommand:
		h := c.Health
		s.Config.Healthcheck = &sandbox.Healthcheck{Test: h.Test, Interval: h.Interval, Timeout: h.Timeout,
			StartPeriod: h.StartPeriod, StartInterval: h.StartInterval, Retries: h.Retries}
	case *instructions.RunCommand:
		return s.run(a, c)
	case *instructions.CopyCommand:
		return s.copy(a, c)
	case *instructions.AddCommand:
		return s.add(a, c)
	default:
		return sandbox.Errorf(sandbox.Unsupported, "", "%s is not known here", strings.ToUpper(cmd.Name()))
	}
	return nil
}

func (s *State) setEnv(name, value string) error {
	if err := checkVariable(name, value); err != nil {
		return err
	}
	v := variables{s.Config.Env}
	v.set(name, value)
	s.Config.Env = v.list
	return nil
}

func (s *State) arg(c *instructions.ArgCommand) error {
	for _, kv := range c.Args {
		key, value := kv.Key, kv.Value
		given, ok := s.plan.args[key]
		switch {
		case ok:
			s.plan.used[key] = true
			value = &given
		case value != nil:
			v, err := expand(s.lex, *value, s.env())
			if err != nil {
				return err
			}
			value = &v
		default:
			if v, ok := s.plan.meta.Get(key); ok {
				value = &v
			}
		}
		if value == nil {
			continue
		}
		if err := checkVariable(key, *value); err != nil {
			return err
		}
		s.args.set(key, *value)
	}
	return nil
}

func (s *State) label(name, value string) {
	labels := map[string]string{}
	for k, v := range s.Config.Labels {
		labels[k] = v
	}
	labels[name] = value
	s.Config.Labels = labels
}

func (s *State) workdir(a *Action, dir string) error {
	if strings.IndexByte(dir, 0) >= 0 || len(dir) > 4096 {
		return sandbox.Errorf(sandbox.Invalid, "", "%q is no directory", clip(dir))
	}
	s.Config.WorkingDir = s.inside(dir)
	if s.Config.WorkingDir != "/" {
		a.Copies = []Copy{{Dest: s.Config.WorkingDir, Owner: s.Config.User}}
	}
	return nil
}

// inside is a path below the working directory.
func (s *State) inside(p string) string {
	if path.IsAbs(p) {
		return path.Clean(p)
	}
	return path.Join("/", s.Config.WorkingDir, p)
}

func (s *State) user(name string) error {
	if name == "" || strings.ContainsAny(name, "\x00\n ") || len(name) > 256 {
		return sandbox.Errorf(sandbox.Invalid, "", "%q is no user", clip(name))
	}
	s.Config.User = name
	return nil
}

func (s *State) shell() []string {
	if len(s.Config.Shell) > 0 {
		return s.Config.Shell
	}
	return []string{"/bin/sh", "-c"}
}

func (s *State) shelled(c instructions.ShellDependantCmdLine) []string {
	if !c.PrependShell {
		return slices.Clone(c.CmdLine)
	}
	return append(slices.Clone(s.shell()), strings.Join(c.CmdLine, " "))
}

// maxPorts is every port of one protocol.
const maxPorts = 1 << 16

func (s *State) expose(ports []string) error {
	all := slices.Clone(s.Config.ExposedPorts)
	for _, p := range ports {
		numbers, protocol, ok := strings.Cut(p, "/")
		if !ok {
			protocol = "tcp"
		}
		first, last, isRange := strings.Cut(numbers, "-")
		if !isRange {
			last = first
		}
		from, err1 := strconv.ParseUint(first, 10, 16)
		to, err2 := strconv.ParseUint(last, 10, 16)
		protocol = strings.ToLower(protocol)
		if err1 != nil || err2 != nil || from > to || from == 0 || protocol != "tcp" && protocol != "udp" && protocol != "sctp" {
			return sandbox.Errorf(sandbox.Invalid, "", "%q is not like 80, 80/udp or 8000-8010", clip(p))
		}
		for n := from; n <= to; n++ {
			all = append(all, strconv.FormatUint(n, 10)+"/"+protocol)
		}
	}
	slices.Sort(all)
	if s.Config.ExposedPorts = slices.Compact(all); len(s.Config.ExposedPorts) > maxPorts {
		return sandbox.Errorf(sandbox.TooLarge, "", "more than %d ports", maxPorts)
	}
	return nil
}

func (s *State) volumes(paths []string) {
	all := append(slices.Clone(s.Config.Volumes), paths...)
	slices.Sort(all)
	s.Config.Volumes = slices.Compact(all)
}

// proxyArgs may be given without an ARG, and are in no history and no key.
var proxyArgs = []string{"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "FTP_PROXY", "ftp_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"}

// Proxies are variables that every command has and no cache key.
func (p *Plan) Proxies() (env []string) {
	for _, name := range proxyArgs {
		if v, ok := p.args[name]; ok {
			p.used[name] = true
			env = append(env, name+"="+v)
		}
	}
	return env
}

func isHTTP(s string) bool {
	return strings.HasPrefix(s, "http://") || strings.HasPrefix(s, "https://")
}

func isGit(s string) bool {
	return strings.HasPrefix(s, "git://") || strings.HasPrefix(s, "git@") || strings.HasPrefix(s, "ssh://") ||
		isHTTP(s) && bytes.HasSuffix([]byte(strings.SplitN(s, "#", 2)[0]), []byte(".git"))
}
