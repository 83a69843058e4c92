"""Processes: output in order and complete, whatever the connection does; at most one run."""

from __future__ import annotations

import base64
import io
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Break, Fail, FakeProcesses, Raw, Stream, envelope


def test_exec_returns_output_and_end(api: Api) -> None:
    processes = FakeProcesses([("STDOUT", b"out\n"), ("STDERR", b"err\n"), ("STDOUT", b"more \xff\n")]).install(
        api.server
    )
    processes.end = {"cause": "exited", "exitCode": 3, "at": "2026-03-01T10:00:00Z"}
    result = api.sandbox().exec("ls", cwd="/tmp", env={"A": "1"}, user=1000, timeout=2.5)
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("out\nmore �\n", "err\n", 3, False)
    assert result.stdout_bytes == b"out\nmore \xff\n"
    assert (result.end.cause, result.duration, result.lost, result.replayed) == ("exited", 0.25, (), False)
    (spec,) = processes.runs.values()
    assert spec == {
        "execId": result.exec_id,
        "command": "ls",
        "cwd": "/tmp",
        "env": {"A": "1"},
        "user": "1000",
        "timeout": "2.5s",
    }
    with pytest.raises(cove.CommandError, match="exited with 3: err") as caught:
        result.check()
    assert caught.value.result is result


def test_a_list_is_an_argument_vector(api: Api) -> None:
    processes = FakeProcesses([]).install(api.server)
    assert api.sandbox().exec(["echo", "a b"]).check().stdout == ""
    (spec,) = processes.runs.values()
    assert spec["args"] == ["echo", "a b"]
    for wrong in ([], [1], 5):
        with pytest.raises((cove.InvalidArgument, TypeError)):
            api.sandbox().exec(wrong)


@pytest.mark.parametrize("cause", ["deadline", "oom", "killed_by_user", "infra"])
def test_an_end_without_exit_code_is_never_zero(api: Api, cause: str) -> None:
    FakeProcesses([("STDOUT", b"part")]).install(api.server).end = {"cause": cause, "detail": "why"}
    result = api.sandbox().exec("sleep 9", timeout=1)
    assert (result.stdout, result.exit_code, result.ok) == ("part", -1, False)
    with pytest.raises(cove.CommandError, match=f"{cause}: why"):
        result.check()


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_that_breaks_again_and_again_loses_and_doubles_nothing(api: Api, seed: int) -> None:
    rng = random.Random(seed)
    output = [(rng.choice(["STDOUT", "STDERR"]), rng.randbytes(rng.randrange(1, 5000))) for _ in range(20)]
    breaks = [rng.choice([0, 1, rng.randrange(5000)]) for _ in range(15)]
    processes = FakeProcesses(output, breaks).install(api.server)
    result = api.sandbox().exec("make noise", stdin="in")
    assert result.stdout_bytes == b"".join(data for stream, data in output if stream == "STDOUT")
    assert result.stderr_bytes == b"".join(data for stream, data in output if stream == "STDERR")
    assert len(processes.runs) == 1
    assert result.lost == ()
    assert not result.replayed
    # The input is sent until the start is confirmed, and then no more.
    confirmed = sum(1 for got in api.server.requests if got.path.endswith("Start"))
    assert confirmed == next((n for n, size in enumerate(breaks) if size), len(breaks)) + 1


