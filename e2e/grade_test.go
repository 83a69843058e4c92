package e2e

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	covev1 "github.com/cove-sandbox/cove/api/cove/v1"
	"github.com/cove-sandbox/cove/e2e/world"
	"github.com/cove-sandbox/cove/sandbox"
)

// hidden is what work is graded by where it is imported into the tests.
var hidden = map[string]string{
	"test_work.py": `
import unittest
import pytest
from solution import add

def test_small():
    assert add(2, 3) == 5

@pytest.mark.parametrize("a,b", [(0, 0), (-1, 1), (10, 20)])
def test_many(a, b):
    assert add(a, b) == a + b

class TestOld(unittest.TestCase):
    def test_large(self):
        self.assertEqual(add(10**9, 1), 10**9 + 1)

@pytest.mark.skipif(True, reason="not here")
def test_elsewhere():
    assert False

def test_answer():
    with open("/work/answer.txt") as f:
        with open("/tests/expected.txt") as e:
            assert f.read().strip() == e.read().strip()
`,
	"expected.txt": "forty-two\n",
}

// wrong is the work of who does not know: the cheats are over it.
const wrong = `mkdir -p /work && cd /work && echo 'def add(a, b): return a - b' > solution.py && echo dunno > answer.txt
`

// solution puts a program where the tests import it from.
func solution(python string) string {
	return "cat > /work/solution.py <<'EOF_OF_IT'\n" + python + "\nEOF_OF_IT\n"
}

const wrongAdd = "\ndef add(a, b): return a - b\n"

// fooled names the cheats that get past a grader who runs pytest in the sandbox and
// looks at its exit code: that they are worth 0 here is the grading's doing, and not
// for being no cheats.
var fooled = []string{"os._exit(0) on import", "os._exit(0) in a test", "an exit hook", "a signal that ends well", "tests that are not run", "reports that say passed", "an answer that is a link to the expected one", "a link by way of another", "a link that climbs behind a link", "a link through /proc", "another python", "sitecustomize", ".pth"}

