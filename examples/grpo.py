"""A GRPO loop on Cove, with a scripted policy in place of a model.

Every prompt is a group of rollouts: sandboxes alike, made by one call. A rollout takes its steps, each an exec whose
output the policy sees, and is graded by tests that it cannot reach. What a trainer wants of it is the advantage of
each rollout within its group. The policy here is as often right as wrong, by a rule, so that what must come out is
known: this is also the check that no step was lost or run twice, and that no fault of the machine became a reward.

    python examples/grpo.py [PROMPTS [ROLLOUTS [STEPS]]]        # needs a server: make start
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cove import AsyncClient, AsyncRun, AsyncSandbox, Verdict

SMALL: dict[str, Any] = {"memory": "64MiB", "cpu": 0.5, "disk": "64MiB", "pids": 64, "network": "none"}

# The hidden test: the work is the sum of the numbers that the steps were given, each of them once and in order.
CHECK = """
set -e
test "$(cat /work/steps)" = "$(seq 1 $(cat /tests/steps))"
n=0; while read i; do n=$((n + i)); done < /work/steps
test "$(cat /work/answer)" = $n
"""


@dataclass
class Rollout:
    right: bool
    """What the policy meant to do."""
    sandbox: str = ""
    verdict: Verdict | None = None
    advantage: float = 0.0
    seconds: float = 0.0
    """From the request for its group to its verdict."""
    grading: float = 0.0


@dataclass
class Epoch:
    """One pass over the prompts, and what is wrong with it."""

    run: str
    began: float = field(default_factory=time.perf_counter)
    rollouts: list[Rollout] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    command_seconds: float = 0.0
    """Within the commands, by the step log, and within the graders' own."""
    cpu_seconds: float = 0.0
    """Of the commands of steps."""
    box_cpu_seconds: float = 0.0
    """Of the whole sandboxes."""
    stood: float = 0.0
    """Seconds until the last group stood."""


async def act(sb: AsyncSandbox, right: bool, step: int, last: int) -> None:
    command = f"mkdir -p /work; echo {step} >> /work/steps; tail -n 1 /work/steps"
    if step == last:
        command += f"; echo {last * (last + 1) // 2 + (not right)} > /work/answer"
    seen = (await sb.exec(command)).check().stdout
    if seen != f"{step}\n":
        raise RuntimeError(f"step {step} of {sb.id} saw {seen!r}")


async def rollout(sb: AsyncSandbox, r: Rollout, steps: int, tests: str, began: float) -> None:
    r.sandbox = sb.id
    for step in range(1, steps + 1):
        await act(sb, r.right, step, steps)
    t = time.perf_counter()
    r.verdict = await sb.grade(tests, ["sh", "/tests/check.sh"], ["/work"])
    r.grading, r.seconds = time.perf_counter() - t, time.perf_counter() - began
    await sb.kill()


async def prompt(run: AsyncRun, out: Epoch, n: int, rollouts: int, steps: int, tests: str) -> list[Rollout]:
    began = time.perf_counter()
    group = await run.group(rollouts, name=f"prompt-{n}", max_wait=600, **SMALL)
    out.stood = max(out.stood, time.perf_counter() - out.began)
    made = [Rollout(right=(n + i) % 2 == 0) for i in range(rollouts)]
    await asyncio.gather(*(rollout(sb, r, steps, tests, began) for sb, r in zip(group, made)))
    rewards = [r.verdict.reward for r in made if r.verdict and r.verdict.reward is not None]
    if rewards:  # what has no reward has no advantage: a fault is not a bad answer
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards) or 1.0
        for r in made:
            if r.verdict and r.verdict.reward is not None:
                r.advantage = (r.verdict.reward - mean) / spread
    return made


async def epoch(prompts: int, rollouts: int, steps: int) -> Epoch:
    name = "grpo-" + uuid.uuid4().hex[:8]
    out = Epoch(name)
    with tempfile.TemporaryDirectory() as tests:
        Path(tests, "check.sh").write_text(CHECK)
        Path(tests, "steps").write_text(str(steps))
        async with AsyncClient() as client:
            async with AsyncRun(name, client=client) as run:
                # All at once: who has to wait for room waits on the server.
                groups = await asyncio.gather(*(prompt(run, out, n, rollouts, steps, tests) for n in range(prompts)))
                out.rollouts = [r for group in groups for r in group]
            out.seconds = time.perf_counter() - out.began
            await check(out, run, steps)
            await AsyncRun.delete(name, client=client)
    return out


async def check(out: Epoch, run: AsyncRun, steps: int) -> None:
    """What must hold after a pass."""
    if left := (await run.info()).sandboxes:
        out.faults.append(f"{left} sandboxes are left")
    out.box_cpu_seconds = sum(cost.cpu_seconds for cost in await run.cost())
    taken: Counter[str] = Counter()
    async for step in run.steps():
        taken[step.sandbox] += 1
        out.command_seconds += step.duration
        out.cpu_seconds += step.cpu_time
        if step.end is None or step.end.cause != "exited" or step.end.exit_code != 0:
            out.faults.append(f"step {step.seq} of {step.sandbox} ended as {step.end}")
    for r in out.rollouts:
        if taken[r.sandbox] != steps:
            out.faults.append(f"{taken[r.sandbox]} steps of {steps} of {r.sandbox} are on record")
        if r.verdict is None or r.verdict.state != "graded" or r.verdict.reward != float(r.right):
            out.faults.append(f"{r.sandbox}, which was {'right' if r.right else 'wrong'}, was judged {r.verdict}")
        else:
            out.command_seconds += max(0.0, r.grading - r.verdict.setup)


def main() -> int:
    prompts, rollouts, steps = [*map(int, sys.argv[1:4]), *(4, 4, 5)[len(sys.argv[1:4]) :]]
    done = asyncio.run(epoch(prompts, rollouts, steps))
    n = len(done.rollouts)
    print(f"{n} rollouts of {steps} steps in {done.seconds:.1f} s: {n / done.seconds:.2f}/s")
    for fault in done.faults:
        print(fault)
    return 1 if done.faults else 0


if __name__ == "__main__":
    sys.exit(main())
