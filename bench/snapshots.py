"""What small snapshots, cold pauses and restores wait for beside N clients that do the same: p50 and p90 by phase.

    eval "$(bin/cove env)"; .venv/bin/python bench/snapshots.py --clients 96 --seconds 60

Runs against any server and needs the SDK alone. Phases of a snapshot are the steps that its stream tells:
  to freeze   its turn at the sandbox (and the look whether anything changed)
  frozen      the sentry saves itself and the sandbox stands still
  stored      compressed, written and synced; the sandbox runs on
  on record   the server's own record, and the answer
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Awaitable
from typing import Any

from cove import AsyncSandbox, CoveError

took: dict[str, list[float]] = {}
failed: dict[str, int] = {}


async def timed(name: str, call: Awaitable[Any]) -> Any:
    began = time.monotonic()
    result = await call
    took.setdefault(name, []).append(time.monotonic() - began)
    return result


async def snapshot(sb: AsyncSandbox) -> Any:
    steps = [("to freeze", time.monotonic())]
    names = {"freeze": "frozen", "store": "stored", "done": "on record"}

    def step(progress: Any) -> None:
        if progress.step in names and names[progress.step] not in (name for name, _ in steps):
            steps.append((names[progress.step], time.monotonic()))

    made = await timed("snapshot", sb.snapshot(on_progress=step))
    steps.append(("", time.monotonic()))
    # A stream that is read late tells the newest step alone: only whole ones count.
    for (name, began), (_, ended) in zip(steps, steps[1:]) if len(steps) == len(names) + 2 else ():
        took.setdefault(f"  {name}", []).append(ended - began)
    took.setdefault("  frozen, by the server", []).append(made.paused)
    return made


async def client(until: float) -> None:
    sb = await timed("create", AsyncSandbox.create(memory="64MiB", disk="256MiB", cpu=0.5))
    try:
        n = 0
        while time.monotonic() < until:
            n += 1
            try:
                await timed("exec", sb.exec(f"echo {n} > /tmp/n"))
                made = await snapshot(sb)
                await timed("pause, cold", sb.pause(cold=True))
                await timed("resume", sb.resume())
                await timed("restore", sb.restore(made))
                await made.delete()
            except CoveError as err:
                failed[err.code] = failed.get(err.code, 0) + 1
    finally:
        with contextlib.suppress(CoveError):
            await sb.kill()


async def run(clients: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(until) for _ in range(clients)))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--seconds", type=float, default=30)
    args = options.parse_args()
    asyncio.run(run(args.clients, args.seconds))
    print(f"{args.clients} clients, {args.seconds:g} s; milliseconds", file=sys.stderr)
    report = {}
    for name, times in took.items():
        times.sort()
        p50, p90 = statistics.median(times), times[len(times) * 9 // 10]
        report[name.strip()] = {"n": len(times), "p50_ms": round(p50 * 1e3, 1), "p90_ms": round(p90 * 1e3, 1)}
        print(f"{name:28}{len(times):7}{p50 * 1e3:10.1f}{p90 * 1e3:10.1f}", file=sys.stderr)
    print(json.dumps({"clients": args.clients, "failed": failed, "phases": report}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
