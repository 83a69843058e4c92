"""Runs against a real server: groups, steps that survive, clients that are killed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import cove

pytestmark = pytest.mark.live


@pytest.fixture
def name() -> Iterator[str]:
    """Of a run that is removed in the end."""
    name = f"run-{uuid.uuid4().hex[:12]}"
    yield name
    with cove.Client() as client:
        for info in cove.Run.list(ended=True, client=client):
            if info.name == name:
                cove.Run.attach(name, client=client).reap()
                cove.Run.delete(name, client=client)


def test_a_group_and_its_steps(name: str) -> None:
    with cove.Client() as client, cove.Run(name, client=client) as run:
        group = run.group(4, memory="64MiB", cpu=0.5, name="prompt-1")
        assert len(group) == 4
        for i, sb in enumerate(group):
            result = sb.exec(f"echo step {i}; echo oops >&2; exit {i}")
            assert result.end.exit_code == i
        busy = group[0].exec("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
        assert busy.ok
        sleeper = group[1].start("sleep 100")
        assert [s.exec_id for s in run.running()] == [sleeper.exec_id]
        steps = list(run.steps(group="prompt-1"))
        assert [s.end.exit_code for s in steps if s.end] == [0, 1, 2, 3, 0]
        assert str(steps[2].stdout) == "step 2\n"
        assert str(steps[2].stderr) == "oops\n"
        loop = steps[4]
        assert 0.01 < loop.cpu_time < loop.duration * 2 + 0.1, "measured, and not more than there was"
        assert loop.peak_memory > 100_000
        child = group[2].fork(1)[0]
        assert child.last_info.run == run.id
        child.exec("true")
        assert run.info().sandboxes == 5
    with cove.Client() as client:
        assert cove.Sandbox.list(client=client, labels={}) is not None
        attached = cove.Run.attach(name, client=client)
        assert attached.last_info.state == "ended"
        assert attached.last_info.sandboxes == 0
        ends = {s.exec_id: s.end for s in attached.steps()}
        assert len(ends) == 7
        end = ends[sleeper.exec_id]
        assert end is not None
        assert end.cause == "client_ended"
        assert attached.last_info.end is not None
        assert attached.last_info.end.cause == "client_ended"
        cost = attached.cost("group")
        total = sum(c.cpu_seconds for c in cost)
        assert sum(c.sandboxes for c in cost) == 5
        assert total >= loop.cpu_time


def test_groups_without_a_name(name: str) -> None:
    """By a key the same each time, and never the name of another worker's."""
    with cove.Run(name) as run, cove.Run(name, resume=True) as worker:
        first = run.group(2, image="base", memory="64MiB", key=name)
        assert [sb.id for sb in run.group(2, image="base", memory="64MiB", key=name)] == [sb.id for sb in first]
        with pytest.raises(cove.AlreadyExists, match=f"was used for a group of 2, '{first.name}' of run"):
            run.group(3, image="base", memory="64MiB", key=name)
        others = [run.group(1, memory="64MiB"), worker.group(1, memory="64MiB")]
        assert len({first.name, *(g.name for g in others)}) == 3
        for group in (first, *others):
            group[0].exec("true")
            assert [step.sandbox for step in run.steps(group=group.name)] == [group[0].id]
        first[0].reset()
        first[0].exec("true")
        rows = [c for c in run.cost("episode") if c.sandbox == first[0].id]
        assert sorted(c.reset for c in rows) == [1, 2]
        assert all(c.steps == 1 for c in rows)
        steps = run.cost("step")
        assert all(c.memory_gib_seconds > 0 for c in steps)
        assert sum(c.cpu_seconds for c in steps) == sum(c.step_cpu_seconds for c in steps) > 0


def test_async(name: str) -> None:
    async def main() -> None:
        async with cove.AsyncClient() as client, cove.AsyncRun(name, client=client) as run:
            group = await run.group(2, memory="64MiB", cpu=0.5)
            await asyncio.gather(*(sb.exec("true") for sb in group))
            assert len([s async for s in run.steps()]) == 2
            assert await run.checkpoint.put({"step": 1}, if_version=0) == 1
            with pytest.raises(cove.Conflict):
                await run.checkpoint.put({"step": 1}, if_version=0)

    asyncio.run(main())


