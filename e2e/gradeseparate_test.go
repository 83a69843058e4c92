package e2e

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// apart judges a program that runs as another user, by what it prints.
var apart = map[string]string{
	"judge.py": `
import json, os, subprocess
right = 0
for a, b in ((2, 3), (10, 20), (-1, 1)):
    try:
        p = subprocess.run([os.environ["COVE_JUDGED"], "python3", "/work/main.py"], input="%d %d\n" % (a, b), capture_output=True, text=True, errors="replace", timeout=2, cwd="/")
    except subprocess.TimeoutExpired: # or the work could choose to have no verdict
        continue
    right += p.stdout.strip() == open("/tests/expected/%d" % (a + b)).read().strip()
    print(p.returncode, p.stdout[:200], p.stderr[:300])
with open(os.environ["COVE_REWARD"], "w") as f:
    json.dump({"reward": float(right == 3), "right": right}, f)
`,
	"expected/5": "5\n", "expected/30": "30\n", "expected/0": "0\n",
	"test_program.py": `
import os, subprocess, pytest
@pytest.mark.parametrize("a,b", [(2, 3), (10, 20)])
def test_sum(a, b):
    p = subprocess.run([os.environ["COVE_JUDGED"], "python3", "/work/main.py"], input="%d %d\n" % (a, b), capture_output=True, text=True, errors="replace", cwd="/")
    assert p.stdout.strip() == str(a + b)
def test_user():
    p = subprocess.run([os.environ["COVE_JUDGED"], "id", "-u"], capture_output=True, text=True, cwd="/")
    assert p.stdout == "64002\n"
`,
	// by a file of the work's, which it must not have led elsewhere
	"file.py": `
import os, subprocess, sys
try:
    subprocess.run([os.environ["COVE_JUDGED"], "python3", "/work/main.py"], timeout=20, cwd="/")
except subprocess.TimeoutExpired:
    pass
try:
    with open("/tests/expected/5") as want, open("/work/out/answer") as got:
        right = want.read() == got.read()
except OSError as e:
    print(e)
    right = False
with open(os.environ["COVE_REWARD"], "w") as f:
    f.write(str(float(right)))
`,
	// by a second python, after the work has run
	"twice.sh": `
echo 2 3 | $COVE_JUDGED sh -c 'test "$HOME" = /tmp && exec python3 /work/main.py' > "$HOME/got"
python3 -c 'import os
open(os.environ["COVE_REWARD"], "w").write(str(float(open(os.environ["HOME"] + "/got").read() == "5\n")))'
`,
}

// runs is the work where it is run and not imported.
func runs(python string) string {
	return "cat > /work/main.py <<'EOF_OF_IT'\n" + python + "\nEOF_OF_IT\n"
}

const rightProgram = "a, b = map(int, input().split())\nprint(a + b)"

