"""The files of a sandbox. Little content travels in a call, more as plain HTTP, directories as tar."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Callable, Optional, Union

from . import _calls
from ._calls import SMALL_FILE, WriteOptions
from ._tar import Unpacker, pack
from ._transfer import (
    AsyncContent,
    Content,
    LocalPath,
    async_save,
    by_megabyte,
    content_of,
    in_thread,
    off_loop,
    read_local,
    save,
)
from ._values import Size, parse_size
from ._wire import Request
from .client import AsyncClient, Client, read_all
from .errors import InvalidArgument, NotFound
from .models import FileInfo, FileList
from .watch import AsyncWatch, Watch

User = Union[str, int]

# The default size of a sandbox's disk: an honest directory fits.
_MAX_DIRECTORY = 10 << 30


class Files:
    """The files of one sandbox. A relative path is below the working directory of its image."""

    def __init__(self, client: Client, sandbox_id: str) -> None:
        self._client, self._id = client, sandbox_id

    def read(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content as text."""
        return self.read_bytes(path).decode(encoding, errors)

    def read_bytes(self, path: str, *, offset: int = 0, length: Optional[int] = None) -> bytes:
        """The content, or a part of it."""
        first = _first_read(length)
        data, info = self._client.call(_calls.read_file(self._id, path, offset, first))
        if _is_all(data, info, offset, length, first):
            return data
        request = _get_file(self._client, self._id, path, offset, length)

        def attempt() -> bytes:
            reply = self._client.content(request)
            return _part(reply.status, b"".join(reply.chunks()), offset, length)

        return self._client.retrying(attempt, repeatable=True)

    def write(
        self,
        path: str,
        data: Content,
        *,
        mode: Optional[int] = None,
        user: Optional[User] = None,
        atomic: bool = False,
        append: bool = False,
        parents: bool = True,
    ) -> FileInfo:
        """Write a file; str as UTF-8. atomic: readers see the old content or the new, never half."""
        options = WriteOptions(mode, user, atomic, append, parents)
        content = content_of(data)
        if isinstance(content, bytes):
            if len(content) <= SMALL_FILE:
                return self._client.call(_calls.write_file(self._id, path, content, options))
            whole = content
            return self._put(path, options, lambda: whole, len(whole), repeatable=not append)
        assert not isinstance(content, AsyncIterable)
        stream = content
        return self._put(path, options, lambda: stream, None, repeatable=False)

    def upload(
        self,
        local: LocalPath,
        path: str,
        *,
        mode: Optional[int] = None,
        user: Optional[User] = None,
        atomic: bool = False,
        parents: bool = True,
    ) -> FileInfo:
        """Copy a local file in; mode is the local file's unless given, without write bits for others."""
        status = os.stat(local)
        options = WriteOptions(status.st_mode & 0o755 if mode is None else mode, user, atomic, False, parents)
        return self._put(path, options, lambda: read_local(local), status.st_size, repeatable=True)

    def _put(
        self,
        path: str,
        options: WriteOptions,
        body: Callable[[], Union[bytes, Iterable[bytes]]],
        length: Optional[int],
        *,
        repeatable: bool,
    ) -> FileInfo:
        def attempt() -> FileInfo:
            reply = self._client.content(_put_file(self._client, self._id, path, options, body(), length))
            info = _info_of(b"".join(reply.chunks()))
            return info if info is not None else self.stat(path)

        return self._client.retrying(attempt, repeatable=repeatable)

    def download(self, path: str, local: LocalPath) -> int:
        """Copy a file out; its size. The local file appears when it is complete."""
        return save(self._client, _get_file(self._client, self._id, path, 0, None), local)

    def upload_dir(self, local: LocalPath, path: str, *, user: Optional[User] = None) -> None:
        """Copy the content of a local directory into a directory, which is made where missing."""
        request = _put_tar(self._client, self._id, path, user)

        def attempt() -> None:
            request.body = pack(os.fspath(local))
            reply = self._client.content(request)
            for _ in reply.chunks():
                pass

        # Unpacking the same files again leaves what unpacking them once leaves.
        self._client.retrying(attempt, repeatable=True)

    def download_dir(
        self, path: str, local: LocalPath, *, max_bytes: Size = _MAX_DIRECTORY, on_unsafe: str = "error"
    ) -> builtins.list[str]:
        """Copy the content of a directory into a local one.

        The sandbox is not trusted: nothing is written outside `local`. An entry
        that would reach out (an absolute or escaping link, a device) raises
        UnsafeArchive, or with on_unsafe="skip" is left out and named in the
        list returned. Owners, setuid bits and write rights of others are dropped.
        """
        limit = parse_size("max_bytes", max_bytes)
        request = _get_tar(self._client, self._id, path)

        def attempt() -> builtins.list[str]:
            with Unpacker(os.fspath(local), max_bytes=limit, on_unsafe=on_unsafe) as unpacker:
                reply = self._client.content(request)
                try:
                    for chunk in reply.chunks():
                        unpacker.feed(chunk)
                finally:
                    reply.close()
                unpacker.finish()
                return unpacker.skipped

        return self._client.retrying(attempt, repeatable=True)

    def list(self, path: str, *, depth: int = 1, limit: int = 10000) -> FileList:
        """The entries of a directory, down to a depth."""
        return self._client.call(_calls.list_files(self._id, path, depth, limit))

    def stat(self, path: str) -> FileInfo:
        return self._client.call(_calls.stat(self._id, path))

    def exists(self, path: str) -> bool:
        """Whether there is anything at path; a link counts, wherever it leads."""
        try:
            self.stat(path)
        except NotFound:
            return False
        return True

    def mkdir(
        self, path: str, *, parents: bool = True, mode: Optional[int] = None, user: Optional[User] = None
    ) -> FileInfo:
        """Make a directory. With parents, missing ones are made and an existing directory is fine."""
        return self._client.call(_calls.mkdir(self._id, path, parents, mode, user))

    def move(self, source: str, target: str) -> FileInfo:
        return self._client.call(_calls.move(self._id, source, target))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        self._client.call(_calls.remove(self._id, path, recursive))

    def chmod(self, path: str, mode: int, *, recursive: bool = False) -> None:
        self._client.call(_calls.chmod(self._id, path, mode, recursive))

    def set_attributes(self, path: str, attributes: Mapping[str, str]) -> FileInfo:
        """Make these all the extended attributes "user.*" of a file or directory, without that prefix."""
        return self._client.call(_calls.set_attributes(self._id, path, attributes))

    def chown(self, path: str, user: User, *, recursive: bool = False) -> None:
        """user: name, uid, name:group or uid:gid."""
        self._client.call(_calls.chown(self._id, path, user, recursive))

    def watch(self, path: str, *, recursive: bool = False, timeout: Optional[float] = None) -> Watch:
        """Changes at or below path, from now on: the watch is set when this returns.

        timeout: iteration ends after so many seconds without a change; None waits for ever.
        """
        return Watch(self._client, self._id, path, recursive, timeout)._open()


