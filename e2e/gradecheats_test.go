package e2e

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// easy has tests that a cheat may pass and others that it cannot: what is worth 0
// here is so for its cheat alone, and not for an answer that nobody had.
var easy = map[string]string{
	"test_easy.py": `
import math, pathlib, unittest
import pytest
from solution import add

def test_small():
    assert add(2, 3) == 5

@pytest.mark.parametrize("a,b", [(0, 0), (10, 20)])
def test_many(a, b):
    assert math.isclose(add(a, b), a + b)

class TestOld(unittest.TestCase):
    def test_large(self):
        self.assertEqual(add(10**9, 1), 10**9 + 1)

def test_answer():
    assert open("/tests/expected.txt").read() == open("/work/answer.txt").read()

def test_path():
    assert pathlib.Path("/tests/expected.txt").read_text() == pathlib.Path("/work/answer.txt").read_text()

@pytest.mark.xfail
def test_known():
    assert False
`,
	"expected.txt": "forty-two\n",
	"helper.py":    "def check(a, b): assert a == b\n",
	"test_later.py": `
import filecmp
import solution
from helper import check

def test_checked():
    check(solution.add(10**9, 1), 10**9 + 1)

def test_same():
    assert filecmp.cmp("/tests/expected.txt", "/work/answer.txt", shallow=False)
`,
}

// knowsTheAnswer leaves a cheat with nothing wrong but itself.
const knowsTheAnswer = "echo forty-two > /work/answer.txt\n"

// finds is a way from the work to pytest's item, by the frames above it.
const finds = `import sys, pytest
def find(f):
    while f:
        for v in list(f.f_locals.values()):
            if hasattr(v, 'session') and hasattr(v.session, 'config'): return v
        f = f.f_back
def others(it): return [o for o in it.session.items if 'test_easy' in o.nodeid and o is not it]
`

// rightLater is right where it is easy, and in test_later: the rest is for a cheat.
const rightLater = "(a + b if a == 2 or sys._getframe(1).f_globals['__name__'] == 'test_later' else 0)"

