"""Processes in a sandbox: their output as it comes, their input, their end.

A Process reads one output stream. Leaving it does not end the process, and a
stream that breaks is picked up where it stopped, while the server restarts if
need be. Writing, signals and resizing are calls of their own, so that one
thread or task may read while another writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import Any, Callable, Optional, Union

from . import _calls, _lease
from ._core import STREAM_SILENCE
from ._session import Collector, Listeners, Piece, ProcessSession, TextDecoder
from ._stdin import NOBODY_READS, as_bytes, cut
from ._values import Seconds, to_seconds
from ._wire import AsyncReply, Reply
from .client import AsyncClient, Client, maybe
from .errors import CoveError, DeadlineExceeded
from .models import End, Output, Result
from .types import Standby

Listener = Callable[[str], Any]
AsyncListener = Callable[[str], Any]
"""May be a coroutine function."""


class _ProcessState:
    """What a process tells about itself; the same for both kinds."""

    def __init__(self, session: ProcessSession) -> None:
        self._session = session
        self._decoder = TextDecoder()
        self._pending: list[Piece] = []  # came, and nobody has read it yet
        self._collector = Collector()  # of wait(); what it has when its time is over stays for the next
        self._asleep: Optional[_Until] = None  # set while its sandbox is paused
        self._kills = False  # a reader that is interrupted takes the process along
        self._deaf = False  # a listener raised: nobody wants the rest

    def _kill_on_cancel(self, choice: Optional[bool]) -> None:
        self._kills = choice is not False
        self._session.kill_on_cancel = choice is True

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._deaf = True
            raise

    def _stray(self, kind: Any) -> bool:
        """Whether leaving with this exception is to kill the process: it is not over, and was not another's."""
        interrupted = self._deaf or (isinstance(kind, type) and not issubclass(kind, Exception))
        return self._kills and interrupted and self.end is None and not self.replayed

    @property
    def exec_id(self) -> str:
        """Names the process within its sandbox; attach(exec_id) comes back to it."""
        return self._session.exec_id

    @property
    def pid(self) -> int:
        """As code inside sees it."""
        return self._session.pid

    @property
    def offset(self) -> int:
        """Bytes of output read so far, all streams together."""
        return self._session.offset

    @property
    def replayed(self) -> bool:
        """The exec_id had been started before: this is that process, nothing new runs."""
        return self._session.replayed

    @property
    def lost(self) -> tuple[tuple[int, int], ...]:
        """Ranges of output the server no longer held."""
        return tuple(self._session.lost)

    @property
    def end(self) -> Optional[End]:
        """How it ended; None until the end has been read."""
        return self._session.end

    @property
    def standby(self) -> Standby:
        """Not "" while its sandbox is paused: the process stands still, and nothing comes until something wakes it."""
        return self._session.standby

    def _until(self, timeout: Optional[Seconds]) -> Optional[_Until]:
        return None if timeout is None else _Until(to_seconds("timeout", timeout), self._session)

    def _sooner(self, until: Optional[_Until]) -> Optional[_Until]:
        """until, or when to stop waiting for a paused sandbox to wake, whichever comes first."""
        patience = self._session.patience
        if not self._session.standby or patience is None:
            self._asleep = None
            return until
        if self._asleep is None:
            self._asleep = _Until(patience, self._session)
        return self._asleep if until is None or self._asleep.at < until.at else until

    def _killing(self) -> _calls.Call[None]:
        return _calls.signal(self._session.sandbox_id, self.exec_id, "SIGKILL", False)

    def __repr__(self) -> str:
        state = str(self.end) if self.end else "running"
        return f"<{type(self).__name__} {self.exec_id} pid {self.pid} {state}>"