// Where the judge has a process and a user of its own, no work that prints the
// wrong thing is worth anything, whatever else it does.
func TestJudgeApart(t *testing.T) {
	w := world.New(t, world.Options{})
	tests := w.Tests(t, apart)
	reward := &covev1.CreateGradeRequest{Args: []string{"python3", "-I", "/tests/judge.py"}, Results: "reward", Separate: true}
	junit := &covev1.CreateGradeRequest{Command: "python3 -P -m pytest -q -p no:cacheprovider --junitxml=$COVE_RESULTS /tests", Results: "junit", Separate: true, Expected: []string{"test_program::test_user"}}
	file := &covev1.CreateGradeRequest{Args: []string{"python3", "-I", "/tests/file.py"}, Results: "reward", Separate: true}
	twice := &covev1.CreateGradeRequest{Args: []string{"sh", "/tests/twice.sh"}, Results: "reward", Separate: true}
	exit := &covev1.CreateGradeRequest{Command: `[ "$(echo 2 3 | $COVE_JUDGED python3 /work/main.py)" = 5 ]`, Separate: true}
	for _, c := range []struct {
		name, do string
		how      *covev1.CreateGradeRequest
		want     float64
	}{
		{"right, by a reward", runs(rightProgram), reward, 1},
		{"right, by JUnit", runs(rightProgram), junit, 1},
		{"right, by an exit code", runs(rightProgram), exit, 1},
		{"wrong, by a reward", runs("print(7)"), reward, 0},
		{"wrong, by JUnit", runs("print(7)"), junit, 0},
		{"wrong, by an exit code", runs("print(7)"), exit, 0},
		{"equal to everything", runs("class A:\n    def __eq__(self, o): return True\nprint(A())"), reward, 0},
		{"reads what is expected", runs("import glob, os\nfor d in ('/tests', '/run/cove-grade/tests', '/proc/1/root/tests', '/proc/%d/root/run/cove-grade/tests' % os.getppid()):\n    for f in glob.glob(d + '/expected/*'): print(open(f).read())\n    try: print(os.listdir(d))\n    except OSError as e: print(e)"), reward, 0},
		{"writes the reward", runs("import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        for d in ('/run/cove-grade', '/proc/1/root/run/cove-grade', '/proc/%d/cwd/..' % os.getppid()):\n            try: open(d + '/reward', 'w').write('1')\n            except OSError: pass\n        time.sleep(0.01)\nprint(7)"), reward, 0},
		{"traces and kills the judge", runs("import ctypes, os, signal\nl = ctypes.CDLL(None)\nprint(l.ptrace(16, os.getppid(), 0, 0))\nfor p in (os.getppid(), -1, 1):\n    try: os.kill(p, 9)\n    except OSError: pass\ntry: open('/proc/%d/mem' % os.getppid(), 'r+b')\nexcept OSError: pass"), reward, 0},
		{"becomes root", `cp /bin/bash /work/rootsh; chmod 6755 /work/rootsh;` + runs("import os, subprocess\ntry: os.setuid(0)\nexcept OSError: pass\nfor c in (['/work/rootsh', '-p', '-c'], ['sudo', '-n', 'sh', '-c'], ['su', '-c']):\n    try: subprocess.run(c + ['echo 1 > /run/cove-grade/reward; cat /tests/expected/*'], timeout=1, stdin=subprocess.DEVNULL)\n    except Exception: pass"), reward, 0},
		{"right, by a file", "mkdir /work/out\n" + runs("open('/work/out/answer', 'w').write('5\\n')"), file, 1},
		{"a file that is a link to what is expected", "mkdir /work/out; ln -s /var/run/cove-grade/tests/expected/5 /work/out/answer\n" + runs("pass"), file, 0},
		{"a file that becomes a link to what is expected", "mkdir /work/out\n" + runs("import os\nos.symlink('/tests/expected/5', '/work/out/answer')"), file, 0},
		{"a file below what becomes a link", runs("import os\nos.mkdir('/tmp/d'); os.symlink('/run/cove-grade/tests/expected/5', '/tmp/d/answer'); os.symlink('/tmp/d', '/work/out')"), file, 0},
		{"a file that becomes a link to what the judge has open", "mkdir /work/out\n" + runs("import os\nos.symlink('/proc/self/fd/3', '/work/out/answer')"), file, 0},
		{"right, judged by two", runs(rightProgram), twice, 1},
		{"leaves code in a home", runs("import os, sys\nfor h in ('/tmp', os.path.expanduser('~'), '/run/cove-grade/home'):\n    d = h + '/.local/lib/python%d.%d/site-packages' % sys.version_info[:2]\n    try: os.makedirs(d)\n    except OSError: continue\n    open(d + '/x.pth', 'w').write(\"import os; os.getuid() == 0 and (open(os.environ['COVE_REWARD'], 'w').write('1'), os._exit(0))\\n\")\nprint(7)"), twice, 0},
		{"prints what is no text, by a reward", runs("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe')"), reward, 0},
		{"prints what is no text, by JUnit", runs("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe')"), junit, 0},
		{"is a link to the judge", `ln -sf /tests/judge.py /work/main.py`, reward, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := w.Create(t, world.Small())
			b.Must(t, "mkdir -p /work\n"+c.do)
			r := &covev1.CreateGradeRequest{Tests: tests, Command: c.how.Command, Args: c.how.Args, Results: c.how.Results, Separate: true, Expected: c.how.Expected,
				Artifacts: []string{"/work"}, Timeout: durationpb.New(time.Minute)}
			graded(t, b.Grade(t, r), c.want)
		})
	}
}

// Without a judge apart, what the exit code is taken of is of the work's own user: it
// can be ended by the work, but not be made to say something else.
func TestWorkDoesNotTraceItsJudge(t *testing.T) {
	w := world.New(t, world.Options{})
	for _, c := range []struct {
		name, python string
		want         float64
	}{
		{"what it started", "p = os.fork()\nif p == 0:\n    import time; time.sleep(60)\ncan = l.ptrace(16, p, 0, 0) == 0\nif can: l.ptrace(17, p, 0, 0)\nos.kill(p, 9)\nsys.exit(not can)", 1},
		{"what started it", "sys.exit(l.ptrace(16, p, 0, 0) != 0)", 0},
		{"the memory of what started it", "open('/proc/%d/mem' % p, 'r+b')", 0},
		{"the memory of what started it, by a call", "class V(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('n', ctypes.c_size_t)]\nb = ctypes.create_string_buffer(1)\nv = V(ctypes.addressof(b), 1)\nsys.exit(l.process_vm_readv(p, ctypes.byref(v), 1, ctypes.byref(v), 1, 0) < 0 and ctypes.get_errno() == 1)", 0},
		{"what started it, from a process nobody waits for", "import time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        if l.ptrace(16, p, 0, 0) == 0: open('/tmp/did', 'w').close()\n        open('/tmp/over', 'w').close()\n        os._exit(0)\n    os._exit(0)\nwhile not os.path.exists('/tmp/over'): time.sleep(0.01)\nsys.exit(not os.path.exists('/tmp/did'))", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := w.Create(t, world.Small())
			b.Must(t, "mkdir -p /work\n"+runs("import ctypes, os, sys\nl = ctypes.CDLL(None, use_errno=True)\np = os.getppid()\n"+c.python))
			graded(t, b.Grade(t, &covev1.CreateGradeRequest{Command: "python3 /work/main.py; exit $?", Artifacts: []string{"/work"}, Timeout: durationpb.New(time.Minute)}), c.want)
		})
	}
}

