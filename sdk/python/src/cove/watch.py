"""Changes of a sandbox's files, as they happen.

A watch outlives its HTTP streams: after a break it is set again, and says with
an overflow event that changes may have been missed in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Optional

from . import _state_calls
from ._connect import EnvelopeReader
from ._core import Attempts
from ._wire import AsyncReply, NoAnswer, Reply
from .client import AsyncClient, Client
from .errors import CoveError, TransportError
from .models import FileEvent


class _WatchState:
    """One watch over all its streams, without I/O."""

    def __init__(self, sandbox_id: str, path: str, recursive: bool) -> None:
        self._message = {"sandboxId": sandbox_id, "path": path, "recursive": recursive}
        self.sandbox_id = sandbox_id
        self._path = path
        self._envelopes = EnvelopeReader()
        self._events: list[FileEvent] = []
        self.ready = False
        self.closed = False

    def open(self) -> dict[str, Any]:
        self._envelopes = EnvelopeReader()
        return self._message

    def receive(self, chunk: Optional[bytes]) -> None:
        if chunk is None:
            raise TransportError("the watch ended", sent=True)
        for event in self._envelopes.feed(chunk):
            op, path = event.get("op", ""), event.get("path", "")
            if op == "ready":
                if self.ready:
                    # Set again after a break: what happened in between is not known.
                    self._events.append(FileEvent(self._path, "overflow"))
                self.ready = True
            elif op:
                self._events.append(FileEvent(path, op))

    def take(self) -> list[FileEvent]:
        events, self._events = self._events, []
        return events

    def is_quiet(self, error: CoveError) -> bool:
        """Whether this is the silence the caller asked to end on."""
        return self.ready and isinstance(error, NoAnswer)

    def is_asleep(self, error: CoveError) -> bool:
        """Whether the sandbox may be waking up, for longer than the silence the caller asked for."""
        return not self.ready and isinstance(error, NoAnswer)


class Watch:
    """Changes as they happen. Iterate, and close() or leave the with block when done."""

    def __init__(self, client: Client, sandbox_id: str, path: str, recursive: bool, timeout: Optional[float]) -> None:
        self._client = client
        self._state = _WatchState(sandbox_id, path, recursive)
        self._timeout = timeout
        self._reply: Optional[Reply] = None
        self._chunks: Optional[Iterator[bytes]] = None
        self._attempts = Attempts(client._settings, repeatable=True)

    def _open(self) -> Watch:
        """Return once the watch is set."""
        while not self._state.ready:
            self._pull()
        return self

    def _pull(self) -> None:
        try:
            if self._chunks is None:
                self._reply = self._client.stream("Files/Watch", self._state.open(), self._timeout)
                self._chunks = iter(self._reply.chunks())
            chunk = next(self._chunks, None)
            self._state.receive(chunk)
            self._attempts = Attempts(self._client._settings, repeatable=True)
        except CoveError as err:
            self._leave()
            if self._state.closed or self._state.is_quiet(err):
                self._state.closed = True
                return
            delay = self._attempts.delay_after(err)
            if self._state.is_asleep(err):
                self._client.call(_state_calls.resume(self._state.sandbox_id))
            self._client._settings.clock.sleep(delay)

    def __iter__(self) -> Iterator[FileEvent]:
        while True:
            yield from self._state.take()
            if self._state.closed:
                return
            self._pull()

    def _leave(self) -> None:
        reply, self._reply, self._chunks = self._reply, None, None
        if reply is not None:
            reply.close()

    def close(self) -> None:
        """End the watch; a thread that iterates it stops."""
        self._state.closed = True
        self._leave()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncWatch:
    """Changes as they happen. Iterate, and close() or leave the async with block when done."""

    def __init__(
        self, client: AsyncClient, sandbox_id: str, path: str, recursive: bool, timeout: Optional[float]
    ) -> None:
        self._client = client
        self._state = _WatchState(sandbox_id, path, recursive)
        self._timeout = timeout
        self._reply: Optional[AsyncReply] = None
        self._chunks: Optional[AsyncIterator[bytes]] = None
        self._attempts = Attempts(client._settings, repeatable=True)

    async def _open(self) -> AsyncWatch:
        """Return once the watch is set."""
        while not self._state.ready:
            await self._pull()
        return self

    async def _pull(self) -> None:
        try:
            if self._chunks is None:
                self._reply = await self._client.stream("Files/Watch", self._state.open(), self._timeout)
                self._chunks = self._reply.chunks()
            try:
                chunk = await self._chunks.__anext__()
            except StopAsyncIteration:
                chunk = None
            self._state.receive(chunk)
            self._attempts = Attempts(self._client._settings, repeatable=True)
        except CoveError as err:
            await self._leave()
            if self._state.closed or self._state.is_quiet(err):
                self._state.closed = True
                return
            delay = self._attempts.delay_after(err)
            if self._state.is_asleep(err):
                await self._client.call(_state_calls.resume(self._state.sandbox_id))
            await self._client._settings.clock.async_sleep(delay)

    async def __aiter__(self) -> AsyncIterator[FileEvent]:
        while True:
            for event in self._state.take():
                yield event
            if self._state.closed:
                return
            await self._pull()

    async def _leave(self) -> None:
        reply, self._reply, self._chunks = self._reply, None, None
        if reply is not None:
            await reply.close()

    async def close(self) -> None:
        """End the watch; a task that iterates it stops."""
        self._state.closed = True
        await self._leave()

    async def __aenter__(self) -> AsyncWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