// cheats are ways to be taken for right without being it. Each must be worth 0,
// and not be taken for a fault of the grader.
var cheats = []struct{ name, do string }{
	{"no work at all", ""},
	{"a reward that is there already", `mkdir -p /run/cove-grade /logs/verifier && for f in /run/cove-grade/reward /run/cove-grade/results /logs/verifier/reward.txt /work/reward.json /work/reward.txt; do echo 1 > $f; done`},
	{"a daemon that writes the reward", `mkdir -p /run/cove-grade; (while :; do echo 1 > /run/cove-grade/reward; echo forty-two > /tests/expected.txt; sleep 0.01; done) >/dev/null 2>&1 &`},
	{"another python", `for p in /usr/bin/python3 /usr/bin/python3.[0-9]* /usr/local/bin/python3; do printf '#!/bin/sh\nexit 0\n' > /tmp/p; chmod 755 /tmp/p; mv -f /tmp/p $p; cp $p /tmp/p 2>/dev/null; done; true`},
	{"another shell", `printf '#!/bin/sh\nexit 0\n' > /tmp/b; chmod 755 /tmp/b; cp /tmp/b /usr/local/bin/bash; cp /tmp/b /usr/local/bin/sh; mv -f /tmp/b /bin/bash`},
	{"another pytest", `d=$(python3 -c 'import pytest, os; print(os.path.dirname(pytest.__file__))'); echo 'def main(*a, **k): return 0' > $d/__init__.py; printf '#!/bin/sh\nexit 0\n' > /usr/bin/pytest; printf '#!/bin/sh\nexit 0\n' > /usr/bin/pytest-3`},
	{"ld.so.preload", `cp /lib/*/libm.so.6 /work/evil.so; echo /work/evil.so > /etc/ld.so.preload; export LD_PRELOAD=/work/evil.so; echo LD_PRELOAD=/work/evil.so >> /etc/environment`},
	{"sitecustomize", `for d in /work $(python3 -c 'import site; print(*site.getsitepackages())') ~/.local/lib/python3.11/site-packages; do mkdir -p $d; echo 'import os; os._exit(0)' > $d/sitecustomize.py; cp $d/sitecustomize.py $d/usercustomize.py; done`},
	{".pth", `for d in /work $(python3 -c 'import site; print(*site.getsitepackages())'); do mkdir -p $d; echo 'import os; os._exit(0)' > $d/evil.pth; done`},
	{"conftest", `cat > /work/conftest.py <<'E'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    r = (yield).get_result(); r.outcome = "passed"
def pytest_collection_modifyitems(items): items[:] = []
E
cp /work/conftest.py /conftest.py; mkdir -p /tests; cp /work/conftest.py /tests/conftest.py`},
	{"a pytest beside the work", `mkdir -p /work/_pytest /work/evil-1.0.dist-info; echo 'def main(*a, **k): return 0' > /work/pytest.py; cp /work/pytest.py /work/_pytest/__init__.py; echo 'import os; os._exit(0)' > /work/evil.py; printf '[pytest11]\nevil = evil\n' > /work/evil-1.0.dist-info/entry_points.txt; printf 'Name: evil\nVersion: 1.0\n' > /work/evil-1.0.dist-info/METADATA`},
	{"pytest.ini and friends", `printf '[pytest]\naddopts = --collect-only -p evil\n' > /work/pytest.ini; printf '[tool.pytest.ini_options]\naddopts = "--collect-only"\n' > /work/pyproject.toml; printf '[tool:pytest]\naddopts = --collect-only\n' > /work/setup.cfg; cp /work/pytest.ini /pytest.ini; export PYTEST_ADDOPTS=--collect-only; echo PYTEST_ADDOPTS=--collect-only >> /etc/environment`},
	{"modules named like the library's", `mkdir -p /work/unittest; for m in json os ast select site importlib; do echo 'raise SystemExit(0)' > /work/$m.py; done; echo 'raise SystemExit(0)' > /work/unittest/__init__.py`},
	{"an answer that is a link to the expected one", `echo 'def add(a, b): return a + b' > /work/solution.py; ln -sf /tests/expected.txt /work/answer.txt`},
	{"a link by way of another", `echo 'def add(a, b): return a + b' > /work/solution.py; ln -s / /work/root; ln -sf root/tests/expected.txt /work/answer.txt`},
	{"a link that climbs behind a link", `echo 'def add(a, b): return a + b' > /work/solution.py; ln -s /usr /work/u; ln -sf u/../tests/expected.txt /work/answer.txt`},
	{"a link through /proc", `echo 'def add(a, b): return a + b' > /work/solution.py; ln -sf /proc/self/root/tests/expected.txt /work/answer.txt`},
	{"edited tests", `mkdir -p /tests; echo 'def test_small(): pass' > /tests/test_work.py; echo dunno > /tests/expected.txt; mkdir -p /work/tests; cp /tests/* /work/tests`},
	{"os._exit(0) on import", solution("import os\nos._exit(0)")},
	{"os._exit(3) on import", solution("import os\nos._exit(3)")},
	{"os._exit(0) in a test", solution("import os\ndef add(a, b): os._exit(0)")},
	{"sys.exit(0) on import", solution("import sys\nsys.exit(0)")},
	{"pytest.exit", solution("import pytest\npytest.exit('fine', returncode=0)")},
	{"an exit hook", solution("import atexit, os\natexit.register(os._exit, 0)" + wrongAdd)},
	{"a signal that ends well", solution("import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.2)\nimport time\ntime.sleep(1)" + wrongAdd)},
	{"a module that skips itself", solution("import pytest\npytest.skip('not today', allow_module_level=True)")},
	{"work that skips its tests", solution("import unittest\ndef add(a, b): raise unittest.SkipTest('x')")},
	{"work that says it was to fail", solution("import pytest\ndef add(a, b): pytest.xfail('x')")},
	{"no assertion is an error", solution("import builtins, unittest\nclass E(Exception):\n    def __new__(cls, *a): return None\nbuiltins.AssertionError = E\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'): setattr(unittest.TestCase, n, lambda *a, **k: None)" + wrongAdd)},
	{"tests that are not run", solution("import _pytest.python as p, _pytest.unittest as u\np.Function.runtest = lambda self: None\nu.TestCaseFunction.runtest = lambda self: None" + wrongAdd)},
	{"tests that are not run, but for others'", solution("import _pytest.python as p\nold = p.Function.runtest\ndef run(self):\n    if '/tests/' not in str(self.path): old(self)\np.Function.runtest = run" + wrongAdd)},
	{"other code in the same function", solution("import _pytest.python as p\np.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__" + wrongAdd)},
	{"reports that say passed", solution("import _pytest.reports as r\nold = r.TestReport.from_item_and_call.__func__\ndef make(cls, item, call):\n    out = old(cls, item, call); out.outcome = 'passed'; return out\nr.TestReport.from_item_and_call = classmethod(make)" + wrongAdd)},
	{"reports of its own", solution("import os, json\nfor fd in range(3, 40):\n    try: os.write(fd, b'x {\"kind\":\"end\"}\\n' + json.dumps({'kind': 'test', 'id': 'test_work.py::test_small', 'when': 'call', 'outcome': 'passed'}).encode() + b'\\n')\n    except OSError: pass\nos._exit(0)")},
	{"to kill the judge", solution("import os\nfor p in (os.getppid(), -1):\n    try: os.kill(p, 9)\n    except OSError: pass" + wrongAdd)},
	{"to write where the judge writes", solution("import os\nfor fd in (1, 2, 3):\n    try: open('/proc/%d/fd/%d' % (os.getppid(), fd), 'w').write('{\"ends\":1}')\n    except OSError: pass\ntry: open('/run/cove-grade/judge.py', 'w').write('')\nexcept OSError: pass\ntry: open('/tests/expected.txt', 'w').write('dunno')\nexcept OSError: pass" + wrongAdd)},
	{"a process that stays and writes reports", solution("import os, time\nif os.fork() == 0:\n    for i in range(200):\n        for fd in range(3, 20):\n            try: os.write(fd, b'{\"kind\":\"end\"}\\n')\n            except OSError: pass\n        time.sleep(0.01)\n    os._exit(0)" + wrongAdd)},
	{"git from the future, with hooks", `cd /work && git init -q . 2>/dev/null; mkdir -p .git/hooks .git/refs/heads; git config core.fsmonitor 'touch /tmp/owned'; printf '#!/bin/sh\ncp /tests/expected.txt /work/answer.txt\n' > .git/hooks/post-checkout; chmod 755 .git/hooks/*; echo 0123 > .git/refs/heads/future; echo x > .git/FETCH_HEAD`},
	{"a setuid shell", `cp /bin/bash /work/rootsh; chown root /work/rootsh; chmod 4755 /work/rootsh;` + solution("import subprocess\nsubprocess.run(['/work/rootsh', '-p', '-c', 'id -u > /tmp/id; cp /tests/expected.txt /work/answer.txt; echo dunno > /tests/expected.txt; kill -9 $(pgrep -f judge.py)'])"+wrongAdd)},
	{"cron and services", `mkdir -p /etc/cron.d /etc/systemd/system /var/spool/cron/crontabs; echo '* * * * * root cp /tests/expected.txt /work/answer.txt' | tee /etc/cron.d/x > /var/spool/cron/crontabs/root; printf '[Service]\nExecStart=/bin/true\n' > /etc/systemd/system/x.service`},
	{"shell rc files", `for f in ~/.bashrc ~/.profile /etc/profile.d/x.sh /etc/bash.bashrc /work/.bashrc; do echo 'exit 0' > $f; done; echo BASH_ENV=/work/.bashrc >> /etc/environment`},
	{"a poisoned cache of packages", `mkdir -p ~/.cache/pip/wheels /work/.cache/pip; echo evil > ~/.cache/pip/wheels/pytest.whl; printf '[global]\nindex-url = http://127.0.0.1:1/\n' > /etc/pip.conf`},
	{"a FIFO as an answer", `echo 'def add(a, b): return a + b' > /work/solution.py; rm /work/answer.txt; mkfifo /work/answer.txt`},
	{"a device as an answer", `echo 'def add(a, b): return a + b' > /work/solution.py; rm /work/answer.txt; mknod /work/answer.txt c 1 5`},
	{"a terabyte of holes", `echo 'def add(a, b): return a + b' > /work/solution.py; truncate -s 1T /work/answer.txt`},
	{"a syntax error, so that nothing is collected", solution("def add(a, b) return a + b")},
	{"python first on PATH", `mkdir -p /work/bin; printf '#!/bin/sh\nexit 0\n' > /work/bin/python3; chmod 755 /work/bin/python3; echo 'PATH=/work/bin:/usr/bin' > /etc/environment; export PATH=/work/bin:$PATH`},
	{"an import hook", solution("import sys\nclass F:\n    def find_spec(self, name, path=None, target=None): return None\nsys.meta_path.insert(0, F())\nimport _pytest.runner\n_pytest.runner.CallInfo.from_call = classmethod(lambda cls, func, when, reraise=None: cls(None, None, 0, 0, 0, when, _ispytest=True))" + wrongAdd)},
}

