package build

import (
	"slices"
	"strings"

	"github.com/cove-sandbox/cove/sandbox"
)

// Step is one step of a build without a Dockerfile. Nothing in it is expanded:
// $X reaches the shell of RUN as it is, and ENV and ARG are in its environment.
type Step struct {
	Op    string   // RUN COPY ENV ARG WORKDIR USER ENTRYPOINT CMD LABEL EXPOSE VOLUME SHELL STOPSIGNAL
	Args  []string // RUN: a command line; COPY: sources and destination; ENV, ARG, LABEL: names and values in turn; the others as they are
	Files string   // COPY: key of uploaded files; "" = the context
	User  string   // RUN: runs as; COPY: owner
	Mode  string   // COPY: octal
	Force bool     // neither it nor what follows comes from the cache
}

// List plans a build on an image ("scratch" = on nothing).
func List(from string, steps []Step, o Options) (*Plan, error) {
	if len(steps) > MaxSteps {
		return nil, tooMany(len(steps))
	}
	if from == "" {
		return nil, sandbox.InvalidField("from", "is missing: an image, or scratch")
	}
	s := &Stage{Name: "0", Text: "FROM " + clip(from)}
	if from != "scratch" {
		s.Image = from
	}
	for i := range steps {
		st := &steps[i]
		text := strings.ToUpper(st.Op) + " " + strings.Join(st.Args, " ")
		s.steps = append(s.steps, step{one: st, index: i, text: firstLine(text)})
	}
	p := &Plan{Stages: []*Stage{s}, args: o.Args, used: map[string]bool{}, list: true}
	// Read once for what is wrong with them: nothing of it depends on the base.
	dry := &State{plan: p, stage: s}
	for i := range s.steps {
		if _, err := dry.Next(i); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// listed is a step of a list.
func (s *State) listed(a *Action, st Step) error {
	n := len(st.Args)
	want := func(ok bool, what string) error {
		if ok {
			return nil
		}
		return sandbox.Errorf(sandbox.Invalid, "", "%s wants %s; it has %d arguments", strings.ToUpper(st.Op), what, n)
	}
	pairs := func(set func(k, v string) error) error {
		if err := want(n > 0 && n%2 == 0, "names and values in turn"); err != nil {
			return err
		}
		for i := 0; i < n; i += 2 {
			if err := set(st.Args[i], st.Args[i+1]); err != nil {
				return err
			}
		}
		return nil
	}
	for _, arg := range st.Args {
		if strings.IndexByte(arg, 0) >= 0 {
			return sandbox.Errorf(sandbox.Invalid, "", "an argument has a NUL byte")
		}
		if len(arg) > MaxDockerfile {
			return sandbox.Errorf(sandbox.TooLarge, "", "an argument of %d bytes", len(arg))
		}
	}
	switch strings.ToUpper(st.Op) {
	case "RUN":
		if err := want(n == 1, "one command line"); err != nil {
			return err
		}
		a.Run = &Run{Args: append(slices.Clone(s.shell()), st.Args[0]), Env: s.env().list, User: s.Config.User, Dir: s.Config.WorkingDir}
		if st.User != "" {
			a.Run.User = st.User
		}
	case "COPY":
		if err := want(n >= 2, "sources and a destination"); err != nil {
			return err
		}
		dest, err := s.dest(st.Args[n-1])
		if err != nil {
			return err
		}
		if err := checkMode(st.Mode); err != nil {
			return err
		}
		a.Copies = []Copy{{Files: st.Files, Sources: st.Args[:n-1], Dest: dest, Owner: st.User, Mode: st.Mode}}
	case "ENV":
		return pairs(s.setEnv)
	case "ARG":
		return pairs(func(k, v string) error {
			if given, ok := s.plan.args[k]; ok {
				v = given
			}
			if err := checkVariable(k, v); err != nil {
				return err
			}
			s.args.set(k, v)
			return nil
		})
	case "LABEL":
		return pairs(func(k, v string) error { s.label(k, v); return nil })
	case "WORKDIR":
		if err := want(n == 1, "one directory"); err != nil {
			return err
		}
		return s.workdir(a, st.Args[0])
	case "USER":
		if err := want(n == 1, "one user"); err != nil {
			return err
		}
		return s.user(st.Args[0])
	case "ENTRYPOINT":
		s.Config.Entrypoint = slices.Clone(st.Args)
		if !s.cmdSet {
			s.Config.Cmd = nil
		}
	case "CMD":
		s.Config.Cmd, s.cmdSet = slices.Clone(st.Args), true
	case "EXPOSE":
		return s.expose(st.Args)
	case "VOLUME":
		s.volumes(st.Args)
	case "SHELL":
		if err := want(n > 0, "a program and its arguments"); err != nil {
			return err
		}
		s.Config.Shell = slices.Clone(st.Args)
	case "STOPSIGNAL":
		if err := want(n == 1, "one signal"); err != nil {
			return err
		}
		s.Config.StopSignal = st.Args[0]
	default:
		return sandbox.Errorf(sandbox.Invalid, "", "%q is no step; RUN, COPY, ENV, ARG, WORKDIR, USER, ENTRYPOINT, CMD, LABEL, EXPOSE, VOLUME, SHELL and STOPSIGNAL are", clip(st.Op))
	}
	return nil
}