// What a sandbox did to a machine is in its verdict, and changes no reward.
func TestFindings(t *testing.T) {
	w := world.New(t, world.Options{})
	tests := w.Tests(t, hidden)
	b := w.Create(t, world.Small())
	b.Must(t, wrong+solution("def add(a, b): return a + b")+`echo forty-two > answer.txt; cp /bin/true /usr/local/bin/python3; cp /bin/true /usr/local/bin/mine; echo x > /etc/ld.so.preload; rm /etc/ld.so.preload
	echo > /work/conftest.py; mkdir -p .git/objects/pack .git/hooks; echo > .git/objects/pack/p; echo > .git/hooks/post-checkout; echo > .git/FETCH_HEAD; echo > x.pth; cp /bin/true sh; chmod 4755 sh; mkfifo pipe; ln -s /tests t
	echo > /etc/cron.d/x; echo >> ~/.bashrc; mkdir -p ~/.cache/pip; echo > ~/.cache/pip/x; mkdir -p /tests; echo > /tests/test_work.py; echo 1 > reward.txt`)
	g := b.Grade(t, &covev1.CreateGradeRequest{Tests: tests, Artifacts: []string{"/work"}})
	graded(t, g, 1)
	found := map[string]bool{} // kind and path → carried
	for _, f := range g.Findings {
		found[f.Kind+" "+f.Path] = f.Carried
	}
	for want, carried := range map[string]bool{"interpreter /usr/local/bin/python3": false, "program /usr/local/bin/mine": false, "test_config /work/conftest.py": true, "git_objects /work/.git": false,
		"git_config /work/.git/hooks/post-checkout": false, "git_history /work/.git": false, "python_path /work/x.pth": true, "setuid /work/sh": true, "special /work/pipe": false, "link /work/t": false,
		"cron /etc/cron.d/x": false, "shell /root/.bashrc": false, "package_cache /root/.cache/pip": false, "tests /tests/test_work.py": false, "reward /work/reward.txt": true} {
		if got, ok := found[want]; !ok || got != carried {
			t.Errorf("%s: found %v, carried %v, want carried %v\n%v", want, ok, got, carried, g.Findings)
		}
	}
	if len(found) > 25 {
		t.Errorf("%d findings of a sandbox that did fifteen things: %v", len(found), g.Findings)
	}
	if _, err := b.TryKill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again := w.WaitGrade(t, g.Id); again.GetReward() != 1 || again.Digest != g.Digest || len(again.Findings) != len(g.Findings) {
		t.Errorf("the verdict after the sandbox: %v", again)
	}
}