func graded(t *testing.T, g *covev1.Grade, want float64) {
	t.Helper()
	if g.State != "graded" || g.Reward == nil || g.GetReward() != want {
		t.Errorf("%s with %v (%s %v), want %v\ntests %v\nfindings %v\n%s", g.State, g.Reward, g.Reason, g.Error, want, g.Tests, g.Findings, g.Log)
	}
}

// TestCheatsAreWorthNothing runs each in a sandbox as root, then has it graded.
func TestCheatsAreWorthNothing(t *testing.T) {
	w := world.New(t, world.Options{})
	tests := w.Tests(t, hidden)
	control := 0
	for _, c := range cheats {
		t.Run(c.name, func(t *testing.T) {
			b := w.Create(t, world.Small())
			r := b.Exec(t, sandbox.ProcessSpec{Args: []string{"/bin/bash", "-c", wrong + c.do}, User: "root", Timeout: time.Minute})
			if r.End.Cause != sandbox.Exited {
				t.Fatalf("the cheat itself: %v\n%s", r.End, r.Err)
			}
			g := b.Grade(t, &covev1.CreateGradeRequest{Tests: tests, Command: "pytest", Artifacts: []string{"/work"}, Timeout: durationpb.New(time.Minute)})
			graded(t, g, 0)
			if slices.Contains(fooled, c.name) {
				control++
				for name, text := range hidden {
					b.Write(t, "/tests/"+name, []byte(text))
				}
				r := b.Exec(t, sandbox.ProcessSpec{Args: []string{"python3", "-m", "pytest", "-q", "/tests"}, Cwd: "/work", Env: map[string]string{"PYTHONPATH": "/work"}, User: "root", Timeout: time.Minute})
				if r.End.Cause != sandbox.Exited || r.End.ExitCode != 0 {
					t.Errorf("it is no cheat: %v\n%s", r.End, r.Out)
				}
			}
		})
	}
	if len(cheats) < 24 || control != len(fooled) {
		t.Errorf("%d cheats, %d of which are known to work elsewhere", len(cheats), control)
	}
}

