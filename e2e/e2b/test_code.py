"""The published code interpreter SDK: run_code, contexts, rich results, charts, errors, and kernels that live on."""

import asyncio
import datetime
import threading
import time

import pytest
from e2b import InvalidArgumentException, NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox
from e2b_code_interpreter.charts import BarChart, BoxAndWhiskerChart, ChartType, LineChart, PieChart, ScatterChart, SuperChart


@pytest.fixture(scope="module")
def sbx():
    s = Sandbox.create(timeout=300, envs={"TEST_ENV_VAR": "supertest"})
    yield s
    s.kill()


@pytest.fixture
def fresh():
    s = Sandbox.create(timeout=300)
    yield s
    s.kill()


def test_state_results_and_streams(fresh):
    assert fresh.get_info().template_id == "code-interpreter-v1"
    fresh.run_code("x = 1")
    out, err, results = [], [], []
    e = fresh.run_code(
        "import sys\nprint('hello')\nprint('oops', file=sys.stderr)\nx += 1; x",
        on_stdout=lambda m: out.append(m.line),
        on_stderr=lambda m: err.append(m.line),
        on_result=results.append,
    )
    assert (e.text, e.logs.stdout, e.logs.stderr, e.error) == ("2", ["hello\n"], ["oops\n"], None)
    assert (out, err, [r.text for r in results]) == (["hello\n"], ["oops\n"], ["2"])
    assert e.execution_count == 2
    assert fresh.run_code("'text'").text == "text"
    assert fresh.run_code("!pwd").logs.stdout[0].strip() == "/home/user"


def test_output_streams_while_the_code_runs(sbx):
    seen = []

    def hear(m):
        seen.append(m.line)
        sbx.files.write("/tmp/heard", "")

    # It goes on only when what it said has been heard.
    sbx.run_code("import os, time\nprint('a', flush=True)\nwhile not os.path.exists('/tmp/heard'): time.sleep(0.01)\nprint('b')", on_stdout=hear)
    assert "".join(seen) == "a\nb\n"


def test_rich_results(sbx):
    e = sbx.run_code(
        "from IPython.display import *\n"
        "display(HTML('<b>h</b>'), Markdown('# m'), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'), JSON({'a': 1}), Latex('$x$'))\n"
        "display({'application/vnd.x+json': {'k': 1}}, raw=True)"
    )
    r = e.results
    assert (r[0].html, r[1].markdown, r[3].json, r[4].latex) == ("<b>h</b>", "# m", {"a": 1}, "$x$")
    assert r[2].svg.startswith("<svg")
    assert r[5].extra == {"application/vnd.x+json": {"k": 1}}
    frame = sbx.run_code("import pandas as pd\npd.DataFrame({'a': [1, 2], 'when': pd.to_datetime(['2020-01-01', None])})").results[0]
    assert frame.data == {"a": [1, 2], "when": ["2020-01-01T00:00:00", None]}
    assert "<table" in frame.html
    image = sbx.run_code("from PIL import Image\nImage.new('RGB', (4, 4)).show()").results[0]
    assert image.png.startswith("iVBOR")
    [saved] = sbx.run_code("Image.new('RGB', (4, 4)).save('/tmp/x.png')").results
    assert saved.png.startswith("iVBOR")


def plot(sbx, code):
    e = sbx.run_code("import matplotlib.pyplot as plt\nimport numpy as np\nimport datetime\n" + code + "\nplt.show()")
    assert e.error is None, e.error
    assert e.results[0].png and e.results[0].text
    return e.results[0].chart


