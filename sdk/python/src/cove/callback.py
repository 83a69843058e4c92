"""Handlers in this process for code inside a sandbox, at http://cove.internal/NAME."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Optional, Union

from ._callback import FAILED, Answer, Asked, Serving, answer_of, chunk_of, has_kind, kind_of, log
from ._calls import Call, nothing
from ._core import STREAM_SILENCE, Attempts
from ._wire import AsyncReply, Reply, Request
from .client import AsyncClient, Client
from .errors import Canceled, CoveError, FailedPrecondition, NotFound, SandboxEnded


class CallbackRequest(Asked):
    """A request from inside. All of it is untrusted input."""

    def __init__(self, event: Any, serving: Callable[[], Callback]) -> None:
        super().__init__(event)
        self._serving = serving

    def stream(self) -> Iterator[bytes]:
        """The body as it comes; once."""
        if self._inline is not None:
            yield self._inline
            return
        handle = self._serving()
        reply = handle._client.content(handle._content("GET", self, "/body"))
        try:
            yield from reply.chunks()
        finally:
            reply.close()

    @property
    def body(self) -> bytes:
        """All of the body, whatever its size; stream() for what may be too much."""
        if self._inline is None:
            self._inline = b"".join(self.stream())
        return self._inline

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.body)


Handler = Callable[[CallbackRequest], Any]


class _Handle:
    """What both kinds of handle know."""

    _serving: Serving

    @property
    def url(self) -> str:
        """Where code inside calls it."""
        return self._serving.url

    @property
    def name(self) -> str:
        return self._serving.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._serving.url} of {self._serving.sandbox_id}>"

    def _request(
        self,
        client: Union[Client, AsyncClient],
        method: str,
        asked: Asked,
        what: str,
        answer: Optional[Answer],
        body: Any,
    ) -> Request:
        kind = f"callbacks/{asked.id}{what}"
        query = None if answer is None else {"status": str(answer.status)}
        headers = () if answer is None else answer.headers
        request = client._settings.content(method, "sandboxes", self._serving.sandbox_id, kind, query, body, headers)
        request.read_timeout = None  # the sandbox may sleep, or read slowly
        return request


_CLOSE_WAIT = 5.0


class Callback(_Handle):
    """A name that this process serves, until close() or the end of the with block.

    It comes back by itself after a break: requests under way go on if that
    takes less than some seconds, and otherwise end with 502 inside.
    """

    def __init__(
        self,
        client: Client,
        sandbox_id: str,
        name: str,
        handler: Handler,
        port: Optional[int],
        replace: bool,
        concurrency: int,
    ) -> None:
        self._client = client
        self._handler = handler
        self._serving = Serving(sandbox_id, name, port, replace, lambda event: CallbackRequest(event, lambda: self))
        self._pool = ThreadPoolExecutor(concurrency, f"cove-{name}")
        self._reply: Optional[Reply] = None
        self._chunks: Optional[Iterator[bytes]] = None
        self._error: Optional[BaseException] = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"cove-callback-{name}", daemon=True)

    def _open(self) -> Callback:
        """Return once code inside can call it."""
        attempts = Attempts(self._client._settings, repeatable=True, slow=True)
        try:
            while not self._serving.url:
                try:
                    self._pull()
                except CoveError as err:
                    self._leave()
                    self._client._settings.clock.sleep(attempts.delay_after(err))
        except BaseException:
            self._leave()
            self._pool.shutdown(wait=False)
            raise
        self._thread.start()
        return self

    def _pull(self) -> None:
        if self._chunks is None:
            self._reply = self._client.stream("Callbacks/Serve", self._serving.open(), STREAM_SILENCE)
            self._chunks = iter(self._reply.chunks())
        for asked in self._serving.receive(next(self._chunks, None)):
            try:
                self._pool.submit(self._handle, asked)
            except RuntimeError:  # closed meanwhile
                return

    def _run(self) -> None:
        try:
            while not self._serving.closed:
                try:
                    self._pull()
                except CoveError as err:
                    self._leave()
                    if self._serving.closed:
                        return
                    delay = self._serving.broke(err, self._client._settings.clock)
                    self._over.wait(delay)
        except SandboxEnded:
            pass
        except BaseException as err:
            if not self._serving.closed:
                self._error = err
                log.warning("callback %s of sandbox %s ended: %s", self.name, self._serving.sandbox_id, err)
        finally:
            self._leave()
            self._over.set()
            self._pool.shutdown(wait=False)

    def _handle(self, asked: Asked) -> None:
        assert isinstance(asked, CallbackRequest)
        try:
            if asked.gone or self._serving.closed:
                return
            try:
                answer = answer_of(self._handler(asked))
                body, answer = self._body(asked, answer)
            except Exception:
                log.exception("the handler of callback %s failed", self.name)
                answer = answer_of(FAILED)
                body = answer.body
            try:
                self._answer(asked, answer, body)
            except (Canceled, NotFound, FailedPrecondition):
                log.debug("callback %s: nobody waits for the answer any more", self.name)
            except CoveError as err:
                log.warning("the answer of callback %s could not be given: %s", self.name, err)
        except Exception:
            log.exception("the handler of callback %s failed in the middle of its answer", self.name)
        finally:
            self._serving.done(asked)

    def _body(self, asked: CallbackRequest, answer: Answer) -> tuple[Any, Answer]:
        """What to send: bytes, or chunks of which the first is there, so that a handler may still fail before it."""
        if isinstance(answer.body, bytes):
            return answer.body, answer
        if not isinstance(answer.body, Iterable):
            raise TypeError("an async iterator needs AsyncSandbox")
        chunks = iter(answer.body)
        first = next(chunks, b"")
        if not has_kind(answer):
            answer = Answer(answer.status, answer.headers + kind_of(first), answer.body)

        def rest() -> Iterator[bytes]:
            try:
                chunk: Any = first
                while not asked.gone:
                    data = chunk_of(chunk)
                    if data:  # an empty one would be the end of an HTTP body
                        yield data
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        return
            finally:
                close = getattr(chunks, "close", None)
                if close is not None:
                    close()

        return rest(), answer

    def _answer(self, asked: Asked, answer: Answer, body: Any) -> None:
        request = self._request(self._client, "PUT", asked, "", answer, body)
        wire = self._client._wire if isinstance(body, bytes) else self._client._bulk
        reply = self._client.send(wire, request)
        for _ in reply.chunks():
            pass

    def _content(self, method: str, asked: Asked, what: str) -> Request:
        return self._request(self._client, method, asked, what, None, b"")

    def _leave(self) -> None:
        reply, self._reply, self._chunks = self._reply, None, None
        if reply is not None:
            reply.close()

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Wait until it has ended; False after timeout seconds. Raises why, unless by close() or with the sandbox."""
        if not self._over.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """Stop serving. Requests under way get 502 inside; handlers that run are not interrupted."""
        if self._serving.closed:
            return
        self._serving.closed = True
        if not self._over.is_set():
            with contextlib.suppress(CoveError):  # gone, or not to be reached: it ends there too
                self._client.call(_close(self._serving))
        reply = self._reply
        if reply is not None and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_WAIT)  # the server ends the stream
            reply.close()
        self._over.set()
        self._pool.shutdown(wait=False)

    def __enter__(self) -> Callback:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(serving: Serving) -> Call[None]:
    return Call("Callbacks/Close", serving.close_message(), nothing, repeatable=True, removes=True)


