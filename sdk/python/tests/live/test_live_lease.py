"""Nothing stays behind of clients that cancel, end or die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

import cove

from .conftest import LABEL, gone_within

pytestmark = pytest.mark.live


def test_cancelled_creates_leave_nothing(run: str) -> None:
    labels = {LABEL: run, "trial": uuid.uuid4().hex}

    async def main() -> None:
        async with cove.AsyncClient() as client:
            await client.info()
            for n in range(60):
                with contextlib.suppress(asyncio.TimeoutError):
                    # From before it is sent until after it is made.
                    sb = await asyncio.wait_for(
                        cove.AsyncSandbox.create(labels=labels, client=client), 0.001 * (n % 20)
                    )
                    await sb.kill()

    asyncio.run(main())
    assert gone_within(labels, 10) == []


def script(labels: dict[str, str], ending: str) -> list[str]:
    program = f"""
import os, sys, cove
from cove import _lease
_lease.TTL, _lease.BEAT = 4.0, 0.5
sb = cove.Sandbox.create(labels={labels!r})
kept = cove.Sandbox.create(labels={ {**labels, "kept": "1"}!r}, keep=True, timeout=60)
print(sb.id, flush=True)
{ending}
"""
    return [sys.executable, "-c", program]


def test_sandboxes_end_with_their_process(run: str) -> None:
    labels = {LABEL: run, "trial": uuid.uuid4().hex}
    id = subprocess.run(script(labels, ""), stdout=subprocess.PIPE, timeout=60, check=True).stdout.decode().strip()
    with cove.Client() as client:
        assert [sb.last_info.labels["kept"] for sb in cove.Sandbox.list(labels, client=client)] == ["1"]
        end = cove.Sandbox.get_info(id, client=client).end
        assert end is not None
        assert end.cause == "client_ended"
        assert "keep=True" in end.detail
        cove.Sandbox.kill_by_label(labels, client=client)


def test_a_process_that_is_killed_loses_its_sandboxes(run: str) -> None:
    labels = {LABEL: run, "trial": uuid.uuid4().hex}
    child = subprocess.Popen(script(labels, "sys.stdin.read()"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    id = child.stdout.readline().decode().strip()
    time.sleep(5)  # longer than the lease lasts: it is renewed
    with cove.Client() as client:
        assert cove.Sandbox.get_info(id, client=client).end is None
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        until = time.monotonic() + 30
        while (end := cove.Sandbox.get_info(id, client=client).end) is None and time.monotonic() < until:
            time.sleep(0.05)
        assert end is not None
        assert end.cause == "lease_expired"
        cove.Sandbox.kill_by_label(labels, client=client)


def test_a_cancelled_exec_is_over(run: str) -> None:
    async def main() -> None:
        client = cove.AsyncClient()
        async with await cove.AsyncSandbox.create(labels={LABEL: run}, client=client) as sb:
            for choice, running in ((None, False), (False, True)):
                heard: asyncio.Queue[str] = asyncio.Queue()
                task = asyncio.ensure_future(
                    sb.exec("echo on; exec sleep 987", kill_on_cancel=choice, on_stdout=heard.put_nowait)
                )
                await asyncio.wait_for(heard.get(), 60)  # it runs
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                tasks = (await sb.processes()).tasks
                assert any("987" in t.command for t in tasks) is running
        await client.close()

    asyncio.run(main())
