package build

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/command"
	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/linter"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/cove-sandbox/cove/sandbox"
)

const (
	// MaxDockerfile is far above what people write by hand.
	MaxDockerfile = 1 << 20
	// MaxSteps of a build; each may be a layer, and an image has at most 512.
	MaxSteps = 500
	// maxValue is what Linux takes as one string of an environment.
	maxValue = 128 << 10
	// maxExpanded bounds what one word may become: ENV A=$A$A is a bomb.
	maxExpanded = 1 << 20
)

// Options of a plan.
type Options struct {
	Args     map[string]string // --build-arg
	Target   string            // stage; "" = the last
	Platform string            // "linux/amd64"
}

// Plan is what a build is to do. It serves one build.
type Plan struct {
	Stages   []*Stage // those that are needed, each after those it needs; the last is the target
	Names    []string // of all stages, for what was probably meant
	Warnings []string

	args map[string]string
	used map[string]bool // of args
	meta variables       // before the first FROM
	list bool            // of steps: nothing is expanded
}

// Stage is one FROM and what follows.
type Stage struct {
	Name  string // as it was called, or its number
	Line  int
	Text  string
	Image string // base: an image, with "" nothing (scratch), unless
	Base  *Stage // it is another stage

	index int
	steps []step
	needs []*Stage // of COPY --from and mounts
}

// step is an instruction that was not looked at yet.
type step struct {
	cmd   instructions.Command // of a Dockerfile
	one   *Step                // of a list
	index int                  // of a list
	line  int
	text  string

	trigger bool // of the base
}

// Len is how many steps a stage has, FROM not among them.
func (s *Stage) Len() int { return len(s.steps) }

// Steps is how many steps the plan has, each FROM among them.
func (p *Plan) Steps() (n int) {
	for _, s := range p.Stages {
		n += 1 + s.Len()
	}
	return n
}

// Parse reads a Dockerfile.
func Parse(dockerfile []byte, o Options) (*Plan, error) {
	if len(dockerfile) > MaxDockerfile {
		return nil, sandbox.Errorf(sandbox.TooLarge, "", "the Dockerfile has more than %d bytes", MaxDockerfile)
	}
	ast, err := parser.Parse(bytes.NewReader(dockerfile))
	if err != nil {
		return nil, fault(lineOf(err), err)
	}
	if len(ast.AST.Children) > MaxSteps {
		return nil, tooMany(len(ast.AST.Children))
	}
	for _, n := range ast.AST.Children {
		if err := known(n.Value); err != nil {
			return nil, fault(n.StartLine, err)
		}
	}
	stages, meta, err := instructions.Parse(ast.AST, linter.New(&linter.Config{}))
	if err != nil {
		return nil, fault(lineOf(err), err)
	}
	p := &Plan{args: o.Args, used: map[string]bool{}, meta: platformArgs(o.Platform)}
	for _, w := range ast.Warnings {
		line := 0
		if w.Location != nil {
			line = w.Location.Start.Line
		}
		p.Warnings = append(p.Warnings, fmt.Sprintf("line %d: %s", line, w.Short))
	}
	lex := shell.NewLex(ast.EscapeToken)
	for _, c := range meta {
		if err := p.metaArg(lex, c); err != nil {
			return nil, err
		}
	}
	all := make([]*Stage, 0, len(stages))
	for i, st := range stages {
		s, err := p.stage(lex, all, i, st, o.Platform)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
		p.Names = append(p.Names, s.Name)
	}
	target, err := find(all, o.Target)
	if err != nil {
		return nil, err
	}
	if err := p.link(all, target); err != nil {
		return nil, err
	}
	return p, nil
}

// known says of a word that is no instruction which was probably meant. BuildKit's
// own guess takes RNU for ENV: two letters that changed places are two faults to it.
func known(word string) error {
	if _, ok := command.Commands[strings.ToLower(word)]; ok {
		return nil
	}
	names := slices.Sorted(maps.Keys(command.Commands))
	for i := range names {
		names[i] = strings.ToUpper(names[i])
	}
	msg := fmt.Sprintf("%q is no instruction", clip(word))
	if did := sandbox.DidYouMean(strings.ToUpper(word), names); did != "" {
		msg += "; " + did
	}
	return sandbox.Errorf(sandbox.Invalid, "", "%s", msg)
}

func tooMany(n int) error {
	return sandbox.Errorf(sandbox.TooLarge, "", "%d steps, more than %d", n, MaxSteps).WithHint("join RUN lines with &&, or build in two images")
}

// platformArgs are what BuildKit defines for every build.
func platformArgs(platform string) variables {
	os, arch, _ := strings.Cut(platform, "/")
	arch, variant, _ := strings.Cut(arch, "/")
	var v variables
	for _, prefix := range []string{"BUILD", "TARGET"} {
		v.set(prefix+"PLATFORM", platform)
		v.set(prefix+"OS", os)
		v.set(prefix+"ARCH", arch)
		v.set(prefix+"VARIANT", variant)
	}
	return v
}

func (p *Plan) metaArg(lex *shell.Lex, c instructions.ArgCommand) error {
	for _, kv := range c.Args {
		if v, ok := p.args[kv.Key]; ok {
			p.used[kv.Key] = true
			p.meta.set(kv.Key, v)
			continue
		}
		if kv.Value == nil {
			continue
		}
		v, err := expand(lex, *kv.Value, &p.meta)
		if err != nil {
			return fault(start(c.Location()), err)
		}
		p.meta.set(kv.Key, v)
	}
	return nil
}

