"""Code in the kernels of a real sandbox: results, contexts, errors, and kernels that are paused, forked and reset."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import cove

from .conftest import LABEL, Live

pytestmark = pytest.mark.live

TEMPLATE = "code-interpreter-v1"


@pytest.fixture(scope="module")
def sb(live: Live) -> Iterator[Any]:
    with live.create(template=TEMPLATE, env={"GREETING": "hello"}) as sandbox:
        yield sandbox


def test_variables_stay_and_results_are_typed(sb: Any) -> None:
    out: list[str] = []
    shown: list[cove.CodeResult] = []
    sb.run_code("x = 20")
    e = sb.run_code(
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"
        "from IPython.display import display, HTML, JSON\ndisplay(HTML('<b>x</b>'), JSON({'a': [1]}))\nx + 1",
        on_stdout=out.append,
        on_result=shown.append,
    )
    assert (e.text, e.stdout, e.stderr, e.error) == ("21", "out\n", "err\n", None)
    assert out == ["out\n"]
    assert shown == e.results
    assert [r.formats() for r in e.results] == [["text", "html"], ["text", "json"], ["text"]]
    assert (e.results[0].html, e.results[1].json) == ("<b>x</b>", {"a": [1]})
    assert [r.is_main_result for r in e.results] == [False, False, True]
    assert sb.run_code("1").execution_count == (e.execution_count or 0) + 1


def test_a_figure_is_a_picture_and_data(sb: Any) -> None:
    e = sb.run_code(
        "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2], label='n')\nplt.title('T')\nplt.show()"
    )
    [figure] = e.results
    assert (figure.png_bytes or b"")[:4] == b"\x89PNG"
    assert figure.chart is not None
    assert (figure.chart["type"], figure.chart["title"]) == ("bar", "T")
    assert figure.chart["elements"] == [
        {"label": "a", "group": "n", "value": 1.0},
        {"label": "b", "group": "n", "value": 2.0},
    ]


def test_errors_are_returned_and_raised_on_request(sb: Any) -> None:
    seen: list[cove.ExecutionError] = []
    e = sb.run_code("def f():\n    raise ValueError('no')\nf()", on_error=seen.append)
    assert e.error is not None
    assert (e.error.name, e.error.value) == ("ValueError", "no")
    assert "line 2, in f" in e.error.traceback or "----> 2" in e.error.traceback
    assert seen == [e.error]
    with pytest.raises(cove.ExecutionError, match="ValueError: no"):
        e.check()
    for options in ({"language": "cobol"}, {"language": "python", "context": "x"}, {"env": {"1": "x"}}):
        with pytest.raises(cove.InvalidArgument):
            sb.run_code("1", **options)
    with pytest.raises(cove.NotFound):
        sb.run_code("1", context="nope")


def test_languages_and_variables_of_the_environment(sb: Any) -> None:
    assert sb.run_code("import os; os.environ['GREETING'] + os.environ.get('A', '')", env={"A": "1"}).text == "hello1"
    assert sb.run_code("os.environ.get('A', 'gone')").text == "gone"
    assert sb.run_code("let n: number = 6; `${process.env.GREETING} ${n * 7}`", language="ts").text == "hello 42"
    assert sb.run_code("var n = 6", language="javascript").error is None
    assert sb.run_code("console.log('x'); n * 7", language="js").text == "42"
    assert sb.run_code("y=6; echo $GREETING $((y * 7))", language="bash").stdout == "hello 42\n"
    assert sb.run_code("echo $y", language="bash").stdout == "6\n"


def test_contexts_are_apart(sb: Any) -> None:
    sb.run_code("mine = 1")
    other = sb.create_code_context(cwd="/tmp")
    assert (other.language, other.cwd) == ("python", "/tmp")
    assert other in sb.list_code_contexts()
    assert sb.run_code("mine", context=other).error.name == "NameError"
    assert sb.run_code("import os; theirs = 1; os.getcwd()", context=other).text == "/tmp"
    sb.restart_code_context(other)
    assert sb.run_code("theirs", context=other.id).error.name == "NameError"
    sb.remove_code_context(other)
    assert other not in sb.list_code_contexts()
    with pytest.raises(cove.NotFound):
        sb.remove_code_context(other)
    assert sb.run_code("mine").text == "1"


def test_a_timeout_interrupts_and_the_variables_stay(sb: Any) -> None:
    sb.run_code("kept = 7")
    began = time.monotonic()
    with pytest.raises(cove.DeadlineExceeded):
        sb.run_code("print('on it', flush=True)\nwhile True: pass", timeout=1)
    assert sb.run_code("kept").text == "7"
    assert time.monotonic() - began < 30


def test_a_kernel_that_dies_is_replaced(sb: Any) -> None:
    e = sb.run_code("import os; os._exit(3)")
    assert e.error is not None
    assert e.error.name == "KernelDied"
    assert "code 3" in e.error.value
    assert sb.run_code("1 + 1").text == "2"


def test_executions_in_one_context_queue(live: Live, sb: Any) -> None:
    sb.run_code("order = []")
    with cove.Client() as client:  # threads, which the async one is not for
        same = cove.Sandbox.connect(sb.id, client=client)

        def run(n: int) -> None:
            same.run_code(f"order.append({n}); import time; time.sleep(0.2); order.append({n})").check()

        threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    order = sb.run_code("order").text
    pairs = [order[1:-1].split(", ")[i : i + 2] for i in (0, 2, 4)]
    assert all(a == b for a, b in pairs)
    assert {a for a, _ in pairs} == {"0", "1", "2"}


def test_a_flood_of_output_comes_whole(sb: Any) -> None:
    e = sb.run_code("for _ in range(50): print('x' * 1_000_000)")
    assert len(e.stdout) == 50 * 1_000_001
    assert sb.run_code("1 + 1").text == "2"


@pytest.mark.parametrize("mode", ["hot", "cold"])
def test_a_pause_keeps_the_kernel(live: Live, mode: str) -> None:
    with live.create(template=TEMPLATE) as sb:
        sb.run_code("import threading; lock = threading.Lock(); value = [1, 2, 3]").check()
        sb.pause(cold=mode == "cold")
        assert sb.run_code("value.append(4); (value, lock.locked())").text == "([1, 2, 3, 4], False)"


def test_forks_have_the_variables_and_then_differ(live: Live) -> None:
    with live.create(template=TEMPLATE) as sb:
        # An open file, a generator half-way and a class of its own: nothing a pickle would carry.
        sb.run_code("f = open('/tmp/f', 'w'); g = (n * n for n in range(100)); next(g); next(g); x = 1").check()
        forks = sb.fork(3, labels={LABEL: live.run})
        for n, child in enumerate(forks):
            assert child.run_code(f"x += {n}; f.write('{n}'); f.flush(); (x, next(g))").text == f"({1 + n}, 4)"
            assert child.run_code("open('/tmp/f').read()").text == str(n)
            child.kill()
        assert sb.run_code("(x, next(g))").text == "(1, 4)"


def test_snapshots_restores_and_resets(live: Live) -> None:
    with live.create(template=TEMPLATE) as sb:
        sb.run_code("x = 'before'")
        snapshot = sb.snapshot(labels={LABEL: live.run})
        sb.run_code("x = 'after'")
        with live.create(snapshot=snapshot) as other:
            assert other.run_code("x").text == "before"
        sb.restore(snapshot)
        assert sb.run_code("x").text == "before"
        sb.reset()
        assert sb.run_code("x").error.name == "NameError"
        assert sb.run_code("40 + 2").text == "42"


def test_every_sandbox_draws_its_own_random_numbers(live: Live) -> None:
    drawn = set()
    for _ in range(2):
        with live.create(template=TEMPLATE) as sb:
            drawn.add(sb.run_code("import random; random.random()").text)
    assert len(drawn) == 2


def test_a_sandbox_without_an_interpreter_says_so(live: Live) -> None:
    with live.create() as sb, pytest.raises(cove.FailedPrecondition, match="cove code setup") as refused:
        sb.run_code("1")
    assert refused.value.reason == "port_closed"
