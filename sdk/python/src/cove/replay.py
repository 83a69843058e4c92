"""What is recorded of a sandbox's HTTP, and how it is replayed. Immutable records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Optional, Union

from ._values import parse_duration, parse_int, parse_time

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """A recording to be made, or under way."""

    name: str = ""
    """Unique in the tenant; empty: it is called by its id."""
    id: str = ""
    """The server's to choose. set_network with that of the one under way goes on with it."""

    def _json(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("id", "name") if getattr(self, key)}


@dataclass(frozen=True)
class Replay:
    """Which recording answers, and which requests are the same.

    Method, scheme, host, port, path, query in any order, Range and body are
    compared unless it says otherwise. The n-th of equal requests gets the n-th
    answer.
    """

    recording: str
    """Name or id."""
    repeat_last: bool = False
    """Equal requests beyond those recorded get the last answer; else they are a miss."""
    ignore_query: tuple[str, ...] = ()
    """Parameters that may differ; "*": all."""
    ignore_body: bool = False
    match_headers: tuple[str, ...] = ()
    """Headers that must be equal too."""

    def _json(self) -> dict[str, Any]:
        j: dict[str, Any] = {"recording": self.recording}
        if self.repeat_last:
            j["repeatLast"] = True
        if self.ignore_query:
            j["ignoreQuery"] = list(self.ignore_query)
        if self.ignore_body:
            j["ignoreBody"] = True
        if self.match_headers:
            j["matchHeaders"] = list(self.match_headers)
        return j

    @classmethod
    def _from(cls, j: Json) -> Replay:
        return cls(
            recording=j.get("recording", ""),
            repeat_last=bool(j.get("repeatLast")),
            ignore_query=tuple(j.get("ignoreQuery") or ()),
            ignore_body=bool(j.get("ignoreBody")),
            match_headers=tuple(j.get("matchHeaders") or ()),
        )


RecordLike = Union[bool, str, Record]
"""True, or a name."""


def to_record(value: Optional[RecordLike]) -> Optional[Record]:
    if isinstance(value, Record):
        return value
    if isinstance(value, str):
        return Record(value)
    return Record() if value else None


@dataclass(frozen=True)
class RecordingInfo:
    """The HTTP and HTTPS of a sandbox, kept to be replayed."""

    id: str
    name: str
    sandbox: str
    """That was recorded; empty: it was imported."""
    node: str
    state: str
    """recording, finished, or interrupted: the server died, and what was complete is there."""
    created_at: Optional[datetime]
    finished_at: Optional[datetime]
    exchanges: int
    bytes: int
    truncated: int
    """Exchanges that a replay cannot answer with: too long, or they became another protocol."""
    dropped: int
    """Exchanges that are not there because it was full."""

    @classmethod
    def parse(cls, j: Json) -> RecordingInfo:
        return cls(
            id=j.get("id", ""),
            name=j.get("name", ""),
            sandbox=j.get("sandbox", ""),
            node=j.get("node", ""),
            state=j.get("state", ""),
            created_at=parse_time(j.get("createdAt")),
            finished_at=parse_time(j.get("finishedAt")),
            exchanges=parse_int(j.get("exchanges")),
            bytes=parse_int(j.get("bytes")),
            truncated=parse_int(j.get("truncated")),
            dropped=parse_int(j.get("dropped")),
        )


@dataclass(frozen=True)
class RecordedRequest:
    """One request and what came of it."""

    number: int
    at: Optional[datetime]
    took: float
    """Seconds."""
    method: str
    url: str
    status: int
    """0: there was no answer."""
    failed: str
    """Why not."""
    sent: int
    received: int
    truncated: bool

    @classmethod
    def _from(cls, j: Json) -> RecordedRequest:
        return cls(
            number=parse_int(j.get("number")),
            at=parse_time(j.get("at")),
            took=parse_duration(j.get("took")),
            method=j.get("method", ""),
            url=j.get("url", ""),
            status=parse_int(j.get("status")),
            failed=j.get("failed", ""),
            sent=parse_int(j.get("sent")),
            received=parse_int(j.get("received")),
            truncated=bool(j.get("truncated")),
        )


@dataclass(frozen=True)
class ReplayMiss:
    """A request that a replay had no answer for: the sandbox got status 424."""

    at: Optional[datetime]
    method: str
    """Or DNS, for a name that was looked up and is not on the recording."""
    url: str
    reason: str
    """replay_miss or replay_truncated."""
    hint: str
    """The recorded request that is most like it, and what differs."""


@dataclass(frozen=True)
class ReplayStatus:
    """How far the replay of a sandbox is."""

    recording: str
    answered: int
    missed: int
    unused: int
    """Recorded and not asked for yet."""
    misses: tuple[ReplayMiss, ...] = ()
    """The last ones, oldest first."""

    @classmethod
    def _from(cls, j: Json) -> ReplayStatus:
        return cls(
            recording=j.get("recording", ""),
            answered=parse_int(j.get("answered")),
            missed=parse_int(j.get("missed")),
            unused=parse_int(j.get("unused")),
            misses=tuple(
                ReplayMiss(
                    parse_time(m.get("at")),
                    m.get("method", ""),
                    m.get("url", ""),
                    m.get("reason", ""),
                    m.get("hint", ""),
                )
                for m in j.get("misses") or ()
            ),
        )
