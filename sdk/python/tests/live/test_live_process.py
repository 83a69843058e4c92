"""Processes of a real server."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import cove

pytestmark = pytest.mark.live


def test_output_exit_code_and_end(sb: Any) -> None:
    result = sb.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("out\n", "err\n", 3, False)
    assert result.end.cause == "exited"
    assert result.end.at is not None
    assert result.duration > 0
    with pytest.raises(cove.CommandError, match="exited with 3: err"):
        result.check()
    assert sb.exec("true").check().ok


def test_an_argument_vector_is_not_parsed(sb: Any) -> None:
    assert sb.exec(["printf", "%s|", "a b", "$HOME", "'", ""]).stdout == "a b|$HOME|'||"


def test_cwd_env_and_user(sb: Any) -> None:
    result = sb.exec("pwd; echo $A; id -u", cwd="/usr", env={"A": "ü"}, user="root")
    assert result.stdout == "/usr\nü\n0\n"
    assert sb.exec("id -un", user="user").stdout == "user\n"
    assert sb.exec("id -u; id -g", user="1234:4321").stdout == "1234\n4321\n"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"cmd": ["/no/such/program"]}, (cove.NotFound, cove.InvalidArgument)),
        ({"cmd": "true", "user": "nobody-here"}, (cove.NotFound, cove.InvalidArgument)),
        ({"cmd": "true", "cwd": "/no/such/dir"}, (cove.NotFound, cove.InvalidArgument)),
        ({"cmd": "true", "exec_id": "sp ace"}, cove.InvalidArgument),
        ({"cmd": "true", "env": {"A=B": "x"}}, cove.InvalidArgument),
    ],
)
def test_what_cannot_start(sb: Any, wrong: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        sb.exec(**wrong)


def test_a_deadline_kills_the_tree_and_keeps_the_output(sb: Any) -> None:
    result = sb.exec("echo before; sleep 1234 & sleep 1234", timeout=2)
    assert result.end.cause == "deadline"
    assert result.stdout == "before\n"
    assert (result.ok, result.exit_code != 0) == (False, True)
    assert not any("1234" in task.command for task in sb.processes().tasks)


def test_it_ends_with_its_main_process(sb: Any) -> None:
    began = time.monotonic()
    assert sb.exec("sleep 600 & echo done").stdout == "done\n"
    assert time.monotonic() - began < 300


def test_a_signal_is_told(sb: Any) -> None:
    result = sb.exec("kill -9 $$")
    assert result.end.cause == "signalled"
    assert (result.end.signal, result.exit_code) == ("SIGKILL", 137)


def test_output_is_heard_while_it_runs(sb: Any) -> None:
    """The command waits for a file that only the listener writes."""
    heard: list[str] = []
    errors: list[str] = []
    sb.files.remove("/tmp/go", recursive=True) if sb.files.exists("/tmp/go") else None
    other = cove.Sandbox.connect(sb.id)

    def listen(text: str) -> None:
        heard.append(text)
        if "".join(heard).startswith("first\n"):
            other.files.write("/tmp/go", "")

    command = "echo first; until [ -e /tmp/go ]; do sleep 0.05; done; echo grüße; echo bad >&2"
    result = sb.exec(command, on_stdout=listen, on_stderr=errors.append, timeout=120)
    assert result.ok
    assert "".join(heard) == "first\ngrüße\n"
    assert "".join(errors) == "bad\n"


def stdin_kinds(data: bytes) -> dict[str, Any]:
    def pieces() -> Iterator[bytes]:
        for start in range(0, len(data), 300_000):
            yield data[start : start + 300_000]

    return {"bytes": data, "file": io.BytesIO(data), "iterator": pieces()}


@pytest.mark.parametrize("kind", ["bytes", "file", "iterator"])
@pytest.mark.parametrize("size", [0, 5, 100_000, 8 << 20])
def test_stdin_arrives_whole(sb: Any, kind: str, size: int) -> None:
    data = os.urandom(size)
    result = sb.exec("sha256sum", stdin=stdin_kinds(data)[kind], timeout=300)
    assert result.check().stdout.split()[0] == hashlib.sha256(data).hexdigest()


def test_without_stdin_there_is_an_end_of_file(sb: Any) -> None:
    assert sb.exec("cat; echo end", timeout=60).stdout == "end\n"


def test_stdin_nobody_reads_is_no_error(sb: Any) -> None:
    assert sb.exec("head -c 3", stdin=b"abcdef" * 1_000_000, timeout=120).stdout == "abc"


def test_start_write_and_read(sb: Any) -> None:
    with sb.start('while read -r line; do echo "got $line"; done; echo bye', stdin=True) as process:
        assert process.pid > 0
        process.write("one\n")
        output = iter(process)
        seen = ""
        while "got one\n" not in seen:
            seen += next(output).text
        process.write("two\n")
        process.close_stdin()
        rest = process.wait()
    assert (seen + rest.stdout) == "got one\ngot two\nbye\n"
    assert rest.ok
    assert process.end.cause == "exited"


def test_signals(sb: Any) -> None:
    with sb.start("trap 'echo term; exit 7' TERM; echo ready; while :; do sleep 0.1; done") as process:
        for piece in process:
            if "ready" in piece.text:
                process.signal("TERM", process_only=True)
                break
        assert process.wait().exit_code == 7
    with sb.start("sleep 1000") as process:
        process.kill()
        assert process.wait().end.cause == "killed_by_user"
        process.kill()


def test_a_pty_is_a_terminal_that_can_be_resized(sb: Any) -> None:
    with sb.start(["sh"], pty=(24, 80), env={"PS1": "", "TERM": "xterm"}) as process:
        process.write("tty; stty size\n")
        seen = read_until(process, "24 80")
        assert "/dev/" in seen
        process.resize(50, 132)
        process.write("stty size\n")
        read_until(process, "50 132")
        process.write("exit 4\n")
        assert process.wait().exit_code == 4


def read_until(process: Any, text: str) -> str:
    seen = ""
    for piece in process:
        assert piece.stream == "pty"
        seen += str(piece.text)
        if text in seen:
            return seen
    raise AssertionError(f"{text!r} never came: {seen!r}")


def test_an_exec_id_runs_once(sb: Any) -> None:
    path = f"/tmp/once-{os.urandom(4).hex()}"
    name = os.urandom(8).hex()
    first = sb.exec(f"echo ran >> {path}; cat {path}", exec_id=name)
    second = sb.exec(f"echo ran >> {path}; cat {path}", exec_id=name)
    assert (first.stdout, first.replayed) == ("ran\n", False)
    assert (second.stdout, second.replayed) == ("ran\n", True)
    assert sb.files.read(path) == "ran\n"


def test_leaving_and_coming_back(sb: Any) -> None:
    with sb.start("echo early; until [ -e /tmp/later ]; do sleep 0.05; done; echo late") as process:
        first = next(iter(process))
        assert first.text == "early\n"
    listed = {p.exec_id: p for p in sb.processes()}
    assert listed[process.exec_id].end is None
    sb.files.write("/tmp/later", "")
    assert sb.attach(process.exec_id, offset=process.offset).wait().stdout == "late\n"
    whole = sb.attach(process.exec_id).wait()
    assert (whole.stdout, whole.end.cause) == ("early\nlate\n", "exited")
    assert {p.exec_id: p for p in sb.processes()}[process.exec_id].end.cause == "exited"
    with pytest.raises(cove.NotFound):
        sb.attach("never-started")


def test_processes_lists_what_others_started(sb: Any) -> None:
    with sb.start("sleep 4321 & wait") as process:
        tasks = sb.processes().tasks
        deadline = time.monotonic() + 30
        while not any("4321" in t.command for t in tasks) and time.monotonic() < deadline:
            tasks = sb.processes().tasks
        assert any("4321" in t.command for t in tasks)
        process.kill()


def test_a_hundred_megabytes_lose_no_byte(sb: Any) -> None:
    program = (
        "import hashlib, os, sys\n"
        "h = hashlib.sha256()\n"
        "for _ in range(100):\n"
        "    b = os.urandom(1 << 20); h.update(b); sys.stdout.buffer.write(b)\n"
        "sys.stdout.flush(); sys.stderr.write(h.hexdigest())\n"
    )
    result = sb.exec(["python3", "-c", program], timeout=500).check()
    assert len(result.stdout_bytes) == 100 << 20
    assert result.lost == ()
    assert hashlib.sha256(result.stdout_bytes).hexdigest() == result.stderr


def test_threads_share_a_sandbox(run: str, sb: Any) -> None:
    shared = cove.Sandbox.connect(sb.id)
    results: dict[int, str] = {}

    def work(n: int) -> None:
        results[n] = shared.exec(["echo", str(n)], timeout=120).stdout

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: f"{n}\n" for n in range(16)}
