"""The calls of runs: groups, steps, checkpoints, costs; see _calls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

from . import errors
from ._calls import Call, Ref, new_id, nothing, ref, strings
from ._connect import decode_base64, encode_base64
from ._state_calls import _at_least_one
from ._values import Seconds, format_duration, parse_int, to_seconds
from .changes import Replayed
from .errors import DeadlineExceeded, InvalidArgument, Unavailable
from .models import Json
from .rollout import Checkpoint, Cost, GroupProgress, PlanInfo, RunInfo, Step
from .state import Forked


def _run(j: Json) -> RunInfo:
    return RunInfo.parse(j["run"])


def create_run(
    name: str,
    *,
    ttl: Seconds,
    labels: Optional[Mapping[str, str]],
    keep: bool,
    output: Optional[str],
    resume: bool,
    steps: Sequence[str] = (),
) -> Call[RunInfo]:
    message: dict[str, Any] = {"name": name, "ttl": format_duration("ttl", ttl), "idempotencyKey": new_id() + new_id()}
    if labels:
        message["labels"] = strings("labels", labels)
    if keep:
        message["keep"] = True
    if output is not None:
        message["output"] = output
    if resume:
        message["resume"] = True
    if steps:
        message["stepDetails"] = [steps] if isinstance(steps, str) else list(steps)
    return Call("Runs/Create", message, _run, repeatable=True)


def get_run(run: str) -> Call[RunInfo]:
    return Call("Runs/Get", {"run": run}, _run, repeatable=True)


def list_runs(ended: bool, labels: Optional[Mapping[str, str]]) -> Call[list[RunInfo]]:
    message: dict[str, Any] = {"ended": True} if ended else {}
    if labels:
        message["labels"] = strings("labels", labels)

    def parse(j: Json) -> list[RunInfo]:
        return [RunInfo.parse(r) for r in j.get("runs") or ()]

    return Call("Runs/List", message, parse, repeatable=True)


def heartbeat_run(run: str) -> Call[None]:
    return Call("Runs/Heartbeat", {"run": run}, nothing, repeatable=True)


def end_run(run: str, detail: str) -> Call[RunInfo]:
    message = {"run": run, **({"detail": detail} if detail else {})}
    return Call("Runs/End", message, _run, repeatable=True, slow=True)


def reap_run(run: str) -> Call[list[str]]:
    return Call("Runs/Reap", {"run": run}, lambda j: list(j.get("ids") or ()), repeatable=True, slow=True)


def delete_run(run: str) -> Call[None]:
    return Call("Runs/Delete", {"run": run}, nothing, repeatable=True, removes=True)


# Groups


def group(
    spec: dict[str, Any],
    n: int,
    *,
    sandbox: Optional[Ref],
    at_least: Optional[int],
    key: Optional[str],
    max_wait: Optional[Seconds],
) -> dict[str, Any]:
    """The message of Runs/Group, which is a stream."""
    message: dict[str, Any] = {
        "spec": spec,
        "count": _at_least_one("n", n),
        "idempotencyKey": key or new_id() + new_id(),
    }
    if sandbox is not None:
        message["sandbox"] = ref("sandbox", sandbox)
    if at_least is not None:
        if _at_least_one("at_least", at_least) > n:
            raise InvalidArgument(f"at_least: {at_least} of {n} cannot be", field="at_least")
        message["atLeast"] = at_least
    if max_wait is not None:
        message["maxWait"] = format_duration("max_wait", max_wait)
    return message


class Grouping:
    """The events of one Runs/Group."""

    def __init__(self, on_progress: Optional[Callable[[GroupProgress], Any]]) -> None:
        self._on_progress = on_progress
        self._last: Json = {}

    def receive(self, event: Json) -> Any:
        self._last = event
        if event.get("state") != "done" and self._on_progress is not None:
            return self._on_progress(GroupProgress.parse(event))
        return None

    def result(self) -> Forked:
        if self._last.get("state") != "done":
            raise Unavailable("the server went away before the group stood", hint="ask again")
        return Forked.parse(self._last)


# Plans


def plan_items(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for n, item in enumerate(items):
        unknown = [key for key in item if key not in ("image", "template", "snapshot", "count")]
        if unknown:
            raise InvalidArgument(
                f"items[{n}]: {unknown[0]!r} is not one of: image, template, snapshot, count", field=f"items[{n}]"
            )
        entry: dict[str, Any] = {"count": _at_least_one(f"items[{n}].count", item.get("count", 1))}
        for key in ("image", "template", "snapshot"):
            if item.get(key) is not None:
                entry[key] = ref(f"items[{n}].{key}", item[key])
        out.append(entry)
    return out


def _plan(j: Json) -> PlanInfo:
    return PlanInfo.parse(j.get("plan") or {})


def set_plan(run: str, items: list[dict[str, Any]]) -> Call[PlanInfo]:
    return Call("Runs/SetPlan", {"run": run, "items": items}, _plan, repeatable=True)


def get_plan(run: str, wait: float = 0.0) -> Call[PlanInfo]:
    message: dict[str, Any] = {"run": run}
    if wait > 0:
        message["wait"] = format_duration("wait", wait)
    return Call("Runs/GetPlan", message, _plan, repeatable=True, slow=True)


class Staging:
    """How long to wait for a plan, without I/O."""

    def __init__(self, timeout: Optional[Seconds]) -> None:
        self._until = None if timeout is None else time.monotonic() + to_seconds("timeout", timeout)

    def next(self, run: str) -> Call[PlanInfo]:
        wait = 20.0
        if self._until is not None:
            wait = min(wait, self._until - time.monotonic())
            if wait <= 0:
                raise DeadlineExceeded("the plan is not ready yet", hint="it goes on; wait again, or look at its items")
        return get_plan(run, max(wait, 0.001))


# Checkpoints


def encode_doc(doc: Any) -> bytes:
    """Bytes and text as they are, all else as JSON."""
    if isinstance(doc, (bytes, bytearray)):
        return bytes(doc)
    if isinstance(doc, str):
        return doc.encode()
    try:
        return json.dumps(doc, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as err:
        raise InvalidArgument(f"doc: {err}", field="doc", hint="bytes, text or what JSON can hold") from None


def put_checkpoint(run: str, doc: Any, if_version: Optional[int]) -> Call[int]:
    message: dict[str, Any] = {"run": run, "doc": encode_base64(encode_doc(doc))}
    if if_version is not None:
        message["ifVersion"] = str(if_version)

    def parse(j: Json) -> int:
        return parse_int((j.get("checkpoint") or {}).get("version"))

    # Sent again with a version it would be refused, although the first was taken.
    return Call("Runs/PutCheckpoint", message, parse)


def get_checkpoint(run: str, version: Optional[int]) -> Call[Optional[Checkpoint]]:
    message: dict[str, Any] = {"run": run, **({"version": str(version)} if version else {})}

    def parse(j: Json) -> Optional[Checkpoint]:
        c = j.get("checkpoint") or {}
        return Checkpoint.parse(c, decode_base64(c.get("doc", "")))

    return Call("Runs/GetCheckpoint", message, parse, repeatable=True)


def list_checkpoints(run: str) -> Call[list[Checkpoint]]:
    def parse(j: Json) -> list[Checkpoint]:
        return [Checkpoint.parse(c, b"") for c in j.get("checkpoints") or ()]

    return Call("Runs/ListCheckpoints", {"run": run}, parse, repeatable=True)


# Steps and costs


@dataclass(frozen=True)
class StepPage:
    steps: list[Step]
    running: list[Step]
    next_cursor: str
    more: bool


def list_steps(
    run: str,
    cursor: str,
    size: int,
    sandbox: Optional[Ref],
    group: Optional[str],
    episode: Optional[str],
    running: bool,
) -> Call[StepPage]:
    message: dict[str, Any] = {"run": run, "pageSize": size}
    if cursor:
        message["cursor"] = cursor
    if sandbox is not None:
        message["sandbox"] = ref("sandbox", sandbox)
    if group:
        message["group"] = group
    if episode:
        message["episode"] = episode
    if running:
        message["running"] = True

    def parse(j: Json) -> StepPage:
        return StepPage(
            [Step.parse(s) for s in j.get("steps") or ()],
            [Step.parse(s) for s in j.get("running") or ()],
            j.get("nextCursor", ""),
            bool(j.get("more")),
        )

    return Call("Runs/ListSteps", message, parse, repeatable=True)


def replay(run: str, sandbox: Optional[Ref], episode: str, reset: int, keep: bool, all: bool) -> dict[str, Any]:
    """The message of Runs/Replay, which is a stream."""
    message: dict[str, Any] = {}
    if run:
        message["run"] = run
    if sandbox is not None:
        message["sandbox"] = ref("sandbox", sandbox)
    if episode:
        message["episode"] = episode
    if reset:
        message["reset"] = str(reset)
    if keep:
        message["keep"] = True
    if all:
        message["all"] = True
    return message


class Replaying:
    """The events of one Runs/Replay."""

    def __init__(self, on_step: Optional[Callable[[int, int], Any]]) -> None:
        self._on_step = on_step
        self._last: Json = {}

    def receive(self, event: Json) -> Any:
        self._last = event
        if event.get("state") == "running" and self._on_step is not None:
            return self._on_step(parse_int(event.get("step")), parse_int(event.get("steps")))
        return None

    def result(self) -> Replayed:
        if self._last.get("state") != "done":
            raise Unavailable(
                "the server went away before the replay was done", hint="ask again; nothing of it is left"
            )
        return Replayed.parse(self._last.get("result") or {})


def cost(by: str, run: str) -> Call[list[Cost]]:
    def parse(j: Json) -> list[Cost]:
        return [Cost.parse(c) for c in j.get("costs") or ()]

    return Call("Runs/Cost", {"by": by, "run": run}, parse, repeatable=True, slow=True)


def over(err: errors.CoveError) -> bool:
    """Whether a heartbeat was refused because there is no such run any more."""
    return isinstance(err, (errors.NotFound, errors.FailedPrecondition))
