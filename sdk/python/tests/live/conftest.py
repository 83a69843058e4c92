"""Tests against a real server, COVE_URL and COVE_KEY. Run with `pytest -m live`; they leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import cove

from ..blocking import Blocking

LABEL = "cove-sdk-test"


def alive(labels: dict[str, str]) -> list[str]:
    with cove.Client() as client:
        return [sb.id for sb in cove.Sandbox.list(labels, client=client)]


def gone_within(labels: dict[str, str], seconds: float) -> list[str]:
    """What is left after at most so long."""
    until = time.monotonic() + seconds
    while (left := alive(labels)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


@dataclass
class Live:
    """One way into the SDK, sync or async; async looks like sync."""

    client: Any
    Sandbox: Any
    Snapshot: Any
    Template: Any
    Volume: Any
    run: str

    def create(self, **options: Any) -> Any:
        labels = {LABEL: self.run, **options.pop("labels", {})}
        return self.Sandbox.create(labels=labels, client=self.client, **options)

    def name(self, word: str) -> str:
        """A name no other test uses, by which it is removed in the end."""
        return f"{word}-{self.run[:12]}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def run() -> Iterator[str]:
    """A label on everything these tests make, by which all of it is removed in the end."""
    if not os.environ.get("COVE_URL"):
        pytest.fail("the live tests need a server: set COVE_URL and COVE_KEY (or COVE_DATA)", pytrace=False)
    name = uuid.uuid4().hex
    yield name
    with cove.Client() as client:
        cove.Sandbox.kill_by_label({LABEL: name}, client=client)
        for snapshot in list(cove.Snapshot.list({LABEL: name}, client=client)):
            snapshot.delete()
        for volume in cove.Volume.list({LABEL: name}, client=client):
            volume.delete()
        for template in cove.Template.list(client=client):
            if name[:12] in template.name:
                template.delete(all_versions=True)


@pytest.fixture(scope="module", params=["sync", "async"])
def live(request: pytest.FixtureRequest, run: str) -> Iterator[Live]:
    if request.param == "sync":
        with cove.Client() as client:
            yield Live(client, cove.Sandbox, cove.Snapshot, cove.Template, cove.Volume, run)
        return
    loop = asyncio.new_event_loop()
    async_client = cove.AsyncClient()
    yield Live(
        Blocking(async_client, loop),
        Blocking(cove.AsyncSandbox, loop),
        Blocking(cove.AsyncSnapshot, loop),
        Blocking(cove.AsyncTemplate, loop),
        Blocking(cove.AsyncVolume, loop),
        run,
    )
    loop.run_until_complete(async_client.close())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture(scope="module")
def sb(live: Live) -> Iterator[Any]:
    """A sandbox a module's tests share; each uses paths of its own."""
    with live.create(memory="256MiB", memory_limit="1GiB", disk="2GiB") as sandbox:
        yield sandbox