def test_charts(sbx):
    c = plot(
        sbx,
        "d = [datetime.date(2023, 9, 1) + datetime.timedelta(days=i) for i in range(10)]\n"
        "plt.plot(d, np.sin(range(10)), label='sin')\nplt.xlabel('Time (s)')\nplt.ylabel('A (Hz)')\nplt.title('T')\nplt.axhline(0)",
    )
    assert isinstance(c, LineChart)
    assert (c.title, c.x_label, c.x_unit, c.y_unit, c.x_scale, c.y_scale) == ("T", "Time (s)", "s", "Hz", "datetime", "linear")
    assert [line.label for line in c.elements] == ["sin"]
    assert len(c.elements[0].points) == 10
    assert datetime.datetime.fromisoformat(c.elements[0].points[0][0]).date() == datetime.date(2023, 9, 1)
    c = plot(sbx, "plt.plot([1, 10, 100], [1, 10, 100])\nplt.yscale('log')")
    assert (c.x_scale, c.y_scale) == ("linear", "log")
    c = plot(sbx, "plt.scatter([1, 2], [3, float('nan')], label='d')\nplt.xlabel('A')")
    assert isinstance(c, ScatterChart)
    assert (c.title, c.x_label, c.elements[0].label, c.elements[0].points[0]) == (None, "A", "d", (1.0, 3.0))
    c = plot(sbx, "plt.bar(['a', 'b'], [1, 2], label='n')")
    assert isinstance(c, BarChart)
    assert [(b.label, b.group, b.value) for b in c.elements] == [("a", "n", 1), ("b", "n", 2)]
    c = plot(sbx, "plt.pie([90, 10], labels=['x', 'y'], startangle=90)")
    assert isinstance(c, PieChart)
    assert [(p.label, p.angle, p.radius) for p in c.elements] == [("x", 324, 1), ("y", 36, 1)]
    c = plot(sbx, "plt.boxplot([[85, 90, 78, 92, 88], [95, 89, 76, 91, 84, 87]], tick_labels=['A', 'B'])")
    assert isinstance(c, BoxAndWhiskerChart)
    assert [(b.label, b.min, b.first_quartile, b.median, b.third_quartile, b.max, b.outliers) for b in c.elements] == [
        ("A", 78, 85, 88, 90, 92, []),
        ("B", 84, 84.75, 88, 90.5, 95, [76]),
    ]
    c = plot(sbx, "f, (a, b) = plt.subplots(1, 2)\nf.suptitle('both')\na.plot([1, 2])\nb.scatter([1], [2])")
    assert isinstance(c, SuperChart)
    assert (c.title, [e.type for e in c.elements]) == ("both", [ChartType.LINE, ChartType.SCATTER])
    assert plot(sbx, "plt.gca().add_artist(plt.Circle((0, 0), 1))").type == ChartType.UNKNOWN


def test_errors(sbx):
    errors = []
    e = sbx.run_code("def f():\n    1 / 0\nf()", on_error=errors.append)
    assert (e.error.name, e.error.value, [x.name for x in errors]) == ("ZeroDivisionError", "division by zero", ["ZeroDivisionError"])
    assert "ZeroDivisionError" in e.error.traceback and "f()" in e.error.traceback
    assert "\x1b" not in e.error.traceback
    e = sbx.run_code("throw new TypeError('no')", language="js")
    assert (e.error.name, e.error.value) == ("TypeError", "no")
    assert sbx.run_code("if True print(1)").error.name == "SyntaxError"
    with pytest.raises(InvalidArgumentException):
        sbx.run_code("1", language="python", context=sbx.list_code_contexts()[0])
    with pytest.raises(NotFoundException):
        sbx.remove_code_context("nope")
    for bad in (lambda: sbx.run_code("1", language="cobol"), lambda: sbx.create_code_context(cwd="/nope"), lambda: sbx.run_code("1", envs={"a b": "c"})):
        with pytest.raises(SandboxException):
            bad()


def test_languages(sbx):
    assert sbx.run_code("console.log('Hello World!')", language="js").logs.stdout == ["Hello World!\n"]
    assert sbx.run_code("import { readFileSync } from 'fs'\nconsole.log(typeof readFileSync)", language="js").logs.stdout == ["function\n"]
    assert sbx.run_code("await Promise.resolve('done')", language="js").text == "done"
    assert sbx.run_code("require('path').join('a', 'b')", language="javascript").text == "a/b"
    for i in range(30):  # its kernel says that it is idle before its result has come
        assert sbx.run_code(f"console.log({i}); {i}", language="js").text == str(i)
    assert sbx.run_code("const m: string = 'typed'; m", language="ts").text == "typed"
    assert sbx.run_code("y=4; pwd", language="bash").logs.stdout == ["/home/user\n"]
    assert sbx.run_code("echo $y", language="bash").logs.stdout == ["4\n"]
    assert {"python", "javascript"} <= {c.language for c in sbx.list_code_contexts()}


@pytest.mark.parametrize(
    ("language", "code"), [("python", "import os; os.getenv('{}')"), ("js", "process.env.{}"), ("bash", "echo ${}")]
)
def test_variables_of_the_sandbox_and_of_one_run(sbx, language, code):
    def value(name, **envs):
        e = sbx.run_code(code.replace("{}", name), language=language, envs=envs or None)
        return e.text or "".join(e.logs.stdout).strip()

    assert value("TEST_ENV_VAR") == "supertest"
    assert value("TEST_ENV_VAR", TEST_ENV_VAR="other 'quoted'") in ("other 'quoted'", r"other 'quoted'")
    assert value("TEST_ENV_VAR") == "supertest"
    assert value("FOO", FOO="bar") == "bar"
    assert value("FOO") in ("", "undefined", "None")


def test_contexts(sbx):
    sbx.run_code("x = 1")
    c = sbx.create_code_context(cwd="/tmp", language="python")
    assert sbx.list_code_contexts()[-1] == c
    assert sbx.run_code("x", context=c).error.value == "name 'x' is not defined"
    assert sbx.run_code("import os; y = 2; os.getcwd()", context=c).text == "/tmp"
    sbx.restart_code_context(c)
    assert sbx.run_code("y", context=c).error.name == "NameError"
    sbx.remove_code_context(c)
    with pytest.raises(NotFoundException):
        sbx.run_code("1", context=c)
    assert sbx.run_code("x").text == "1"


