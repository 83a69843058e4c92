"""What the size of a sandbox's memory costs: forks, wakes, snapshots."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any

from cove import Sandbox

from measure import Raw, log, p, timed, wait_warm
from state import all_answer, disk

# Memory that does not compress. A line on stdin has that many MiB of it written.
HOLD = """
import os, sys
mb = int(sys.argv[1])
b = [bytearray(os.urandom(1 << 20)) for _ in range(mb)]
print("ready", flush=True)
for line in sys.stdin:
    for i in range(int(line)):
        b[(i * 7) % mb][:] = os.urandom(1 << 20)
    print("done", flush=True)
"""


class Holding:
    """A sandbox whose only process holds so much memory."""

    def __init__(self, mb: int) -> None:
        self.sb = Sandbox.create(memory=f"{mb + 92}MiB", disk="2GiB", timeout=1200)
        self.proc = self.sb.start(
            ["python3", "-uc", HOLD, str(mb)], exec_id="hold", stdin=True
        )
        self.await_line(b"ready")

    def await_line(self, line: bytes) -> None:
        for out in self.proc:
            if line in out.data:
                return
        raise AssertionError("the holder ended")

    def touch(self, mb: int) -> None:
        self.proc.write(f"{mb}\n".encode())
        self.await_line(b"done")

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        self.sb.kill()


def forks(sb: Sandbox, n: int, raw: Raw) -> tuple[float, float]:
    """Until all children have answered, in seconds; and the memory of one, in MiB."""
    wait_warm(raw)
    time.sleep(1)  # blanks
    t = time.perf_counter()
    children = sb.fork(n)
    asyncio.run(all_answer([c.id for c in children]))
    took = time.perf_counter() - t
    time.sleep(1)
    mem = statistics.median(c.stats().memory for c in children)
    for c in children:
        c.kill()
    return took, mem / 2**20


def bench_memory(rounds: int, data: str, many: int) -> dict[str, Any]:
    raw = Raw()
    figures: dict[str, float] = {}
    wakes: dict[int, list[float]] = {10: [], 1000: []}
    with Holding(10) as small, Holding(1000) as large:
        held = {10: small.sb, 1000: large.sb}
        for _ in range(rounds):
            for mb, sb in held.items():
                sb.pause(cold=True)
                wait_warm(raw)
                time.sleep(1)  # blanks
                wakes[mb].append(timed(lambda sb=sb: sb.exec(["true"])))
        log("  woken")
        paused, stored, written = [], [], []
        large.sb.snapshot()
        for _ in range(rounds):
            large.touch(10)
            before = disk(data)
            snap = large.sb.snapshot()
            paused.append(snap.paused)
            stored.append(snap.stored / 2**20)
            written.append((disk(data) - before) / 2**20)
        figures["snapshot of 1 GB after 10 MB, stood still, ms"] = (
            statistics.median(paused) * 1e3
        )
        figures["the same, stored, MiB"] = statistics.median(stored)
        figures["the same, with the files kept for a restore, MiB"] = statistics.median(
            written
        )
    with Holding(100) as hundred:
        eight = [forks(hundred.sb, 8, raw) for _ in range(rounds)]
        figures["8 forks of 100 MB, s"] = statistics.median(t for t, _ in eight)
        figures["memory of a child, MiB"] = statistics.median(m for _, m in eight)
        if many:
            figures[f"{many} forks of 100 MB, s"] = statistics.median(
                forks(hundred.sb, many, raw)[0] for _ in range(3)
            )
    ms = {
        f"cold {mb} MB to exec": {"p50": p(v, 0.5), "p90": p(v, 0.9)}
        for mb, v in wakes.items()
    }
    return {
        "ms": ms,
        "figures": figures,
        "checks": [
            (
                "cold wake of 1 GB vs 10 MB",
                ms["cold 1000 MB to exec"]["p50"] / ms["cold 10 MB to exec"]["p50"],
                "<=",
                1.3,
            ),
            ("cold wake of 10 MB, ms", ms["cold 10 MB to exec"]["p50"], "<=", 60.0),
            (
                "snapshot of 1 GB after 10 MB, ms",
                figures["snapshot of 1 GB after 10 MB, stood still, ms"],
                "<=",
                60.0,
            ),
            (
                "the same, stored, MB",
                figures["the same, stored, MiB"] * 2**20 / 1e6,
                "<=",
                20.0,
            ),
            *(
                (name, figures[name], "<=", 1.0 if (os.cpu_count() or 1) >= 16 else 6.0)
                for name in [f"{many} forks of 100 MB, s"]
                if many == 100
            ),
            ("8 forks of 100 MB answer, s", figures["8 forks of 100 MB, s"], "<=", 0.5),
            (
                "memory of a child of 100 MB that only ran, MiB",
                figures["memory of a child, MiB"],
                "<=",
                20.0,
            ),
        ],
    }