def test_a_break_within_a_message_is_a_break(api: Api) -> None:
    whole = envelope({"output": {"stream": "OUTPUT_STREAM_STDOUT", "data": base64.b64encode(b"hello").decode()}})
    started = {"started": {"execId": "e", "pid": 1}}
    api.server.on("Processes/Start", Stream([started, Raw(whole[: len(whole) // 2]), Break()]))
    api.server.on(
        "Processes/Attach", Stream([started, Raw(whole), {"end": {"end": {"cause": "exited"}, "outputBytes": "5"}}])
    )
    assert api.sandbox().exec("x").stdout == "hello"


def test_a_stream_that_ends_too_early_or_drains_is_picked_up(api: Api) -> None:
    started = {"started": {"execId": "e", "pid": 1}}
    draining = Fail("unavailable", "unavailable", "draining", status=503, retry_after_ms=2000)
    cut_off = Fail("canceled", "canceled", "shutting down")
    api.server.on("Processes/Start", Stream([started]))
    later = [Stream([draining]), Stream([cut_off]), Stream([started, {"end": {"end": {"cause": "exited"}}}])]
    api.server.on("Processes/Attach", lambda _: later.pop(0))
    assert api.sandbox().exec("x").ok
    assert max(api.time.slept) > 2


def test_a_server_restart_in_the_middle(api: Api) -> None:
    data = os.urandom(20_000)
    processes = FakeProcesses([("STDOUT", data)], [7_000]).install(api.server)
    sb = api.sandbox()

    def restart() -> None:
        api.time.on_sleep = lambda: None
        api.server.stop()
        api.server.start()

    api.time.on_sleep = restart
    assert sb.exec("x").stdout_bytes == data
    assert len(processes.runs) == 1


def test_a_server_that_stays_away_ends_the_exec_with_an_error(api: Api) -> None:
    FakeProcesses([("STDOUT", b"x" * 5000)], [1000]).install(api.server)
    sb = api.sandbox()
    api.time.on_sleep = api.server.stop
    with pytest.raises(cove.TransportError):
        sb.exec("x")
    assert sum(api.time.slept) <= 30


def test_an_error_of_the_start_is_raised(api: Api) -> None:
    api.server.on("Processes/Start", Fail("invalid_argument", field_name="process.user", message="no user 'bob'"))
    with pytest.raises(cove.InvalidArgument, match="no user 'bob'") as caught:
        api.sandbox().exec("x", user="bob")
    assert caught.value.field == "process.user"
    with pytest.raises(cove.InvalidArgument):
        api.sandbox().start("x", user="bob")


def test_the_same_exec_id_runs_once(api: Api) -> None:
    processes = FakeProcesses([("STDOUT", b"once")]).install(api.server)
    sb = api.sandbox()
    first, second = sb.exec("x", exec_id="step-1"), sb.exec("x", exec_id="step-1")
    assert (first.stdout, first.replayed) == ("once", False)
    assert (second.stdout, second.replayed) == ("once", True)
    assert list(processes.runs) == ["step-1"]


def test_lost_output_is_told(api: Api) -> None:
    started = {"started": {"execId": "e", "pid": 1, "replayed": True}}
    tail = {"output": {"stream": "OUTPUT_STREAM_STDOUT", "offset": "100", "data": base64.b64encode(b"tail").decode()}}
    end = {"end": {"end": {"cause": "exited"}, "outputBytes": "120"}}
    api.server.on("Processes/Attach", Stream([started, {"lost": {"to": "100"}}, tail, end]))
    result = api.sandbox().attach("e").wait()
    assert result.stdout == "tail"
    assert result.lost == ((0, 100), (104, 120))


def test_listeners_hear_text_as_it_comes_whole_characters_only(api: Api) -> None:
    text = "grüße € 🎉\n"
    output = [("STDOUT", text.encode()), ("STDERR", b"e"), ("STDOUT", b"cut \xe2\x82")]
    FakeProcesses(output, piece=1).install(api.server)
    heard: list[str] = []
    errors: list[str] = []
    result = api.sandbox().exec("x", on_stdout=heard.append, on_stderr=errors.append)
    assert "".join(heard) == text + "cut �"
    assert all("�" not in piece for piece in heard[:-1])
    assert errors == ["e"]
    assert result.stdout == "".join(heard)


def test_a_listener_that_fails_ends_the_exec(api: Api) -> None:
    FakeProcesses([("STDOUT", b"abc")]).install(api.server)

    def listener(_: str) -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        api.sandbox().exec("x", on_stdout=listener)
    assert api.sandbox().exec("x").stdout == "abc"


def test_start_iterates_and_waits(api: Api) -> None:
    processes = FakeProcesses([("STDOUT", b"a" * 1500), ("STDERR", b"b"), ("STDOUT", b"c")]).install(api.server)
    with api.sandbox().start(["x"], stdin=True) as process:
        assert process.pid == 7
        pieces = iter(process)
        first = next(pieces)
        assert (first.stream, first.data, first.offset, first.text) == ("stdout", b"a" * 1000, 0, "a" * 1000)
        process.write("ü")
        process.write(b"\x00")
        process.close_stdin()
        process.signal("TERM", process_only=True)
        process.resize(40, 120)
        process.kill()
        rest = process.wait()
    assert rest.stdout_bytes == b"a" * 500 + b"c"
    assert rest.stderr == "b"
    assert process.end.cause == "exited"
    assert process.offset == 1502
    assert processes.input[process.exec_id] == "ü\0".encode()
    assert processes.signals == [(process.exec_id, "TERM"), (process.exec_id, "SIGKILL")]
    assert api.server.sent("Signal")[0].message["processOnly"] is True
    assert api.server.sent("Resize")[0].message["size"] == {"rows": 40, "cols": 120}


def test_kill_of_what_has_ended_is_no_error(api: Api) -> None:
    FakeProcesses([]).install(api.server)
    api.server.on("Processes/Signal", Fail("not_found", "not_found", status=404))
    process = api.sandbox().start("x")
    process.kill()
    with pytest.raises(cove.NotFound):
        process.signal("HUP")


def test_attach_reads_from_an_offset(api: Api) -> None:
    processes = FakeProcesses([("STDOUT", b"0123456789")]).install(api.server)
    processes.runs["e1"] = {}
    process = api.sandbox().attach("e1", offset=4)
    assert "".join(piece.text for piece in process) == "456789"
    assert api.server.count("Start") == 0
    with pytest.raises(cove.NotFound):
        api.sandbox().attach("e2")


def test_a_pty_can_be_written_to_and_is_stdout(api: Api) -> None:
    processes = FakeProcesses([("PTY", b"$ ")]).install(api.server)
    process = api.sandbox().start("bash", pty=(24, 80))
    process.write("exit\n")
    assert process.wait().stdout == "$ "
    (spec,) = processes.runs.values()
    assert spec["pty"] == {"rows": 24, "cols": 80}
    assert spec["stdin"] is True


def pieces_of(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 700_000):
        yield data[start : start + 700_000]


@pytest.mark.parametrize("kind", ["text", "bytes", "file", "text file", "iterator"])
def test_stdin_arrives_whole(api: Api, kind: str) -> None:
    processes = FakeProcesses([("STDOUT", b"ok")]).install(api.server)
    text = "ü" * 1_500_000
    data = text.encode()
    stdin: Any = {
        "text": text,
        "bytes": data,
        "file": io.BytesIO(data),
        "text file": io.StringIO(text),
        "iterator": pieces_of(data),
    }[kind]
    processes.ends_when_changed = True  # as cat does: at the end of its input
    result = api.sandbox().exec("cat", stdin=stdin)
    assert processes.input[result.exec_id] == data
    assert processes.closed == {result.exec_id}


def test_little_stdin_goes_with_the_start(api: Api) -> None:
    processes = FakeProcesses([]).install(api.server)
    api.sandbox().exec("cat", stdin="hello")
    (spec,) = processes.runs.values()
    assert base64.b64decode(spec["input"]) == b"hello"
    assert "stdin" not in spec
    assert api.server.count("SendInput") == 0


def test_a_process_that_does_not_read_its_stdin_is_no_error(api: Api) -> None:
    processes = FakeProcesses([("STDOUT", b"ok")]).install(api.server)
    api.server.on("Processes/SendInput", Fail("failed_precondition", "failed_precondition"))
    assert api.sandbox().exec("true", stdin=pieces_of(b"x" * 3_000_000)).stdout == "ok"
    assert processes.signals == []


def test_stdin_that_fails_kills_the_process_and_is_raised(api: Api) -> None:
    processes = FakeProcesses([("STDOUT", b"half")]).install(api.server)
    processes.ends_when_changed = True

    def broken() -> Iterator[bytes]:
        yield b"first half"
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        api.sandbox().exec("cat > /important", stdin=broken())
    assert [signal for _, signal in processes.signals] == ["SIGKILL"]
    assert processes.closed == set()


def test_processes_are_listed(api: Api) -> None:
    process = {"execId": "e1", "pid": 5, "args": ["sleep", "9"], "user": "root", "startedAt": "2026-03-01T10:00:00Z"}
    ended = {"execId": "e2", "pid": 6, "end": {"end": {"cause": "signalled", "signal": "SIGKILL", "exitCode": 137}}}
    task = {"pid": 9, "ppid": 5, "uid": 1000, "state": "S", "command": "sleep 9", "execId": "e1"}
    api.server.on("Processes/List", {"processes": [process, ended], "tasks": [task]})
    found = api.sandbox().processes()
    assert [(p.exec_id, p.end.cause if p.end else None) for p in found] == [("e1", None), ("e2", "signalled")]
    assert found.tasks[0].command == "sleep 9"
    assert str(found.processes[1].end) == "signalled by SIGKILL"


def test_a_hundred_megabytes_arrive_byte_for_byte(api: Api) -> None:
    block = os.urandom(256 << 10)
    FakeProcesses([("STDOUT", block)] * 400, [33 << 20], piece=256 << 10).install(api.server)
    result = api.sandbox().exec("x")
    assert len(result.stdout_bytes) == 400 * len(block)
    assert result.stdout_bytes == block * 400


def _slow(go: threading.Event, head: list[Any], tail: list[Any]) -> Stream:
    def items() -> Iterator[Any]:
        yield from head
        go.wait(20)
        yield from tail

    return Stream(items())


def _out(text: bytes, offset: int) -> dict[str, Any]:
    return {
        "output": {"stream": "OUTPUT_STREAM_STDOUT", "offset": str(offset), "data": base64.b64encode(text).decode()}
    }


def test_read_and_wait_have_their_time_and_lose_nothing(api: Api) -> None:
    go = threading.Event()
    started, end = {"started": {"execId": "e", "pid": 1}}, {"end": {"end": {"cause": "exited"}, "outputBytes": "8"}}
    api.server.on("Processes/Start", lambda _: _slow(go, [started, _out(b"one\n", 0)], []))

    def attach(got: Any) -> Any:
        one = [] if got.message.get("offset") else [_out(b"one\n", 0)]
        return _slow(go, [started, *one], [_out(b"two\n", 4), end])

    api.server.on("Processes/Attach", attach)
    try:
        process = api.sandbox().start("slow")
        assert process.read(timeout=20).data == b"one\n"
        for late in (process.read, process.wait):
            with pytest.raises(TimeoutError) as caught:
                late(timeout=0.05)
            assert isinstance(caught.value, cove.DeadlineExceeded)
        go.set()
        assert process.wait(timeout=20).stdout == "two\n"
        assert process.read(timeout=1) is None
    finally:
        go.set()


def test_what_a_late_wait_had_is_the_next_ones(api: Api) -> None:
    go = threading.Event()
    started = {"started": {"execId": "e", "pid": 1}}
    api.server.on("Processes/Start", lambda _: _slow(go, [started, _out(b"one\n", 0)], []))
    api.server.on("Processes/Attach", Stream([started, {"end": {"end": {"cause": "exited"}, "outputBytes": "4"}}]))
    try:
        process = api.sandbox().start("slow")
        with pytest.raises(cove.DeadlineExceeded):
            process.wait(timeout=1)  # in which the line arrives
        assert process.wait().stdout == "one\n"
    finally:
        go.set()


def test_a_pause_is_told_and_waited_for_no_longer_than_the_timeout(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    events = [{"started": {"execId": "e", "pid": 1}}, {"standby": {"standby": "hot"}}]
    api.server.on("Processes/Start", lambda _: _slow(go, events, []))
    try:
        with pytest.raises(cove.DeadlineExceeded, match=r"was paused \(hot\), and did not wake in 0.2 s") as caught:
            api.sandbox().exec("slow", timeout=0.2, exec_id="e")
        assert caught.value.reason == "asleep"
        assert "sandbox sb1 was paused (hot): exec e stands still" in caplog.text
        process = api.sandbox().start("slow", exec_id="e")  # no timeout: as long as it takes
        with pytest.raises(cove.DeadlineExceeded, match=r"was paused") as caught:
            process.wait(timeout=1)
        assert (caught.value.reason, process.standby) == ("asleep", "hot")
    finally:
        go.set()


def test_a_process_that_woke_has_all_its_time(api: Api) -> None:
    go = threading.Event()
    events = [{"started": {"execId": "e", "pid": 1}}, {"standby": {"standby": "cold"}}, {"standby": {}}]
    end = {"end": {"end": {"cause": "exited"}, "outputBytes": "0"}}
    api.server.on("Processes/Start", lambda _: _slow(go, events, [end]))
    timer = threading.Timer(0.5, go.set)  # longer than the patience with one that sleeps
    timer.start()
    try:
        assert api.sandbox().exec("slow", timeout=0.2).end.cause == "exited"
    finally:
        timer.cancel()
        go.set()
