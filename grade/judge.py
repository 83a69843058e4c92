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
import ast, configparser, fnmatch, json, os, select, sys, time

MAX_TESTS = 20000
MAX_LINE = 8192


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Classes that pytest does not take for tests: they have a constructor.
MADE = ("NamedTuple", "Enum", "TypedDict", "Exception", "dataclass")


class Source:
    """The tests as they are written: which there must be, and what they may leave out."""

    def __init__(self, root, ini, wanted):
        self.ids, self.broken = [], []
        self.marks = {}  # id -> what is written at it
        self.text, self.elsewhere = set(), set()  # words of all of them, and of what is written at no test
        self.skips = set()  # (file, line) of calls that skip
        options = inioptions(ini)
        self.files = options.get("python_files", "").split() or ["test_*.py", "*_test.py"]
        self.classes = options.get("python_classes", "").split() or ["Test"]
        self.functions = options.get("python_functions", "").split() or ["test"]
        ignored = set()
        for where, dirs, names in os.walk(root):
            dirs[:] = sorted(d for d in dirs if not d.startswith(".") and d not in ("__pycache__", "node_modules", "venv", "build", "dist", "CVS", "_darcs") and not d.endswith(".egg"))
            if "conftest.py" in names:
                ignored |= ignores(where)
            for name in sorted(names):
                full = os.path.join(where, name)
                test = any(fnmatch.fnmatch(name, p) for p in self.files) and name.endswith(".py") and not any(full == i or full.startswith(i + "/") for i in ignored)
                if not name.endswith(".py"):
                    continue
                rel = os.path.relpath(full, root)
                try:
                    with open(full, "rb") as f:
                        tree = ast.parse(f.read(), full)
                except (OSError, SyntaxError, ValueError) as e:
                    if test:
                        self.broken.append("%s: %s" % (rel, e))
                    continue
                for node in ast.walk(tree):
                    if isinstance(node, (ast.Call, ast.Raise)) and called(node) in ("skip", "importorskip", "skipTest", "SkipTest", "xfail"):
                        self.skips.update((full, n) for n in range(node.lineno, node.end_lineno + 1))
                if test:
                    for id, written in self.defined(tree.body, marked(tree.body)):
                        self.ids.append(rel + "::" + id)
                        self.marks[rel + "::" + id] = written
                self.text |= words(ast.dump(tree))
                for node in ast.walk(tree):
                    if hasattr(node, "decorator_list"):
                        node.decorator_list = []
                self.elsewhere |= words(ast.dump(tree))
        if wanted:
            self.ids = [i for i in self.ids if any(i == w or i.startswith(w + "::") or i.startswith(w + "/") for w in wanted)]
        self.ids = self.ids[:MAX_TESTS]

    def defined(self, body, above, unittest=False):
        gone = {t.id for n in body if isinstance(n, ast.Delete) for t in n.targets if isinstance(t, ast.Name)}
        gone |= {t.id for n in body if isinstance(n, ast.Assign) and getattr(n.value, "value", n) is None for t in n.targets if isinstance(t, ast.Name)}
        classes, found = {}, {}  # of this body: a name to itself and those it inherits from
        for node in body:
            written = above + "".join(ast.dump(d) for d in getattr(node, "decorator_list", ()))
            if isinstance(node, FUNCTION) and named(node.name, ["test"] if unittest else self.functions):
                if not any("fixture" in ast.dump(d) for d in node.decorator_list):
                    found[node.name] = written
            elif isinstance(node, ast.ClassDef):
                line = [c for b in reversed(node.bases) for c in classes.get(getattr(b, "id", ""), ())] + [node]
                classes[node.name] = line[-100:]
                inside = [n for c in line for n in c.body][:MAX_TESTS]
                made = "".join(ast.dump(b) for c in line for b in c.bases + c.decorator_list)
                old = "TestCase" in made
                plain = named(node.name, self.classes) and not any(w in made for w in MADE) and not any(isinstance(n, FUNCTION) and n.name in ("__init__", "__new__") for n in inside)
                off = any(isinstance(n, ast.Assign) and any(getattr(t, "id", "") == "__test__" for t in n.targets) for n in inside)
                if (old or plain) and not off:
                    for name, more in self.defined(inside, written + marked(inside), old):
                        found[node.name + "::" + name] = more
        return [(name, written) for name, written in found.items() if name.split("::")[0] not in gone]

    def owns(self, m):
        """Whether it is the tests that skip, or expect a failure, and not the work."""
        if tuple(m.get("at") or ()) in self.skips:
            return True
        word = "xfail" if m.get("xfail") else "skip"
        written = self.marks.get(str(m.get("id", "")).split("[")[0])
        if written is not None and word in words(written):
            return True
        # By a name that is given to a mark, or a hook of theirs; or by a class it inherits.
        return bool(m.get("marked")) and word in (self.text if written is None else self.elsewhere)


