# The judge of "results: pytest". The server puts this file where only root of the
# grader can read it and runs it as root, with -I -S: of what is in the grader, J
# (this process) loads the standard library and nothing else. J never imports a
# line of the work or of the tests.
#
#   J reads the tests' source and notes which tests there must be.
#   J forks C, which gives up root and runs pytest with the work in its process.
#   C reports each test over a pipe; J writes what it heard to its own stdout,
#   which C does not have. The server decides what that is worth.
#
# C shares its process with the work, so a work that is written against this very
# file can lie to J: docs/grading.md, "What is not provable". What it cannot do is
# end early, leave tests out, or get past a check that fails without being seen to.
import ast, json, os, select, sys, time

MAX_TESTS = 20000
MAX_LINE = 8192


def expected(root, wanted):
    """Ids of the tests that the source names, and files that cannot be read."""
    ids, broken = [], []
    for where, dirs, names in os.walk(root):
        dirs[:] = sorted(d for d in dirs if not d.startswith(".") and d not in ("__pycache__", "node_modules", "venv"))
        for name in sorted(names):
            if not (name.startswith("test_") and name.endswith(".py") or name.endswith("_test.py")):
                continue
            full = os.path.join(where, name)
            rel = os.path.relpath(full, root)
            try:
                with open(full, "rb") as f:
                    tree = ast.parse(f.read(), full)
            except (OSError, SyntaxError, ValueError) as e:
                broken.append("%s: %s" % (rel, e))
                continue
            ids += [rel + "::" + i for i in defined(tree.body)]
    if wanted:
        ids = [i for i in ids if any(i == w or i.startswith(w + "::") or i.startswith(w + "/") for w in wanted)]
    return ids[:MAX_TESTS], broken


def defined(body):
    function = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in body:
        if isinstance(node, function) and node.name.startswith("test"):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            bases = [ast.dump(b) for b in node.bases]
            unittest = any("TestCase" in b for b in bases)
            plain = node.name.startswith("Test") and not any(isinstance(n, function) and n.name == "__init__" for n in node.body)
            off = any(isinstance(n, ast.Assign) and any(getattr(t, "id", "") == "__test__" for t in n.targets) for n in node.body)
            if (unittest or plain) and not off:
                for name in defined(node.body):
                    yield node.name + "::" + name


CANARY = '''import unittest
import pytest


def test_%s():
    assert 1 == 2


class Test%s(unittest.TestCase):
    def test_%s(self):
        self.assertEqual(1, 2)


def test_%s():
    with pytest.raises(ValueError):
        pass


def test_%s():
    raise RuntimeError("x")
'''


def canaries(dir):
    """Tests that must fail: whoever has pytest pass everything passes these too."""
    def word():
        return "".join("abcdefghijklmnopqrstuvwxyz"[b % 26] for b in os.urandom(8))
    n = [word() for _ in range(5)]
    path = os.path.join(dir, "test_%s.py" % word())
    with open(path, "w") as f:
        f.write(CANARY % tuple(n))
    os.chmod(path, 0o444)
    return path, {"test_" + n[0], "Test%s::test_%s" % (n[1], n[2]), "test_" + n[3], "test_" + n[4]}