def test_a_killed_client_leaves_nothing(name: str) -> None:
    program = f"""
import sys, cove
run = cove.Run({name!r}, ttl=4).begin()
group = run.group(2, memory="64MiB", cpu=0.5)
group[0].fork(2)
group[0].start("sleep 1000")
print("ready", flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    with cove.Client() as client:
        run = cove.Run.attach(name, client=client)
        assert run.info().sandboxes == 4
        time.sleep(5)
        assert run.info().sandboxes == 4, "it says that it is there"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        until = time.monotonic() + 30
        while run.info().state == "active" and time.monotonic() < until:
            time.sleep(0.05)
        info = run.info()
        assert (info.state, info.sandboxes) == ("ended", 0)
        assert info.end is not None
        assert info.end.cause == "lease_expired"
        steps = list(run.steps())
        assert [s.end.cause for s in steps if s.end] == ["lease_expired"]


def test_cancelled_groups_leave_nothing(name: str) -> None:
    async def main() -> None:
        async with cove.AsyncClient() as client, cove.AsyncRun(name, client=client) as run:
            for n in range(4):
                task = asyncio.ensure_future(run.group(8, memory="64MiB", cpu=0.5))
                await asyncio.sleep(0.02 * n * n)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(empty_within, name, 30)

    asyncio.run(main())


def empty_within(name: str, seconds: float) -> None:
    with cove.Client() as client:
        run, until = cove.Run.attach(name, client=client), time.monotonic() + seconds
        while run.info().sandboxes and time.monotonic() < until:
            time.sleep(0.1)
        assert run.info().sandboxes == 0


def test_grpo(name: str) -> None:
    """The loop of the benchmark, smaller: no sandbox is left, no step is lost or run twice, no fault is a reward."""
    del name
    example = Path(__file__).parents[4] / "examples" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", example)
    assert spec is not None
    assert spec.loader is not None
    grpo = importlib.util.module_from_spec(spec)
    sys.modules["grpo"] = grpo  # dataclasses look for it
    spec.loader.exec_module(grpo)
    done = asyncio.run(grpo.epoch(4, 4, 5))
    assert done.faults == []
    assert len(done.rollouts) == 16
    assert {r.advantage for r in done.rollouts if r.right} == {1.0}
    assert {r.advantage for r in done.rollouts if not r.right} == {-1.0}


def test_plan(name: str) -> None:
    seen: list[str] = []
    with cove.Client() as client, cove.Run(name, client=client) as run:
        sb = run.sandbox(memory="64MiB")
        warm = sb.snapshot(name=f"{name}-warm", memory=True)
        try:
            plan = run.plan([{"image": "base", "count": 3}, {"snapshot": warm, "count": 2}])
            info = plan.wait(120, on_progress=lambda p: seen.append(p.state))
            assert info.ready, info
            assert [i.state for i in info.items] == ["ready", "ready"]
            assert seen[-1] == "ready"
            assert info.kernels == 3
            assert info.kernels_ready >= info.kernels_aim > 0
            assert len(run.group(2, snapshot=warm)) == 2
            plan = run.plan([{"image": "base", "count": 1}, {"image": f"localhost:1/{name}", "count": 1}])
            info = plan.wait(120)
            assert (info.version, info.state) == (2, "failed")
            assert info.items[1].error_code
            plan.cancel()
            assert plan.info().state == "none"
            with pytest.raises(cove.InvalidArgument):
                run.plan([{"image": "base", "template": "b", "count": 1}])
        finally:
            warm.delete()


def test_async_plan(name: str) -> None:
    async def main() -> None:
        async with cove.AsyncClient() as client, cove.AsyncRun(name, client=client) as run:
            plan = await run.plan([{"image": "base", "count": 1}])
            assert (await plan.wait(120)).ready
            assert await plan.ready()
            await plan.cancel()

    asyncio.run(main())
