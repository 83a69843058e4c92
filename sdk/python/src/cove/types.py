"""The words of the API as types, for editors and type checkers. A newer server may say more than is here."""

from __future__ import annotations

from typing import Literal, Union

EndCause = Union[
    Literal[
        "exited",
        "signalled",
        "deadline",
        "oom",
        "disk_full",
        "killed_by_user",
        "lease_expired",
        "client_ended",
        "ttl",
        "idle",
        "evicted",
        "node_lost",
        "init_killed",
        "reset",
        "egress_denied",
        "infra",
    ],
    str,
]
"""Why a process or sandbox ended."""

OnIdle = Literal["kill", "pause"]
VolumeMode = Literal["rw", "ro", "shared"]
StateName = Literal["creating", "running", "ending", "ended"]
Standby = Literal["", "hot", "cold"]
SnapshotKind = Literal["memory", "filesystem", "directory"]
IfBusy = Literal["freeze", "refuse"]
StreamName = Literal["stdout", "stderr", "pty"]
