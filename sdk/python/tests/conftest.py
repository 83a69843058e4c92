from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

import httpx
import pytest

import cove
from cove._retry import Clock

from .blocking import Blocking
from .fake_cove import FakeCove, sandbox_json


@dataclass
class FakeTime:
    """Time that passes only by sleeping."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)
    on_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        self.on_sleep()

    async def async_sleep(self, seconds: float) -> None:
        self.sleep(seconds)

    def clock(self) -> Clock:
        return Clock(now=lambda: self.now, sleep=self.sleep, async_sleep=self.async_sleep, random=lambda: 0.5)


@dataclass
class Api:
    """One way into the SDK: sync or async, over our connections or httpx's. Async looks like sync."""

    client: Any
    Sandbox: Any
    Snapshot: Any
    Template: Any
    Volume: Any
    Recording: Any
    Run: Any
    Shipment: Any
    server: FakeCove
    time: FakeTime

    def sandbox(self) -> Any:
        self.server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
        return self.Sandbox.connect("sb1", client=self.client)


@pytest.fixture
def server() -> Iterator[FakeCove]:
    fake = FakeCove()
    fake.start()
    yield fake
    fake.stop()
    assert fake.breaches == []


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture(params=["sync-direct", "sync-httpx", "async-direct", "async-httpx"])
def api(request: pytest.FixtureRequest, server: FakeCove, time: FakeTime) -> Iterator[Api]:
    kind, _, wire = request.param.partition("-")
    options: dict[str, Any] = {"url": server.url, "key": FakeCove.KEY, "_clock": time.clock(), "keep": True}
    if kind == "sync":
        http = httpx.Client() if wire == "httpx" else None
        client = cove.Client(**options, http_client=http)
        yield Api(
            client,
            cove.Sandbox,
            cove.Snapshot,
            cove.Template,
            cove.Volume,
            cove.Recording,
            cove.Run,
            cove.Shipment,
            server,
            time,
        )
        client.close()
        if http is not None:
            http.close()
        return
    loop = asyncio.new_event_loop()
    http_async = httpx.AsyncClient() if wire == "httpx" else None
    async_client = cove.AsyncClient(**options, http_client=http_async)
    yield Api(
        Blocking(async_client, loop),
        Blocking(cove.AsyncSandbox, loop),
        Blocking(cove.AsyncSnapshot, loop),
        Blocking(cove.AsyncTemplate, loop),
        Blocking(cove.AsyncVolume, loop),
        Blocking(cove.AsyncRecording, loop),
        Blocking(cove.AsyncRun, loop),
        Blocking(cove.AsyncShipment, loop),
        server,
        time,
    )
    loop.run_until_complete(async_client.close())
    if http_async is not None:
        loop.run_until_complete(http_async.aclose())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
