"""What the API tells of kept state: snapshots, the tree they form, templates, volumes. Immutable records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, Optional, TypeVar, Union

from . import errors
from ._values import parse_duration, parse_int, parse_time
from .errors import CoveError
from .models import Json, SandboxInfo


@dataclass(frozen=True)
class SnapshotInfo:
    """Frozen state with a parent. It does not change; only its name can move on."""

    id: str
    name: str
    kind: str
    """memory, filesystem or directory."""
    labels: Mapping[str, str]
    sandbox: str
    """Id of the sandbox it was taken of."""
    parent: str
    """A snapshot or sandbox; empty: a root."""
    ancestors: tuple[str, ...]
    """Parent first."""
    image_id: str
    path: str
    """Of a directory snapshot."""
    node: str
    created_at: Optional[datetime]
    size: int
    """Bytes of state."""
    stored: int
    """Bytes it added to the store: what was there already costs nothing."""
    build: str
    """What a memory snapshot can be restored with."""
    expires_at: Optional[datetime] = None
    """It is deleted then; None: never."""

    @classmethod
    def parse(cls, j: Json) -> SnapshotInfo:
        return cls(
            id=j.get("id", ""),
            name=j.get("name", ""),
            kind=j.get("kind", ""),
            labels=j.get("labels") or {},
            sandbox=j.get("sandbox", ""),
            parent=j.get("parent", ""),
            ancestors=tuple(j.get("ancestors") or ()),
            image_id=j.get("imageId", ""),
            path=j.get("path", ""),
            node=j.get("node", ""),
            created_at=parse_time(j.get("createdAt")),
            size=parse_int(j.get("size")),
            stored=parse_int(j.get("stored")),
            build=j.get("build", ""),
            expires_at=parse_time(j.get("expiresAt")),
        )


@dataclass(frozen=True)
class SnapshotProgress:
    """A step of taking a snapshot: freeze, store, done. Bytes; total 0 means unknown."""

    step: str
    done: int
    total: int


@dataclass(frozen=True)
class PrunedSnapshot:
    """A snapshot that retention rules removed, or would with dry_run."""

    id: str
    reason: str
    stored: int

    @classmethod
    def parse(cls, j: Json) -> PrunedSnapshot:
        return cls(id=j.get("id", ""), reason=j.get("reason", ""), stored=parse_int(j.get("stored")))


S = TypeVar("S")


class Forks(list[S], Generic[S]):
    """The children of a fork that are ready, in order.

    `errors` has one error for each child that did not come up, `paused` the
    seconds a live source stood still.
    """

    def __init__(self, sandboxes: list[S], errors: list[CoveError], paused: float) -> None:
        super().__init__(sandboxes)
        self.errors = errors
        self.paused = paused


@dataclass(frozen=True)
class Forked:
    """The answer to a fork."""

    ready: list[SandboxInfo]
    errors: list[CoveError]
    paused: float

    @classmethod
    def parse(cls, j: Json) -> Forked:
        results = j.get("results") or ()
        return cls(
            ready=[SandboxInfo.parse(r["sandbox"]) for r in results if r.get("sandbox")],
            errors=[_error(r) for r in results if not r.get("sandbox")],
            paused=parse_duration(j.get("paused")),
        )


def _error(result: Json) -> CoveError:
    """The error of a ForkResult that has no sandbox."""
    detail: Json = result.get("error") or {}
    retry_after_ms = parse_int(detail.get("retryAfterMs"))
    return errors.make(
        detail.get("code") or "internal",
        result.get("message") or "the child did not come up",
        op=detail.get("op", ""),
        field=detail.get("field", ""),
        hint=detail.get("hint", ""),
        reason=detail.get("reason", ""),
        retry_after=retry_after_ms / 1000 if retry_after_ms else None,
    )


@dataclass(frozen=True)
class TreeNode:
    """A sandbox or snapshot in its tree."""

    id: str
    parent: str
    """Of the nodes in the same tree; empty: a root."""
    kind: str
    """sandbox, memory, filesystem or directory."""
    name: str
    state: str
    """Of a sandbox: its state, or hot or cold."""
    created_at: Optional[datetime]

    def __str__(self) -> str:
        return " ".join(word for word in (self.id, self.kind, self.state, self.name and f"({self.name})") if word)

    @classmethod
    def parse(cls, j: Json) -> TreeNode:
        return cls(
            id=j.get("id", ""),
            parent=j.get("parent", ""),
            kind=j.get("kind", ""),
            name=j.get("name", ""),
            state=j.get("state", ""),
            created_at=parse_time(j.get("createdAt")),
        )


@dataclass(frozen=True)
class Tree:
    """Everything that hangs together with a sandbox or snapshot. str() draws it."""

    nodes: tuple[TreeNode, ...]
    """Parents before children."""
    _children: Mapping[str, tuple[TreeNode, ...]] = field(repr=False, compare=False)

    @property
    def roots(self) -> tuple[TreeNode, ...]:
        return self._children.get("", ())

    def children(self, node: Union[TreeNode, str]) -> tuple[TreeNode, ...]:
        """Of a node or an id."""
        id = node if isinstance(node, str) else node.id
        return self._children.get(id, ()) if id else ()

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        lines: list[str] = []
        # A stack, not recursion: a chain of a thousand snapshots is an ordinary one.
        stack = [(node, "", "") for node in reversed(self.roots)]
        while stack:
            node, branch, indent = stack.pop()
            lines.append(f"{branch}{node}")
            below = self.children(node)
            for position, child in reversed(list(enumerate(below))):
                last = position == len(below) - 1
                stack.append((child, indent + ("└── " if last else "├── "), indent + ("    " if last else "│   ")))
        return "\n".join(lines)

    @classmethod
    def parse(cls, j: Json) -> Tree:
        nodes = tuple(TreeNode.parse(n) for n in j.get("nodes") or ())
        children: dict[str, list[TreeNode]] = {"": []}
        for node in nodes:
            # Only a parent that came before counts, so that there is no cycle.
            children[node.parent if node.parent in children else ""].append(node)
            children.setdefault(node.id, [])
        return cls(nodes, {id: tuple(below) for id, below in children.items()})


@dataclass(frozen=True)
class TemplateInfo:
    """A version of a template. Of it only the tags ever change."""

    name: str
    version: int
    image: str
    start: str
    ready_command: str
    ready_port: int
    ready_timeout: float
    snapshot: str
    created_at: Optional[datetime]
    build_time: float
    """Seconds."""
    size: int
    """Bytes of state."""
    tags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, j: Json) -> TemplateInfo:
        return cls(
            name=j.get("name", ""),
            version=parse_int(j.get("version")),
            image=(j.get("spec") or {}).get("image", ""),
            start=j.get("start", ""),
            ready_command=j.get("readyCommand", ""),
            ready_port=j.get("readyPort", 0),
            ready_timeout=parse_duration(j.get("readyTimeout")),
            snapshot=j.get("snapshot", ""),
            created_at=parse_time(j.get("createdAt")),
            build_time=parse_duration(j.get("buildTime")),
            size=parse_int(j.get("size")),
            tags=tuple(j.get("tags") or ()),
        )


@dataclass(frozen=True)
class VolumeHolder:
    """A sandbox that has a volume mounted."""

    sandbox: str
    mode: str


@dataclass(frozen=True)
class VolumeInfo:
    """Durable storage that survives every sandbox. Sizes are bytes."""

    id: str
    name: str
    size: int
    """What it may hold."""
    used: int
    labels: Mapping[str, str]
    node: str
    created_at: Optional[datetime]
    cloned_from: str
    holders: tuple[VolumeHolder, ...]

    @classmethod
    def parse(cls, j: Json) -> VolumeInfo:
        return cls(
            id=j.get("id", ""),
            name=j.get("name", ""),
            size=parse_int(j.get("size")),
            used=parse_int(j.get("used")),
            labels=j.get("labels") or {},
            node=j.get("node", ""),
            created_at=parse_time(j.get("createdAt")),
            cloned_from=j.get("from", ""),
            holders=tuple(VolumeHolder(h.get("sandbox", ""), h.get("mode", "")) for h in j.get("holders") or ()),
        )
