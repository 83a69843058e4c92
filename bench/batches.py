"""Batches of `true`: inputs a second, and the share of the time that is not the command."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from cove import Batch

from measure import REPO, log

PARALLEL = 4


def command(inputs: int, reuse: bool) -> list[float]:
    """Seconds of each command, by `cove batch`."""
    with tempfile.TemporaryDirectory() as tmp:
        lines, out = Path(tmp, "in"), Path(tmp, "out")
        lines.write_text("".join(f"{i}\n" for i in range(inputs)))
        args = [str(REPO / "bin" / "cove"), "batch", str(lines), "-o", str(out), "-p", str(PARALLEL), "--network", "none", "--memory", "64MiB"]
        subprocess.run([*args, *(["--reuse"] if reuse else []), "--", "true"], check=True, capture_output=True)
        return [_done(json.loads(line)) for line in out.read_text().splitlines()]


def _done(result: dict[str, Any]) -> float:
    if result["status"] != "ok":
        raise RuntimeError(f"{result}")
    return float(result.get("duration_s", 0))


def function(inputs: int, reuse: bool) -> list[float]:
    """The same by Python's Batch."""
    batch = Batch("true", map(str, range(inputs)), parallel=PARALLEL, reuse=reuse, network="none", memory="64MiB")
    return [_done({"status": r.status, "duration_s": r.duration_s}) for r in batch]


def bench_batch(rounds: int) -> dict[str, Any]:
    """BENCH_BATCH=20000 for the figure of the docs; rates are the same from some hundred on."""
    inputs = int(os.environ.get("BENCH_BATCH", "600"))
    kinds = os.environ.get("BENCH_BATCH_KINDS", "cli-reuse,cli,python-reuse,python").split(",")
    figures: dict[str, float] = {"inputs": inputs, "at a time": PARALLEL}
    checks = []
    for kind in kinds:
        run = command if kind.startswith("cli") else function
        t = time.perf_counter()
        took = run(inputs, kind.endswith("reuse"))
        wall = time.perf_counter() - t
        if len(took) != inputs:
            raise RuntimeError(f"{kind}: {len(took)} results of {inputs}")
        figures[f"{kind}: inputs a second"] = inputs / wall
        figures[f"{kind}: % that is not the command"] = 100 * (1 - sum(took) / (wall * PARALLEL))
        log(f"{kind}: {inputs} in {wall:.1f} s, load {os.getloadavg()[0]:.0f}")
        checks.append((f"{kind}: each input once", float(len(took)), ">=", float(inputs)))
    return {"figures": figures, "checks": checks}