def child(conf, canary, names, fd, nonce):
    """C: gives up root, then has the work in its process."""
    uid = conf["uid"]
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # J's stdout is not ours
    os.environ.clear()
    os.environ.update(conf["env"])
    os.chdir(conf["cwd"] or "/")
    sys.dont_write_bytecode = True
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    try:
        import ctypes
        libc = ctypes.CDLL(None)
        libc.prctl(38, 1, 0, 0, 0)  # no new privileges
        libc.prctl(4, 0, 0, 0, 0)  # our descriptors and memory are not our siblings' to open
    except (ImportError, OSError, AttributeError):
        pass
    import site  # -I is in force: no directory of the work is on sys.path yet
    site.main()
    try:
        import pytest
    except ImportError as e:
        os.write(2, ("pytest cannot be imported in the grader: %s\n" % e).encode())
        os._exit(3)
    import unittest, doctest, importlib  # noqa: F401  before the work can be found under these names
    import _pytest.assertion.rewrite, _pytest.runner, _pytest.python, _pytest.unittest, _pytest.reports  # noqa: F401

    root = conf["tests"]
    artifacts = conf["paths"][::2]
    ours = [root, os.path.dirname(__file__)] + [p for p in sys.path if p]  # before the work's are there

    def below(file, dirs):
        return any(file.startswith(d.rstrip("/") + "/") for d in dirs)

    class Reporter:
        def __init__(self, fd):
            self.fd, self.patched, self.sound = fd, False, list(self.owned())
            self.config, self.items = None, {}
            sys.addaudithook(self.audit)  # which nobody can take away

        def owned(self):
            """Every function of the test frameworks: where it is kept, itself, its code."""
            import builtins
            classes = set()
            tops = ("_pytest", "pluggy", "unittest", "pytest")
            for name, module in list(sys.modules.items()):
                if name.split(".")[0] not in tops or module is None:
                    continue
                for key, value in list(vars(module).items()):
                    if hasattr(value, "__code__"):
                        yield name, vars(module), key, value, value.__code__
                        continue
                    if isinstance(value, type):
                        yield name, vars(module), key, value, None
                    if isinstance(value, type) and str(value.__module__).split(".")[0] in tops and value not in classes:
                        classes.add(value)
                        for k, v in list(vars(value).items()):
                            f = getattr(v, "__func__", getattr(v, "fget", v))
                            if hasattr(f, "__code__") and k != "_getini_unknown_type":  # which pytest replaces itself
                                yield name + "." + key, vars(value), k, v, f.__code__
            for key, value in list(vars(builtins).items()):
                if key[0] != "_" and key not in ("print", "input", "exit", "quit", "help", "copyright", "credits", "license") or key in ("__import__", "__build_class__"):
                    yield "builtins", vars(builtins), key, value, None
            # What tests compare and read with. Not what libraries replace for good reasons: os, socket, time, subprocess.
            for name in ("io", "re", "ast", "math", "json", "copy", "types", "difflib", "fnmatch", "operator", "functools", "genericpath", "posixpath"):
                for key, value in list(vars(sys.modules.get(name, object)).items()):
                    if key[0] != "_" and callable(value):
                        yield name, vars(sys.modules[name]), key, value, getattr(value, "__code__", None)
            import pathlib
            for kind in (pathlib.PurePath, pathlib.Path):
                for key, value in list(vars(kind).items()):
                    if hasattr(value, "__code__"):
                        yield "pathlib." + kind.__name__, vars(kind), key, value, value.__code__
            yield "unittest.TestCase", vars(unittest.TestCase), "failureException", AssertionError, None

        def send(self, what):
            line = (nonce + " " + json.dumps(what)).encode()
            if len(line) > MAX_LINE:
                line = (nonce + " " + json.dumps({**what, "text": "", "id": what.get("id", "")[:300]})).encode()
            os.write(self.fd, line + b"\n")

        def look(self):
            if self.patched:
                return
            changed = list(self.strangers())
            for where, kept, key, value, code in self.sound:
                now = kept.get(key)
                if now is not value or code is not None and getattr(getattr(now, "__func__", getattr(now, "fget", now)), "__code__", None) is not code:
                    changed.append((where + "." + key)[:100])
            if changed:
                self.tell(changed[:10])

        def tell(self, names):
            self.patched = True
            self.send({"kind": "patched", "names": names})

        def audit(self, event, args):
            """A trace function can jump over the line that would have failed, and be gone when it has."""
            if event in ("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback") and not self.patched:
                if not below(sys._getframe(1).f_code.co_filename, [root]):
                    self.tell([event])

        def strangers(self):
            """Hooks of pytest's that are neither the image's nor the tests'."""
            for name, caller in list(vars(self.config.hook).items()) if self.config else ():
                for impl in caller.get_hookimpls() if hasattr(caller, "get_hookimpls") else ():
                    file = getattr(getattr(impl.function, "__code__", None), "co_filename", "")
                    if not below(file, ours) or below(file, artifacts):
                        yield "a plugin's " + name

        def runs(self, item):
            """The code of a test by its name, which is what was collected."""
            f = getattr(item.parent.obj, getattr(item, "originalname", None) or item.name, None)
            return getattr(getattr(f, "__func__", f), "__code__", None)

        def pytest_collection_finish(self, session):
            # Nothing has run yet, so these are the marks and the code that the tests have.
            self.config = session.config
            for item in session.items:
                self.items[item.nodeid] = ({m.name for m in item.iter_markers()}, self.runs(item))

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_call(self, item):
            code = self.items.get(item.nodeid, ((), None))[1]
            now = getattr(item, "obj", None)
            now = getattr(getattr(now, "__func__", now), "__code__", None)
            if not self.patched and (self.runs(item) is not code or now is not code or {"runtest", "ihook"} & set(vars(item))):
                self.tell(["the test " + item.nodeid[:100]])

        def pytest_report_teststatus(self, report):
            if report.nodeid.partition("::")[2] in names:
                return "", "", ""  # they are ours, and would only confuse who reads the log

        def pytest_runtest_logreport(self, report):
            if report.when == "teardown":  # by now the tests' own mocks are undone
                self.look()
            if report.when != "call" and report.outcome == "passed":
                return
            text, marks = "", self.items.get(report.nodeid, ((), None))[0]
            if report.outcome != "passed":
                text = str(report.longreprtext or report.longrepr or "")[-1500:]
            self.send({"kind": "test", "id": report.nodeid[:1000], "when": report.when, "outcome": report.outcome, "seconds": report.duration,
                       "marked": bool(set(marks) & ({"xfail"} if hasattr(report, "wasxfail") else {"skip", "skipif"})), "text": text})

        def pytest_collectreport(self, report):
            if report.failed:
                self.send({"kind": "collect", "id": report.nodeid[:1000], "text": str(report.longrepr)[-1500:]})

    reporter = Reporter(fd)
    for p in conf["paths"]:
        if p not in sys.path:
            sys.path.append(p)
    args = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--rootdir=" + root, "--confcutdir=" + root, "-c", conf["ini"], "-q", "--tb=short", "--color=no"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    reporter.send({"kind": "ready"})
    status = int(pytest.main(args + conf["args"] + [canary], plugins=[reporter]))
    reporter.look()
    reporter.send({"kind": "end", "status": status})
    os._exit(0)


