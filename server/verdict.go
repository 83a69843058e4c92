package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"path"
	"strings"

	"github.com/cove-sandbox/cove/grade"
	"github.com/cove-sandbox/cove/sandbox"
)

// logHead and logTail are what a verdict keeps of what the command printed.
const (
	logHead = 32 << 10
	logTail = 32 << 10
)

// decide runs the command and makes a verdict of what came of it. An error is a
// fault of ours, or of the judge: the state says whose.
func (g *grading) decide(ctx context.Context, box string) (sandbox.GradeState, error) {
	spec, err := g.command()
	if err != nil {
		return sandbox.GradeInfra, err
	}
	var log keptLog
	var report []byte
	var end *sandbox.ProcessEnd
	err = g.inside(ctx, box, func() error {
		for ev, err := range g.node.Start(ctx, box, spec, 0) {
			switch {
			case err != nil:
				return err
			case ev.Output != nil && ev.Output.Stream == sandbox.Stdout && g.grade.Spec.Results == sandbox.PytestResults:
				if len(report) <= grade.MaxReport {
					report = append(report, ev.Output.Data...)
				}
			case ev.Output != nil:
				log.add(ev.Output.Data)
			case ev.End != nil:
				end = ev.End
			}
		}
		return nil
	})
	g.phases.reached("command_over")
	g.verdict.Log, g.verdict.LogDropped = log.text()
	if err != nil || end == nil {
		return g.broken(ctx, err, box)
	}
	g.verdict.End = end
	zero := 0.0
	switch end.Cause {
	case sandbox.Exited:
	case sandbox.Deadline:
		g.verdict.Reward, g.verdict.Reason = &zero, "the command had not ended after "+g.grade.Spec.Timeout.String()
		return sandbox.GradeTimeout, nil
	case sandbox.OOM:
		g.verdict.Reward, g.verdict.Reason = &zero, "the command ended over the grader's memory"
		return sandbox.GradeOOM, nil
	case sandbox.Signalled:
		if g.grade.Spec.Results == sandbox.ExitResults && !g.grade.Spec.Separate {
			g.verdict.Reward, g.verdict.Reason = &zero, "the command was ended by "+end.Signal
			return sandbox.Graded, nil
		}
		return sandbox.GraderFailed, &sandbox.Error{Class: sandbox.Precondition, Msg: "the judge was ended by " + end.Signal}
	default:
		return sandbox.GradeInfra, &sandbox.Error{Class: sandbox.Unavailable, Msg: "the command ended by " + end.String()}
	}
	out, err := g.outcome(ctx, box, report, end.ExitCode)
	switch {
	case err != nil:
		return sandbox.GradeInfra, err
	case out.Err != nil && g.grade.Spec.Results.FromFile() && g.full(ctx, box):
		g.verdict.Reward, g.verdict.Reason = &zero, "the grader's disk is full, so that the judge could not write its results"
		return sandbox.Graded, nil
	case out.Err != nil:
		g.verdict.Tests = out.Tests
		return sandbox.GraderFailed, out.Err
	}
	g.verdict.Reward, g.verdict.Rewards, g.verdict.Reason, g.verdict.Tests = &out.Reward, out.Rewards, out.Reason, out.Tests
	return sandbox.Graded, nil
}

// broken is the end of a grade whose command was not seen to its end.
func (g *grading) broken(ctx context.Context, err error, box string) (sandbox.GradeState, error) {
	if err == nil {
		err = &sandbox.Error{Class: sandbox.Unavailable, Msg: "the command was lost"}
	}
	switch {
	case ctx.Err() != nil:
		return sandbox.GradeInfra, err
	case errors.Is(err, sandbox.ErrCommandNotFound), sandbox.ClassOf(err) == sandbox.Invalid, sandbox.ClassOf(err) == sandbox.Denied, sandbox.ClassOf(err) == sandbox.NotFound && !errors.Is(err, sandbox.ErrNoSandbox):
		return sandbox.GraderFailed, err // no such command, directory or user in the image
	}
	if sb, gerr := g.store.GetSandbox(ctx, box); gerr == nil && sb.End != nil && sb.End.Cause == sandbox.OOM {
		zero := 0.0
		g.verdict.Reward, g.verdict.Reason = &zero, "the grader ran out of memory"
		return sandbox.GradeOOM, nil
	}
	return sandbox.GradeInfra, err
}

