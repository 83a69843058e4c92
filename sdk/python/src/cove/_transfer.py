"""Content on its way between the local machine and the server: what can be sent, where it is put."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import IO, Any, Callable, Protocol, TypeVar, Union

from ._calls import new_id
from ._stdin import as_bytes
from ._tar import CHUNK
from ._wire import AsyncReply, Request
from .client import AsyncClient, Client
from .errors import InvalidArgument

T = TypeVar("T")

Content = Union[str, bytes, IO[bytes], IO[str], Iterable[bytes]]
AsyncContent = Union[Content, AsyncIterable[bytes]]
LocalPath = Union[str, "os.PathLike[str]"]


class Appearing:
    """A local file that appears, or replaces an older one, only when it is complete."""

    def __init__(self, path: LocalPath) -> None:
        self._path = os.fspath(path)
        directory, name = os.path.split(self._path)
        self._partial = os.path.join(directory, f".{name}.{new_id()}.part")
        self._file = open(self._partial, "xb")  # noqa: SIM115 (closed by __exit__)

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def commit(self) -> int:
        size = self._file.tell()
        self._file.close()
        os.replace(self._partial, self._path)
        return size

    def __enter__(self) -> Appearing:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._partial)


def content_of(data: AsyncContent) -> Union[bytes, Iterator[bytes], AsyncIterable[bytes]]:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if hasattr(data, "read"):
        return _read_open(data)
    if isinstance(data, AsyncIterable):
        return data
    if isinstance(data, Iterable):
        return (as_bytes(item) for item in data)
    raise InvalidArgument(
        f"data: {type(data).__name__} is no content", field="data", hint="give str, bytes, an open file or an iterator"
    )


def _read_open(file: Any) -> Iterator[bytes]:
    while True:
        data = file.read(CHUNK)
        if not data:
            return
        yield as_bytes(data)


def read_local(path: LocalPath) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from _read_open(file)


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


async def off_loop(source: Iterator[bytes]) -> AsyncIterator[bytes]:
    """An iterator that reads files, run beside the event loop."""
    while True:
        data = await in_thread(next, source, None)
        if data is None:
            return
        yield data


async def by_megabyte(reply: AsyncReply) -> AsyncIterator[bytes]:
    """The body in pieces large enough to be worth a trip to a thread."""
    buffer: list[bytes] = []
    size = 0
    try:
        async for chunk in reply.chunks():
            buffer.append(chunk)
            size += len(chunk)
            if size >= CHUNK:
                yield b"".join(buffer)
                buffer, size = [], 0
    finally:
        await reply.close()
    if buffer:
        yield b"".join(buffer)


# A reply's body into a local file


def save(client: Client, request: Request, local: LocalPath) -> int:
    """Its size. The local file appears when it is complete."""

    def attempt() -> int:
        with Appearing(local) as file:
            copy(client, request, file)
            return file.commit()

    return client.retrying(attempt, repeatable=True)


async def async_save(client: AsyncClient, request: Request, local: LocalPath) -> int:
    async def attempt() -> int:
        with Appearing(local) as file:
            await async_copy(client, request, file)
            return file.commit()

    return await client.retrying(attempt, repeatable=True)


class Sink(Protocol):
    def write(self, data: bytes, /) -> Any: ...


def copy(client: Client, request: Request, file: Sink) -> int:
    """One attempt; how much it was."""
    size = 0
    reply = client.content(request)
    try:
        for chunk in reply.chunks():
            file.write(chunk)
            size += len(chunk)
    finally:
        reply.close()
    return size


async def async_copy(client: AsyncClient, request: Request, file: Sink) -> int:
    size = 0
    async for data in by_megabyte(await client.content(request)):
        await in_thread(file.write, data)
        size += len(data)
    return size
