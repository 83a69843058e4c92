"""Volumes: durable storage that survives every sandbox."""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncIterable, Iterable, Mapping
from datetime import datetime
from typing import Callable, Optional, Union

from . import _state_calls
from ._transfer import AsyncContent, Content, LocalPath, async_save, content_of, off_loop, read_local, save
from ._values import Size
from ._wire import Request
from .client import AsyncClient, Client, default_async_client, default_client, read_all
from .models import FileList
from .snapshot import AsyncSnapshot, Snapshot, SnapshotState
from .state import VolumeInfo


def _snapshot_id(snapshot: Optional[Union[SnapshotState, str]]) -> Optional[str]:
    return snapshot.id if isinstance(snapshot, SnapshotState) else snapshot


class VolumeState:
    """What a volume object knows without asking."""

    def __init__(self, info: VolumeInfo) -> None:
        self.last_info = info
        """The volume as this object last saw it; info() asks again."""

    @property
    def id(self) -> str:
        return self.last_info.id

    @property
    def name(self) -> str:
        return self.last_info.name

    @property
    def size(self) -> int:
        """Bytes it may hold."""
        return self.last_info.size

    @property
    def labels(self) -> Mapping[str, str]:
        return self.last_info.labels

    @property
    def created_at(self) -> Optional[datetime]:
        return self.last_info.created_at

    def _seen(self, info: VolumeInfo) -> VolumeInfo:
        self.last_info = info
        return info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name!r} {self.size} bytes>"


Mounts = Mapping[str, Union[str, VolumeState, tuple[Union[str, VolumeState], str]]]
"""By path inside: a volume or its name, alone or with a mode: rw (the default, alone), ro, shared."""


class Volume(VolumeState):
    """A volume. Sandbox.create(volumes={"/data": volume}) mounts it."""

    def __init__(self, client: Client, info: VolumeInfo) -> None:
        """Use create(), get() or list()."""
        super().__init__(info)
        self._client = client
        self.files = VolumeFiles(client, info.id)

    @classmethod
    def create(
        cls,
        name: str,
        size: Size = "1GiB",
        *,
        labels: Optional[Mapping[str, str]] = None,
        snapshot: Optional[Union[SnapshotState, str]] = None,
        client: Optional[Client] = None,
    ) -> Volume:
        """Make a volume, empty or with the content of a directory snapshot; AlreadyExists if the name is taken."""
        client = client or default_client()
        return cls(client, client.call(_state_calls.create_volume(name, size, labels, _snapshot_id(snapshot))))

    @classmethod
    def get(cls, name: str, *, client: Optional[Client] = None) -> Volume:
        """By name or id."""
        client = client or default_client()
        return cls(client, client.call(_state_calls.get_volume(name)))

    @classmethod
    def list(
        cls, labels: Optional[Mapping[str, str]] = None, *, client: Optional[Client] = None
    ) -> builtins.list[Volume]:
        """Every volume that has all the labels."""
        client = client or default_client()
        return [cls(client, info) for info in client.call(_state_calls.list_volumes(labels))]

    def info(self) -> VolumeInfo:
        """Use and holders as they are now."""
        return self._seen(self._client.call(_state_calls.get_volume(self.id)))

    def resize(self, size: Size) -> VolumeInfo:
        """Grow it."""
        return self._seen(self._client.call(_state_calls.resize_volume(self.id, size)))

    def clone(self, new_name: str, *, labels: Optional[Mapping[str, str]] = None) -> Volume:
        """A new volume with the content as it is now."""
        return Volume(self._client, self._client.call(_state_calls.clone_volume(self.id, new_name, labels)))

    def snapshot(self, name: Optional[str] = None, *, labels: Optional[Mapping[str, str]] = None) -> Snapshot:
        """Freeze its content as it is now, as a directory snapshot."""
        return Snapshot(self._client, self._client.call(_state_calls.snapshot_volume(self.id, name, labels)))

    def delete(self) -> None:
        """Remove it and all it holds; FailedPrecondition while a sandbox has it mounted."""
        self._client.call(_state_calls.delete_volume(self.id))


