package sandbox

import (
	"path"
	"slices"
	"strings"
	"time"
)

// Bounds of a grade.
const (
	DefaultGradeTimeout = 10 * time.Minute
	MaxGradeTimeout     = 24 * time.Hour
	DefaultTestsPath    = "/tests"
	maxArtifacts        = 256
	maxExpected         = 10_000
	maxGradeArgs        = 1024
)

// GradeDir is where a grader keeps what belongs to the judge. Nothing is carried
// there, and only root can look into it.
const GradeDir = "/run/cove-grade"

// noArtifacts cannot be carried over: they are the kernel's, or the judge's.
var noArtifacts = []string{"/proc", "/sys", "/dev", GradeDir}

// tooMuch is what an artifact may lie in but not be: to carry all of one over
// would make the agent's system the grader's.
var tooMuch = []string{"/", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/run", "/var", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/local", "/usr/local/bin", "/usr/local/sbin", "/usr/local/lib"}

// WithDefaults fills what was left out.
func (g GradeSpec) WithDefaults() GradeSpec {
	if g.TestsPath == "" {
		g.TestsPath = DefaultTestsPath
	}
	if g.Timeout == 0 {
		g.Timeout = DefaultGradeTimeout
	}
	if args, ok := pytestArgs(g); ok && g.Results == "" && !g.Separate {
		g.Results, g.Command, g.Args = PytestResults, "", args
	}
	if g.Results == "" {
		g.Results = ExitResults
	}
	return g
}

// pytestArgs are the arguments of a command that is pytest and nothing more, or
// of none: only Cove's runner can tell what came of it when the agent's code is
// in the same process.
func pytestArgs(g GradeSpec) (args []string, ok bool) {
	words := g.Args
	if g.Command != "" {
		if strings.ContainsAny(g.Command, "'\"`$;&|<>(){}[]*?~\\\n#!=") {
			return nil, false
		}
		words = strings.Fields(g.Command)
	}
	if len(words) == 0 {
		return nil, true
	}
	switch name := path.Base(words[0]); {
	case name == "pytest" || name == "pytest-3" || name == "py.test":
		return words[1:], true
	case strings.HasPrefix(name, "python") && len(words) >= 3 && words[1] == "-m" && words[2] == "pytest":
		return words[3:], true
	}
	return nil, false
}

// Validate checks a spec that has its defaults.
func (g GradeSpec) Validate(l Limits) error {
	if !ValidID(g.Sandbox) {
		return InvalidField("sandbox", "%q is no sandbox id; lower-case letters and digits are accepted", clip(g.Sandbox))
	}
	if g.Tests != "" {
		if err := ValidateSnapshotRef("tests", g.Tests); err != nil {
			return err
		}
	}
	if err := ValidateMountPath("tests_path", g.TestsPath); err != nil {
		return err
	}
	if clean := path.Clean(g.TestsPath); slices.Contains(tooMuch, clean) || slices.ContainsFunc(noArtifacts, func(p string) bool { return Within(clean, p) }) {
		return InvalidField("tests_path", "'%s' is the system's; a directory of its own is accepted, as in /tests", clip(clean))
	}
	if err := g.validateCommand(); err != nil {
		return err
	}
	if len(g.Artifacts) == 0 {
		return InvalidField("artifacts", "there are none, so that nothing of the sandbox would be graded; at least one absolute path is accepted")
	}
	if len(g.Artifacts) > maxArtifacts {
		return InvalidField("artifacts", "there are %d; at most %d are accepted", len(g.Artifacts), maxArtifacts).WithHint("name the directory they are in")
	}
	for _, p := range g.Artifacts {
		if err := g.validateArtifact(p); err != nil {
			return err
		}
	}
	if len(g.Expected) > maxExpected {
		return InvalidField("expected", "there are %d; at most %d are accepted", len(g.Expected), maxExpected)
	}
	if len(g.Expected) > 0 && g.Results == ExitResults {
		return InvalidField("expected", "an exit code names no tests; results pytest, junit and pytest-json do")
	}
	for _, id := range g.Expected {
		if id == "" || len(id) > maxPath {
			return InvalidField("expected", "%q is no id of a test", clip(id))
		}
	}
	if g.Image != "" && g.Snapshot != "" {
		return InvalidField("snapshot", "image and snapshot are both set; at most one is accepted")
	}
	if g.Cwd != "" {
		if err := ValidatePath("cwd", g.Cwd); err != nil {
			return err
		}
	}
	if g.Timeout < time.Second || g.Timeout > MaxGradeTimeout {
		return InvalidField("timeout", "%s is not accepted; 1s to %s is", g.Timeout, MaxGradeTimeout)
	}
	if err := ValidateEnv("env", g.Env); err != nil {
		return err
	}
	return ValidateLabels("labels", g.Labels)
}