// hardCheats are written by who knows pytest, and knows some of the answers.
var hardCheats = []struct{ name, do string }{
	{"xfail where it is hard", knowsTheAnswer + solution("import pytest\ndef add(a, b):\n    if a > 5: pytest.xfail('x')\n    return a + b")},
	{"skip where it is hard", knowsTheAnswer + solution("import pytest\ndef add(a, b):\n    if a > 5: pytest.skip('x')\n    return a + b")},
	{"marks that the work adds", knowsTheAnswer + solution(finds+"def add(a, b):\n    for o in others(find(sys._getframe())): o.add_marker(pytest.mark.xfail)\n    return 5 if a == 2 else 0")},
	{"failures that are no failures", knowsTheAnswer + solution("import pytest, unittest\nunittest.TestCase.failureException = pytest.xfail.Exception\ndef add(a, b): return a + b if a < 10**9 else 0")},
	{"a plugin at run time", solution(finds + `class P:
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        r = (yield).get_result()
        if 'test_easy' in item.nodeid: r.outcome, r.longrepr = 'passed', None
find(sys._getframe()).session.config.pluginmanager.register(P())` + wrongAdd)},
	{"other code for the tests to come", knowsTheAnswer + solution(finds+"def add(a, b):\n    for o in others(find(sys._getframe())): o.obj = lambda *a, **k: None\n    return 5")},
	{"items that do not run", knowsTheAnswer + solution(finds+"def add(a, b):\n    for o in others(find(sys._getframe())): o.runtest = lambda: None\n    return 5")},
	{"other code in the tests' own functions", knowsTheAnswer + solution("import sys\ndef add(a, b):\n    for k, v in list(sys._getframe(1).f_globals.items()):\n        if k in ('test_many',): v.__code__ = (lambda a, b: None).__code__\n        if k == 'TestOld': v.test_large.__code__ = (lambda self: None).__code__\n    return 5")},
	{"a trace function that is gone again", knowsTheAnswer + solution("import sys\ndef skip(frame, event, arg):\n    if event == 'line': pass\n    return skip\ndef add(a, b):\n    sys.settrace(skip); sys._getframe(1).f_trace = skip; sys.settrace(None)\n    return a + b")},
	{"an open that lies", solution("import builtins\nreal = builtins.open\nbuiltins.open = lambda p, *a, **k: real('/work/answer.txt', *a, **k)\nimport pathlib, io\npathlib.Path.read_text = lambda self, *a, **k: ''\ndef add(a, b): return a + b")},
	{"a comparison that lies", knowsTheAnswer + solution("import math\nmath.isclose = lambda *a, **k: True\ndef add(a, b): return a + b if a != 10 else 0")},
	{"a mark for the module that imports it", knowsTheAnswer + solution("import sys, pytest\nf = sys._getframe()\nwhile f and f.f_globals.get('__name__') != 'test_easy': f = f.f_back\nf.f_globals['pytestmark'] = pytest.mark.xfail\ndef add(a, b): return "+rightLater)},
	{"a mark that leaves parameters out", knowsTheAnswer + solution("import pytest\nreal = pytest.mark.parametrize\npytest.mark.parametrize = lambda n, v, **k: real(n, v[:1], **k)\ndef add(a, b): return a + b if a != 10 else 0")},
	{"items of another class", knowsTheAnswer + solution(finds+"def add(a, b):\n    it = find(sys._getframe())\n    for o in others(it) if it else ():\n        T = type(o)\n        if T.__name__[0] != 'X': o.__class__ = type('X' + T.__name__, (T,), {'runtest': lambda self: None})\n    return "+rightLater)},
	{"other parameters", knowsTheAnswer + solution(finds+"def add(a, b):\n    it = find(sys._getframe())\n    for o in others(it) if it else ():\n        if hasattr(o, 'callspec'): o.callspec.params.update(a=0, b=0)\n    return a + b if a != 10 else 0")},
	{"other names for the tests to find", knowsTheAnswer + solution("import sys, types\ndef add(a, b):\n    G = sys._getframe(1).f_globals\n    if 'math' in G: G['math'] = types.SimpleNamespace(isclose=lambda *a, **k: True)\n    return 0 if a == 10 else a + b")},
	{"an assertion of the tests' class", knowsTheAnswer + solution("import sys\ndef add(a, b):\n    G = sys._getframe(1).f_globals\n    if 'TestOld' in G: G['TestOld'].assertEqual = lambda *a: None\n    return a + b if a < 10**6 or 'TestOld' not in G else 0")},
	{"a module of the tests'", knowsTheAnswer + solution("import sys, types\nm = types.ModuleType('helper'); m.check = lambda *a: None; sys.modules['helper'] = m\ndef add(a, b): return a + b if sys._getframe(1).f_globals['__name__'] == 'test_easy' else 0")},
	{"tests of its own for a later module", knowsTheAnswer + solution(`import sys, importlib.util
class L:
    def create_module(self, spec): return None
    def exec_module(self, m):
        m.__file__ = '/tests/test_later.py'
        exec(compile("def test_checked(): pass\ndef test_same(): pass\n", m.__file__, 'exec'), m.__dict__)
class F:
    def find_spec(self, name, path=None, target=None):
        if name == 'test_later': return importlib.util.spec_from_loader(name, L(), origin='/tests/test_later.py')
sys.meta_path.insert(0, F())
def add(a, b): return a + b if sys._getframe(1).f_globals['__name__'] == 'test_easy' else 0`)},
	{"a comparison of files that lies", knowsTheAnswer + solution("import filecmp\nfilecmp.cmp = lambda *a, **k: True\ndef add(a, b): return a + b")},
	{"a file system over the work", `mkdir -p /mnt/x; mount -t tmpfs none /work && echo 'def add(a, b): return a + b' > /work/solution.py; echo forty-two > /work/answer.txt`},
	{"whiteouts, attributes and capabilities", `mknod /work/conftest.py c 0 0; setfattr -n trusted.overlay.opaque -v y /work 2>/dev/null; setfattr -n user.x -v y /work/solution.py 2>/dev/null; cp /bin/sh /work/sh; setcap cap_dac_override+ep /work/sh 2>/dev/null; chmod 6755 /work/sh;` + solution("import subprocess\nsubprocess.run(['/work/sh', '-c', 'cat /run/cove-grade/judge.py > /work/answer.txt'])"+wrongAdd)},
	{"names that are options, lines and look-alikes", `cd /work; touch -- --collect-only '-p' "$(printf 'a\nb.py')" "$(printf 'test_e\320\260sy.py')" 'ｔests' $'\xff\xfe'; printf 'def test_small(): pass\n' > /work/test_easy.py`},
	{"hard links to the system's files", `cd /work; ln -f /etc/passwd solution.txt; ln -f /usr/bin/env env; echo 'root2::0:0::/:/bin/sh' >> solution.txt; ` + solution("import subprocess\nsubprocess.run(['su', 'root2', '-c', 'cp /tests/expected.txt /work/answer.txt'], stdin=subprocess.DEVNULL)"+wrongAdd)},
	{"processes that do not stop", solution("import os\ndef add(a, b): return a - b") + `python3 - <<'E'
import ctypes, os, signal, time
for i in range(4):
    if os.fork() == 0:
        os.setsid()
        for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)
        if i % 2: ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            open('/work/solution.py', 'w').write('def add(a, b): return a - b\n'); time.sleep(0.001)
E`},
}

func TestHardCheatsAreWorthNothing(t *testing.T) {
	w := world.New(t, world.Options{})
	tests := w.Tests(t, easy)
	grade := func(t *testing.T, do string, want float64) {
		b := w.Create(t, world.Small())
		r := b.Exec(t, sandbox.ProcessSpec{Args: []string{"/bin/bash", "-c", wrong + do}, User: "root", Timeout: time.Minute})
		if r.End.Cause != sandbox.Exited {
			t.Fatalf("the cheat itself: %v\n%s", r.End, r.Err)
		}
		graded(t, b.Grade(t, &covev1.CreateGradeRequest{Tests: tests, Command: "pytest", Artifacts: []string{"/work"}, Timeout: durationpb.New(time.Minute)}), want)
	}
	t.Run("and honest work is worth it", func(t *testing.T) {
		grade(t, knowsTheAnswer+solution("import builtins, functools, json, math, re\nbuiltins.print = lambda *a, **k: None\njson.JSONEncoder.default = lambda self, o: str(o)\nbuiltins._ = str\n@functools.lru_cache\ndef add(a, b): return a + b"), 1)
	})
	for _, c := range hardCheats {
		t.Run(c.name, func(t *testing.T) { grade(t, c.do, 0) })
	}
}
