"""What runs, groups, steps and costs are to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Optional, TypeVar

from ._connect import decode_base64
from ._values import parse_duration, parse_int, parse_time
from .changes import Diff
from .errors import CoveError
from .models import End, Json

S = TypeVar("S")


@dataclass(frozen=True)
class RunInfo:
    """A run as the server knows it."""

    id: str
    name: str
    labels: Mapping[str, str]
    ttl: float
    keep: bool
    output: str
    state: str
    """active or ended."""
    created_at: Optional[datetime]
    expires_at: Optional[datetime]
    end: Optional[End]
    """Its last one."""
    sandboxes: int
    """Of it that live."""
    steps: int
    resumed: int
    checkpoint: int
    """Latest version; 0: none."""
    step_details: tuple[str, ...] = ()

    @classmethod
    def parse(cls, j: Json) -> RunInfo:
        return cls(
            id=j.get("id", ""),
            name=j.get("name", ""),
            labels=j.get("labels") or {},
            ttl=parse_duration(j.get("ttl")),
            keep=bool(j.get("keep")),
            output=j.get("output", ""),
            state=j.get("state", ""),
            created_at=parse_time(j.get("createdAt")),
            expires_at=parse_time(j.get("expiresAt")),
            end=End.parse(j["end"]) if j.get("end") else None,
            sandboxes=parse_int(j.get("sandboxes")),
            steps=parse_int(j.get("steps")),
            resumed=parse_int(j.get("resumed")),
            checkpoint=parse_int(j.get("checkpoint")),
            step_details=tuple(j.get("stepDetails") or ()),
        )


@dataclass(frozen=True)
class GroupProgress:
    """How far a group is."""

    state: str
    """queued or creating."""
    position: int
    """Queued: how many are before it."""
    ready: int
    count: int
    retry_after: float

    @classmethod
    def parse(cls, j: Json) -> GroupProgress:
        return cls(
            state=j.get("state", ""),
            position=parse_int(j.get("position")),
            ready=parse_int(j.get("ready")),
            count=parse_int(j.get("count")),
            retry_after=parse_duration(j.get("retryAfter")),
        )


class Group(list[S], Generic[S]):
    """The sandboxes of a group that stand, in order; `errors` has one for each that does not."""

    def __init__(self, name: str, sandboxes: list[S], errors: list[CoveError]) -> None:
        super().__init__(sandboxes)
        self.name = name
        self.errors = errors


@dataclass(frozen=True)
class PlanItem:
    """One thing that sandboxes will start from, and how far it is."""

    image: str
    template: str
    snapshot: str
    count: int
    state: str
    """waiting, staging, ready or failed."""
    step: str
    """Of a pull: resolve, download, flatten, erofs."""
    done: int
    total: int
    error_code: str
    """Failed: why. Waiting: why it is tried again."""
    error: str

    @classmethod
    def parse(cls, j: Json) -> PlanItem:
        item = j.get("item") or {}
        return cls(
            image=item.get("image", ""),
            template=item.get("template", ""),
            snapshot=item.get("snapshot", ""),
            count=parse_int(item.get("count")),
            state=j.get("state", ""),
            step=j.get("step", ""),
            done=parse_int(j.get("done")),
            total=parse_int(j.get("total")),
            error_code=(j.get("error") or {}).get("code", ""),
            error=j.get("message", ""),
        )


@dataclass(frozen=True)
class PlanInfo:
    """What of a plan is ready."""

    version: int
    state: str
    """none, staging, ready, or failed: nothing is under way and not all is ready."""
    items: tuple[PlanItem, ...]
    kernels: int
    """That the sandboxes to come will take."""
    kernels_aim: int
    """How many of them the node heats to, within its memory."""
    kernels_ready: int

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @classmethod
    def parse(cls, j: Json) -> PlanInfo:
        return cls(
            version=parse_int(j.get("version")),
            state=j.get("state", ""),
            items=tuple(PlanItem.parse(i) for i in j.get("items") or ()),
            kernels=parse_int(j.get("kernels")),
            kernels_aim=parse_int(j.get("kernelsAim")),
            kernels_ready=parse_int(j.get("kernelsReady")),
        )


@dataclass(frozen=True)
class StepOutput:
    """What is kept of a stream: head, then dropped bytes, then tail."""

    head: bytes
    dropped: int
    tail: bytes
    digest: str = ""
    """SHA-256 of all of it in hex, kept or not; empty where some of it was lost."""

    @classmethod
    def parse(cls, j: Json) -> StepOutput:
        head, tail = decode_base64(j.get("head", "")), decode_base64(j.get("tail", ""))
        return cls(head, parse_int(j.get("dropped")), tail, j.get("digest", ""))

    def __str__(self) -> str:
        middle = f"\n[{self.dropped} bytes]\n" if self.dropped else ""
        return self.head.decode("utf-8", "replace") + middle + self.tail.decode("utf-8", "replace")


@dataclass(frozen=True)
class StepEgress:
    """What left a sandbox while a step ran."""

    requests: int
    denied: int
    sent: int
    received: int
    hosts: tuple[str, ...]
    """The first 20."""

    @classmethod
    def parse(cls, j: Json) -> StepEgress:
        return cls(
            requests=parse_int(j.get("requests")),
            denied=parse_int(j.get("denied")),
            sent=parse_int(j.get("sent")),
            received=parse_int(j.get("received")),
            hosts=tuple(j.get("hosts") or ()),
        )


@dataclass(frozen=True)
class Step:
    """One exec in a sandbox of a run."""

    id: str
    seq: int
    run: str
    group: str
    episode: str
    sandbox: str
    reset: int
    """The sandbox's episode number: 1, one more with each reset."""
    exec_id: str
    args: tuple[str, ...]
    command: str
    cwd: str
    user: str
    started_at: Optional[datetime]
    ended_at: Optional[datetime]
    end: Optional[End]
    """None while it runs."""
    duration: float
    cpu_time: float
    peak_memory: int
    bytes_in: int
    bytes_out: int
    stdout: StepOutput
    stderr: StepOutput
    egress_denied: int
    replay_missed: int
    egress_sent: int = 0
    egress_received: int = 0
    files: Optional[Diff] = None
    """What changed in the file system, of a run with steps=["files"]."""
    egress: Optional[StepEgress] = None
    """Of a run with steps=["egress"]."""
    env: tuple[str, ...] = ()
    """Names of the variables it was given."""
    not_kept: tuple[str, ...] = ()
    """Why it cannot be replayed."""

    @classmethod
    def parse(cls, j: Json) -> Step:
        return cls(
            id=j.get("id", ""),
            seq=parse_int(j.get("seq")),
            run=j.get("run", ""),
            group=j.get("group", ""),
            episode=j.get("episode", ""),
            sandbox=j.get("sandbox", ""),
            reset=parse_int(j.get("reset")),
            exec_id=j.get("execId", ""),
            args=tuple(j.get("args") or ()),
            command=j.get("command", ""),
            cwd=j.get("cwd", ""),
            user=j.get("user", ""),
            started_at=parse_time(j.get("startedAt")),
            ended_at=parse_time(j.get("endedAt")),
            end=End.parse(j["end"]) if j.get("end") else None,
            duration=parse_duration(j.get("duration")),
            cpu_time=parse_duration(j.get("cpuTime")),
            peak_memory=parse_int(j.get("peakMemory")),
            bytes_in=parse_int(j.get("bytesIn")),
            bytes_out=parse_int(j.get("bytesOut")),
            stdout=StepOutput.parse(j.get("stdout") or {}),
            stderr=StepOutput.parse(j.get("stderr") or {}),
            egress_denied=parse_int(j.get("egressDenied")),
            replay_missed=parse_int(j.get("replayMissed")),
            egress_sent=parse_int(j.get("egressSent")),
            egress_received=parse_int(j.get("egressReceived")),
            files=Diff.parse(j["files"]) if j.get("files") is not None else None,
            egress=StepEgress.parse(j["egress"]) if j.get("egress") is not None else None,
            env=tuple(j.get("env") or ()),
            not_kept=tuple(j.get("notKept") or ()),
        )