@pytest.mark.parametrize("code", ["import time; time.sleep(300)", "while True: pass"])
def test_who_leaves_interrupts_the_kernel(sbx, code):
    sbx.run_code("kept = 1")
    with pytest.raises(TimeoutException):
        sbx.run_code(code, timeout=2)
    began = time.monotonic()
    assert sbx.run_code("kept", timeout=30).text == "1"
    assert time.monotonic() - began < 15


def test_a_kernel_that_dies(sbx):
    e = sbx.run_code("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert e.error.name == "KernelDied"
    assert sbx.run_code("1 + 1").text == "2"


def test_the_interpreter_itself_is_killed(fresh):
    fresh.commands.run("pkill -9 -f '[s]erver.py'")

    def answers():
        try:
            return fresh.run_code("1 + 1", timeout=30).text == "2"
        except SandboxException:
            return False

    deadline = time.monotonic() + 60
    while not answers():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_at_once_queue(sbx):
    got = []
    threads = [threading.Thread(target=lambda n=n: got.append(sbx.run_code(f"import time; time.sleep(0.3); {n}").text)) for n in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(got) == ["0", "1", "2"]


def test_a_flood(sbx):
    e = sbx.run_code("for _ in range(50): print('x' * 1_000_000)")
    assert sum(map(len, e.logs.stdout)) == 50 * 1_000_001
    e = sbx.run_code("from IPython.display import display\nfor i in range(1500): display(i)")
    assert [r.text for r in e.results] == [str(i) for i in range(1500)]


def test_killed_while_code_runs():
    s = Sandbox.create(timeout=60)
    with pytest.raises(TimeoutException, match="killed"):
        s.run_code("print('on', flush=True); import time; time.sleep(300)", timeout=300, on_stdout=lambda _: s.kill())


def test_pause_and_resume_with_variables(fresh):
    fresh.run_code("import socket; a, b = socket.socketpair(); a.send(b'unread'); x = {'k': 1}")
    fresh.pause()
    fresh.connect(timeout=120)
    assert fresh.run_code("(x, b.recv(10))").text == "({'k': 1}, b'unread')"


def test_forks_of_a_live_kernel(fresh):
    fresh.run_code("import itertools; ids = itertools.count(); next(ids); model = {'w': [0.0]}")
    children = fresh.fork(count=2, timeout=120)
    try:
        for n, child in enumerate(children):
            assert child.run_code(f"model['w'].append({n}); (next(ids), model['w'])").text == f"(1, [0.0, {n}])"
        assert fresh.run_code("(next(ids), model['w'])").text == "(1, [0.0])"
    finally:
        for child in children:
            child.kill()


def test_a_snapshot_of_a_live_kernel(fresh):
    fresh.run_code("x = 'snap'")
    snap = fresh.create_snapshot()
    fresh.run_code("x = 'later'")
    child = Sandbox.create(snap.snapshot_id, timeout=60)
    try:
        assert child.run_code("x").text == "snap"
    finally:
        child.kill()
        Sandbox.delete_snapshot(snap.snapshot_id)


def test_another_sandboxs_token_opens_nothing(sbx, fresh):
    import os

    import httpx

    headers = {"E2b-Sandbox-Id": sbx.sandbox_id, "E2b-Sandbox-Port": "49999"}
    url = os.environ["E2B_SANDBOX_URL"] + "/execute"
    for token in (fresh._envd_access_token, "x", "."):
        r = httpx.post(url, json={"code": "1"}, headers={**headers, "X-Access-Token": token})
        assert r.status_code == 401, r.text


def test_a_sandbox_without_an_interpreter():
    s = Sandbox.create("base", timeout=60)
    try:
        with pytest.raises(TimeoutException, match="no code interpreter"):  # the SDK's word for a 502
            s.run_code("1")
    finally:
        s.kill()


def test_async():
    async def main():
        s = await AsyncSandbox.create(timeout=120)
        try:
            seen = []

            async def on_result(r):
                seen.append(r.text)

            assert (await s.run_code("x = 20; x + 1", on_result=on_result)).text == "21"
            assert seen == ["21"]
            c = await s.create_code_context(language="js")
            both = await asyncio.gather(s.run_code("x * 2"), s.run_code("1 + 2", context=c))
            assert [e.text for e in both] == ["40", "3"]
            assert c in await s.list_code_contexts()
            await s.restart_code_context(c)
            await s.remove_code_context(c)
            with pytest.raises(TimeoutException):
                await s.run_code("while True: pass", timeout=1)
            assert (await s.run_code("x")).text == "20"
        finally:
            await s.kill()

    asyncio.run(main())