func (g GradeSpec) validateCommand() error {
	switch g.Results {
	case PytestResults:
		if g.Command != "" {
			return InvalidField("command", "results pytest runs pytest itself; args are its arguments").WithHint("command=\"pytest -v\" alone is understood, too")
		}
		if g.Separate {
			return InvalidField("separate", "results pytest imports the work into the tests' process, so there is no judge beside it").
				WithHint("with separate, run pytest as the command and read its report: results=\"junit\", command=\"pytest /tests --junitxml=$COVE_RESULTS\"")
		}
		if g.Tests == "" {
			return InvalidField("tests", "results pytest needs tests")
		}
		for _, a := range g.Args {
			if chooses(a) && len(g.Expected) == 0 {
				return InvalidField("args", "'%s' leaves tests out, so that nobody could say which must have run", clip(a)).
					WithHint("name files or tests instead (test_a.py, test_a.py::test_x), or say which ones are expected")
			}
		}
	case ExitResults, RewardResults, JUnitResults, PytestJSONResults:
		if (g.Command == "") == (len(g.Args) == 0) {
			return InvalidField("command", "exactly one of command and args is accepted")
		}
		if g.Results.FromFile() && !g.Separate {
			return InvalidField("results", "'%s' is a file that the command writes, and without separate the work that is graded could write it too", g.Results).
				WithHint("set separate and run the work through $COVE_JUDGED, or use results pytest or exit")
		}
	default:
		return InvalidField("results", "%q is not accepted; exit, pytest, reward, junit and pytest-json are", clip(string(g.Results)))
	}
	if len(g.Args) > maxGradeArgs || len(g.Command) > maxStartCommand {
		return InvalidField("command", "is too long")
	}
	for _, a := range append(slices.Clone(g.Args), g.Command) {
		if strings.IndexByte(a, 0) >= 0 || len(a) > maxStartCommand {
			return InvalidField("command", "holds a NUL byte, or is too long")
		}
	}
	return nil
}

// chooses says whether an argument of pytest runs fewer tests than the files have.
func chooses(arg string) bool {
	for _, o := range []string{"-k", "-m", "--deselect", "--ignore", "--ignore-glob", "--lf", "--ff", "--last-failed", "--sw", "--stepwise", "--co", "--collect-only", "--maxfail", "-x", "--exitfirst"} {
		if arg == o || strings.HasPrefix(arg, o+"=") || len(o) == 2 && o != "-x" && strings.HasPrefix(arg, o) {
			return true
		}
	}
	return false
}

func (g GradeSpec) validateArtifact(p string) error {
	if err := ValidatePath("artifacts", p); err != nil {
		return err
	}
	clean := path.Clean(p)
	switch {
	case strings.Contains(p, "/../") || strings.HasSuffix(p, "/.."):
		return InvalidField("artifacts", "'%s' has .. in it; a plain absolute path is accepted", clip(p))
	case slices.Contains(tooMuch, clean):
		return InvalidField("artifacts", "'%s' is the system, which is what the grader must not have of the sandbox", clean).
			WithHint("name what the work is: a directory of it, or single files, as in /etc/app.conf")
	case slices.ContainsFunc(noArtifacts, func(q string) bool { return Within(clean, q) }):
		return InvalidField("artifacts", "'%s' is the kernel's, or the grader's own", clean)
	case Within(clean, path.Clean(g.TestsPath)) || Within(path.Clean(g.TestsPath), clean):
		return InvalidField("artifacts", "'%s' and the tests at '%s' are one in the other", clean, g.TestsPath).WithHint("mount the tests elsewhere: tests_path")
	}
	return nil
}

// Within says whether a clean absolute path is dir or below it.
func Within(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}
