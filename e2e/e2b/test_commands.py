"""Commands and terminals."""

import threading
import time

import pytest
from e2b import AuthenticationException, CommandExitException, InvalidArgumentException, NotFoundException, Sandbox, TimeoutException
from e2b import PtySize


def test_run(sbx):
    r = sbx.commands.run("echo out; echo err >&2")
    assert (r.stdout, r.stderr, r.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(CommandExitException) as e:
        sbx.commands.run("echo x; exit 3")
    assert (e.value.exit_code, e.value.stdout) == (3, "x\n")
    assert sbx.commands.run("whoami; pwd").stdout == "user\n/home/user\n"
    assert sbx.commands.run("whoami; pwd", user="root").stdout == "root\n/root\n"
    assert sbx.commands.run("echo $A-$HOME", envs={"A": "1"}, cwd="/tmp").stdout == "1-/home/user\n"
    with pytest.raises(InvalidArgumentException):
        sbx.commands.run("true", cwd="/no/such")
    with pytest.raises(AuthenticationException):
        sbx.commands.run("true", user="nobody-like-this")


def test_output_in_order_and_large(sbx):
    seen = []
    r = sbx.commands.run("for i in 1 2 3; do echo $i; done", on_stdout=seen.append)
    assert "".join(seen) == r.stdout == "1\n2\n3\n"
    big = sbx.commands.run("head -c 5000000 /dev/zero | tr '\\0' 'é' | head -c 3000000")
    assert len(big.stdout.encode(errors="replace")) >= 3_000_000
    assert sbx.commands.run("printf 'ünïcödé 🎉'").stdout == "ünïcödé 🎉"


def test_background_list_connect_kill(sbx):
    h = sbx.commands.run("echo begun; sleep 300", background=True, timeout=0)
    assert h.pid > 0
    [mine] = [p for p in sbx.commands.list() if p.pid == h.pid]
    assert mine.cmd == "/bin/bash" and mine.args == ["-l", "-c", "echo begun; sleep 300"]
    assert sbx.commands.run(f"kill -0 {h.pid} && echo alive").stdout == "alive\n"
    other = sbx.commands.connect(h.pid)
    assert other.pid == h.pid
    assert sbx.commands.kill(h.pid) is True
    with pytest.raises(CommandExitException) as e:
        other.wait()
    assert e.value.exit_code != 0
    with pytest.raises(CommandExitException):
        h.wait()
    assert sbx.commands.kill(h.pid) is False
    assert h.pid not in [p.pid for p in sbx.commands.list()]
    with pytest.raises(NotFoundException):
        sbx.commands.connect(999_999)


def test_a_process_outlives_its_reader(sbx):
    h = sbx.commands.run("sleep 0.5; echo late > /tmp/late", background=True)
    h.disconnect()
    deadline = time.monotonic() + 20
    while not sbx.files.exists("/tmp/late"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert sbx.files.read("/tmp/late") == "late\n"


def test_stdin(sbx):
    h = sbx.commands.run("cat", background=True, stdin=True)
    sbx.commands.send_stdin(h.pid, "one\n")
    sbx.commands.send_stdin(h.pid, "two")
    sbx.commands.close_stdin(h.pid)
    assert h.wait().stdout == "one\ntwo"
    h = sbx.commands.run("wc -c", background=True, stdin=True)
    sbx.commands.stream_input(h.pid, (b"x" * 1000 for _ in range(20)))
    sbx.commands.close_stdin(h.pid)
    assert h.wait().stdout.strip() == "20000"
    # Without stdin a command reads nothing instead of waiting.
    assert sbx.commands.run("cat; echo done", timeout=10).stdout == "done\n"
    with pytest.raises(NotFoundException):
        sbx.commands.send_stdin(999_999, "x")


def test_timeout_ends_the_command(sbx):
    began = time.monotonic()
    with pytest.raises(TimeoutException):
        sbx.commands.run("sleep 4711", timeout=1)
    assert time.monotonic() - began < 20
    deadline = time.monotonic() + 20
    while "4711" in sbx.commands.run("ps ax -o args | grep '[s]leep 4711' || true").stdout:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_killed_under_a_command():
    s = Sandbox.create(timeout=60)
    h = s.commands.run("sleep 300", background=True)
    threading.Timer(0.3, s.kill).start()
    with pytest.raises(TimeoutException):
        h.wait()


def test_pty(sbx):
    out = bytearray()
    pty = sbx.pty.create(PtySize(rows=24, cols=80), timeout=60)
    sbx.pty.resize(pty.pid, PtySize(rows=30, cols=100))
    sbx.pty.send_stdin(pty.pid, b"stty size; echo $TERM; exit 5\n")
    with pytest.raises(CommandExitException) as e:
        pty.wait(on_pty=out.extend)
    assert e.value.exit_code == 5
    assert b"30 100" in out and b"xterm" in out
    p = sbx.pty.create(PtySize(rows=24, cols=80))
    assert sbx.pty.kill(p.pid)
