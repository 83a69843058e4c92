"""What changed in files, what a replay found, and what is fixed. Immutable records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Optional

from ._connect import decode_base64
from ._values import parse_duration, parse_int

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Deterministic:
    """What is fixed of a sandbox, so that the same commands see the same. See docs/rl.md."""

    clock: Optional[datetime] = None
    """Where the clock of day starts; None: 2025-01-01T00:00:00Z."""
    seed: int = 0
    """Of hashes, and for programs that ask for one (COVE_SEED)."""

    def _json(self) -> dict[str, Any]:
        message: dict[str, Any] = {"seed": str(self.seed)} if self.seed else {}
        if self.clock is not None:
            clock = self.clock if self.clock.tzinfo else self.clock.replace(tzinfo=timezone.utc)
            message["clock"] = clock.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
        return message


@dataclass(frozen=True)
class FileState:
    """A path on one side of a comparison."""

    type: str
    """file, dir, symlink or other."""
    size: int
    mode: int
    uid: int
    gid: int
    target: str
    hash: str
    """SHA-256 in hex, if asked for."""

    @classmethod
    def parse(cls, j: Json) -> FileState:
        return cls(
            type=j.get("type", ""),
            size=parse_int(j.get("size")),
            mode=parse_int(j.get("mode")),
            uid=parse_int(j.get("uid")),
            gid=parse_int(j.get("gid")),
            target=j.get("target", ""),
            hash=j.get("hash", ""),
        )


@dataclass(frozen=True)
class Change:
    """One path that differs."""

    path: str
    kind: str
    """added, modified, or deleted (with all that was in it)."""
    what: tuple[str, ...]
    """Of modified: content, type, mode, owner, target."""
    before: Optional[FileState]
    now: Optional[FileState]

    @classmethod
    def parse(cls, j: Json) -> Change:
        return cls(
            path=j.get("path", ""),
            kind=j.get("kind", ""),
            what=tuple(j.get("what") or ()),
            before=FileState.parse(j["before"]) if j.get("before") else None,
            now=FileState.parse(j["now"]) if j.get("now") else None,
        )


@dataclass(frozen=True)
class Diff:
    """What changed in the files of a sandbox, or while a step ran."""

    changes: list[Change]
    """In the order of paths; the first ones."""
    added: int
    modified: int
    deleted: int
    bytes: int
    """Of files that were added or have other content."""
    truncated: bool
    """Not all was looked at."""
    omitted: bool = False
    """There are more than are listed."""
    since: str = ""
    took: float = 0.0

    @classmethod
    def parse(cls, j: Json) -> Diff:
        return cls(
            changes=[Change.parse(c) for c in j.get("changes") or ()],
            added=parse_int(j.get("added")),
            modified=parse_int(j.get("modified")),
            deleted=parse_int(j.get("deleted")),
            bytes=parse_int(j.get("bytes")),
            truncated=bool(j.get("truncated")),
            omitted=bool(j.get("omitted")),
            since=j.get("since", ""),
            took=parse_duration(j.get("took")),
        )

    @property
    def paths(self) -> list[str]:
        return [c.path for c in self.changes]


@dataclass(frozen=True)
class StepDifference:
    """The first observation of a step that is not what it was."""

    step: int
    """Its seq."""
    id: str
    what: str
    """stdout, stderr, exit_code, cause, signal, did_not_end or did_not_start."""
    offset: Optional[int]
    """Of streams: the first byte that differs; None: in what was kept as a digest only."""
    expected: bytes
    actual: bytes
    command: str
    detail: str

    @classmethod
    def parse(cls, j: Json) -> StepDifference:
        offset = parse_int(j.get("offset"))
        return cls(
            step=parse_int(j.get("step")),
            id=j.get("id", ""),
            what=j.get("what", ""),
            offset=offset if offset >= 0 else None,
            expected=decode_base64(j.get("expected", "")),
            actual=decode_base64(j.get("actual", "")),
            command=j.get("command", ""),
            detail=j.get("detail", ""),
        )


@dataclass(frozen=True)
class ReplayGap:
    """Something the episode had that its replay has not."""

    after_step: int
    what: str
    detail: str

    @classmethod
    def parse(cls, j: Json) -> ReplayGap:
        return cls(parse_int(j.get("afterStep")), j.get("what", ""), j.get("detail", ""))


@dataclass(frozen=True)
class Replayed:
    """What came of running the steps of an episode again."""

    run: str
    sandbox: str
    """Whose steps they were."""
    reset: int
    started_from: str
    steps: int
    replayed: int
    same: bool
    """Every observation was."""
    differences: list[StepDifference]
    """The first; with all=True one of each step that differs."""
    gaps: list[ReplayGap]
    kept: str
    """Id of the sandbox that stays."""
    deterministic: bool
    not_fixed: tuple[str, ...]
    took: float

    @property
    def first(self) -> Optional[StepDifference]:
        return self.differences[0] if self.differences else None

    @classmethod
    def parse(cls, j: Json) -> Replayed:
        return cls(
            run=j.get("run", ""),
            sandbox=j.get("sandbox", ""),
            reset=parse_int(j.get("reset")),
            started_from=j.get("startedFrom", ""),
            steps=parse_int(j.get("steps")),
            replayed=parse_int(j.get("replayed")),
            same=bool(j.get("same")),
            differences=[StepDifference.parse(d) for d in j.get("differences") or ()],
            gaps=[ReplayGap.parse(g) for g in j.get("gaps") or ()],
            kept=j.get("kept", ""),
            deterministic=bool(j.get("deterministic")),
            not_fixed=tuple(j.get("notFixed") or ()),
            took=parse_duration(j.get("took")),
        )