// The causes of a grade that came to nothing are told apart.
func TestGradeFaults(t *testing.T) {
	w := world.New(t, world.Options{})
	tests := w.Tests(t, hidden)
	work := func(t *testing.T, python string) *world.Box {
		b := w.Create(t, world.Small())
		b.Must(t, wrong+solution(python))
		return b
	}
	right := "def add(a, b): return a + b"
	for _, c := range []struct {
		name, python string
		r            *covev1.CreateGradeRequest
		state        string
		reward       bool
	}{
		{"work that never ends", "import time\ndef add(a, b): time.sleep(1000)", &covev1.CreateGradeRequest{Timeout: durationpb.New(3 * time.Second)}, "timeout", true},
		{"a command that never ends", right, &covev1.CreateGradeRequest{Command: "(sleep 1000 &) ; sleep 1000", Timeout: durationpb.New(time.Second)}, "timeout", true},
		{"work that takes all memory", "x = []\nwhile True: x.append(bytearray(b'x') * (8 << 20))", &covev1.CreateGradeRequest{}, "graded", true},
		{"a command that takes all memory", right, &covev1.CreateGradeRequest{Args: []string{"python3", "-c", "x = []\nwhile True: x.append(bytearray(b'x') * (8 << 20))"}}, "oom", true},
		{"work that fills the disk", "f = open('/tmp/big', 'wb')\nwhile True: f.write(b'x' * (8 << 20))", &covev1.CreateGradeRequest{}, "graded", true},
		{"work that fills the judge's disk", right, &covev1.CreateGradeRequest{Command: "$COVE_JUDGED dd if=/dev/zero of=/tmp/big bs=1M 2>/dev/null; echo 1 > $COVE_REWARD || exit 1", Separate: true, Results: "reward"}, "graded", true},
		{"no such command", right, &covev1.CreateGradeRequest{Args: []string{"no-such-program"}}, "grader_failed", false},
		{"no such directory", right, &covev1.CreateGradeRequest{Args: []string{"true"}, Cwd: "/nowhere"}, "grader_failed", false},
		{"a judge that writes nothing", right, &covev1.CreateGradeRequest{Args: []string{"true"}, Separate: true, Results: "reward"}, "grader_failed", false},
		{"a judge that writes nonsense", right, &covev1.CreateGradeRequest{Command: "echo NaN > $COVE_REWARD", Separate: true, Results: "reward"}, "grader_failed", false},
		{"tests that are not there", right, &covev1.CreateGradeRequest{Args: []string{"pytest", "test_other.py"}}, "grader_failed", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := work(t, c.python)
			c.r.Tests, c.r.Artifacts = tests, []string{"/work"}
			g := b.Grade(t, c.r)
			if g.State != c.state || (g.Reward != nil) != c.reward || g.GetReward() != 0 || (g.Error == nil) != c.reward {
				t.Errorf("%s, reward %v, error %v, want %s\n%s %s", g.State, g.Reward, g.Error, c.state, g.Reason, g.Log)
			}
			b.WantRunning(t)
		})
	}
	t.Run("a directory where the image has a link", func(t *testing.T) {
		setup := w.Create(t, world.Small())
		setup.Must(t, "mkdir -p /opt/x && ln -s /etc /opt/x/link")
		trusted := setup.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot})
		b := w.Create(t, sandbox.Spec{Snapshot: trusted.ID})
		b.Must(t, "rm /opt/x/link && mkdir /opt/x/link && echo evil > /opt/x/link/evil.conf")
		graded(t, b.Grade(t, &covev1.CreateGradeRequest{Command: "test ! -e /etc/evil.conf && test -f /opt/x/link/evil.conf && test ! -L /opt/x/link", Artifacts: []string{"/opt/x"}, Snapshot: trusted.ID}), 1)
	})
	t.Run("refused", func(t *testing.T) {
		b := work(t, right)
		snap := b.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot})
		from := w.Create(t, sandbox.Spec{Snapshot: snap.ID})
		for name, c := range map[string]struct {
			b     *world.Box
			r     *covev1.CreateGradeRequest
			class sandbox.Class
		}{
			"no artifacts":          {b, &covev1.CreateGradeRequest{Tests: tests}, sandbox.Invalid},
			"the system":            {b, &covev1.CreateGradeRequest{Tests: tests, Artifacts: []string{"/usr"}}, sandbox.Invalid},
			"the tests":             {b, &covev1.CreateGradeRequest{Tests: tests, Artifacts: []string{"/tests/x"}}, sandbox.Invalid},
			"no such tests":         {b, &covev1.CreateGradeRequest{Tests: "nosuch", Artifacts: []string{"/work"}}, sandbox.NotFound},
			"other tests":           {b, &covev1.CreateGradeRequest{Tests: snap.ID, Artifacts: []string{"/work"}}, sandbox.Invalid},
			"a report of the work":  {b, &covev1.CreateGradeRequest{Tests: tests, Artifacts: []string{"/work"}, Command: "true", Results: "junit"}, sandbox.Invalid},
			"a choice of tests":     {b, &covev1.CreateGradeRequest{Tests: tests, Artifacts: []string{"/work"}, Command: "pytest -k small"}, sandbox.Invalid},
			"an image of the agent": {from, &covev1.CreateGradeRequest{Tests: tests, Artifacts: []string{"/work"}}, sandbox.Precondition},
		} {
			_, err := c.b.TryGrade(t.Context(), c.r)
			if sandbox.ClassOf(err) != c.class {
				t.Errorf("%s: %v (%s), want %s", name, err, sandbox.ClassOf(err), c.class)
			}
		}
		graded(t, from.Grade(t, &covev1.CreateGradeRequest{Tests: tests, Artifacts: []string{"/work"}, Image: "base"}), 0) // the work is in the snapshot, not in what changed since
		graded(t, from.Grade(t, &covev1.CreateGradeRequest{Args: []string{"grep", "a + b", "/work/solution.py"}, Artifacts: []string{"/work"}, Snapshot: snap.ID}), 1)
	})
}
