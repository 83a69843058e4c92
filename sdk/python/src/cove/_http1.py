"""A small HTTP/1.1 client for calls: keep-alive connections, a body in memory, a reply in chunks.

It talks to one server and does only what a Connect call needs: no redirects,
cookies, proxies or content codings (see _wire for what uses httpx). The parser
is shared; a sync and an async connection feed it. A free connection is taken
last in, first out, in constant time, however many there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from typing import Optional
from urllib.parse import urlsplit

from ._wire import CONNECT_TIMEOUT, Request, broken, no_answer, trust, unreachable
from .errors import TransportError

_RECV = 256 << 10
_MAX_HEAD = 64 << 10

# Below the idle timeout of servers and balancers (60 s and up), so that we are
# usually the ones who close.
_MAX_IDLE = 30.0


class ResponseParser:
    """An HTTP/1.1 response, fed as it arrives."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep_alive = True
        self._buffer = bytearray()  # a head or chunk line not yet complete
        self._chunked = False
        self._left = 0  # bytes of the body, or of the chunk, still to come
        self._trailer = False

    @property
    def has_head(self) -> bool:
        return self.status != 0

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of the body in data."""
        if self._buffer:
            self._buffer += data
            data = bytes(self._buffer)
            self._buffer.clear()
        position = 0
        if not self.status:
            stop = data.find(b"\r\n\r\n")
            if stop < 0:
                if len(data) > _MAX_HEAD:
                    raise broken("the head of the reply has no end")
                self._buffer += data
                return []
            self._head(data[:stop])
            position = stop + 4
            if self.status < 200:  # 1xx: the real head follows
                self.status = 0
                return self.feed(data[position:])
        pieces: list[bytes] = []
        if self._chunked:
            position = self._chunks(data, position, pieces)
        elif not self.complete:
            piece = data[position : position + self._left]
            position += len(piece)
            self._left -= len(piece)
            if piece:
                pieces.append(piece)
            self.complete = self._left == 0
        if self.complete and position < len(data):
            self.keep_alive = False  # bytes nobody asked for
        return pieces

    def _head(self, head: bytes) -> None:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = status_line.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdigit():
            raise broken(f"not an HTTP reply: {status_line[:80]!r}")
        headers = self.headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self.status = int(rest[:3])
        connection = headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection if version == "HTTP/1.1" else "keep-alive" in connection
        if "transfer-encoding" in headers:
            if headers["transfer-encoding"].lower() != "chunked":
                raise broken(f"unknown transfer encoding {headers['transfer-encoding']!r}")
            self._chunked = True
        elif self.status in (204, 304):
            self.complete = True
        elif self.status >= 200:
            length = headers.get("content-length", "")
            if not length.isdigit():
                raise broken("a reply of unknown length")
            self._left = int(length)
            self.complete = self._left == 0

    def _chunks(self, data: bytes, position: int, pieces: list[bytes]) -> int:
        end = len(data)
        while position < end:
            if self._left > 2:  # within a chunk; its CRLF counts as two more
                stop = min(position + self._left - 2, end)
                pieces.append(data[position:stop])
                self._left -= stop - position
                position = stop
            elif self._left:
                skip = min(self._left, end - position)
                self._left -= skip
                position += skip
            else:
                stop = data.find(b"\r\n", position)
                if stop < 0:
                    if end - position > _MAX_HEAD:
                        raise broken("a chunk line has no end")
                    self._buffer += data[position:]
                    return end
                line = data[position:stop]
                position = stop + 2
                if self._trailer:
                    if not line:
                        self.complete = True
                        return position
                    continue
                try:
                    size = int(line.partition(b";")[0], 16)
                except ValueError:
                    raise broken(f"not a chunk size: {line[:40]!r}") from None
                if size == 0:
                    self._trailer = True
                else:
                    self._left = size + 2
        return position


class _Origin:
    """What both pools need to know of a server."""

    def __init__(self, url: str, ca: Optional[str] = None) -> None:
        parts = urlsplit(url)
        self._ca = ca
        self.url = url
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        self._ssl: Optional[ssl.SSLContext] = None

    def ssl_context(self) -> Optional[ssl.SSLContext]:
        if self.tls and self._ssl is None:
            self._ssl = trust(self._ca)  # the same as on the other way
        return self._ssl

    def encode(self, request: Request) -> bytes:
        assert isinstance(request.body, bytes)
        lines = [f"{request.method} {self._prefix}{request.target} HTTP/1.1", f"host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in request.headers]
        lines += [f"content-length: {len(request.body)}", "", ""]
        return "\r\n".join(lines).encode("latin-1") + request.body


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A watch may be silent for hours; this notices a peer that is gone.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _readable(descriptor: int) -> bool:
    """Whether an idle connection has something to say, which can only be its end."""
    if not hasattr(select, "poll"):
        return bool(select.select([descriptor], [], [], 0)[0])
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


# Sync


class _Connection:
    def __init__(self, origin: _Origin) -> None:
        try:
            sock = socket.create_connection((origin.host, origin.port), timeout=CONNECT_TIMEOUT)
            _tune(sock)
            context = origin.ssl_context()
            self._sock = context.wrap_socket(sock, server_hostname=origin.host) if context else sock
        except OSError as err:
            raise unreachable(origin.url, err) from err
        self._timeout: Optional[float] = CONNECT_TIMEOUT
        self.idle_since = 0.0

    def is_fresh(self) -> bool:
        """Idle for a short time and not closed by the server: nothing is readable."""
        return time.monotonic() - self.idle_since <= _MAX_IDLE and not _readable(self._sock.fileno())

    def within(self, timeout: Optional[float]) -> None:
        if timeout != self._timeout:
            self._sock.settimeout(timeout)
            self._timeout = timeout

    def send(self, data: bytes, timeout: Optional[float]) -> None:
        self.within(timeout)
        try:
            self._sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server may have answered before it had read all; receive() will tell
        except OSError as err:
            raise broken(err) from err

    def receive(self) -> bytes:
        try:
            data = self._sock.recv(_RECV)
        except (socket.timeout, TimeoutError):
            raise no_answer(self._timeout) from None
        except OSError as err:
            raise broken(err) from err
        if not data:
            raise broken("closed by the server")
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Unlike close alone, this wakes a thread that is reading.
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()


class Http1Reply:
    def __init__(self, pool: Http1Wire, connection: _Connection) -> None:
        self._pool, self._connection = pool, connection
        self._parser = parser = ResponseParser()
        self._pieces: list[bytes] = []
        try:
            while not parser.has_head:
                self._pieces = parser.feed(connection.receive())
        except BaseException:
            connection.close()
            raise
        self.status = parser.status
        self._done = False
        if parser.complete:
            self._release()

    def header(self, name: str) -> Optional[str]:
        return self._parser.headers.get(name)

    def chunks(self) -> Iterator[bytes]:
        parser = self._parser
        pieces, self._pieces = self._pieces, []
        try:
            while True:
                yield from pieces
                if parser.complete:
                    self._release()
                    return
                pieces = parser.feed(self._connection.receive())
        finally:
            self.close()

    def within(self, seconds: float) -> None:
        if not self._done:
            self._connection.within(seconds)

    def _release(self) -> None:
        if not self._done:
            self._done = True
            self._pool.take_back(self._connection, self._parser.keep_alive)

    def close(self) -> None:
        if not self._done:
            self._done = True
            self._connection.close()


class Http1Wire:
    """Thread-safe: a connection belongs to one reply at a time, and list.append and list.pop are atomic."""

    def __init__(self, url: str, ca: Optional[str] = None) -> None:
        self._origin = _Origin(url, ca)
        self._idle: list[_Connection] = []
        self._pid = os.getpid()
        self._closed = False

    def send(self, request: Request) -> Http1Reply:
        connection = self._connection()
        try:
            connection.send(self._origin.encode(request), request.read_timeout)
            return Http1Reply(self, connection)
        except BaseException:
            connection.close()
            raise

    def _connection(self) -> _Connection:
        if self._pid != os.getpid():
            # Forked: the parent owns these connections. Two processes on one
            # would read each other's replies.
            self._idle, self._pid = [], os.getpid()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return _Connection(self._origin)
            if connection.is_fresh():
                return connection
            connection.close()

    def take_back(self, connection: _Connection, keep: bool) -> None:
        if not keep or self._closed or self._pid != os.getpid():
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()


# Async


class _AsyncConnection(asyncio.Protocol):
    """Receives into a queue of chunks; reading stops while a slow reader has _HIGH bytes waiting."""

    _HIGH = 1 << 20

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Optional[asyncio.Transport] = None
        self._received: list[bytes] = []
        self._size = 0
        self._paused = False
        self._lost: Optional[TransportError] = None
        self._waiter: Optional[asyncio.Future[None]] = None
        self._descriptor = -1
        self.idle_since = 0.0

    @classmethod
    async def open(cls, origin: _Origin) -> _AsyncConnection:
        loop = asyncio.get_running_loop()
        try:
            context = origin.ssl_context()
            connecting = loop.create_connection(
                cls, origin.host, origin.port, ssl=context, server_hostname=origin.host if context else None
            )
            _, connection = await asyncio.wait_for(connecting, CONNECT_TIMEOUT)
        except (OSError, asyncio.TimeoutError) as err:
            raise unreachable(origin.url, err) from err
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            _tune(sock)
            self._descriptor = sock.fileno()

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._size += len(data)
        if self._size > self._HIGH and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Optional[Exception]) -> None:
        self._lost = broken(exc or "closed by the server")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def is_fresh(self) -> bool:
        return (
            self._lost is None
            and not self._received
            and self._loop is asyncio.get_running_loop()
            and time.monotonic() - self.idle_since <= _MAX_IDLE
            # The loop may have been busy, and not yet told us of the end.
            and not _readable(self._descriptor)
        )

    def send(self, data: bytes) -> None:
        if self._lost is not None or self._transport is None:
            raise self._lost or broken("closed")
        self._transport.write(data)

    async def receive(self, timeout: Optional[float]) -> bytes:
        if not self._received:
            if self._lost is not None:
                raise self._lost
            await self._wait(timeout)
            if not self._received:
                raise self._lost or no_answer(timeout)
        data = self._received[0] if len(self._received) == 1 else b"".join(self._received)
        self._received, self._size = [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self, timeout: Optional[float]) -> None:
        # A bare future and timer: asyncio.wait_for makes a task per call before Python 3.12.
        self._waiter = self._loop.create_future()
        timer = None if timeout is None else self._loop.call_later(timeout, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        if self._transport is not None and not self._loop.is_closed():
            self._transport.abort()


class AsyncHttp1Reply:
    def __init__(self, pool: AsyncHttp1Wire, connection: _AsyncConnection, read_timeout: Optional[float]) -> None:
        self.status = 0
        self._pool, self._connection, self._read_timeout = pool, connection, read_timeout
        self._parser = ResponseParser()
        self._pieces: list[bytes] = []
        self._done = False

    async def read_head(self) -> None:
        parser = self._parser
        while not parser.has_head:
            self._pieces = parser.feed(await self._connection.receive(self._read_timeout))
        self.status = parser.status
        if parser.complete:
            self._release()

    def header(self, name: str) -> Optional[str]:
        return self._parser.headers.get(name)

    async def chunks(self) -> AsyncIterator[bytes]:
        parser = self._parser
        pieces, self._pieces = self._pieces, []
        try:
            while True:
                for piece in pieces:
                    yield piece
                if parser.complete:
                    self._release()
                    return
                pieces = parser.feed(await self._connection.receive(self._read_timeout))
        finally:
            await self.close()

    def _release(self) -> None:
        if not self._done:
            self._done = True
            self._pool.take_back(self._connection, self._parser.keep_alive)

    async def close(self) -> None:
        if not self._done:
            self._done = True
            self._connection.close()


class AsyncHttp1Wire:
    """For one event loop at a time; connections of an earlier loop are dropped."""

    def __init__(self, url: str, ca: Optional[str] = None) -> None:
        self._origin = _Origin(url, ca)
        self._idle: list[_AsyncConnection] = []
        self._pid = os.getpid()
        self._closed = False

    async def send(self, request: Request) -> AsyncHttp1Reply:
        connection = await self._connection()
        try:
            connection.send(self._origin.encode(request))
            reply = AsyncHttp1Reply(self, connection, request.read_timeout)
            await reply.read_head()
            return reply
        except BaseException:
            connection.close()
            raise

    async def _connection(self) -> _AsyncConnection:
        if self._pid != os.getpid():
            self._idle, self._pid = [], os.getpid()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            connection.close()
        return await _AsyncConnection.open(self._origin)

    def take_back(self, connection: _AsyncConnection, keep: bool) -> None:
        if not keep or self._closed:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()
