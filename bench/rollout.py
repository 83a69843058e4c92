"""Runs: what a step on record costs an exec, and a group of many at once."""

from __future__ import annotations

import os
import random
import time
import uuid
from typing import Any

from cove import Run, Sandbox

from measure import log, p, timed

SMALL: dict[str, Any] = {"memory": "32MiB", "cpu": 0.05, "disk": "16MiB", "pids": 64}


def bench_steps(rounds: int) -> dict[str, Any]:
    """execs of true in turns: in sandboxes of no run, and in some whose steps are kept.

    Sixteen of each: two sandboxes of the same kind differ by more than a step costs. How far
    the two halves of the plain ones are apart says what of the result is chance.
    """
    many, rounds = 16, rounds * 2
    with Run("bench-" + uuid.uuid4().hex[:8]) as run:
        kinds = (("plain", Sandbox.create), ("logged", run.sandbox), ("plain again", Sandbox.create), ("logged", run.sandbox))
        sandboxes = [(kind, make(network="none")) for _ in range(many // 2) for kind, make in kinds]
        times: dict[str, list[float]] = {kind: [] for kind, _ in kinds}
        for _, sb in sandboxes:
            for _ in range(20):
                sb.exec(["true"])
        for _ in range(rounds):
            for kind, sb in random.sample(sandboxes, len(sandboxes)):
                times[kind].append(timed(lambda sb=sb: sb.exec(["true"])))
        kept = sum(1 for _ in run.steps())
        for _, sb in sandboxes:
            sb.kill()
        name = run.name
    Run.delete(name)
    if kept != many * (rounds + 20):
        raise RuntimeError(f"{kept} steps of {many * (rounds + 20)} are on record")
    plain, logged = p(times["plain"] + times["plain again"], 0.5), p(times["logged"], 0.5)
    return {
        "figures": {
            "execs of each": many * rounds,
            "exec p50 without steps, ms": plain,
            "exec p50 with steps, ms": logged,
            "chance: half of those without against the other, %": (p(times["plain again"], 0.5) / p(times["plain"], 0.5) - 1) * 100,
        },
        "checks": [("a step on record, % of exec p50", (logged / plain - 1) * 100, "<=", 5.0)],
    }


def bench_group(rounds: int) -> dict[str, Any]:
    """One group of 256 small sandboxes, an exec in each, all gone."""
    count = int(os.environ.get("BENCH_GROUP", "256"))
    with Run("bench-" + uuid.uuid4().hex[:8]) as run:
        t = time.perf_counter()
        group = run.group(count, max_wait=600, **SMALL)
        made = time.perf_counter() - t
        t = time.perf_counter()
        for sb in group:
            sb.exec(["true"]).check()
        used = time.perf_counter() - t
        steps = sum(1 for _ in run.steps())
        t = time.perf_counter()
        run.end()
        ended = time.perf_counter() - t
        left = run.info().sandboxes
        name = run.name
    Run.delete(name)
    log(f"{count} sandboxes in {made:.1f} s, ended in {ended:.1f} s")
    if left or steps != count:
        raise RuntimeError(f"{left} sandboxes are left, {steps} steps of {count} on record")
    return {
        "figures": {"made, s": made, "an exec in each, one by one, s": used, "ended, s": ended},
        "checks": [("sandboxes of one group", float(len(group)), ">=", float(count))],
    }