class AsyncFiles:
    """The files of one sandbox. A relative path is below the working directory of its image."""

    def __init__(self, client: AsyncClient, sandbox_id: str) -> None:
        self._client, self._id = client, sandbox_id

    async def read(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content as text."""
        return (await self.read_bytes(path)).decode(encoding, errors)

    async def read_bytes(self, path: str, *, offset: int = 0, length: Optional[int] = None) -> bytes:
        """The content, or a part of it."""
        first = _first_read(length)
        data, info = await self._client.call(_calls.read_file(self._id, path, offset, first))
        if _is_all(data, info, offset, length, first):
            return data
        request = _get_file(self._client, self._id, path, offset, length)

        async def attempt() -> bytes:
            reply = await self._client.content(request)
            return _part(reply.status, await read_all(reply), offset, length)

        return await self._client.retrying(attempt, repeatable=True)

    async def write(
        self,
        path: str,
        data: AsyncContent,
        *,
        mode: Optional[int] = None,
        user: Optional[User] = None,
        atomic: bool = False,
        append: bool = False,
        parents: bool = True,
    ) -> FileInfo:
        """Write a file; str as UTF-8. atomic: readers see the old content or the new, never half."""
        options = WriteOptions(mode, user, atomic, append, parents)
        content = content_of(data)
        if isinstance(content, bytes):
            if len(content) <= SMALL_FILE:
                return await self._client.call(_calls.write_file(self._id, path, content, options))
            whole = content
            return await self._put(path, options, lambda: whole, len(whole), repeatable=not append)
        stream = content if isinstance(content, AsyncIterable) else off_loop(content)
        return await self._put(path, options, lambda: stream, None, repeatable=False)

    async def upload(
        self,
        local: LocalPath,
        path: str,
        *,
        mode: Optional[int] = None,
        user: Optional[User] = None,
        atomic: bool = False,
        parents: bool = True,
    ) -> FileInfo:
        """Copy a local file in; mode is the local file's unless given, without write bits for others."""
        status = os.stat(local)
        options = WriteOptions(status.st_mode & 0o755 if mode is None else mode, user, atomic, False, parents)
        return await self._put(path, options, lambda: off_loop(read_local(local)), status.st_size, repeatable=True)

    async def _put(
        self,
        path: str,
        options: WriteOptions,
        body: Callable[[], Union[bytes, AsyncIterable[bytes]]],
        length: Optional[int],
        *,
        repeatable: bool,
    ) -> FileInfo:
        async def attempt() -> FileInfo:
            reply = await self._client.content(_put_file(self._client, self._id, path, options, body(), length))
            info = _info_of(await read_all(reply))
            return info if info is not None else await self.stat(path)

        return await self._client.retrying(attempt, repeatable=repeatable)

    async def download(self, path: str, local: LocalPath) -> int:
        """Copy a file out; its size. The local file appears when it is complete."""
        return await async_save(self._client, _get_file(self._client, self._id, path, 0, None), local)

    async def upload_dir(self, local: LocalPath, path: str, *, user: Optional[User] = None) -> None:
        """Copy the content of a local directory into a directory, which is made where missing."""
        request = _put_tar(self._client, self._id, path, user)

        async def attempt() -> None:
            request.body = off_loop(pack(os.fspath(local)))
            await read_all(await self._client.content(request))

        await self._client.retrying(attempt, repeatable=True)

    async def download_dir(
        self, path: str, local: LocalPath, *, max_bytes: Size = _MAX_DIRECTORY, on_unsafe: str = "error"
    ) -> builtins.list[str]:
        """Copy the content of a directory into a local one; see Files.download_dir."""
        limit = parse_size("max_bytes", max_bytes)
        request = _get_tar(self._client, self._id, path)

        async def attempt() -> builtins.list[str]:
            with Unpacker(os.fspath(local), max_bytes=limit, on_unsafe=on_unsafe) as unpacker:
                async for data in by_megabyte(await self._client.content(request)):
                    await in_thread(unpacker.feed, data)
                await in_thread(unpacker.finish)
                return unpacker.skipped

        return await self._client.retrying(attempt, repeatable=True)

    async def list(self, path: str, *, depth: int = 1, limit: int = 10000) -> FileList:
        """The entries of a directory, down to a depth."""
        return await self._client.call(_calls.list_files(self._id, path, depth, limit))

    async def stat(self, path: str) -> FileInfo:
        return await self._client.call(_calls.stat(self._id, path))

    async def exists(self, path: str) -> bool:
        """Whether there is anything at path; a link counts, wherever it leads."""
        try:
            await self.stat(path)
        except NotFound:
            return False
        return True

    async def mkdir(
        self, path: str, *, parents: bool = True, mode: Optional[int] = None, user: Optional[User] = None
    ) -> FileInfo:
        """Make a directory. With parents, missing ones are made and an existing directory is fine."""
        return await self._client.call(_calls.mkdir(self._id, path, parents, mode, user))

    async def move(self, source: str, target: str) -> FileInfo:
        return await self._client.call(_calls.move(self._id, source, target))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        await self._client.call(_calls.remove(self._id, path, recursive))

    async def chmod(self, path: str, mode: int, *, recursive: bool = False) -> None:
        await self._client.call(_calls.chmod(self._id, path, mode, recursive))

    async def set_attributes(self, path: str, attributes: Mapping[str, str]) -> FileInfo:
        """Make these all the extended attributes "user.*" of a file or directory, without that prefix."""
        return await self._client.call(_calls.set_attributes(self._id, path, attributes))

    async def chown(self, path: str, user: User, *, recursive: bool = False) -> None:
        """user: name, uid, name:group or uid:gid."""
        await self._client.call(_calls.chown(self._id, path, user, recursive))

    async def watch(self, path: str, *, recursive: bool = False, timeout: Optional[float] = None) -> AsyncWatch:
        """Changes at or below path, from now on; see Files.watch."""
        return await AsyncWatch(self._client, self._id, path, recursive, timeout)._open()


# What both kinds share


def _first_read(length: Optional[int]) -> int:
    """How much to ask for in the first call."""
    if length is not None and length < 0:
        raise InvalidArgument(f"length: {length} is negative", field="length")
    return SMALL_FILE if length is None else min(length, SMALL_FILE)


def _is_all(data: bytes, info: FileInfo, offset: int, length: Optional[int], asked: int) -> bool:
    """Whether the first read has everything. Files such as those in /proc say that they have size 0."""
    if length is not None and len(data) >= length:
        return True
    return len(data) < asked and info.size <= offset + len(data)


def _get_file(
    client: Union[Client, AsyncClient], sandbox_id: str, path: str, offset: int, length: Optional[int]
) -> Request:
    headers: tuple[tuple[str, str], ...] = ()
    if offset or length is not None:
        last = "" if length is None else str(offset + length - 1)
        headers = (("range", f"bytes={offset}-{last}"),)
    return client._settings.content("GET", "sandboxes", sandbox_id, "files", {"path": path}, headers=headers)


def _part(status: int, body: bytes, offset: int, length: Optional[int]) -> bytes:
    """A file that does not know its size, as in /proc, comes whole even when a part was asked for."""
    if status == 206 or (not offset and length is None):
        return body
    return body[offset:] if length is None else body[offset : offset + length]


def _put_file(
    client: Union[Client, AsyncClient],
    sandbox_id: str,
    path: str,
    options: WriteOptions,
    body: Union[bytes, Iterable[bytes], AsyncIterable[bytes]],
    length: Optional[int],
) -> Request:
    headers = () if length is None or isinstance(body, bytes) else (("content-length", str(length)),)
    return client._settings.content(
        "PUT", "sandboxes", sandbox_id, "files", {"path": path, **options.query()}, body, headers
    )


def _get_tar(client: Union[Client, AsyncClient], sandbox_id: str, path: str) -> Request:
    return client._settings.content("GET", "sandboxes", sandbox_id, "tar", {"path": path})


def _put_tar(client: Union[Client, AsyncClient], sandbox_id: str, path: str, user: Optional[User]) -> Request:
    query = {"path": path}
    if user is not None:
        query["user"] = str(user)
    return client._settings.content("PUT", "sandboxes", sandbox_id, "tar", query)


def _info_of(body: bytes) -> Optional[FileInfo]:
    """The FileInfo a PUT answers with, where it does."""
    try:
        answer = json.loads(body)
    except ValueError:
        return None
    info = answer.get("info", answer) if isinstance(answer, dict) else None
    return FileInfo.parse(info) if info and "path" in info else None
