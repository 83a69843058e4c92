"""Clients: where they look for the server, how they use connections, what they share."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

import cove
from cove._http1 import Http1Wire
from cove._retry import Backoff, Clock

from .fake_cove import FakeCove, FakeProcesses, Got, Plain, Stream, sandbox_json


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("COVE_URL", "COVE_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COVE_DATA", str(tmp_path / "data"))


def test_the_environment_says_where_the_server_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(cove.Unauthenticated, match="COVE_KEY is not set") as caught:
        cove.Client()
    assert "cove env" in caught.value.hint
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "key").write_text("from_file\n")
    with pytest.raises(cove.Unavailable, match="does not run"):
        cove.Client()  # whoever has its port now does not get its key
    (tmp_path / "data" / "pid").write_text(f"{os.getpid()}\n")
    with pytest.raises(cove.Unauthenticated, match="only"):
        cove.Client(url="http://other:1")
    client = cove.Client()
    assert client.url == "http://127.0.0.1:7777"
    assert ("authorization", "Bearer from_file") in client._settings._unary
    monkeypatch.setenv("COVE_URL", "https://cove.example/prefix/")
    monkeypatch.setenv("COVE_KEY", "from_env")
    client = cove.Client()
    assert client.url == "https://cove.example/prefix"
    assert ("authorization", "Bearer from_env") in client._settings._unary
    assert cove.Client(url="http://other:1").url == "http://other:1"


@pytest.mark.parametrize("url", ["127.0.0.1:7777", "ftp://x"])
def test_a_url_without_scheme_is_refused(url: str) -> None:
    with pytest.raises(cove.InvalidArgument) as caught:
        cove.Client(url=url, key="k")
    assert caught.value.field == "url"


@pytest.mark.parametrize("key", ["a\r\nX-Evil: 1", "schlüssel", "a\tb"])
def test_a_key_cannot_add_headers(key: str) -> None:
    with pytest.raises(cove.InvalidArgument):
        cove.Client(url="http://x", key=key)


def test_default_clients_are_shared_and_follow_the_environment(
    server: FakeCove, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    monkeypatch.setenv("COVE_URL", server.url)
    monkeypatch.setenv("COVE_KEY", FakeCove.KEY)
    assert cove.default_client() is cove.default_client()
    assert cove.Sandbox.connect("sb1")._client is cove.default_client()
    first = cove.default_client()
    monkeypatch.setenv("COVE_KEY", "another")
    assert cove.default_client() is not first

    monkeypatch.setenv("COVE_KEY", FakeCove.KEY)

    async def connect() -> cove.AsyncClient:
        sb = await cove.AsyncSandbox.connect("sb1")
        assert sb._client is cove.default_async_client()
        await sb.info()
        return cove.default_async_client()

    # A second loop has connections of its own.
    assert asyncio.run(connect()) is not asyncio.run(connect())


def test_an_async_client_may_meet_another_loop(server: FakeCove) -> None:
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    server.on("GET files", lambda _: Plain(b"x"))
    client = cove.AsyncClient(server.url, FakeCove.KEY)

    async def twice() -> None:
        sb = await cove.AsyncSandbox.connect("sb1", client=client)
        await sb.info()

    asyncio.run(twice())
    asyncio.run(twice())


def test_connections_are_used_again(server: FakeCove) -> None:
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    FakeProcesses([("STDOUT", b"x")]).install(server)
    with cove.Client(server.url, FakeCove.KEY) as client:
        sb = cove.Sandbox.connect("sb1", client=client)
        for _ in range(20):
            assert sb.exec("x").stdout == "x"
    assert len({got.peer for got in server.requests}) == 1


def test_a_stream_that_is_left_does_not_poison_its_connection(server: FakeCove) -> None:
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    FakeProcesses([("STDOUT", b"x" * 100_000)]).install(server)
    with cove.Client(server.url, FakeCove.KEY) as client:
        sb = cove.Sandbox.connect("sb1", client=client)
        for _ in range(5):
            with sb.start("x") as process:
                next(iter(process))
            assert sb.info().id == "sb1"


def test_a_connection_the_server_closed_is_not_used(server: FakeCove) -> None:
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    server.on("Files/Remove", {})
    with cove.Client(server.url, FakeCove.KEY) as client:
        sb = cove.Sandbox.connect("sb1", client=client)
        server.stop()
        server.start()
        sb.files.remove("/x")  # not repeatable: a stale connection would show
    assert server.count("Remove") == 1


def test_threads_share_a_client(server: FakeCove) -> None:
    server.on("Sandboxes/Get", lambda got: {"sandbox": sandbox_json(got.message["id"])})
    failures: list[str] = []
    with cove.Client(server.url, FakeCove.KEY) as client:

        def work(worker: int) -> None:
            for n in range(50):
                name = f"w{worker}n{n}"
                if cove.Sandbox.get_info(name, client=client).id != name:
                    failures.append(name)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(server.requests) == 400


def test_a_fork_does_not_share_connections(server: FakeCove) -> None:
    server.on("Sandboxes/Get", lambda got: {"sandbox": sandbox_json(got.message["id"])})
    with cove.Client(server.url, FakeCove.KEY) as client:
        assert cove.Sandbox.get_info("before", client=client).id == "before"
        child = os.fork()
        if child == 0:
            status = 1
            try:
                right = all(cove.Sandbox.get_info(f"c{n}", client=client).id == f"c{n}" for n in range(50))
                status = 0 if right else 2
            finally:
                os._exit(status)
        right = all(cove.Sandbox.get_info(f"p{n}", client=client).id == f"p{n}" for n in range(50))
        _, status = os.waitpid(child, 0)
        assert (right, status) == (True, 0)
    parents = {got.peer for got in server.requests if got.message["id"][0] in "bp"}
    children = {got.peer for got in server.requests if got.message["id"][0] == "c"}
    assert len(parents) == 1
    assert not parents & children


def test_two_hundred_fifty_six_at_once(server: FakeCove) -> None:
    lock = threading.Lock()
    made: list[str] = []

    def create(_: Got) -> Any:
        with lock:
            made.append(f"sb{len(made)}")
            return {"sandbox": sandbox_json(made[-1])}

    server.on("Sandboxes/Create", create)
    server.on(
        "Sandboxes/Kill", lambda got: {"sandbox": sandbox_json(got.message["id"], end={"cause": "killed_by_user"})}
    )
    FakeProcesses([("STDOUT", b"hello")]).install(server)

    async def main() -> list[str]:
        async with cove.AsyncClient(server.url, FakeCove.KEY) as client:

            async def episode() -> str:
                async with await cove.AsyncSandbox.create(client=client) as sb:
                    assert (await sb.exec("x")).stdout == "hello"
                    return sb.id

            return list(await asyncio.gather(*(episode() for _ in range(256))))

    assert len(set(asyncio.run(main()))) == 256
    assert server.count("Kill") == 256


def test_async_listeners_and_stdin_may_be_async(server: FakeCove) -> None:
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    processes = FakeProcesses([("STDOUT", b"one"), ("STDERR", b"two")]).install(server)
    heard: list[str] = []

    async def listen(text: str) -> None:
        await asyncio.sleep(0)
        heard.append(text)

    async def source() -> Any:
        yield "first "
        await asyncio.sleep(0)
        yield b"second"

    async def main() -> None:
        async with cove.AsyncClient(server.url, FakeCove.KEY) as client:
            sb = await cove.AsyncSandbox.connect("sb1", client=client)
            await sb.exec("x", on_stdout=listen, on_stderr=listen)
            process = await sb.start("cat", stdin=True)
            async for piece in source():
                await process.write(piece)
            await process.wait()

    asyncio.run(main())
    assert heard == ["one", "two"]
    assert b"first second" in processes.input.values()


def test_a_cancelled_exec_leaves_the_client_usable(server: FakeCove) -> None:
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    release = threading.Event()

    def hang() -> Any:
        yield {"started": {"execId": "e", "pid": 1}}
        release.wait(30)

    server.on("Processes/Start", lambda _: Stream(hang()))

    async def main() -> None:
        async with cove.AsyncClient(server.url, FakeCove.KEY) as client:
            sb = await cove.AsyncSandbox.connect("sb1", client=client)
            process = await sb.start("sleep 100")
            waiting = asyncio.ensure_future(process.wait())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await sb.info()).id == "sb1"
            await process.close()

    try:
        asyncio.run(main())
    finally:
        release.set()


def test_a_proxy_or_a_client_of_your_own_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(cove.Client("http://cove.example", "k")._wire, Http1Wire)
    with httpx.Client() as mine:
        client = cove.Client("http://cove.example", "k", http_client=mine)
        assert client._wire is client._bulk
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    client = cove.Client("http://cove.example", "k")
    assert client._wire is client._bulk
    assert isinstance(cove.Client("http://127.0.0.1:7777", "k")._wire, Http1Wire)


def test_backoff_grows_is_jittered_and_ends() -> None:
    now = 0.0
    backoff = Backoff(30, Clock(now=lambda: now, random=lambda: 1.0))
    error = cove.Unavailable("x")
    delays = []
    while now < 28:
        delays.append(backoff.delay_after(error))
        now += delays[-1]
    with pytest.raises(cove.Unavailable):
        backoff.delay_after(cove.Unavailable("x", retry_after=2.0))
    assert delays[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert sum(delays) <= 30
    assert Backoff(30, Clock(now=lambda: 0.0, random=lambda: 0.0)).delay_after(error) == 0.025
