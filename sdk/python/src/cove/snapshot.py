"""Snapshots: frozen state to go back to, to start from, to fork, to mount elsewhere."""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Callable, Optional, Union

from . import _lease, _state_calls
from ._transfer import LocalPath, async_copy, async_save, copy, save
from ._values import Seconds, Size, parse_duration, parse_int
from ._wire import Request
from .client import AsyncClient, Client, default_async_client, default_client
from .errors import TransportError
from .models import Json
from .state import Forks, PrunedSnapshot, SnapshotInfo, SnapshotProgress, Tree

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox, Sandbox

OnProgress = Callable[[SnapshotProgress], Any]


class SnapshotState:
    """What a snapshot object knows without asking."""

    def __init__(self, info: SnapshotInfo, unchanged: bool = False, paused: float = 0.0) -> None:
        self.last_info = info
        self.unchanged = unchanged
        """Nothing had happened since this snapshot, so sandbox.snapshot() made no new one."""
        self.paused = paused
        """Seconds the sandbox stood still for it, where this object took it."""

    @property
    def id(self) -> str:
        return self.last_info.id

    @property
    def name(self) -> str:
        return self.last_info.name

    @property
    def kind(self) -> str:
        """memory, filesystem or directory."""
        return self.last_info.kind

    @property
    def labels(self) -> Mapping[str, str]:
        return self.last_info.labels

    @property
    def size(self) -> int:
        """Bytes of state."""
        return self.last_info.size

    @property
    def stored(self) -> int:
        """Bytes it added to the store."""
        return self.last_info.stored

    @property
    def parent(self) -> str:
        """Id of a snapshot or sandbox; empty: a root."""
        return self.last_info.parent

    @property
    def sandbox(self) -> str:
        """Id of the sandbox it was taken of."""
        return self.last_info.sandbox

    @property
    def path(self) -> str:
        """Of a directory snapshot."""
        return self.last_info.path

    @property
    def created_at(self) -> Optional[datetime]:
        return self.last_info.created_at

    @property
    def expires_at(self) -> Optional[datetime]:
        """It is deleted then; None: never."""
        return self.last_info.expires_at

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<{type(self).__name__} {self.id}{name} {self.kind} {self.size} bytes>"


