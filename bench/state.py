"""Standby, snapshots and forks."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from cove import AsyncClient, AsyncSandbox, Sandbox, Snapshot

from measure import Raw, available, kernels, log, p, timed, wait_warm

# Memory that does not compress and is not shared, touched now and then.
HOLD = """
import os, sys, time
b = bytearray(os.urandom(int(sys.argv[1]) << 20))
print("ready", flush=True)
while True:
    b[0] ^= 1
    time.sleep(0.05)
"""


def holding(mb: int) -> Sandbox:
    """A sandbox with a Python process that holds so much memory."""
    sb = Sandbox.create()
    proc = sb.start(["python3", "-c", HOLD, str(mb)], exec_id="hold")
    for out in proc:
        if b"ready" in out.data:
            break
    return sb


def percentiles(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {k: {"p50": p(v, 0.5), "p90": p(v, 0.9)} for k, v in times.items() if v}


def bench_standby(rounds: int) -> dict[str, Any]:
    raw = Raw()
    times: dict[str, list[float]] = {
        k: []
        for k in (
            "create + first exec",
            "pause",
            "resume",
            "pause cold",
            "cold 5 MB to exec",
            "cold 100 MB to exec",
        )
    }
    with holding(5) as five:
        for _ in range(rounds):
            wait_warm(raw)
            t = time.perf_counter()
            with Sandbox.create() as sb:
                sb.exec(["true"])
                times["create + first exec"].append(time.perf_counter() - t)
            wait_warm(raw)  # or the end of the one above runs beside it
            times["pause"].append(timed(five.pause))
            times["resume"].append(timed(five.resume))
            five.exec(["true"])
            times["pause cold"].append(timed(lambda: five.pause(cold=True)))
            wait_warm(raw)
            times["cold 5 MB to exec"].append(timed(lambda: five.exec(["true"])))
    # Not in the loop above: while 100 MB go to the disk, a create waits for it.
    with holding(100) as hundred:
        for _ in range(rounds):
            hundred.pause(cold=True)
            wait_warm(raw)
            times["cold 100 MB to exec"].append(timed(lambda: hundred.exec(["true"])))
    ms = percentiles(times)
    return {
        "ms": ms,
        "checks": [
            ("resume, hot, ms", ms["resume"]["p50"], "<", 5.0),
            (
                "cold resume to first exec, 5 MB, vs create + first exec",
                ms["cold 5 MB to exec"]["p50"] / ms["create + first exec"]["p50"],
                "<",
                2.0,
            ),
        ],
    }


def disk(data: str) -> int:
    """Bytes below the server's data directory, as allocated."""
    out = subprocess.run(
        ["du", "-s", "-B1", "--exclude=images", data],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return int(out.split()[0])


def bench_fork(rounds: int, data: str) -> dict[str, Any]:
    paused: list[float] = []
    took: list[float] = []
    ram: list[float] = []
    room: list[float] = []
    raw = Raw()
    with holding(100) as sb:
        for _ in range(rounds):
            snap = sb.snapshot()
            paused.append(snap.paused)
            snap.delete()
            wait_warm(raw)
            time.sleep(1)  # blanks
            before = disk(data)
            t = time.perf_counter()
            children = sb.fork(8)
            asyncio.run(all_answer([c.id for c in children]))
            took.append(time.perf_counter() - t)
            ids = {c.id for c in children}
            assert len(ids) == 8
            time.sleep(1)
            room.append((disk(data) - before) / 8)
            ram.append(statistics.median(c.stats().memory for c in children))
            for c in children:
                c.kill()
    return {
        "figures": {
            "snapshot 100 MB, source stood still, ms": statistics.median(paused) * 1e3,
            "fork of 8 at 100 MB until all answered, s": statistics.median(took),
            "memory of a child, MiB": statistics.median(ram) / 2**20,
            "disk of a child, MiB": statistics.median(room) / 2**20,
        },
        "checks": [
            (
                "memory snapshot at 100 MB, source stands still, ms",
                statistics.median(paused) * 1e3,
                "<",
                100.0,
            ),
            ("8 children of 100 MB answer, s", statistics.median(took), "<=", 0.5),
            (
                "disk of a child that only ran, MiB",
                statistics.median(room) / 2**20,
                "<",
                1.0,
            ),
        ],
    }


async def all_answer(ids: list[str]) -> None:
    async with AsyncClient() as client:

        async def one(id: str) -> None:
            sb = await AsyncSandbox.connect(id, client=client)
            r = await sb.exec(["echo", id])
            assert r.stdout.strip() == id, r

        await asyncio.gather(*(one(i) for i in ids))


def bench_files(rounds: int) -> dict[str, Any]:
    raw = Raw()
    times: dict[str, list[float]] = {
        "create": [],
        "from files": [],
        "create + exec": [],
        "from files + exec": [],
    }
    with Sandbox.create() as sb:
        made = sb.exec(
            "mkdir /w && for i in $(seq 300); do head -c 68000 /dev/urandom > /w/$i || exit 1; done",
            user="root",
        )
        assert made.exit_code == 0, made
        taken = timed(lambda: sb.snapshot(memory=False))
        snap = next(iter(Snapshot.list(sandbox=sb.id)))
    first = timed(lambda: Sandbox.create(snapshot=snap.id).kill())
    for _ in range(rounds):
        for what, start in (("create", None), ("from files", snap.id)):
            wait_warm(raw)
            t = time.perf_counter()
            with Sandbox.create(snapshot=start) as sb:
                times[what].append(time.perf_counter() - t)
                sb.exec(["true"])
                times[what + " + exec"].append(time.perf_counter() - t)
    snap.delete()
    ms = percentiles(times)
    return {
        "ms": ms,
        "figures": {
            "snapshot of 20 MB in 300 files, ms": taken * 1e3,
            "first create from it, ms": first * 1e3,
        },
        "checks": [
            (
                "create from files, later ones, vs create",
                ms["from files"]["p50"] / ms["create"]["p50"],
                "<=",
                2.0,
            ),
            (
                "the same with the first exec",
                ms["from files + exec"]["p50"] / ms["create + exec"]["p50"],
                "<=",
                2.0,
            ),
        ],
    }


def server_pid(data: str) -> int:
    return int((Path(data) / "pid").read_text())


def cpu_and_memory(pid: int) -> tuple[float, int]:
    stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    ticks = int(stat[11]) + int(stat[12])
    rss = int(
        next(
            line
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("VmRSS")
        ).split()[1]
    )
    return ticks / os.sysconf("SC_CLK_TCK"), rss * 1024


async def park(n: int) -> list[str]:
    async with AsyncClient() as client:
        gate = asyncio.Semaphore(8)
        done = 0

        async def one(i: int) -> str:
            nonlocal done
            async with gate:
                sb = await AsyncSandbox.create(
                    cpu=0.1,
                    memory="32MiB",
                    labels={"bench": "cold"},
                    client=client,
                    create_timeout=600,
                )
                await sb.exec(["sh", "-c", f"echo {i} > /number"])
                await sb.pause(cold=True)
                done += 1
                if done % 200 == 0:
                    log(f"  {done} in cold standby")
                return sb.id

        return await asyncio.gather(*(one(i) for i in range(n)))


def bench_cold(n: int, data: str) -> dict[str, Any]:
    """n sandboxes in cold standby: what they take, and whether one wakes."""
    time.sleep(5)
    pid, before, used = server_pid(data), available(), disk(data)
    _, rss = cpu_and_memory(pid)
    t = time.perf_counter()
    ids = asyncio.run(park(n))
    parked = time.perf_counter() - t
    # The pool has grown with the demand and shrinks half a minute after it.
    for _ in range(120):
        info = Raw().call("System/Info", {})
        if int(info.get("warmTarget", 0)) <= 4 and len(kernels(data)) <= 6:
            break
        time.sleep(1)
    cpu0, rss1 = cpu_and_memory(pid)
    time.sleep(20)
    cpu1, _ = cpu_and_memory(pid)
    left = len(kernels(data))
    woken = []
    for i in random.sample(range(n), min(20, n)):
        t = time.perf_counter()
        r = Sandbox.connect(ids[i]).exec(["cat", "/number"])
        woken.append(time.perf_counter() - t)
        assert r.stdout.strip() == str(i), (i, r)
    figures = {
        "parked": float(n),
        "park_s": parked,
        "server_cpu_percent_at_rest": (cpu1 - cpu0) / 20 * 100,
        "server_memory_each_KiB": (rss1 - rss) / n / 1024,
        "machine_memory_each_KiB": (before - available()) / n / 1024,
        "disk_each_MiB": (disk(data) - used) / n / 2**20,
        "kernels_left": float(left),
        "wake_ms_p50": p(woken, 0.5),
    }
    asyncio.run(remove(ids))
    return {
        "figures": figures,
        "checks": [
            (
                f"{n} in cold standby: kernels beyond the pool",
                float(max(0, left - 6)),
                "<=",
                0.0,
            ),
            (
                "a random one wakes and knows itself",
                float(len(woken)),
                ">=",
                float(min(20, n)),
            ),
        ],
    }


async def remove(ids: list[str]) -> None:
    async with AsyncClient() as client:
        gate = asyncio.Semaphore(8)

        async def one(id: str) -> None:
            async with gate:
                await (await AsyncSandbox.connect(id, client=client)).kill()

        await asyncio.gather(*(one(i) for i in ids))