class VolumeFiles:
    """The files of a volume, reached without a sandbox."""

    def __init__(self, client: Client, volume_id: str) -> None:
        self._client, self._id = client, volume_id

    def read(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content as text."""
        return self.read_bytes(path).decode(encoding, errors)

    def read_bytes(self, path: str) -> bytes:
        request = _get_file(self._client, self._id, path)

        def attempt() -> bytes:
            return b"".join(self._client.content(request).chunks())

        return self._client.retrying(attempt, repeatable=True)

    def write(self, path: str, data: Content, *, mode: Optional[int] = None) -> None:
        """Write a file; str as UTF-8. An open file or iterator is read while it is sent."""
        content = content_of(data)
        assert not isinstance(content, AsyncIterable)
        source = content
        self._put(path, mode, lambda: source, None, repeatable=isinstance(source, bytes))

    def upload(self, local: LocalPath, path: str, *, mode: Optional[int] = None) -> None:
        """Copy a local file in; mode is the local file's unless given."""
        status = os.stat(local)
        mode = status.st_mode & 0o777 if mode is None else mode
        self._put(path, mode, lambda: read_local(local), status.st_size, repeatable=True)

    def _put(
        self,
        path: str,
        mode: Optional[int],
        body: Callable[[], Union[bytes, Iterable[bytes]]],
        length: Optional[int],
        *,
        repeatable: bool,
    ) -> None:
        def attempt() -> None:
            for _ in self._client.content(_put_file(self._client, self._id, path, mode, body(), length)).chunks():
                pass

        self._client.retrying(attempt, repeatable=repeatable)

    def download(self, path: str, local: LocalPath) -> int:
        """Copy a file out; its size. The local file appears when it is complete."""
        return save(self._client, _get_file(self._client, self._id, path), local)

    def list(self, path: str = "/", *, depth: int = 1) -> FileList:
        """The entries of a directory, down to a depth."""
        return self._client.call(_state_calls.list_volume_files(self._id, path, depth))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        self._client.call(_state_calls.remove_volume_file(self._id, path, recursive))


class AsyncVolume(VolumeState):
    """A volume for asyncio; see Volume."""

    def __init__(self, client: AsyncClient, info: VolumeInfo) -> None:
        """Use create(), get() or list()."""
        super().__init__(info)
        self._client = client
        self.files = AsyncVolumeFiles(client, info.id)

    @classmethod
    async def create(
        cls,
        name: str,
        size: Size = "1GiB",
        *,
        labels: Optional[Mapping[str, str]] = None,
        snapshot: Optional[Union[SnapshotState, str]] = None,
        client: Optional[AsyncClient] = None,
    ) -> AsyncVolume:
        """Make a volume, empty or with the content of a directory snapshot; AlreadyExists if the name is taken."""
        client = client or default_async_client()
        return cls(client, await client.call(_state_calls.create_volume(name, size, labels, _snapshot_id(snapshot))))

    @classmethod
    async def get(cls, name: str, *, client: Optional[AsyncClient] = None) -> AsyncVolume:
        """By name or id."""
        client = client or default_async_client()
        return cls(client, await client.call(_state_calls.get_volume(name)))

    @classmethod
    async def list(
        cls, labels: Optional[Mapping[str, str]] = None, *, client: Optional[AsyncClient] = None
    ) -> builtins.list[AsyncVolume]:
        """Every volume that has all the labels."""
        client = client or default_async_client()
        return [cls(client, info) for info in await client.call(_state_calls.list_volumes(labels))]

    async def info(self) -> VolumeInfo:
        """Use and holders as they are now."""
        return self._seen(await self._client.call(_state_calls.get_volume(self.id)))

    async def resize(self, size: Size) -> VolumeInfo:
        """Grow it."""
        return self._seen(await self._client.call(_state_calls.resize_volume(self.id, size)))

    async def clone(self, new_name: str, *, labels: Optional[Mapping[str, str]] = None) -> AsyncVolume:
        """A new volume with the content as it is now."""
        info = await self._client.call(_state_calls.clone_volume(self.id, new_name, labels))
        return AsyncVolume(self._client, info)

    async def snapshot(
        self, name: Optional[str] = None, *, labels: Optional[Mapping[str, str]] = None
    ) -> AsyncSnapshot:
        """Freeze its content as it is now, as a directory snapshot."""
        return AsyncSnapshot(self._client, await self._client.call(_state_calls.snapshot_volume(self.id, name, labels)))

    async def delete(self) -> None:
        """Remove it and all it holds; FailedPrecondition while a sandbox has it mounted."""
        await self._client.call(_state_calls.delete_volume(self.id))


class AsyncVolumeFiles:
    """The files of a volume, reached without a sandbox."""

    def __init__(self, client: AsyncClient, volume_id: str) -> None:
        self._client, self._id = client, volume_id

    async def read(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content as text."""
        return (await self.read_bytes(path)).decode(encoding, errors)

    async def read_bytes(self, path: str) -> bytes:
        request = _get_file(self._client, self._id, path)

        async def attempt() -> bytes:
            return await read_all(await self._client.content(request))

        return await self._client.retrying(attempt, repeatable=True)

    async def write(self, path: str, data: AsyncContent, *, mode: Optional[int] = None) -> None:
        """Write a file; str as UTF-8. An open file or iterator is read while it is sent."""
        content = content_of(data)
        source = content if isinstance(content, (bytes, AsyncIterable)) else off_loop(content)
        await self._put(path, mode, lambda: source, None, repeatable=isinstance(source, bytes))

    async def upload(self, local: LocalPath, path: str, *, mode: Optional[int] = None) -> None:
        """Copy a local file in; mode is the local file's unless given."""
        status = os.stat(local)
        mode = status.st_mode & 0o777 if mode is None else mode
        await self._put(path, mode, lambda: off_loop(read_local(local)), status.st_size, repeatable=True)

    async def _put(
        self,
        path: str,
        mode: Optional[int],
        body: Callable[[], Union[bytes, AsyncIterable[bytes]]],
        length: Optional[int],
        *,
        repeatable: bool,
    ) -> None:
        async def attempt() -> None:
            await read_all(await self._client.content(_put_file(self._client, self._id, path, mode, body(), length)))

        await self._client.retrying(attempt, repeatable=repeatable)

    async def download(self, path: str, local: LocalPath) -> int:
        """Copy a file out; its size. The local file appears when it is complete."""
        return await async_save(self._client, _get_file(self._client, self._id, path), local)

    async def list(self, path: str = "/", *, depth: int = 1) -> FileList:
        """The entries of a directory, down to a depth."""
        return await self._client.call(_state_calls.list_volume_files(self._id, path, depth))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        await self._client.call(_state_calls.remove_volume_file(self._id, path, recursive))


def _get_file(client: Union[Client, AsyncClient], id: str, path: str) -> Request:
    return client._settings.content("GET", "volumes", id, "files", {"path": path})


def _put_file(
    client: Union[Client, AsyncClient],
    id: str,
    path: str,
    mode: Optional[int],
    body: Union[bytes, Iterable[bytes], AsyncIterable[bytes]],
    length: Optional[int],
) -> Request:
    query = {"path": path, **({} if mode is None else {"mode": f"{mode:04o}"})}
    headers = () if length is None else (("content-length", str(length)),)
    return client._settings.content("PUT", "volumes", id, "files", query, body, headers)
