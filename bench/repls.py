"""What a session of Python takes to have a large context."""

from __future__ import annotations

from typing import Any

from cove import Sandbox

from measure import timed
from state import percentiles

SIZE = 50_000_000


def bench_repl(rounds: int) -> dict[str, Any]:
    """50 MB of text into a variable, beside the same bytes into a file."""
    text = ("x" * 99 + "\n") * (SIZE // 100)
    loads, writes = [], []
    for _ in range(rounds):
        with Sandbox.create(memory="512MiB", network="none") as sb, sb.repl() as repl:
            loads.append(timed(lambda: repl.load("context", text)))
            if repl.run("len(context)").value != str(SIZE):
                raise RuntimeError("the context is not whole")
            writes.append(timed(lambda: sb.files.write("/tmp/context", text)))
    ms = percentiles({"50 MB into a session": loads, "50 MB into a file": writes})
    load, write = (ms[f"50 MB into a {what}"]["p50"] for what in ("session", "file"))
    return {
        "ms": ms,
        "figures": {"session against file": load / write},
        "checks": [("50 MB into a session, ms", load, "<=", 1000.0)],
    }