class Snapshot(SnapshotState):
    """A snapshot. Sandbox.snapshot() takes one, Sandbox.create(snapshot=…) starts from it."""

    def __init__(self, client: Client, info: SnapshotInfo, unchanged: bool = False, paused: float = 0.0) -> None:
        """Use Sandbox.snapshot(), get() or list()."""
        super().__init__(info, unchanged, paused)
        self._client = client

    @classmethod
    def get(cls, id: str, *, client: Optional[Client] = None) -> Snapshot:
        """By id or name."""
        client = client or default_client()
        return cls(client, client.call(_state_calls.get_snapshot(id)))

    @classmethod
    def list(
        cls,
        labels: Optional[Mapping[str, str]] = None,
        *,
        sandbox: Optional[Union[Sandbox, str]] = None,
        kind: Optional[str] = None,
        page_size: int = 100,
        client: Optional[Client] = None,
    ) -> Iterator[Snapshot]:
        """Every snapshot that has all the labels, newest first; page by page as you iterate."""
        client = client or default_client()
        token = ""
        while True:
            page = client.call(_state_calls.list_snapshots(labels, sandbox, kind, page_size, token))
            for info in page.snapshots:
                yield cls(client, info)
            token = page.next_token
            if not token:
                return

    @staticmethod
    def prune(
        *,
        keep_last: Optional[int] = None,
        keep_labels: Optional[Mapping[str, str]] = None,
        max_bytes: Optional[Size] = None,
        max_age: Optional[Seconds] = None,
        sandbox: Optional[Union[Sandbox, str]] = None,
        dry_run: bool = False,
        client: Optional[Client] = None,
    ) -> builtins.list[PrunedSnapshot]:
        """Delete what the rules do not keep; what went, or with dry_run would go, and why.

        keep_last: so many of each sandbox. keep_labels: those that have one of
        these stay. max_bytes: of all together, the oldest go first. sandbox:
        only of this one.
        """
        call = _state_calls.prune_snapshots(
            keep_last=keep_last,
            keep_labels=keep_labels,
            max_bytes=max_bytes,
            max_age=max_age,
            sandbox=sandbox,
            dry_run=dry_run,
        )
        return (client or default_client()).call(call)

    def fork(
        self,
        n: int,
        *,
        min_ready: Optional[int] = None,
        labels: Optional[Mapping[str, str]] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[Seconds] = None,
        keep: Optional[bool] = None,
    ) -> Forks[Sandbox]:
        """Start n sandboxes from it; see Sandbox.fork."""
        from .sandbox import Sandbox  # which makes snapshots

        lease = _lease.fork_lease(self._client, keep)
        call = _state_calls.fork(
            {"snapshot": self.id}, n, min_ready=min_ready, labels=labels, env=env, timeout=timeout, lease=lease
        )
        forked = _lease.fork(self._client, call)
        return Forks([Sandbox(self._client, info) for info in forked.ready], forked.errors, forked.paused)

    def mount(self, sandbox: Union[Sandbox, str], path: Optional[str] = None, *, unpack: bool = False) -> None:
        """Put a directory snapshot into a sandbox, whatever its image.

        path: where; default is where it was taken. Read-only and at once, or
        with unpack as the sandbox's own files.
        """
        self._client.call(_state_calls.mount_snapshot(self.id, sandbox, path, unpack))

    def verify(self) -> int:
        """Read every byte; how many. Corrupt names what is broken."""
        return self._client.call(_state_calls.verify_snapshot(self.id))

    def export(self, target: Union[LocalPath, IO[bytes]]) -> int:
        """Write its files as a tar to a path, where it appears when it is complete, or an open file; its size.

        The tar is what a sandbox made: unpack it as you would a stranger's.
        """
        request = _tar(self._client, self.id)
        if isinstance(target, (str, os.PathLike)):
            return save(self._client, request, target)
        return self._client.retrying(lambda: copy(self._client, request, target), repeatable=False)

    def tree(self) -> Tree:
        """Everything it hangs together with."""
        return self._client.call(_state_calls.tree(self.id))

    def delete(self) -> int:
        """Remove it; the bytes that became free. What was made from it goes on working."""
        return self._client.call(_state_calls.delete_snapshot(self.id))