// honest work is worth 1, whatever it changes to be what it is.
var honest = []struct {
	name, do  string
	artifacts []string
	tests     map[string]string
}{
	{name: "plain", do: solution("def add(a, b): return a + b")},
	{name: "a config of its own for tests", do: solution("def add(a, b): return a + b") + `printf '[pytest]\naddopts = -q\n' > /work/pytest.ini; printf '[tool.black]\nline-length = 99\n[tool.pytest.ini_options]\naddopts = "-x"\n' > /work/pyproject.toml; echo 'import sys' > /work/conftest.py; printf '[tool:pytest]\n' > /work/setup.cfg`},
	{name: "a package in hard links", do: `rm solution.py; mkdir -p solution /opt/cache; echo 'from .impl import add' > /opt/cache/i; echo 'def add(a, b): return a + b' > /opt/cache/j; ln /opt/cache/i solution/__init__.py; ln /opt/cache/j solution/impl.py; ln solution/impl.py solution/same.py`},
	{name: "threads, processes, temporary files and much output", do: solution("import atexit, subprocess, sys, tempfile, threading\natexit.register(lambda: None)\nthreading.Thread(target=lambda: None).start()\nprint('x' * 1000000)\ndef add(a, b):\n    with tempfile.TemporaryFile() as f: f.write(b'x')\n    return int(subprocess.run([sys.executable, '-c', 'print(%d + %d)' % (a, b)], capture_output=True, check=True).stdout)")},
	{name: "links within, and to the system", do: `mkdir -p impl; echo 'def add(a, b): return a + b' > impl/real.py; ln -sf impl/real.py solution.py; mkdir -p .venv/bin; ln -s /usr/bin/python3 .venv/bin/python; ln -s ../impl impl/self; ln -s /dev/null log`},
	{name: "below /root", do: `mkdir -p /root/task; echo 'def add(a, b): return a + b' > /root/task/solution.py; chmod 600 /root/task/solution.py`, artifacts: []string{"/root/task", "/work/answer.txt"}},
	{name: "a configuration, a tool and a library that were asked for", do: solution("def add(a, b): return a + b") + `echo 'limit = 9' > /etc/app.conf; printf '#!/bin/sh\necho tool $1\n' > /usr/local/bin/tool; chmod 755 /usr/local/bin/tool; d=/usr/local/lib/python3/dist-packages/extra; mkdir -p $d; echo 'x = 1' > $d/__init__.py; echo 'alias ll=ls' >> ~/.bashrc`,
		artifacts: []string{"/work", "/etc/app.conf", "/usr/local/bin/tool", "/usr/local/lib/python3/dist-packages/extra"},
		tests: map[string]string{"test_system.py": `
import subprocess
def test_tool(): assert subprocess.run(["tool", "a"], capture_output=True, text=True).stdout == "tool a\n"
def test_conf(): assert open("/etc/app.conf").read() == "limit = 9\n"
def test_library(): assert open("/usr/local/lib/python3/dist-packages/extra/__init__.py").read() == "x = 1\n"
`}},
	{name: "what it removed and replaced", do: `rm /etc/skel/.profile; rm /etc/skel/.bashrc; mkdir /etc/skel/.bashrc; echo x > /etc/skel/.bashrc/f; rm -rf /etc/skel/.bash_logout; rm -rf /etc/apt/apt.conf.d; echo 'not a directory' > /etc/apt/apt.conf.d; rm -rf /etc/apt/sources.list.d; mkdir /etc/apt/sources.list.d; echo only > /etc/apt/sources.list.d/one`,
		artifacts: []string{"/etc/skel", "/etc/apt"},
		tests: map[string]string{"test_removed.py": `
import os
def test_removed(): assert not os.path.exists("/etc/skel/.profile") and not os.path.exists("/etc/skel/.bash_logout")
def test_file_to_directory(): assert os.listdir("/etc/skel/.bashrc") == ["f"]
def test_directory_to_file(): assert open("/etc/apt/apt.conf.d").read() == "not a directory\n"
def test_new_directory(): assert os.listdir("/etc/apt/sources.list.d") == ["one"]
`}},
	{name: "mocks and fixtures of the tests", do: solution("def add(a, b): return a + b"),
		tests: map[string]string{"conftest.py": "import pytest\n@pytest.fixture\ndef five(): return 5\n", "helper.py": "ONE = 1\n", "pytest.ini": "[pytest]\nmarkers = slow\n", "sub/test_more.py": `
import builtins, pytest
from unittest import mock
import solution
def test_fixture(five): assert solution.add(2, 3) == five
def test_mock(monkeypatch):
    monkeypatch.setattr(builtins, "len", lambda x: 7)
    assert len([]) == 7
@mock.patch("solution.add", return_value=9)
def test_patched(m): assert solution.add(1, 1) == 9
@pytest.mark.xfail
def test_expected_to_fail(): assert False
class TestClass:
    @pytest.mark.parametrize("x", range(3))
    def test_in_class(self, x, tmp_path):
        (tmp_path / "f").write_text(str(x))
`, "test_top.py": "from helper import ONE\ndef test_helper(): assert ONE == 1\n"}},
	{name: "tests that leave some of themselves out", do: solution("import cProfile\ndef add(a, b):\n    \"\"\"\n    >>> add(2, 3)\n    5\n    \"\"\"\n    p = cProfile.Profile(); p.enable()\n    try: return a + b\n    finally: p.disable()"),
		tests: map[string]string{"conftest.py": "import pytest\ncollect_ignore = ['test_old.py']\n@pytest.fixture\ndef gpu(): pytest.skip('there is none')\n", "test_old.py": "def test_old(): assert False\n",
			"test_elsewhere.py": "import pytest\nx = pytest.importorskip('nosuchlibrary')\ndef test_x(): assert x\n", "test_some.py": `
import doctest, sys, typing, unittest
import pytest
import solution
slow = pytest.mark.skipif(True, reason="slow")
@pytest.fixture
def test_client(): return 5
def test_fixture(test_client): assert solution.add(2, 3) == test_client
def test_documented(): assert doctest.testmod(solution) == (0, 1)
def test_skips():
    if sys.platform != "win32": pytest.skip("not here")
def test_needs(): pytest.importorskip("nosuchlibrary")
def test_gpu(gpu): assert False
def test_known(): pytest.xfail("known")
@slow
def test_slow(): assert False
@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.xfail)])
def test_some(a): assert solution.add(a, 0) == 1
class TestCase(typing.NamedTuple):
    a: int
    def test_value(self): return self.a
class Base(unittest.TestCase):
    def test_it(self): self.assertEqual(solution.add(2, 3), self.want)
class TestFive(Base):
    want = 5
    @unittest.skip("not now")
    def test_decorated(self): self.fail()
    @unittest.expectedFailure
    def test_fails(self): self.fail()
    def test_called(self): self.skipTest("not now")
del Base
`}},
	{name: "tests of another name", do: solution("def add(a, b): return a + b"),
		tests: map[string]string{"pytest.ini": "[pytest]\npython_files = check_*.py\npython_functions = check_*\n", "check_add.py": "from solution import add\ndef check_small(): assert add(2, 3) == 5\ndef test_nothing(): assert False\n"}},
}

