"""Creates from a template against creates from an image."""

from __future__ import annotations

import random
import time
from typing import Any

from cove import Sandbox, Template

from measure import Raw, wait_warm
from state import HOLD, percentiles

NAME = "bench-template"
DISK = 1 << 30


def bench_template(rounds: int) -> dict[str, Any]:
    """In turns, one at a time, with the pools full before each, as for creates.

    The template has a Python process that holds 5 MB. Once more from one kernel that
    was not restored ahead: from a snapshot that nobody has used before.
    """
    raw = Raw()
    times: dict[str, list[float]] = {
        k: []
        for k in (
            "create from an image",
            "create from a template",
            "create from an image + first exec",
            "create from a template + first exec",
            "create from a snapshot not used before + first exec",
        )
    }

    def create(name: str, **source: Any) -> None:
        wait_warm(raw)
        t = time.perf_counter()
        with Sandbox.create(**source) as sb:
            if name in times:
                times[name].append(time.perf_counter() - t)
            sb.exec(["true"])
            times[name + " + first exec"].append(time.perf_counter() - t)

    template = Template.build(
        NAME,
        image="base",
        disk=DISK,
        start=f"python3 -c '{HOLD}' 5 > /tmp/up",
        ready_command="grep -q ready /tmp/up",
    )
    try:
        while not int(raw.call("System/Info", {}).get("heldTarget", 0)):
            with Sandbox.create(template=template.id):  # until it is in use
                time.sleep(0.3)
        for _ in range(rounds):
            with Sandbox.create(template=template.id) as sb:
                sb.exec(["true"])
                snap = sb.snapshot()
            turns = [
                lambda: create("create from an image", image="base", disk=DISK),
                lambda: create("create from a template", template=template.id),
                lambda: create(
                    "create from a snapshot not used before", snapshot=snap.id
                ),
            ]
            random.shuffle(turns)
            for turn in turns:
                turn()
            snap.delete()
    finally:
        template.delete()
    ms = percentiles(times)

    def ratio(what: str) -> float:
        return (
            ms[f"create from a template{what}"]["p50"]
            / ms[f"create from an image{what}"]["p50"]
        )

    return {
        "ms": ms,
        "checks": [
            ("create from a template vs from an image", ratio(""), "<=", 1.3),
            (
                "create from a template + first exec vs from an image",
                ratio(" + first exec"),
                "<=",
                1.3,
            ),
        ],
    }