class AsyncSnapshot(SnapshotState):
    """A snapshot for asyncio; see Snapshot."""

    def __init__(self, client: AsyncClient, info: SnapshotInfo, unchanged: bool = False, paused: float = 0.0) -> None:
        """Use AsyncSandbox.snapshot(), get() or list()."""
        super().__init__(info, unchanged, paused)
        self._client = client

    @classmethod
    async def get(cls, id: str, *, client: Optional[AsyncClient] = None) -> AsyncSnapshot:
        """By id or name."""
        client = client or default_async_client()
        return cls(client, await client.call(_state_calls.get_snapshot(id)))

    @classmethod
    async def list(
        cls,
        labels: Optional[Mapping[str, str]] = None,
        *,
        sandbox: Optional[Union[AsyncSandbox, str]] = None,
        kind: Optional[str] = None,
        page_size: int = 100,
        client: Optional[AsyncClient] = None,
    ) -> AsyncIterator[AsyncSnapshot]:
        """Every snapshot that has all the labels, newest first; page by page as you iterate."""
        client = client or default_async_client()
        token = ""
        while True:
            page = await client.call(_state_calls.list_snapshots(labels, sandbox, kind, page_size, token))
            for info in page.snapshots:
                yield cls(client, info)
            token = page.next_token
            if not token:
                return

    @staticmethod
    async def prune(
        *,
        keep_last: Optional[int] = None,
        keep_labels: Optional[Mapping[str, str]] = None,
        max_bytes: Optional[Size] = None,
        max_age: Optional[Seconds] = None,
        sandbox: Optional[Union[AsyncSandbox, str]] = None,
        dry_run: bool = False,
        client: Optional[AsyncClient] = None,
    ) -> builtins.list[PrunedSnapshot]:
        """Delete what the rules do not keep; see Snapshot.prune."""
        call = _state_calls.prune_snapshots(
            keep_last=keep_last,
            keep_labels=keep_labels,
            max_bytes=max_bytes,
            max_age=max_age,
            sandbox=sandbox,
            dry_run=dry_run,
        )
        return await (client or default_async_client()).call(call)

    async def fork(
        self,
        n: int,
        *,
        min_ready: Optional[int] = None,
        labels: Optional[Mapping[str, str]] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[Seconds] = None,
        keep: Optional[bool] = None,
    ) -> Forks[AsyncSandbox]:
        """Start n sandboxes from it; see Sandbox.fork."""
        from .sandbox import AsyncSandbox  # which makes snapshots

        lease = await _lease.async_fork_lease(self._client, keep)
        call = _state_calls.fork(
            {"snapshot": self.id}, n, min_ready=min_ready, labels=labels, env=env, timeout=timeout, lease=lease
        )
        forked = await _lease.async_fork(self._client, call)
        return Forks([AsyncSandbox(self._client, info) for info in forked.ready], forked.errors, forked.paused)

    async def mount(
        self, sandbox: Union[AsyncSandbox, str], path: Optional[str] = None, *, unpack: bool = False
    ) -> None:
        """Put a directory snapshot into a sandbox; see Snapshot.mount."""
        await self._client.call(_state_calls.mount_snapshot(self.id, sandbox, path, unpack))

    async def verify(self) -> int:
        """Read every byte; how many. Corrupt names what is broken."""
        return await self._client.call(_state_calls.verify_snapshot(self.id))

    async def export(self, target: Union[LocalPath, IO[bytes]]) -> int:
        """Write its files as a tar; see Snapshot.export."""
        request = _tar(self._client, self.id)
        if isinstance(target, (str, os.PathLike)):
            return await async_save(self._client, request, target)
        return await self._client.retrying(lambda: async_copy(self._client, request, target), repeatable=False)

    async def tree(self) -> Tree:
        """Everything it hangs together with."""
        return await self._client.call(_state_calls.tree(self.id))

    async def delete(self) -> int:
        """Remove it; the bytes that became free. What was made from it goes on working."""
        return await self._client.call(_state_calls.delete_snapshot(self.id))


# What both kinds share


class Taking:
    """The events of taking one snapshot, without I/O."""

    def __init__(self, sandbox_id: str, on_progress: Optional[OnProgress]) -> None:
        self._sandbox_id, self._on_progress = sandbox_id, on_progress
        self._last: Optional[Json] = None

    def receive(self, event: Json) -> Any:
        if event.get("snapshot"):
            self._last = event
        if self._on_progress is None:
            return None
        progress = SnapshotProgress(event.get("step", ""), parse_int(event.get("done")), parse_int(event.get("total")))
        return self._on_progress(progress)

    def result(self) -> tuple[SnapshotInfo, bool, float]:
        if self._last is None:
            raise TransportError(
                "the stream ended without a snapshot",
                sent=True,
                hint=f'it may be there all the same: look with Snapshot.list(sandbox="{self._sandbox_id}")',
            )
        event = self._last
        return (
            SnapshotInfo.parse(event["snapshot"]),
            bool(event.get("unchanged")),
            parse_duration(event.get("paused")),
        )


def _tar(client: Union[Client, AsyncClient], id: str) -> Request:
    return client._settings.content("GET", "snapshots", id, "tar")
