"""What a sandbox may reach, and what it tried to. Immutable records."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Optional, Union

from ._values import parse_int, parse_time
from .errors import InvalidArgument
from .replay import Record, RecordingInfo, RecordLike, Replay, ReplayStatus, to_record

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """Allows or denies a domain ("pypi.org", "*.pypi.org"), a CIDR, or with neither every destination."""

    action: str
    """allow or deny."""
    domain: str = ""
    cidr: str = ""
    ports: tuple[tuple[int, int], ...] = ()
    """Ranges, both ends included; none: every port."""
    protocol: str = ""
    """any (the default), tcp or udp."""

    @classmethod
    def parse(cls, text: str) -> Rule:
        """A rule as the command line takes it: "allow pypi.org tcp 443", "deny * 25"."""
        words = text.split()
        if len(words) < 2:
            raise InvalidArgument(
                f"network: {text!r} is no rule", field="network", hint='as in "allow pypi.org tcp 443"'
            )
        action, target, rest = words[0], words[1], words[2:]
        domain = cidr = protocol = ""
        if _is_address(target):
            cidr = target
        elif target != "*":
            domain = target
        if rest and not rest[0][0].isdigit():
            protocol, rest = rest[0], rest[1:]
        ports = tuple(_ports(text, part) for part in rest[0].split(",")) if rest else ()
        if len(rest) > 1:
            raise InvalidArgument(f"network: {text!r}: what is {rest[1]!r}?", field="network")
        return cls(action, domain, cidr, ports, protocol)

    def _json(self) -> dict[str, Any]:
        j: dict[str, Any] = {"action": self.action}
        for key in ("domain", "cidr", "protocol"):
            if getattr(self, key):
                j[key] = getattr(self, key)
        if self.ports:
            j["ports"] = [{"from": a, "to": b} for a, b in self.ports]
        return j

    @classmethod
    def _from(cls, j: Json) -> Rule:
        ranges = [(parse_int(p.get("from")), parse_int(p.get("to"))) for p in j.get("ports") or ()]
        ports = tuple((first, last or first) for first, last in ranges)
        return cls(j.get("action", ""), j.get("domain", ""), j.get("cidr", ""), ports, j.get("protocol", ""))


def _is_address(target: str) -> bool:
    try:
        ipaddress.ip_address(target.partition("/")[0])
    except ValueError:
        return "/" in target
    return True


def _ports(text: str, part: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if not found:
        raise InvalidArgument(f"network: {text!r}: {part!r} is no port or range of ports", field="network")
    return int(found[1]), int(found[2] or found[1])


@dataclass(frozen=True)
class Network:
    """A network policy; docs/network.md says what it means."""

    mode: str = ""
    """none, public or rules; empty: rules if there are any, else the server's default."""
    rules: tuple[Rule, ...] = ()
    bytes_per_second: int = 0
    """Both ways together; 0: no limit."""
    connections: int = 0
    """Open at a time; 0: the server's default."""
    record: Optional[RecordLike] = None
    """Record all HTTP and HTTPS: True or a name. As read back, a Record with the id of the recording."""
    replay: Optional[Replay] = None
    """Answer all HTTP and HTTPS out of a recording; nothing leaves."""

    def _json(self) -> dict[str, Any]:
        j: dict[str, Any] = {}
        if self.mode:
            j["mode"] = self.mode
        if self.rules:
            j["rules"] = [r._json() for r in self.rules]
        limits: dict[str, Any] = {}
        if self.bytes_per_second:
            limits["bytesPerSecond"] = str(self.bytes_per_second)
        if self.connections:
            limits["connections"] = self.connections
        if limits:
            j["limits"] = limits
        record = to_record(self.record)
        if record is not None:
            j["record"] = record._json()
        if self.replay is not None:
            j["replay"] = self.replay._json()
        return j

    @classmethod
    def _from(cls, j: Json) -> Network:
        limits: Json = j.get("limits") or {}
        record: Optional[Json] = j.get("record")
        replay: Optional[Json] = j.get("replay")
        return cls(
            mode=j.get("mode", ""),
            rules=tuple(Rule._from(r) for r in j.get("rules") or ()),
            bytes_per_second=parse_int(limits.get("bytesPerSecond")),
            connections=parse_int(limits.get("connections")),
            record=None if record is None else Record(record.get("name", ""), record.get("id", "")),
            replay=None if replay is None else Replay._from(replay),
        )


NetworkLike = Union[str, Network, Sequence[Union[str, Rule]]]
"""A mode ("none", "public"), a Network, or rules: ["allow pypi.org", "deny * tcp 25"]."""


def to_network(value: NetworkLike) -> Network:
    if isinstance(value, Network):
        return value
    if isinstance(value, str):
        return Network(mode=value)
    return Network(mode="rules", rules=tuple(r if isinstance(r, Rule) else Rule.parse(r) for r in value))


@dataclass(frozen=True)
class Flow:
    """One attempt to reach something."""

    start: Optional[datetime]
    end: Optional[datetime]
    """None while it is open."""
    name: str
    address: str
    port: int
    protocol: str
    """tcp, udp, or dns for a name that was refused."""
    sent: int
    received: int
    allowed: bool
    rule: int
    """Index of the rule that decided; -1: none of them."""
    reason: str

    @classmethod
    def _from(cls, j: Json) -> Flow:
        return cls(
            start=parse_time(j.get("start")),
            end=parse_time(j.get("end")),
            name=j.get("name", ""),
            address=j.get("address", ""),
            port=parse_int(j.get("port")),
            protocol=j.get("protocol", ""),
            sent=parse_int(j.get("sent")),
            received=parse_int(j.get("received")),
            allowed=bool(j.get("allowed")),
            rule=parse_int(j.get("rule")),
            reason=j.get("reason", ""),
        )


@dataclass(frozen=True)
class NetworkStatus:
    """The policy in force, and what came of it."""

    network: Network
    generation: int
    allowed: int
    denied: int
    flows: tuple[Flow, ...] = ()
    recording: Optional[RecordingInfo] = None
    """Under way."""
    replay: Optional[ReplayStatus] = None
    """Under way, with the requests it had no answer for."""

    @classmethod
    def _from(cls, j: Json) -> NetworkStatus:
        return cls(
            network=Network._from(j.get("network") or {}),
            generation=parse_int(j.get("generation")),
            allowed=parse_int(j.get("allowed")),
            denied=parse_int(j.get("denied")),
            flows=tuple(Flow._from(f) for f in j.get("flows") or ()),
            recording=RecordingInfo.parse(j["recording"]) if "recording" in j else None,
            replay=ReplayStatus._from(j["replay"]) if "replay" in j else None,
        )
