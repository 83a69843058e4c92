"""Two servers in turns: p50 of exec, reset and create of each, and the ratio of the second to the first.

    .venv/bin/python bench/turns.py URL KEY URL KEY [--execs 2000] [--resets 500] [--creates 100] [--block 50] [--runs 3]

For a bound between two builds on a machine that is shared and noisy: they take blocks of 50 in turns, and the first of a
pair of blocks is the second of the next. A create has a kernel of the pool, one at a time. Needs the SDK alone; the
default image of both should be the same (`cove image import base FILE`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

from cove import Client, Sandbox

Block = Callable[[int], list[float]]


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument(
        "servers",
        nargs=4,
        metavar="URL KEY",
        help="of both, the one to compare with first",
    )
    ap.add_argument("--execs", type=int, default=2000)
    ap.add_argument("--resets", type=int, default=500)
    ap.add_argument("--creates", type=int, default=100)
    ap.add_argument("--block", type=int, default=50)
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--json", help="a file to keep the medians in")
    a = ap.parse_args()
    s = a.servers
    # keep: no lease, which an older server may not have; close is in finally.
    clients = [Client(s[0], s[1], keep=True), Client(s[2], s[3], keep=True)]
    versions = [c.info().version for c in clients]
    print(f"first {versions[0]}, second {versions[1]}, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'run':4}{'':8}{'n':>6}{'first p50':>12}{'second p50':>12}{'ratio':>8}   first p90, second p90 (ms)"
    )
    rows = []
    for run in range(1, a.runs + 1):
        boxes: list[Sandbox] = []
        try:
            for c in clients:
                boxes.append(Sandbox.create(client=c))
            for name, n, make in (
                ("exec", a.execs, execs),
                ("reset", a.resets, resets),
            ):
                rows.append(
                    report(run, name, turns([make(b) for b in boxes], n, a.block))
                )
        finally:
            for b in boxes:
                b.kill()
        # Fewer in a row: each waits for the pool, and the other's pool fills meanwhile.
        rows.append(
            report(
                run,
                "create",
                turns([creates(c) for c in clients], a.creates, max(1, a.block // 10)),
            )
        )
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"versions": versions, "rows": rows}, f, indent=1)


def turns(blocks: list[Block], n: int, size: int) -> list[list[float]]:
    """n of each, in blocks; the order changes with each pair."""
    took: list[list[float]] = [[], []]
    order = [0, 1]
    for b in blocks:
        b(min(n, 5))  # warm, not counted
    while len(took[0]) < n:
        for i in order:
            took[i] += blocks[i](min(size, n - len(took[i])))
        order.reverse()
    return took


def report(run: int, name: str, took: list[list[float]]) -> dict[str, float | str]:
    p50 = [statistics.median(t) * 1e3 for t in took]
    p90 = [statistics.quantiles(t, n=10)[8] * 1e3 for t in took]
    ratio = p50[1] / p50[0]
    print(
        f"{run:<4}{name:8}{len(took[0]):6}{p50[0]:12.2f}{p50[1]:12.2f}{ratio:8.3f}   {p90[0]:.2f}, {p90[1]:.2f}",
        flush=True,
    )
    return {
        "run": run,
        "name": name,
        "first_ms": p50[0],
        "second_ms": p50[1],
        "ratio": ratio,
    }


def timed(f: Callable[[], object], n: int) -> list[float]:
    took = []
    for _ in range(n):
        t = time.perf_counter()
        f()
        took.append(time.perf_counter() - t)
    return took


def execs(sb: Sandbox) -> Block:
    return lambda n: timed(lambda: sb.exec(["true"]), n)


def resets(sb: Sandbox) -> Block:
    return lambda n: timed(sb.reset, n)


def creates(c: Client) -> Block:
    def block(n: int) -> list[float]:
        took = []
        for _ in range(n):
            wait_warm(c)
            t = time.perf_counter()
            sb = Sandbox.create(client=c)
            took.append(time.perf_counter() - t)
            sb.kill()
        return took

    return block


def wait_warm(c: Client) -> None:
    """Filling the pool is not part of a create."""
    for _ in range(3000):
        info = c.info()
        if info.warm_kernels >= info.warm_target:
            time.sleep(0.15)  # and the blank kernel behind it, and what was just killed
            return
        time.sleep(0.02)
    raise RuntimeError("the kernel pool does not fill")


if __name__ == "__main__":
    main()