class _Until:
    """A moment after which a reader does not wait any longer. Real time: sockets wait in it."""

    def __init__(self, seconds: float, session: ProcessSession) -> None:
        self._seconds, self.at = seconds, time.monotonic() + seconds
        self._session = session

    def left(self) -> float:
        """Seconds until then; DeadlineExceeded once it is past."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise self.over()
        return left

    def over(self) -> DeadlineExceeded:
        standby = self._session.standby
        if standby:
            return DeadlineExceeded(
                f"the sandbox was paused ({standby}), and did not wake in {self._seconds:g} s",
                hint="resume() it, or attach() to the process, which wakes it: it goes on where it was",
                reason="asleep",
            )
        return DeadlineExceeded(
            f"nothing came to an end in {self._seconds:g} s", hint="the process runs on: ask again, or kill() it"
        )


class Process(_ProcessState):
    """A process that was started or attached to. Iterate over its output, or wait() for its end."""

    def __init__(self, client: Client, session: ProcessSession) -> None:
        super().__init__(session)
        self._client = client
        self._reply: Optional[Reply] = None
        self._chunks: Optional[Iterator[bytes]] = None

    def _open(self) -> Process:
        """Return once the process exists."""
        while not self._session.started and self._session.end is None:
            pieces = self._pull()
            if pieces is None:
                break
            self._pending += pieces
        return self

    def _pull(self, until: Optional[_Until] = None) -> Optional[list[Piece]]:
        """The output of the next chunk that has news; None once the stream is over."""
        session = self._session
        until = self._sooner(until)
        while True:
            try:
                silence = STREAM_SILENCE if until is None else min(STREAM_SILENCE, until.left())
                if self._reply is not None:
                    self._reply.within(silence)
                if self._chunks is None:
                    if session.end is not None:
                        return None
                    method, message = session.open()
                    self._reply = self._client.stream(method, message, silence)
                    self._chunks = iter(self._reply.chunks())
                chunk = next(self._chunks, None)
                if chunk is not None:
                    was = session.started, session.standby
                    pieces = session.receive(chunk)
                    if pieces or was != (session.started, session.standby):
                        return pieces
                    continue
                self.close()
                session.body_ended()
            except CoveError as err:
                self.close()
                if session.end is not None:
                    return None  # all has come; how the connection went does not matter
                if until is not None:
                    until.left()
                delay = session.broke(err, self._client._settings.backoff)
                self._client._settings.clock.sleep(delay)

    def _pieces(self, until: Optional[_Until] = None) -> Iterator[list[Piece]]:
        if self._pending:
            pending, self._pending = self._pending, []
            yield pending
        while True:
            pieces = self._pull(until)
            if pieces is None:
                return
            yield pieces

    def __iter__(self) -> Iterator[Output]:
        """Output as it comes, until the process ends."""
        for pieces in self._pieces():
            for piece in pieces:
                yield self._decoder.output(piece)

    def read(self, timeout: Optional[Seconds] = None) -> Optional[Output]:
        """The next output, or None once the process has ended. DeadlineExceeded (a TimeoutError) if none
        came in timeout seconds; the process runs on, and nothing is lost."""
        until = self._until(timeout)
        while not self._pending:
            pieces = self._pull(until)
            if pieces is None:
                return None
            self._pending += pieces
        return self._decoder.output(self._pending.pop(0))

    def wait(
        self,
        timeout: Optional[Seconds] = None,
        *,
        on_stdout: Optional[Listener] = None,
        on_stderr: Optional[Listener] = None,
    ) -> Result:
        """Read to the end. The result has the output that was not read by iterating or read().

        DeadlineExceeded (a TimeoutError) after timeout seconds: the process runs
        on, and a later wait() has what came until then too.
        """
        collector = self._collector
        listeners = Listeners(on_stdout, on_stderr)
        for pieces in self._pieces(self._until(timeout)):
            collector.add(pieces)
            if listeners:
                with self._listening():
                    for callback, text in listeners.calls(pieces):
                        callback(text)
        for callback, text in listeners.last_calls():
            callback(text)
        return collector.result(self._session)

    def write(self, data: Union[str, bytes]) -> None:
        """Write to stdin; needs start(…, stdin=True) or a pty."""
        for piece in cut(as_bytes(data)):
            self._client.call(_calls.send_input(self._session.sandbox_id, self.exec_id, piece))

    def close_stdin(self) -> None:
        self._client.call(_calls.close_input(self._session.sandbox_id, self.exec_id))

    def signal(self, signal: Union[str, int], *, process_only: bool = False) -> None:
        """Send a signal ("SIGTERM", "TERM" or 15) to the whole process tree, or to the process alone."""
        self._client.call(_calls.signal(self._session.sandbox_id, self.exec_id, signal, process_only))

    def kill(self) -> None:
        """SIGKILL to the whole tree. Nothing happens if it has ended."""
        with contextlib.suppress(*NOBODY_READS):
            self.signal("SIGKILL")

    def resize(self, rows: int, cols: int) -> None:
        """Tell a process on a pty its new terminal size."""
        self._client.call(_calls.resize(self._session.sandbox_id, self.exec_id, rows, cols))

    def close(self) -> None:
        """Leave the output stream. The process runs on."""
        reply, self._reply, self._chunks = self._reply, None, None
        if reply is not None:
            reply.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close()
        if self._stray(kind):
            _lease.keeper_of(self._client).undo(self._killing())


class StdinPump:
    """Sends stdin from a thread while the caller reads output.

    If the source fails, the process is killed rather than left with half an
    input it would take for the whole.
    """

    def __init__(self, process: Process, source: Iterator[bytes]) -> None:
        self._process, self._source = process, source
        self._stop = threading.Event()
        self._error: Optional[BaseException] = None
        self._thread = threading.Thread(target=self._run, name=f"cove-stdin-{process.exec_id}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for piece in self._source:
                if self._stop.is_set():
                    return
                self._process.write(piece)
            self._process.close_stdin()
        except NOBODY_READS:
            return
        except BaseException as err:
            self._error = err
            with contextlib.suppress(CoveError):
                self._process.kill()

    def finish(self) -> None:
        """The process has ended. Raises what the source raised.

        A source blocked in a read of its own (a terminal, say) is not waited
        for: its thread ends with its next piece.
        """
        self._stop.set()
        self._thread.join(timeout=1.0)
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """The reader left; the process keeps what it was given."""
        self._stop.set()


class AsyncProcess(_ProcessState):
    """A process that was started or attached to. Iterate over its output, or wait() for its end."""

    def __init__(self, client: AsyncClient, session: ProcessSession) -> None:
        super().__init__(session)
        self._client = client
        self._reply: Optional[AsyncReply] = None
        self._chunks: Optional[AsyncIterator[bytes]] = None

    async def _open(self) -> AsyncProcess:
        """Return once the process exists."""
        while not self._session.started and self._session.end is None:
            pieces = await self._pull()
            if pieces is None:
                break
            self._pending += pieces
        return self

    async def _pull(self) -> Optional[list[Piece]]:
        """The output of the next chunk that has news; None once the stream is over."""
        session = self._session
        while True:
            try:
                if self._chunks is None:
                    if session.end is not None:
                        return None
                    method, message = session.open()
                    self._reply = await self._client.stream(method, message, STREAM_SILENCE)
                    self._chunks = self._reply.chunks()
                chunk = await _next(self._chunks)
                if chunk is not None:
                    was = session.started, session.standby
                    pieces = session.receive(chunk)
                    if pieces or was != (session.started, session.standby):
                        return pieces
                    continue
                await self.close()
                session.body_ended()
            except CoveError as err:
                await self.close()
                if session.end is not None:
                    return None  # all has come; how the connection went does not matter
                delay = session.broke(err, self._client._settings.backoff)
                await self._client._settings.clock.async_sleep(delay)

    async def _pull_until(self, until: Optional[_Until]) -> Optional[list[Piece]]:
        until = self._sooner(until)
        if until is None:
            return await self._pull()
        try:
            return await asyncio.wait_for(self._pull(), until.left())
        except asyncio.TimeoutError as err:
            if isinstance(err, CoveError):
                raise
            over = until.over()
            await self.close()  # cut in the middle; the next goes on at the same byte
            raise over from None

    async def _pieces(self, until: Optional[_Until] = None) -> AsyncIterator[list[Piece]]:
        if self._pending:
            pending, self._pending = self._pending, []
            yield pending
        while True:
            pieces = await self._pull_until(until)
            if pieces is None:
                return
            yield pieces

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Output as it comes, until the process ends."""
        async for pieces in self._pieces():
            for piece in pieces:
                yield self._decoder.output(piece)

    async def read(self, timeout: Optional[Seconds] = None) -> Optional[Output]:
        """The next output, or None once the process has ended; see Process.read."""
        until = self._until(timeout)
        while not self._pending:
            pieces = await self._pull_until(until)
            if pieces is None:
                return None
            self._pending += pieces
        return self._decoder.output(self._pending.pop(0))

    async def wait(
        self,
        timeout: Optional[Seconds] = None,
        *,
        on_stdout: Optional[AsyncListener] = None,
        on_stderr: Optional[AsyncListener] = None,
    ) -> Result:
        """Read to the end; see Process.wait. on_stdout and on_stderr may be coroutine functions."""
        collector = self._collector
        listeners = Listeners(on_stdout, on_stderr)
        async for pieces in self._pieces(self._until(timeout)):
            collector.add(pieces)
            if listeners:
                with self._listening():
                    for callback, text in listeners.calls(pieces):
                        await maybe(callback(text))
        for callback, text in listeners.last_calls():
            await maybe(callback(text))
        return collector.result(self._session)

    async def write(self, data: Union[str, bytes]) -> None:
        """Write to stdin; needs start(…, stdin=True) or a pty."""
        for piece in cut(as_bytes(data)):
            await self._client.call(_calls.send_input(self._session.sandbox_id, self.exec_id, piece))

    async def close_stdin(self) -> None:
        await self._client.call(_calls.close_input(self._session.sandbox_id, self.exec_id))

    async def signal(self, signal: Union[str, int], *, process_only: bool = False) -> None:
        """Send a signal ("SIGTERM", "TERM" or 15) to the whole process tree, or to the process alone."""
        await self._client.call(_calls.signal(self._session.sandbox_id, self.exec_id, signal, process_only))

    async def kill(self) -> None:
        """SIGKILL to the whole tree. Nothing happens if it has ended."""
        with contextlib.suppress(*NOBODY_READS):
            await self.signal("SIGKILL")

    async def resize(self, rows: int, cols: int) -> None:
        """Tell a process on a pty its new terminal size."""
        await self._client.call(_calls.resize(self._session.sandbox_id, self.exec_id, rows, cols))

    async def close(self) -> None:
        """Leave the output stream. The process runs on."""
        reply, chunks = self._reply, self._chunks
        self._reply = self._chunks = None
        if reply is not None:
            await reply.close()
        if chunks is not None and inspect.isasyncgen(chunks):
            await chunks.aclose()

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(self, kind: Any, *_: object) -> None:
        await self.close()
        if self._stray(kind):
            await _lease.settled(_lease.keeper_of(self._client).undo(self._killing()))


class AsyncStdinPump:
    """Sends stdin from a task while the caller reads output; see StdinPump."""

    def __init__(self, process: AsyncProcess, source: Union[Iterator[bytes], AsyncIterable[Any]]) -> None:
        self._process, self._source = process, source
        self._error: Optional[Exception] = None
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            if isinstance(self._source, AsyncIterable):
                async for item in self._source:
                    await self._process.write(item)
            else:
                # A file may block, and a generator may run user code that does:
                # neither on the event loop.
                loop = asyncio.get_running_loop()
                while True:
                    piece = await loop.run_in_executor(None, next, self._source, None)
                    if piece is None:
                        break
                    await self._process.write(piece)
            await self._process.close_stdin()
        except NOBODY_READS:
            return
        except Exception as err:
            self._error = err
            with contextlib.suppress(CoveError):
                await self._process.kill()

    async def finish(self) -> None:
        """The process has ended. Raises what the source raised."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """The reader left; the process keeps what it was given."""
        self._task.cancel()


async def _next(chunks: AsyncIterator[bytes]) -> Optional[bytes]:
    try:
        return await chunks.__anext__()
    except StopAsyncIteration:
        return None
