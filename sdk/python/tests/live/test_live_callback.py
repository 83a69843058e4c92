"""Handlers of this process, called from inside a sandbox without a network."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

import cove

from ..blocking import Blocking
from .conftest import Live

pytestmark = pytest.mark.live

ASK = """
import sys, urllib.request, urllib.error
try:
    with urllib.request.urlopen(sys.argv[1], sys.argv[2].encode() if len(sys.argv) > 2 else None) as r:
        print(r.status, r.headers.get("content-type"), r.read().decode())
except urllib.error.HTTPError as e:
    print(e.code, e.headers.get("x-cove-error"), e.read().decode())
except Exception as e:
    print("failed", e)
"""


def ask(sb: Any, path: str, *body: str) -> str:
    result = sb.exec(["python3", "-c", ASK, "http://cove.internal/" + path, *body], timeout=120)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout).strip()


def is_async(live: Live) -> bool:
    return isinstance(live.client, Blocking)


def handler(live: Live, function: Any) -> Any:
    """function(request, body) for either way into the SDK."""
    if not is_async(live):
        return lambda request: function(request, request.body)

    async def handle(request: Any) -> Any:
        return function(request, await request.body())

    return handle


class Gate:
    """A handler that answers when it is told to."""

    def __init__(self, live: Live) -> None:
        self.asked: list[str] = []
        self.answer: Any = None
        self.handler = self._async if is_async(live) else self._sync

    def _sync(self, request: Any) -> Any:
        self.asked.append(request.path)
        while self.answer is None:
            time.sleep(0.01)
        return self.answer

    async def _async(self, request: Any) -> Any:
        self.asked.append(request.path)
        while self.answer is None:  # noqa: ASYNC110 (set from outside of the loop)
            await asyncio.sleep(0.01)
        return self.answer

    def wait(self, sb: Any, path: str) -> None:
        until(sb, lambda: path in self.asked)


def until(sb: Any, true: Any) -> None:
    """Wait for something here; asking for the sandbox's record runs the event loop and wakes nothing."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        sb.info()
        time.sleep(0.02)


def test_what_a_handler_may_return(live: Live, sb: Any) -> None:
    def handle(request: Any, body: bytes) -> Any:
        if request.path == "/echo":
            return {
                "method": request.method,
                "query": request.query,
                "body": body.decode(),
                "type": request.headers["Content-Type"],
            }
        if request.path == "/text":
            return "grüße"
        if request.path == "/bytes":
            return b"\x00\x01"
        if request.path == "/none":
            return None
        if request.path == "/teapot":
            return cove.Response("short and stout", 418, {"X-Pot": "tea", "Content-Type": "text/pot"})
        if request.path == "/iterator":
            return (word for word in ["a", "", "b"])
        if request.path == "/wrong":
            return object()
        raise ValueError("a secret of the host")

    with sb.serve("kinds", handler(live, handle)) as served:
        assert served.url == "http://cove.internal/kinds"
        status, kind, body = ask(sb, "kinds/echo?a=1&b=%20x", "hello").split(" ", 2)
        assert (status, kind) == ("200", "application/json")
        assert json.loads(body) == {
            "method": "POST",
            "query": {"a": "1", "b": " x"},
            "body": "hello",
            "type": "application/x-www-form-urlencoded",
        }
        assert ask(sb, "kinds/text") == "200 text/plain; charset=utf-8 grüße"
        assert ask(sb, "kinds/bytes").startswith("200 application/octet-stream")
        assert ask(sb, "kinds/none") == "204 None"
        assert ask(sb, "kinds/teapot") == "418 None short and stout"
        assert ask(sb, "kinds/iterator") == "200 text/plain; charset=utf-8 ab"
        for path in ("wrong", "boom"):
            answer = ask(sb, "kinds/" + path)
            assert answer.startswith("500 ")
            assert "handler_failed" in answer
            assert "secret" not in answer
            assert "Traceback" not in answer
        assert ask(sb, "nobody").startswith("404 no_such_name")
        with pytest.raises(cove.AlreadyExists):
            sb.serve("kinds", handler(live, handle))
    assert "refused" in ask(sb, "kinds/text")


def test_chunks_arrive_one_by_one(live: Live, sb: Any) -> None:
    """Each word is sent only after code inside has said that it has the one before."""
    read: list[str] = []

    def said(request: Any, body: bytes) -> str:
        read.append(body.decode())
        return "ok"

    def words(request: Any) -> Any:
        for i in range(5):
            while len(read) < i:
                time.sleep(0.005)
            yield f"data: {i}\n\n"

    async def async_words(request: Any) -> Any:
        for i in range(5):
            while len(read) < i:  # noqa: ASYNC110 (the same)
                await asyncio.sleep(0.005)
            yield f"data: {i}\n\n"

    events = async_words if is_async(live) else words
    with sb.serve("sse", events), sb.serve("said", handler(live, said)):
        code = """
import urllib.request
with urllib.request.urlopen("http://cove.internal/sse") as r:
    for line in r:
        if line.strip():
            print(line.decode().strip())
            urllib.request.urlopen("http://cove.internal/said", line).read()
"""
        result = sb.exec(["python3", "-c", code], timeout=60)
        assert result.stdout.split("\n") == [f"data: {i}" for i in range(5)] + [""], result.stderr
    assert len(read) == 5