def words(text):
    return {w for w, forms in (("skip", ("skip", "Skip")), ("xfail", ("xfail", "expectedFailure"))) if any(f in text for f in forms)}


def marked(body):
    return "".join(ast.dump(n) for n in body if isinstance(n, ast.Assign) and "pytestmark" in ast.dump(n.targets[0]))


def called(node):
    f = node.func if isinstance(node, ast.Call) else node.exc
    return getattr(f, "attr", getattr(f, "id", ""))


def named(name, patterns):
    return any(name.startswith(p) or fnmatch.fnmatch(name, p) for p in patterns)


def inioptions(path):
    """What the tests' own ini file says to pytest, where it says it in so many words."""
    try:
        if path.endswith(".toml"):
            import tomllib
            with open(path, "rb") as f:
                found = tomllib.load(f).get("tool", {}).get("pytest", {}).get("ini_options", {})
            return {k: " ".join(v) if isinstance(v, list) else str(v) for k, v in found.items()}
        ini = configparser.ConfigParser(interpolation=None, strict=False)
        ini.read(path)
        section = "tool:pytest" if path.endswith("setup.cfg") else "pytest"
        return dict(ini[section]) if section in ini else {}
    except (ImportError, OSError, ValueError, configparser.Error):
        return {}


def ignores(where):
    """Paths that a conftest names in collect_ignore."""
    found = set()
    try:
        with open(os.path.join(where, "conftest.py"), "rb") as f:
            tree = ast.parse(f.read())
        for node in tree.body:
            if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["collect_ignore"]:
                found |= {os.path.normpath(os.path.join(where, n)) for n in ast.literal_eval(node.value)}
    except (OSError, SyntaxError, ValueError, TypeError):
        pass
    return found


CANARY = '''import unittest
import pytest


def %s():
    assert 1 == 2


class Test%s(unittest.TestCase):
    def test_%s(self):
        self.assertEqual(1, 2)


def %s():
    with pytest.raises(ValueError):
        pass


def %s():
    raise RuntimeError("x")
'''