@dataclass(frozen=True)
class Checkpoint:
    """A version of a run's document."""

    version: int
    data: bytes
    """Empty in a list."""
    size: int
    created_at: Optional[datetime]

    def json(self) -> Any:
        return json.loads(self.data)

    @classmethod
    def parse(cls, j: Json, data: bytes) -> Checkpoint:
        return cls(parse_int(j.get("version")), data, parse_int(j.get("size")), parse_time(j.get("createdAt")))


@dataclass(frozen=True)
class Cost:
    """What a run, group, episode, sandbox or step used; names that do not apply are empty."""

    run: str
    group: str
    episode: str
    sandbox: str
    step: str
    sandboxes: int
    episodes: int
    steps: int
    cpu_seconds: float
    step_cpu_seconds: float
    memory_gib_seconds: float
    memory_reserved_gib_seconds: float
    disk_gib_seconds: float
    snapshot_gib: float
    seconds: float
    step_seconds: float
    idle_seconds: float
    standby_seconds: float
    egress_sent: int = 0
    egress_received: int = 0
    reset: int = 0
    """By episode: which of the sandbox's, 1 and one more with each reset."""

    @classmethod
    def parse(cls, j: Json) -> Cost:
        def amount(name: str) -> float:
            return float(j.get(name) or 0.0)

        return cls(
            run=j.get("run", ""),
            group=j.get("group", ""),
            episode=j.get("episode", ""),
            sandbox=j.get("sandbox", ""),
            step=j.get("step", ""),
            sandboxes=parse_int(j.get("sandboxes")),
            episodes=parse_int(j.get("episodes")),
            steps=parse_int(j.get("steps")),
            cpu_seconds=amount("cpuSeconds"),
            step_cpu_seconds=amount("stepCpuSeconds"),
            memory_gib_seconds=amount("memoryGibSeconds"),
            memory_reserved_gib_seconds=amount("memoryReservedGibSeconds"),
            disk_gib_seconds=amount("diskGibSeconds"),
            snapshot_gib=amount("snapshotGib"),
            seconds=amount("seconds"),
            step_seconds=amount("stepSeconds"),
            idle_seconds=amount("idleSeconds"),
            standby_seconds=amount("standbySeconds"),
            egress_sent=parse_int(j.get("egressSent")),
            egress_received=parse_int(j.get("egressReceived")),
            reset=parse_int(j.get("reset")),
        )