def read(fd, nonce, pid, out):
    """Takes reports until C has ended: a process it left may hold the pipe for ever."""
    buf, ended = b"", None
    while True:
        ready, _, _ = select.select([fd], [], [], 0 if ended is not None else 0.05)
        chunk = os.read(fd, 65536) if ready else b""
        buf += chunk
        while b"\n" in buf:
            line, buf = buf.split(b"\n", 1)
            take(line, nonce, out)
        if len(buf) > 2 * MAX_LINE:
            buf = b""
        if ended is not None and not chunk:
            return ended
        if ended is None and not chunk:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended = status
        if ended is not None and time.monotonic() > out["until"]:
            return ended
        if ended is None:
            out["until"] = time.monotonic() + 2


def take(line, nonce, out):
    head, _, rest = line.partition(b" ")
    if head.decode("ascii", "replace") != nonce:
        out["noise"] += 1
        return
    try:
        m = json.loads(rest)
        kind = m["kind"]
    except (ValueError, KeyError, TypeError):
        out["noise"] += 1
        return
    if kind == "end":
        out["ends"] += 1
    elif kind == "ready":
        out["ready"] = True
    elif kind == "patched":
        out["patched"] = [str(n) for n in m.get("names", [])][:10]
    elif len(out["reports"]) < 3 * MAX_TESTS:
        out["reports"].append(m)


def main():
    conf = json.load(sys.stdin)
    root = conf["tests"]
    wanted = [os.path.relpath(os.path.join(root, a.split("[")[0].split("::")[0]), root) + a[len(a.split("::")[0]):].split("[")[0]
              for a in conf["args"] if not a.startswith("-")]
    wanted = [w for w in wanted if w != "."]
    ids, broken = expected(root, wanted)
    conf["args"] = [a if a.startswith("-") else os.path.join(root, a) for a in conf["args"]]
    if not wanted:
        conf["args"].append(root)
    ini = [os.path.join(root, n) for n in ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg") if os.path.exists(os.path.join(root, n))]
    dir = "/tmp/" + os.urandom(8).hex()
    os.mkdir(dir)
    os.chmod(dir, 0o755)
    conf["ini"] = ini[0] if ini else os.path.join(dir, "pytest.ini")
    if not ini:
        with open(conf["ini"], "w") as f:
            f.write("[pytest]\n")
        os.chmod(conf["ini"], 0o444)
    canary, names = canaries(dir)
    nonce = os.urandom(16).hex()
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.close(r)
            out = sys.stdout
            sys.stdout = sys.stderr
            os.close(out.fileno())
            child(conf, canary, names, w, nonce)
        except BaseException as e:
            os.write(2, ("the tests could not be run: %s: %s\n" % (type(e).__name__, e)).encode("utf-8", "replace"))
        finally:
            os._exit(code)
    os.close(w)
    out = {"expected": ids, "broken": broken, "reports": [], "patched": [], "ready": False, "ends": 0, "noise": 0, "until": 0}
    status = read(r, nonce, pid, out)
    out["canaries"] = len(names)
    seen, rest = {}, []
    for m in out["reports"]:
        name = str(m.get("id", "")).partition("::")[2]
        if name in names:
            if m.get("when") == "call":
                seen[name] = m.get("outcome")
        elif m.get("kind") in ("test", "collect"):
            rest.append(m)
    out["caught"] = sum(1 for n in names if seen.get(n) == "failed")
    out["reports"] = rest
    out["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    out["code"] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
    del out["until"]
    data = json.dumps(out).encode()
    while data:
        data = data[os.write(1, data):]


main()