def test_many_at_once_and_large_bodies(live: Live, sb: Any) -> None:
    def handle(request: Any, body: bytes) -> Any:
        return cove.Response(hashlib.sha256(body).hexdigest().encode() + body)

    with sb.serve("echo", handler(live, handle), concurrency=64):
        code = """
import hashlib, os, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
def call(size):
    data = os.urandom(size)
    answer = urllib.request.urlopen("http://cove.internal/echo", data).read()
    return answer == hashlib.sha256(data).hexdigest().encode() + data
n, size = int(sys.argv[1]), int(sys.argv[2])
with ThreadPoolExecutor(n) as pool:
    print(list(pool.map(call, [size] * n)).count(True))
"""
        for count, size in ((64, 100), (64, 100_000), (2, 10_000_000)):
            result = sb.exec(["python3", "-c", code, str(count), str(size)], timeout=120)
            assert result.stdout.strip() == str(count), result.stderr


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("woken_by", ["answer", "resume"])
def test_a_call_outlives_a_pause(live: Live, cold: bool, woken_by: str) -> None:
    gate = Gate(live)
    with live.create() as sb, sb.serve("llm", gate.handler):
        process = sb.start(["python3", "-c", ASK, "http://cove.internal/llm/think"])
        gate.wait(sb, "/think")
        sb.pause(cold=cold)
        assert sb.info().standby == ("cold" if cold else "hot")
        if woken_by == "resume":
            sb.resume()
        gate.answer = "the answer"
        assert process.wait().stdout.strip() == "200 text/plain; charset=utf-8 the answer"
        assert sb.info().standby == ""
        # and the route is as before
        assert ask(sb, "llm/again").endswith("the answer")


def test_reset_fork_and_restore(live: Live) -> None:
    gate = Gate(live)
    with live.create() as sb, sb.serve("llm", gate.handler):
        process = sb.start(["python3", "-c", ASK, "http://cove.internal/llm/one"])
        gate.wait(sb, "/one")
        with sb.fork(1)[0] as child:
            # What it inherited is answered: there is nobody to ask.
            answer = child.attach(process.exec_id).wait().stdout
            assert answer.startswith("502 handler_gone"), answer
            assert "refused" in ask(child, "llm/child")
            assert "/child" not in gate.asked
        gate.answer = "yes"
        assert process.wait().stdout.strip().endswith("yes")
        gate.answer = None

        sb.start(["python3", "-c", ASK, "http://cove.internal/llm/two"])
        gate.wait(sb, "/two")
        sb.reset()
        gate.answer = "after the reset"
        assert ask(sb, "llm/three").endswith("after the reset")
        snapshot = sb.snapshot()
        try:
            sb.restore(snapshot)
            assert ask(sb, "llm/four").endswith("after the reset")
        finally:
            snapshot.delete()


def test_whatever_the_network(live: Live) -> None:
    for network in ("none", "public", ["allow 192.0.2.1"]):
        with live.create(network=network) as sb, sb.serve("llm", handler(live, lambda request, body: "here")):
            assert ask(sb, "llm").endswith("here")


CLIENT = """
import sys, time, cove
sb = cove.Sandbox.connect(sys.argv[1])
def handle(request):
    print("asked", flush=True)
    time.sleep(1000)
sb.serve("llm", handle)
print("serving", flush=True)
time.sleep(1000)
"""


def test_the_client_is_killed(live: Live) -> None:
    if is_async(live):
        pytest.skip("the process that is killed is the same one")
    with live.create() as sb:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, sb.id], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "serving\n"
        process = sb.start(["python3", "-c", ASK, "http://cove.internal/llm"])
        assert client.stdout.readline() == "asked\n"
        client.kill()
        client.wait()
        client.stdout.close()
        assert process.wait().stdout.startswith("502 handler_gone")
        assert ask(sb, "llm").startswith("503 no_handler")
        with sb.serve("llm", lambda request: "back"):
            assert ask(sb, "llm").endswith("back")


def test_the_end_of_the_sandbox_is_the_handles(live: Live) -> None:
    sb = live.create()
    served = sb.serve("llm", handler(live, lambda request, body: "x"))
    assert served.wait(timeout=0.01) is False
    live.Sandbox.connect(sb.id, client=live.client).kill()
    assert served.wait(timeout=60) is True