def canaries(dir, pattern):
    """Tests that must fail: whoever has pytest pass everything passes these too."""
    def word():
        return "".join("abcdefghijklmnopqrstuvwxyz"[b % 26] for b in os.urandom(8))
    n = [word() for _ in range(5)]
    for i in (0, 3, 4):  # called as these tests are
        n[i] = pattern.replace("*", "_" + n[i]) if "*" in pattern else pattern + "_" + n[i]
    path = os.path.join(dir, "test_%s.py" % word())
    with open(path, "w") as f:
        f.write(CANARY % tuple(n))
    os.chmod(path, 0o444)
    return path, {n[0], "Test%s::test_%s" % (n[1], n[2]), n[3], n[4]}


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
    import unittest, doctest, filecmp, hashlib, importlib  # noqa: F401  before the work can be found under these names
    import _pytest.assertion.rewrite, _pytest.runner, _pytest.python, _pytest.unittest, _pytest.reports  # noqa: F401

    root = conf["tests"]
    artifacts = conf["paths"][::2]
    import builtins, types
    ours = [root, os.path.dirname(__file__)] + [p for p in sys.path if p]  # before the work's are there

    def below(file, dirs):
        return any(file.startswith(d.rstrip("/") + "/") for d in dirs)

    # The image's plugins, as pytest would find them, had it not to find the work's too.
    plugins = []
    try:
        from importlib.metadata import entry_points
        entries = {e.value: e for e in entry_points(group="pytest11")}
    except (ImportError, TypeError):  # of a Python before 3.10
        entries = {}
    for entry in entries.values():
        try:
            plugin = entry.load()
        except Exception as e:
            os.write(2, ("the plugin %s cannot be imported: %s\n" % (entry.name, e)).encode("utf-8", "replace"))
            continue
        if not below(getattr(plugin, "__file__", None) or "", artifacts):
            plugins.append(plugin)

    class Reporter:
        def __init__(self, fd):
            self.fd, self.patched, self.sound = fd, False, list(self.owned())
            self.config, self.items, self.modules, self.own, self.at = None, {}, {}, [], {}
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
            for name in ("io", "re", "ast", "math", "json", "copy", "types", "difflib", "filecmp", "fnmatch", "hashlib", "operator", "functools", "genericpath", "posixpath"):
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
            changed = list(self.strangers()) + list(self.led())
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
            if event not in ("sys.settrace", "sys.monitoring.register_callback") or self.patched:
                return  # a profile function cannot jump
            frame = sys._getframe(1)
            if below(frame.f_code.co_filename, [root]):
                return
            if frame.f_code is doctest.DocTestRunner.run.__code__ and frame.f_locals.get("save_trace") is None:
                return  # puts back what there was
            if args and type(args[0]) is type(len):
                return  # cProfile's own
            self.tell([event])

        def strangers(self):
            """Hooks of pytest's that are neither the image's nor the tests'."""
            for name, caller in list(vars(self.config.hook).items()) if self.config else ():
                for impl in caller.get_hookimpls() if hasattr(caller, "get_hookimpls") else ():
                    file = getattr(getattr(impl.function, "__code__", None), "co_filename", "")
                    if not below(file, ours) or below(file, artifacts):
                        yield "a plugin's " + name

        def led(self):
            """What the work gave the tests instead of their own."""
            for name in vars(pytest.mark):
                if name[0] != "_":
                    yield "pytest.mark." + name
            for name in self.own:
                spec = getattr(sys.modules.get(name), "__spec__", None)
                if name in sys.modules and not below(getattr(spec, "origin", None) or "", [root]):
                    yield "the tests' module " + name
            for name, (kept, were) in self.modules.items():
                for key, value in were.items():
                    if kept.get(key, value) is not value:
                        yield name + "." + key
                for key in kept.keys() - were.keys():
                    if hasattr(builtins, key) and key[0] != "_" and callable(kept[key]) or name[:6] == "class " and callable(kept[key]) and hasattr(unittest.TestCase, key):
                        yield name + "." + key

        def keep(self, name, kept):
            """What a module or class of the tests calls: not its data, which tests may change."""
            if name not in self.modules:
                self.modules[name] = kept, {k: v for k, v in kept.items() if (isinstance(v, types.ModuleType) or callable(v)) and not self.works(v)}

        def works(self, value):
            """Whether it is of the work: the tests replace that for good reasons."""
            module = value if isinstance(value, types.ModuleType) else sys.modules.get(str(getattr(value, "__module__", "")))
            return below(str(getattr(module, "__file__", "")), artifacts)

        def runs(self, item):
            """The code of a test by its name, which is what was collected."""
            f = getattr(item.parent.obj, getattr(item, "originalname", None) or item.name, None)
            return getattr(getattr(f, "__func__", f), "__code__", None)

        def pytest_collection_finish(self, session):
            # Nothing has run yet, so these are the marks and the code that the tests have.
            self.config = session.config
            self.own = [n[:-3] for d in sys.path if d == root or below(d, [root]) and os.path.isdir(d) for n in os.listdir(d) if n.endswith(".py")]
            for item in session.items:
                params = getattr(getattr(item, "callspec", None), "params", {})
                self.items[item.nodeid] = ({m.name for m in item.iter_markers()}, self.runs(item), type(item), dict(params))
                module, cls = getattr(item, "module", None), getattr(item, "cls", None)
                if module is not None:
                    loader = type(getattr(getattr(module, "__spec__", None), "loader", None)).__module__
                    if loader.split(".")[0] not in ("_pytest", "_frozen_importlib_external", "importlib"):
                        self.tell(["the tests' module " + module.__name__])
                    self.keep(module.__name__, vars(module))
                if cls is not None:
                    self.keep("class " + cls.__module__ + "." + cls.__qualname__, vars(cls))

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_call(self, item):
            _, code, kind, params = self.items.get(item.nodeid, ((), None, type(item), {}))
            given = getattr(getattr(item, "callspec", None), "params", {})
            now = getattr(item, "obj", None)
            now = getattr(getattr(now, "__func__", now), "__code__", None)
            same = type(item) is kind and given.keys() == params.keys() and all(given[k] is params[k] for k in params)
            if not self.patched and (not same or self.runs(item) is not code or now is not code or {"runtest", "ihook"} & set(vars(item))):
                self.tell(["the test " + item.nodeid[:100]])

        def pytest_report_teststatus(self, report):
            if report.nodeid.partition("::")[2] in names:
                return "", "", ""  # they are ours, and would only confuse who reads the log

        def pytest_runtest_logreport(self, report):
            if report.when == "teardown":  # by now the tests' own mocks are undone
                self.look()
            if report.when != "call" and report.outcome == "passed":
                return
            text, marks, at = "", self.items.get(report.nodeid, ((), None))[0], self.at.pop((report.nodeid, report.when), None)
            if report.outcome != "passed":
                text = str(report.longreprtext or report.longrepr or "")[-1500:]
            self.send({"kind": "test", "id": report.nodeid[:1000], "when": report.when, "outcome": report.outcome, "seconds": report.duration,
                       "marked": bool(set(marks) & ({"xfail"} if hasattr(report, "wasxfail") else {"skip", "skipif"})), "xfail": hasattr(report, "wasxfail"), "at": at, "text": text})

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(self, item, call):
            """Notes which line has skipped, if nothing of the work was on the way to it."""
            yield  # in which pytest takes up what unittest noted
            error, at = call.excinfo.value if call.excinfo else None, None
            while isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)):
                tb = error.__traceback__
                while tb is not None:
                    file = tb.tb_frame.f_code.co_filename
                    if not below(file, ours) or below(file, artifacts):
                        return
                    if below(file, [root]):
                        at = file, tb.tb_lineno
                    tb = tb.tb_next
                error = error.__context__  # unittest's, of which pytest has made its own
            self.at[item.nodeid, call.when] = at

        def pytest_collectreport(self, report):
            if report.skipped and isinstance(report.longrepr, tuple):
                self.send({"kind": "skipped", "id": report.nodeid[:1000], "at": [str(report.longrepr[0]), report.longrepr[1]], "text": str(report.longrepr[2])[-1500:]})
            if report.failed:
                self.send({"kind": "collect", "id": report.nodeid[:1000], "text": str(report.longrepr)[-1500:]})

    reporter = Reporter(fd)
    for p in conf["paths"]:
        if p not in sys.path:
            sys.path.append(p)
    args = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--rootdir=" + root, "--confcutdir=" + root, "-c", conf["ini"], "-q", "--tb=short", "--color=no"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    reporter.send({"kind": "ready"})
    status = int(pytest.main(args + conf["args"] + [canary], plugins=[reporter] + plugins))
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
    ini = [os.path.join(root, n) for n in ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg") if os.path.exists(os.path.join(root, n))]
    source = Source(root, ini[0] if ini else "", wanted)
    conf["args"] = [a if a.startswith("-") else os.path.join(root, a) for a in conf["args"]]
    if not wanted:
        conf["args"].append(root)
    dir = "/tmp/" + os.urandom(8).hex()
    os.mkdir(dir)
    os.chmod(dir, 0o755)
    conf["ini"] = ini[0] if ini else os.path.join(dir, "pytest.ini")
    if not ini:
        with open(conf["ini"], "w") as f:
            f.write("[pytest]\n")
        os.chmod(conf["ini"], 0o444)
    canary, names = canaries(dir, source.functions[0])
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
    out = {"expected": source.ids, "broken": source.broken, "reports": [], "patched": [], "ready": False, "ends": 0, "noise": 0, "until": 0}
    status = read(r, nonce, pid, out)
    out["canaries"] = len(names)
    seen, rest = {}, []
    for m in out["reports"]:
        name = str(m.get("id", "")).partition("::")[2]
        if name in names:
            if m.get("when") == "call":
                seen[name] = m.get("outcome")
        elif m.get("kind") == "skipped":
            if tuple(m.get("at") or ()) in source.skips:
                rest += [{"kind": "test", "id": i, "when": "setup", "outcome": "skipped", "marked": True, "text": m.get("text", "")} for i in source.ids if i.startswith(str(m.get("id")) + "::")]
        elif m.get("kind") in ("test", "collect"):
            m["marked"] = source.owns(m)
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
