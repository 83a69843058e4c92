"""Shells, ports and pickled sandboxes against a real server."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import cove

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def sb() -> Iterator[cove.Sandbox]:
    with cove.Sandbox.create() as sandbox:
        yield sandbox


def test_a_shell_keeps_what_it_was_told(sb: cove.Sandbox) -> None:
    with sb.shell(env={"B": "2"}) as sh:
        assert sh.run("cd /tmp; export A=1; f() { echo f$1; }").ok
        result = sh.run('printf "%s" "$PWD $A $B"; f 3 >&2; false')
        assert (result.stdout, result.stderr, result.exit_code) == ("/tmp 1 2", "f3\n", 1)
        assert sh.run("echo $?").stdout == "1\n"
        assert sh.run("cat; read x; echo got $?").stdout == "got 1\n"  # nobody takes the next command for input
        assert sh.run("echo 'a''b\"c'\necho two").stdout == 'ab"c\ntwo\n'
        wrong = sh.run("if then")
        assert wrong.exit_code != 0
        assert "syntax" in wrong.stderr
        assert sh.run("pwd").stdout == "/tmp\n"
        big = sh.run("head -c 3000000 /dev/zero | tr '\\0' x")
        assert len(big.stdout_bytes) == 3_000_000
        late = sh.run("echo before; sleep 60; echo after", timeout=2)
        assert (late.end.cause, late.stdout, late.exit_code) == ("deadline", "before\n", -1)
        assert sh.run("pwd").stdout == "/tmp\n"
        assert sh.run("exit 7").exit_code == 7
        with pytest.raises(cove.FailedPrecondition, match="has ended"):
            sh.run("pwd")


def test_a_command_that_does_not_end_takes_its_shell_along(sb: cove.Sandbox) -> None:
    sh = sb.shell()
    late = sh.run("trap '' INT; while :; do :; done", timeout=0.5)
    assert late.end.cause == "deadline"
    with pytest.raises(cove.FailedPrecondition):
        sh.run("true")


def test_an_async_shell_and_an_async_listener(sb: cove.Sandbox) -> None:
    async def use() -> None:
        box = await cove.AsyncSandbox.connect(sb.id)
        async with await box.shell() as sh:
            await sh.run("cd /usr")
            assert (await sh.run("pwd")).stdout == "/usr\n"
        heard: list[str] = []

        async def listen(text: str) -> None:
            await asyncio.sleep(0)
            heard.append(text)

        await box.exec("echo heard", on_stdout=listen)
        assert heard == ["heard\n"]
        process = await box.start("sleep 60")
        with pytest.raises(TimeoutError):
            await process.wait(timeout=0.2)
        await process.kill()
        assert (await process.wait()).end.cause == "killed_by_user"

    asyncio.run(use())


def test_a_port_is_fetched(sb: cove.Sandbox) -> None:
    sb.start("cd /tmp && mkdir -p www && echo hello > www/page && python3 -m http.server -d www 8123")
    sb.wait_port(8123)
    port = sb.port(8123)
    assert port.fetch("/page").text == "hello\n"
    assert port.fetch("/none").status_code == 404
    import httpx

    assert httpx.get(sb.url(8123, "page")).text == "hello\n"
    for where in (port.url + "/page", port.url + "page", f"{port.url}/page"):
        answer = httpx.get(where, headers=port.headers)
        assert (answer.status_code, answer.text) == (200, "hello\n"), where
    assert httpx.get(port.at("page")).status_code == 401


def _elsewhere(sent: bytes, out: Any) -> None:
    out.put(pickle.loads(sent).exec("echo from elsewhere").stdout)


def test_a_sandbox_goes_to_another_process(sb: cove.Sandbox) -> None:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    worker = context.Process(target=_elsewhere, args=(pickle.dumps(sb), out))
    worker.start()
    assert out.get(timeout=60) == "from elsewhere\n"
    worker.join(30)