// outcome reads the reward from where the agent's code cannot have written it.
func (g *grading) outcome(ctx context.Context, box string, report []byte, code int) (grade.Outcome, error) {
	spec := g.grade.Spec
	read := func(name string) ([]byte, *grade.Outcome, error) {
		b, _, err := g.node.ReadFile(ctx, box, path.Join(sandbox.GradeDir, name), 0, grade.MaxReport)
		if errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrNoSandbox) {
			return nil, &grade.Outcome{Err: &sandbox.Error{Class: sandbox.Precondition, Op: "grade",
				Msg: "the command exited with " + exitCode(code) + " and wrote no results", Hint: "it writes them to $COVE_REWARD or $COVE_RESULTS"}}, nil
		}
		return b, nil, err
	}
	switch spec.Results {
	case sandbox.PytestResults:
		if len(report) > grade.MaxReport {
			return grade.Outcome{Err: &sandbox.Error{Class: sandbox.TooLarge, Op: "grade", Msg: "the report is too large"}}, nil
		}
		return grade.Pytest(report, spec.Expected), nil
	case sandbox.RewardResults:
		b, missing, err := read(grade.RewardFile)
		if missing != nil || err != nil {
			return orNone(missing), err
		}
		return grade.Reward(b), nil
	case sandbox.JUnitResults, sandbox.PytestJSONResults:
		b, missing, err := read(grade.ResultsFile)
		if missing != nil || err != nil {
			return orNone(missing), err
		}
		if spec.Results == sandbox.JUnitResults {
			return grade.JUnit(b, spec.Expected), nil
		}
		return grade.PytestJSON(b, spec.Expected), nil
	}
	return grade.Exit(code), nil
}

// full says whether a grader has no disk left. The judge has little to write, so the
// work has filled it: it must not be able to choose that there is no verdict.
func (g *grading) full(ctx context.Context, box string) bool {
	st, err := g.node.Stats(ctx, box)
	disk := cmp.Or(g.grade.Spec.Resources.Disk, g.sb.Spec.Resources.Disk)
	return err == nil && st.DiskUsed >= disk-disk/20
}

func orNone(o *grade.Outcome) grade.Outcome {
	if o == nil {
		return grade.Outcome{}
	}
	return *o
}

func exitCode(code int) string { b, _ := json.Marshal(code); return string(b) }

// command is the process that judges.
func (g *grading) command() (sandbox.ProcessSpec, error) {
	spec := g.grade.Spec
	env := map[string]string{"PATH": strings.Join(g.searchPath(), ":"), "HOME": "/tmp", "COVE_TESTS": spec.TestsPath}
	maps.Copy(env, spec.Env)
	p := sandbox.ProcessSpec{ExecID: "grade", Args: spec.Args, Command: spec.Command, Cwd: spec.Cwd, User: judgedUser, Env: env, Timeout: spec.Timeout}
	if spec.Separate {
		p.User = rootUser
		env["COVE_JUDGED"], env["COVE_JUDGED_USER"] = path.Join(sandbox.GradeDir, grade.JudgedFile), judgedUser
		env["COVE_REWARD"], env["COVE_RESULTS"] = path.Join(sandbox.GradeDir, grade.RewardFile), path.Join(sandbox.GradeDir, grade.ResultsFile)
		if p.Cwd == "" && g.tests != nil {
			p.Cwd = grade.SealedTests // and not where the agent's files are
		}
	}
	if spec.Results != sandbox.PytestResults {
		return p, nil
	}
	in := grade.JudgeInput{UID: judgedUID, Tests: spec.TestsPath, Args: spec.Args, Cwd: spec.Cwd, Env: map[string]string{"LANG": "C.UTF-8"}}
	if in.Args == nil {
		in.Args = []string{}
	}
	if in.Cwd == "" {
		in.Cwd = g.img.Config.WorkingDir
	}
	for _, e := range g.img.Config.Env {
		if k, v, ok := strings.Cut(e, "="); ok && !strings.HasPrefix(k, "PYTHON") && !strings.HasPrefix(k, "PYTEST") {
			in.Env[k] = v
		}
	}
	maps.Copy(in.Env, env)
	for _, a := range g.rules().Artifacts {
		in.Paths = append(in.Paths, a, path.Dir(a)) // a directory, or a file in one
	}
	var err error
	p.Input, err = json.Marshal(in)
	p.Args, p.Command, p.User, p.Cwd = []string{"python3", "-I", "-S", path.Join(sandbox.GradeDir, grade.JudgeFile)}, "", rootUser, "/"
	p.Env = map[string]string{"PATH": env["PATH"], "LANG": "C.UTF-8"}
	return p, err
}

// keptLog keeps the beginning and the end of what is printed.
type keptLog struct {
	head, tail []byte
	dropped    int64
}

func (l *keptLog) add(b []byte) {
	if free := logHead - len(l.head); free > 0 {
		n := min(free, len(b))
		l.head, b = append(l.head, b[:n]...), b[n:]
	}
	l.tail = append(l.tail, b...)
	if over := len(l.tail) - logTail; over > logTail { // not with every line
		l.tail = append([]byte(nil), l.tail[over:]...)
		l.dropped += int64(over)
	}
}

func (l *keptLog) text() (string, int64) {
	if over := len(l.tail) - logTail; over > 0 {
		l.tail, l.dropped = l.tail[over:], l.dropped+int64(over)
	}
	sep := ""
	if l.dropped > 0 {
		sep = "\n…\n"
	}
	return strings.ToValidUTF8(string(l.head)+sep+string(l.tail), "\uFFFD"), l.dropped
}
