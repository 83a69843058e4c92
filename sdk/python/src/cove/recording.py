"""Recordings: the HTTP of sandboxes, kept to be replayed with the network off."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import AsyncIterable, Iterable
from typing import Any, Optional, Union

from . import _state_calls
from ._transfer import LocalPath, async_save, off_loop, read_local, save
from ._wire import Request
from .client import AsyncClient, Client, default_async_client, default_client, read_all
from .replay import RecordedRequest, RecordingInfo

_PAGE = 1000


class RecordingState:
    """What a recording object knows without asking."""

    def __init__(self, info: RecordingInfo) -> None:
        self.last_info = info
        """The recording as this object last saw it; info() asks again."""

    @property
    def id(self) -> str:
        return self.last_info.id

    @property
    def name(self) -> str:
        return self.last_info.name

    @property
    def state(self) -> str:
        return self.last_info.state

    def _seen(self, info: RecordingInfo) -> RecordingInfo:
        self.last_info = info
        return info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name!r} {self.state} {self.last_info.exchanges} exchanges>"


class Recording(RecordingState):
    """A recording. Sandbox.create(record="name") makes one, Sandbox.create(replay="name") replays it."""

    def __init__(self, client: Client, info: RecordingInfo) -> None:
        """Use get(), list() or import_()."""
        super().__init__(info)
        self._client = client

    @classmethod
    def get(cls, name: str, *, client: Optional[Client] = None) -> Recording:
        """By name or id."""
        client = client or default_client()
        return cls(client, client.call(_state_calls.get_recording(name)))

    @classmethod
    def list(cls, *, client: Optional[Client] = None) -> builtins.list[Recording]:
        """Every recording, newest first."""
        client = client or default_client()
        return [cls(client, info) for info in client.call(_state_calls.list_recordings())]

    @classmethod
    def import_(cls, local: LocalPath, name: Optional[str] = None, *, client: Optional[Client] = None) -> Recording:
        """Make a recording of an archive that export() wrote; AlreadyExists if the name is taken."""
        client = client or default_client()
        reply = client.content(_put(client, name, read_local(local), os.stat(local).st_size))
        try:
            body = b"".join(reply.chunks())
        finally:
            reply.close()
        return cls(client, _parse(body))

    def info(self) -> RecordingInfo:
        """As it is now."""
        return self._seen(self._client.call(_state_calls.get_recording(self.id)))

    def requests(self) -> builtins.list[RecordedRequest]:
        """What is on it, in the order it was asked."""
        found: builtins.list[RecordedRequest] = []
        while True:
            page = self._client.call(_state_calls.recorded_requests(self.id, found[-1].number if found else 0, _PAGE))
            found += page
            if len(page) < _PAGE:
                return found

    def export(self, local: LocalPath, *, har: bool = False) -> int:
        """Write the archive, or with har a HAR 1.2, to a local file; its size. The file appears when it is complete."""
        return save(self._client, _get(self._client, self.id, har), local)

    def delete(self) -> None:
        """Remove it; FailedPrecondition while a sandbox records or replays it."""
        self._client.call(_state_calls.delete_recording(self.id))


class AsyncRecording(RecordingState):
    """A recording. AsyncSandbox.create(record="name") makes one, AsyncSandbox.create(replay="name") replays it."""

    def __init__(self, client: AsyncClient, info: RecordingInfo) -> None:
        """Use get(), list() or import_()."""
        super().__init__(info)
        self._client = client

    @classmethod
    async def get(cls, name: str, *, client: Optional[AsyncClient] = None) -> AsyncRecording:
        """By name or id."""
        client = client or default_async_client()
        return cls(client, await client.call(_state_calls.get_recording(name)))

    @classmethod
    async def list(cls, *, client: Optional[AsyncClient] = None) -> builtins.list[AsyncRecording]:
        """Every recording, newest first."""
        client = client or default_async_client()
        return [cls(client, info) for info in await client.call(_state_calls.list_recordings())]

    @classmethod
    async def import_(
        cls, local: LocalPath, name: Optional[str] = None, *, client: Optional[AsyncClient] = None
    ) -> AsyncRecording:
        """Make a recording of an archive that export() wrote; AlreadyExists if the name is taken."""
        client = client or default_async_client()
        request = _put(client, name, off_loop(read_local(local)), os.stat(local).st_size)
        return cls(client, _parse(await read_all(await client.content(request))))

    async def info(self) -> RecordingInfo:
        """As it is now."""
        return self._seen(await self._client.call(_state_calls.get_recording(self.id)))

    async def requests(self) -> builtins.list[RecordedRequest]:
        """What is on it, in the order it was asked."""
        found: builtins.list[RecordedRequest] = []
        while True:
            after = found[-1].number if found else 0
            page = await self._client.call(_state_calls.recorded_requests(self.id, after, _PAGE))
            found += page
            if len(page) < _PAGE:
                return found

    async def export(self, local: LocalPath, *, har: bool = False) -> int:
        """Write the archive, or with har a HAR 1.2, to a local file; its size. The file appears when it is complete."""
        return await async_save(self._client, _get(self._client, self.id, har), local)

    async def delete(self) -> None:
        """Remove it; FailedPrecondition while a sandbox records or replays it."""
        await self._client.call(_state_calls.delete_recording(self.id))


def _get(client: Union[Client, AsyncClient], id: str, har: bool) -> Request:
    return client._settings.content("GET", "recordings", id, "archive", {"format": "har"} if har else None)


def _put(
    client: Union[Client, AsyncClient],
    name: Optional[str],
    body: Union[Iterable[bytes], AsyncIterable[bytes]],
    length: int,
) -> Request:
    headers = (("content-length", str(length)),)
    return client._settings.plain("PUT", "/v1/recordings", {"name": name} if name else None, body, headers)


def _parse(body: bytes) -> RecordingInfo:
    j: Any = json.loads(body)
    return RecordingInfo.parse(j)
