"""The lease of this process, and what is taken back of calls that were cancelled."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import cove
from cove import _lease

from .fake_cove import Fail, FakeCove, FakeProcesses, Got, sandbox_json


@pytest.fixture(params=["sync", "async", "async-httpx"])
def create(request: pytest.FixtureRequest, server: FakeCove) -> Iterator[Any]:
    """Creates a sandbox with a client of its own, as a call that returns when it is there."""
    server.on("Sandboxes/Create", {"sandbox": sandbox_json()})
    if request.param == "sync":
        client = cove.Client(server.url, FakeCove.KEY)
        yield lambda **options: cove.Sandbox.create(client=client, **options)
        return
    loop = asyncio.new_event_loop()
    http = httpx.AsyncClient() if request.param == "async-httpx" else None
    async_client = cove.AsyncClient(server.url, FakeCove.KEY, http_client=http)
    yield lambda **options: loop.run_until_complete(cove.AsyncSandbox.create(client=async_client, **options))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def leases(server: FakeCove) -> list[Any]:
    return [got.message["spec"].get("lease") for got in server.sent("Sandboxes/Create")]


def test_sandboxes_carry_the_lease_of_the_process(create: Any, server: FakeCove) -> None:
    create()
    create(keep=True)
    create()
    assert leases(server) == ["l1", None, "l1"]
    assert server.count("Leases/Create") == 1, "one lease, whatever it is for"
    message = server.sent("Leases/Create")[0].message
    assert message["ttl"] == "300s"
    assert f"pid {os.getpid()}" in message["name"]


def test_a_lease_that_is_over_is_replaced(create: Any, server: FakeCove) -> None:
    ids = iter(["l1", "l2"])
    server.on("Leases/Create", lambda _: {"lease": {"id": next(ids)}})

    def made(got: Got) -> Any:
        if got.message["spec"]["lease"] == "l1":
            return Fail("not_found", "not_found", "no lease 'l1'", field_name="spec.lease", status=404)
        return {"sandbox": sandbox_json()}

    server.on("Sandboxes/Create", made)
    assert create().id == "sb1"
    assert leases(server) == ["l1", "l2"]


def test_a_server_without_leases_makes_sandboxes_all_the_same(create: Any, server: FakeCove) -> None:
    server.on("Leases/Create", Fail("unsupported", "unimplemented", "no such call", status=404))
    create()
    create()
    assert leases(server) == [None, None]
    assert server.count("Leases/Create") == 1


def test_the_lease_is_renewed_and_forgotten_when_it_is_gone(server: FakeCove) -> None:
    client = cove.Client(server.url, FakeCove.KEY)
    server.on("Sandboxes/Create", {"sandbox": sandbox_json()})
    cove.Sandbox.create(client=client)
    keeper = _lease.keeper_of(client)
    assert keeper is _lease.keeper_of(cove.AsyncClient(server.url, FakeCove.KEY)), "one for both kinds"
    assert any(t.name == "cove-lease" and t.daemon for t in threading.enumerate())
    keeper.beat()
    assert server.sent("Leases/Heartbeat")[0].message == {"id": "l1"}
    server.on("Leases/Heartbeat", Fail("not_found", "not_found", "no lease", status=404))
    keeper.beat()
    assert keeper.id is None


def test_a_fork_of_the_process_has_a_lease_of_its_own(server: FakeCove) -> None:
    client = cove.Client(server.url, FakeCove.KEY)
    keeper = _lease.keeper_of(client)
    assert keeper.lease() == "l1"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        own = _lease.keeper_of(client)
        os.write(write, b"own" if own is not keeper and own.lease() == "l1" else b"not")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 3) == b"own"
    assert server.count("Leases/Create") == 2
    assert _lease.keeper_of(client) is keeper


@pytest.mark.parametrize(("ending", "ends"), [("", 1), ("os._exit(0)", 0), ("raise SystemExit(3)", 1), ("1/0", 1)])
def test_a_process_that_ends_ends_its_lease(server: FakeCove, ending: str, ends: int) -> None:
    server.on("Sandboxes/Create", {"sandbox": sandbox_json()})
    program = f"import cove, os\ncove.Sandbox.create()\n{ending}\n"
    env = {**os.environ, "COVE_URL": server.url, "COVE_KEY": FakeCove.KEY}
    subprocess.run([sys.executable, "-c", program], env=env, timeout=60, stderr=subprocess.DEVNULL)
    assert server.count("Leases/End") == ends


def test_a_cancelled_create_is_taken_back_by_its_key(server: FakeCove) -> None:
    reached, gate, killed = threading.Event(), threading.Event(), threading.Event()

    def slow(_: Got) -> Any:
        reached.set()
        gate.wait(30)
        return {"sandbox": sandbox_json()}

    def kill(_: Got) -> Any:
        killed.set()
        return {"sandbox": sandbox_json()}

    server.on("Sandboxes/Create", slow)
    server.on("Sandboxes/Kill", kill)

    async def main(**options: Any) -> None:
        async with cove.AsyncClient(server.url, FakeCove.KEY) as client:
            task = asyncio.ensure_future(cove.AsyncSandbox.create(client=client, **options))
            await asyncio.get_running_loop().run_in_executor(None, reached.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert killed.wait(30)
    key = server.sent("Sandboxes/Create")[0].message["idempotencyKey"]
    assert server.sent("Sandboxes/Kill")[0].message == {"idempotencyKey": key}
    reached.clear()
    asyncio.run(main(idempotency_key="mine"))
    assert server.count("Sandboxes/Kill") == 1, "a key of the caller's own may be a sandbox of before"
    gate.set()


def test_a_cancelled_fork_is_taken_back_by_its_key(server: FakeCove) -> None:
    reached, gate, killed = threading.Event(), threading.Event(), threading.Event()

    def slow(_: Got) -> Any:
        reached.set()
        gate.wait(30)
        return {"results": [{"sandbox": sandbox_json("sb2")}]}

    def kill(_: Got) -> Any:
        killed.set()
        return {"sandbox": sandbox_json("sb2")}

    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    server.on("Sandboxes/Fork", slow)
    server.on("Sandboxes/Kill", kill)

    async def main() -> None:
        async with cove.AsyncClient(server.url, FakeCove.KEY) as client:
            sb = await cove.AsyncSandbox.connect("sb1", client=client)
            task = asyncio.ensure_future(sb.fork(1))
            await asyncio.get_running_loop().run_in_executor(None, reached.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    gate.set()
    assert killed.wait(30)
    key = server.sent("Sandboxes/Fork")[0].message["idempotencyKey"]
    assert server.sent("Sandboxes/Kill")[0].message == {"idempotencyKey": key}


def test_an_interrupted_fork_is_taken_back_by_its_key(server: FakeCove, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})

    def kill(_: Got) -> Any:
        killed.set()
        return {"sandbox": sandbox_json("sb2")}

    server.on("Sandboxes/Kill", kill)
    client = cove.Client(server.url, FakeCove.KEY, keep=True)
    sb = cove.Sandbox.connect("sb1", client=client)
    keys = []

    def interrupted(call: Any, *_: Any) -> Any:
        keys.append(call.message["idempotencyKey"])
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sb.fork(2)
    assert killed.wait(30)
    assert [got.message for got in server.sent("Sandboxes/Kill")] == [{"idempotencyKey": key} for key in keys]


@pytest.mark.parametrize(("choice", "killed"), [(None, True), (True, True), (False, False)])
def test_a_cancelled_exec_kills_the_command(server: FakeCove, choice: Any, killed: bool) -> None:
    processes = FakeProcesses([("STDOUT", b"ready")]).install(server)
    processes.ends_when_changed = True
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})

    async def main() -> None:
        async with cove.AsyncClient(server.url, FakeCove.KEY, keep=True) as client:
            sb = await cove.AsyncSandbox.connect("sb1", client=client)
            seen = asyncio.Event()
            task = asyncio.ensure_future(
                sb.exec("sleep 99", exec_id="e1", on_stdout=lambda _: seen.set(), kill_on_cancel=choice)
            )
            await seen.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert processes.signals == ([("e1", "SIGKILL")] if killed else [])
    processes.changed.set()
    assert server.sent("Processes/Start")[0].message.get("killOnCancel", False) is (choice is True)


def test_an_interrupted_exec_kills_the_command(server: FakeCove) -> None:
    processes = FakeProcesses([("STDOUT", b"ready")]).install(server)
    processes.ends_when_changed = True
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    client = cove.Client(server.url, FakeCove.KEY, keep=True)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cove.Sandbox.connect("sb1", client=client).exec("sleep 99", exec_id="e1", on_stdout=interrupt)
    assert processes.changed.wait(30)
    assert processes.signals == [("e1", "SIGKILL")]


@pytest.mark.parametrize(("choice", "killed"), [(None, True), (False, False)])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_listener_that_raises_kills_the_command(server: FakeCove, kind: str, choice: Any, killed: bool) -> None:
    processes = FakeProcesses([("STDOUT", b"ready")]).install(server)
    processes.ends_when_changed = True
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})

    def raises(_: str) -> None:
        raise ValueError("not what was expected")

    async def in_loop() -> None:
        async with cove.AsyncClient(server.url, FakeCove.KEY, keep=True) as client:
            sb = await cove.AsyncSandbox.connect("sb1", client=client)
            await sb.exec("sleep 99", exec_id="e1", on_stdout=raises, kill_on_cancel=choice)

    def run() -> None:
        if kind == "async":
            return asyncio.run(in_loop())
        sb = cove.Sandbox.connect("sb1", client=cove.Client(server.url, FakeCove.KEY, keep=True))
        sb.exec("sleep 99", exec_id="e1", on_stdout=raises, kill_on_cancel=choice)
        return None

    with pytest.raises(ValueError, match="not what was expected"):
        run()
    if killed:
        assert processes.changed.wait(30)
    assert processes.signals == ([("e1", "SIGKILL")] if killed else [])
    processes.changed.set()


def test_children_have_the_lease_of_who_forks(server: FakeCove) -> None:
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    server.on("Sandboxes/Fork", {"results": [{"sandbox": sandbox_json("sb2")}]})
    server.on("Sandboxes/SetLease", {"sandbox": sandbox_json()})
    sb = cove.Sandbox.connect("sb1", client=cove.Client(server.url, FakeCove.KEY))
    sb.fork(1)
    sb.fork(1, keep=True)
    assert [got.message["lease"] for got in server.sent("Fork")] == ["l1", ""]
    sb.keep()
    assert server.sent("SetLease")[0].message == {"id": "sb1", "lease": ""}