func (p *Plan) stage(lex *shell.Lex, before []*Stage, i int, st instructions.Stage, platform string) (*Stage, error) {
	s := &Stage{Name: st.Name, Line: start(st.Location), Text: firstLine(st.SourceCode), index: i}
	if s.Name == "" {
		s.Name = strconv.Itoa(i)
	}
	base, err := expand(lex, st.BaseName, &p.meta)
	if err == nil && base == "" {
		err = fmt.Errorf("FROM %s names nothing: an ARG before it has no value", clip(st.BaseName))
	}
	if err != nil {
		return nil, fault(s.Line, err)
	}
	want, err := expand(lex, st.Platform, &p.meta)
	if err == nil && want != "" && want != platform {
		err = sandbox.Errorf(sandbox.Unsupported, "", "--platform=%s: this node is %s", clip(want), platform)
	}
	if err != nil {
		return nil, fault(s.Line, err)
	}
	if !strings.EqualFold(base, "scratch") {
		if s.Base = named(before, base); s.Base == nil {
			s.Image = base
		}
	}
	for _, c := range st.Commands {
		s.steps = append(s.steps, step{cmd: c, line: start(c.Location()), text: firstLine(fmt.Sprint(c))})
	}
	return s, nil
}

// named finds a stage by its name or, for COPY --from, its number.
func named(stages []*Stage, name string) *Stage {
	for _, s := range slices.Backward(stages) {
		if strings.EqualFold(s.Name, name) {
			return s
		}
	}
	return nil
}

func find(all []*Stage, target string) (*Stage, error) {
	if target == "" {
		return all[len(all)-1], nil
	}
	if s := named(all, target); s != nil {
		return s, nil
	}
	if i, err := strconv.Atoi(target); err == nil && i >= 0 && i < len(all) {
		return all[i], nil
	}
	var names []string
	for _, s := range all {
		names = append(names, s.Name)
	}
	e := sandbox.InvalidField("target", "no stage %q; there is %s", clip(target), strings.Join(names, ", "))
	if did := sandbox.DidYouMean(target, names); did != "" {
		e.Msg += "; " + did
	}
	return nil, e
}

// link finds which stages the target needs. What COPY --from names is known
// without the config of any base: BuildKit expands it with ARGs of before FROM
// alone, if at all.
func (p *Plan) link(all []*Stage, target *Stage) error {
	for i, s := range all {
		for _, st := range s.steps {
			for _, from := range sourcesOf(st.cmd) {
				of, err := source(all, i, from)
				if err != nil {
					return fault(st.line, err)
				}
				if of != nil {
					s.needs = append(s.needs, of)
				}
			}
		}
	}
	needed := map[*Stage]bool{}
	var visit func(*Stage)
	visit = func(s *Stage) { // stages name only earlier ones, so this ends
		if s == nil || needed[s] {
			return
		}
		needed[s] = true
		visit(s.Base)
		for _, n := range s.needs {
			visit(n)
		}
	}
	visit(target)
	for _, s := range all {
		if needed[s] && s != target {
			p.Stages = append(p.Stages, s)
		}
	}
	p.Stages = append(p.Stages, target)
	if n := p.Steps(); n > MaxSteps {
		return tooMany(n)
	}
	return nil
}

// sourcesOf is what an instruction copies or mounts from.
func sourcesOf(c instructions.Command) (names []string) {
	switch c := c.(type) {
	case *instructions.CopyCommand:
		names = append(names, c.From)
	case *instructions.RunCommand:
		for _, m := range instructions.GetMounts(c) {
			names = append(names, m.From)
		}
	}
	return slices.DeleteFunc(names, func(s string) bool { return s == "" })
}

// source finds the stage that --from of stage i means; nil if it means an image.
func source(all []*Stage, i int, from string) (*Stage, error) {
	if n, err := strconv.Atoi(from); err == nil {
		if n < 0 || n >= i {
			return nil, fmt.Errorf("--from=%s: stage %d has only stages 0 to %d before it", clip(from), i, i-1)
		}
		return all[n], nil
	}
	if s := named(all[:i], from); s != nil {
		return s, nil
	}
	if s := named(all[i:], from); s != nil {
		return nil, fmt.Errorf("--from=%s: that stage is not built before this one", clip(from))
	}
	return nil, nil
}

// Unused are the build arguments that no ARG asked for, once the build is over.
func (p *Plan) Unused() []string {
	var names []string
	for _, k := range slices.Sorted(maps.Keys(p.args)) {
		if !p.used[k] && !p.list {
			names = append(names, k)
		}
	}
	return names
}

// fault is an error of an instruction.
func fault(line int, err error) error {
	field := "dockerfile"
	if line > 0 {
		field += ":" + strconv.Itoa(line)
	}
	return at(field, err)
}

// at says of an error where in the input it is.
func at(field string, err error) error {
	var e *sandbox.Error
	if errors.As(err, &e) {
		own := *e
		if own.Field == "" {
			own.Field = field
		}
		return &own
	}
	msg := err.Error()
	if _, rest, ok := strings.Cut(msg, "dockerfile parse error on line "); ok {
		if _, said, ok := strings.Cut(rest, ": "); ok {
			msg = said
		}
	}
	return sandbox.InvalidField(field, "%s", clip(msg))
}

// lineOf finds the place that BuildKit's parser notes on its errors.
func lineOf(err error) int {
	var e *parser.LocationError
	if errors.As(err, &e) && len(e.Locations) > 0 {
		return start(e.Locations[0])
	}
	return 0
}

func start(r []parser.Range) int {
	if len(r) == 0 {
		return 0
	}
	return r[0].Start.Line
}

func firstLine(s string) string {
	line, rest, _ := strings.Cut(s, "\n")
	if rest != "" {
		line += " …"
	}
	return clip(line)
}

// clip shortens hostile text for a message.
func clip(s string) string {
	if len(s) > 300 {
		return strings.ToValidUTF8(s[:300], "") + "…"
	}
	return s
}
