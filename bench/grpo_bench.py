"""A synthetic GRPO loop: examples/grpo.py, measured."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from measure import REPO, log

sys.path.insert(0, str(REPO / "examples"))

from grpo import epoch  # noqa: E402


def bench_grpo() -> dict[str, Any]:
    """32 prompts, 8 rollouts of each, 20 steps, a grade (BENCH_GRPO=PROMPTSxROLLOUTSxSTEPS)."""
    prompts, rollouts, steps = map(int, os.environ.get("BENCH_GRPO", "32x8x20").split("x"))
    done = asyncio.run(epoch(prompts, rollouts, steps))
    for fault in done.faults[:20]:
        log(fault)
    n = len(done.rollouts)
    total = sum(r.seconds for r in done.rollouts)
    return {
        "figures": {
            f"rollouts, of {steps} steps and a grade": n,
            "seconds": done.seconds,
            "rollouts/s": n / done.seconds,
            "of it until the groups stood, s": done.stood,
            "of a rollout's time not within a command, %": 100 * (1 - done.command_seconds / total),
            "processor seconds of the sandboxes, not of steps, a rollout": (done.box_cpu_seconds - done.cpu_seconds) / n,
        },
        "checks": [("faults: leaked sandboxes, lost steps, rewards that are none", float(len(done.faults)), "<=", 0.0)],
    }