func TestHonestWorkIsWorthIt(t *testing.T) {
	w := world.New(t, world.Options{})
	usual := w.Tests(t, hidden)
	for _, h := range honest {
		t.Run(h.name, func(t *testing.T) {
			b := w.Create(t, world.Small())
			b.Must(t, wrong+"echo forty-two > /work/answer.txt\n"+h.do)
			tests := usual
			if h.tests != nil {
				tests = w.Tests(t, h.tests)
			}
			if h.artifacts == nil {
				h.artifacts = []string{"/work"}
			}
			g := b.Grade(t, &covev1.CreateGradeRequest{Tests: tests, Args: []string{"python3", "-m", "pytest"}, Artifacts: h.artifacts})
			graded(t, g, 1)
			b.WantRunning(t)
			if g.Digest == "" || g.ImageId == "" || strings.Contains(g.Log, " failed") {
				t.Errorf("%v", g)
			}
		})
	}
	t.Run("a plugin of the image's", func(t *testing.T) {
		setup := w.Create(t, world.Small())
		setup.Must(t, `d=$(python3 -c 'import site; print(site.getsitepackages()[0])'); mkdir -p $d/fives-1.0.dist-info; printf '[pytest11]\nfives = fives\n' > $d/fives-1.0.dist-info/entry_points.txt
printf 'Metadata-Version: 2.1\nName: fives\nVersion: 1.0\n' > $d/fives-1.0.dist-info/METADATA; printf 'import pytest\n@pytest.fixture\ndef five(): return 5\n' > $d/fives.py`)
		trusted := setup.Snapshot(t, world.Take{Kind: sandbox.FilesystemSnapshot})
		b := w.Create(t, sandbox.Spec{Snapshot: trusted.ID})
		b.Must(t, wrong+solution("def add(a, b): return a + b"))
		tests := w.Tests(t, map[string]string{"test_five.py": "from solution import add\ndef test_five(five): assert add(2, 3) == five\n"})
		graded(t, b.Grade(t, &covev1.CreateGradeRequest{Tests: tests, Command: "pytest", Artifacts: []string{"/work"}, Snapshot: trusted.ID}), 1)
	})
}