class AsyncCallbackRequest(Asked):
    """A request from inside. All of it is untrusted input."""

    def __init__(self, event: Any, serving: Callable[[], AsyncCallback]) -> None:
        super().__init__(event)
        self._serving = serving

    async def stream(self) -> AsyncIterator[bytes]:
        """The body as it comes; once."""
        if self._inline is not None:
            yield self._inline
            return
        handle = self._serving()
        reply = await handle._client.content(handle._content("GET", self, "/body"))
        try:
            async for chunk in reply.chunks():
                yield chunk
        finally:
            await reply.close()

    async def body(self) -> bytes:
        """All of the body, whatever its size; stream() for what may be too much."""
        if self._inline is None:
            self._inline = b"".join([chunk async for chunk in self.stream()])
        return self._inline

    async def text(self) -> str:
        return (await self.body()).decode("utf-8", "replace")

    async def json(self) -> Any:
        return json.loads(await self.body())


AsyncHandler = Callable[[AsyncCallbackRequest], Union[Awaitable[Any], AsyncIterable[Any], Any]]


class AsyncCallback(_Handle):
    """A name that this process serves, until close() or the end of the async with block; see Callback."""

    def __init__(
        self,
        client: AsyncClient,
        sandbox_id: str,
        name: str,
        handler: AsyncHandler,
        port: Optional[int],
        replace: bool,
        concurrency: int,
    ) -> None:
        self._client = client
        self._handler = handler
        self._serving = Serving(
            sandbox_id, name, port, replace, lambda event: AsyncCallbackRequest(event, lambda: self)
        )
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._reply: Optional[AsyncReply] = None
        self._chunks: Optional[AsyncIterator[bytes]] = None
        self._reader: Optional[asyncio.Task[None]] = None

    async def _open(self) -> AsyncCallback:
        """Return once code inside can call it."""
        attempts = Attempts(self._client._settings, repeatable=True, slow=True)
        try:
            while not self._serving.url:
                try:
                    await self._pull()
                except CoveError as err:
                    await self._leave()
                    await self._client._settings.clock.async_sleep(attempts.delay_after(err))
        except BaseException:
            await self._leave()
            raise
        self._reader = asyncio.ensure_future(self._run())
        return self

    async def _pull(self) -> None:
        if self._chunks is None:
            self._reply = await self._client.stream("Callbacks/Serve", self._serving.open(), STREAM_SILENCE)
            self._chunks = self._reply.chunks()
        try:
            chunk: Optional[bytes] = await self._chunks.__anext__()
        except StopAsyncIteration:
            chunk = None
        for asked in self._serving.receive(chunk):
            task = asyncio.ensure_future(self._handle(asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        try:
            while not self._serving.closed:
                try:
                    await self._pull()
                except CoveError as err:
                    await self._leave()
                    if self._serving.closed:
                        return
                    await self._client._settings.clock.async_sleep(
                        self._serving.broke(err, self._client._settings.clock)
                    )
        except SandboxEnded:
            pass
        except CoveError as err:
            log.warning("callback %s of sandbox %s ended: %s", self.name, self._serving.sandbox_id, err)
            raise
        finally:
            await self._leave()

    async def _handle(self, asked: Asked) -> None:
        assert isinstance(asked, AsyncCallbackRequest)
        try:
            async with self._slots:
                if asked.gone or self._serving.closed:
                    return
                try:
                    result = self._handler(asked)
                    if inspect.isawaitable(result):
                        result = await result
                    body, answer = await self._body(asked, answer_of(result))
                except Exception:
                    log.exception("the handler of callback %s failed", self.name)
                    answer = answer_of(FAILED)
                    body = answer.body
                try:
                    await self._answer(asked, answer, body)
                except (Canceled, NotFound, FailedPrecondition):
                    log.debug("callback %s: nobody waits for the answer any more", self.name)
                except CoveError as err:
                    log.warning("the answer of callback %s could not be given: %s", self.name, err)
        except Exception:
            log.exception("the handler of callback %s failed in the middle of its answer", self.name)
        finally:
            self._serving.done(asked)

    async def _body(self, asked: AsyncCallbackRequest, answer: Answer) -> tuple[Any, Answer]:
        if isinstance(answer.body, bytes):
            return answer.body, answer
        chunks = answer.body.__aiter__() if isinstance(answer.body, AsyncIterable) else _awaited(answer.body)
        try:
            first: Any = await chunks.__anext__()
        except StopAsyncIteration:
            first = b""
        if not has_kind(answer):
            answer = Answer(answer.status, answer.headers + kind_of(first), answer.body)

        async def rest() -> AsyncIterator[bytes]:
            try:
                chunk = first
                while not asked.gone:
                    data = chunk_of(chunk)
                    if data:
                        yield data
                    try:
                        chunk = await chunks.__anext__()
                    except StopAsyncIteration:
                        return
            finally:
                close = getattr(chunks, "aclose", None)
                if close is not None:
                    await close()

        return rest(), answer

    async def _answer(self, asked: Asked, answer: Answer, body: Any) -> None:
        request = self._request(self._client, "PUT", asked, "", answer, body)
        wire = self._client._wire if isinstance(body, bytes) else self._client._bulk
        reply = await self._client.send(wire, request)
        async for _ in reply.chunks():
            pass

    def _content(self, method: str, asked: Asked, what: str) -> Request:
        return self._request(self._client, method, asked, what, None, b"")

    async def _leave(self) -> None:
        reply, self._reply, self._chunks = self._reply, None, None
        if reply is not None:
            await reply.close()

    async def wait(self, timeout: Optional[float] = None) -> bool:
        """Wait until it has ended; False after timeout seconds. Raises why, unless by close() or with the sandbox."""
        assert self._reader is not None
        done, _ = await asyncio.wait({self._reader}, timeout=timeout)
        if not done:
            return False
        if not self._serving.closed:
            self._reader.result()
        return True

    async def close(self) -> None:
        """Stop serving. Requests under way get 502 inside, and their handlers are cancelled."""
        if self._serving.closed:
            return
        self._serving.closed = True
        if self._reader is not None and not self._reader.done():
            with contextlib.suppress(CoveError):
                await self._client.call(_close(self._serving))
            self._reader.cancel()
        tasks = [
            task for task in (self._reader, *self._tasks) if task is not None and task is not asyncio.current_task()
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> AsyncCallback:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _awaited(chunks: Iterable[Any]) -> AsyncIterator[Any]:
    """An iterator of a handler that is no coroutine. It runs on the event loop, as that does."""
    for chunk in chunks:
        yield chunk
        await asyncio.sleep(0)
