"""HTTP as the clients need it: send one request, read the reply in chunks.

Two ways lead to a server. httpx moves files and directories, and everything
else too where a proxy stands in between or the caller brings an httpx client.
The direct way (_http1) carries the calls otherwise. Measured on exec of a
server that answers at once: 0.84 ms of CPU by httpx, 0.14 ms direct; with 256
at once in asyncio 5 to 9 ms each, because httpcore polls all its connections for
every request, against 0.16 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Optional, Protocol, Union
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from .errors import DeadlineExceeded, TransportError

CONNECT_TIMEOUT = 10.0
_WRITE_TIMEOUT = 60.0


@dataclass
class Request:
    method: str
    target: str
    """Path and query."""
    headers: list[tuple[str, str]]
    body: Union[bytes, Iterable[bytes], AsyncIterable[bytes]] = b""
    read_timeout: Optional[float] = None
    """Seconds without a byte after which the reply counts as broken."""


class Reply(Protocol):
    status: int

    def header(self, name: str) -> Optional[str]: ...
    def chunks(self) -> Iterator[bytes]: ...
    def within(self, seconds: float) -> None:
        """From now on so many seconds without a byte are too many."""
        ...

    def close(self) -> None: ...


class AsyncReply(Protocol):
    status: int

    def header(self, name: str) -> Optional[str]: ...
    def chunks(self) -> AsyncIterator[bytes]: ...
    async def close(self) -> None: ...


class Wire(Protocol):
    def send(self, request: Request) -> Reply: ...
    def close(self) -> None: ...


class AsyncWire(Protocol):
    async def send(self, request: Request) -> AsyncReply: ...
    async def close(self) -> None: ...


def behind_proxy(url: str) -> bool:
    """Whether the environment sends this URL through a proxy."""
    parts = urlsplit(url)
    proxies = getproxies()
    if not (proxies.get(parts.scheme) or proxies.get("all")):
        return False
    return not proxy_bypass(parts.hostname or "")


def unreachable(url: str, error: Exception) -> TransportError:
    return TransportError(
        f"cannot reach the Cove server at {url}: {error or type(error).__name__}",
        sent=False,
        hint="is it running (`make start`, `cove serve`)? COVE_URL says where it is looked for",
    )


def broken(error: object) -> TransportError:
    return TransportError(
        f"the connection to the server broke: {error or type(error).__name__}",
        sent=True,
        hint="sandboxes and what is on record are not lost: when the server is back, look whether it was done,"
        " and ask again if not",
    )


class NoAnswer(TransportError):
    """The read timeout passed."""


def no_answer(seconds: Optional[float]) -> NoAnswer:
    return NoAnswer(f"no answer from the server for {seconds or 0:g} s", sent=True)


def _translate(url: str, error: httpx.HTTPError, request: Request) -> Exception:
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)):
        return unreachable(url, error)
    if isinstance(error, httpx.ReadTimeout):
        return no_answer(request.read_timeout)
    if isinstance(error, httpx.WriteTimeout):
        return DeadlineExceeded(f"the server took no data for {_WRITE_TIMEOUT:g} s")
    return broken(error)


def _limits() -> httpx.Limits:
    return httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0)


def _timeout(request: Request) -> dict[str, Optional[float]]:
    return {"connect": CONNECT_TIMEOUT, "pool": None, "write": _WRITE_TIMEOUT, "read": request.read_timeout}


class HttpxReply:
    def __init__(self, url: str, request: Request, response: httpx.Response) -> None:
        self.status = response.status_code
        self._timer: Optional[threading.Timer] = None
        self._url, self._request, self._response = url, request, response

    def header(self, name: str) -> Optional[str]:
        value: Optional[str] = self._response.headers.get(name)
        return value

    def chunks(self) -> Iterator[bytes]:
        try:
            yield from self._response.iter_raw()
        except httpx.HTTPError as err:
            raise _translate(self._url, err, self._request) from err

    def within(self, seconds: float) -> None:
        self._no_timer()
        if seconds >= (self._request.read_timeout or float("inf")):
            return
        # httpcore looks at its timeout once, when the body begins: what is shorter
        # must wake it from outside.
        stream = self._response.extensions.get("network_stream")
        sock = stream.get_extra_info("socket") if stream is not None else None
        if isinstance(sock, socket.socket):
            self._timer = threading.Timer(seconds, _cut, [sock])
            self._timer.daemon = True
            self._timer.start()

    def _no_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        self._no_timer()
        self._response.close()


def _cut(sock: socket.socket) -> None:
    """Wake whoever reads. Not SSLSocket's own shutdown, which is not for two threads."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def trust(ca: Optional[str]) -> ssl.SSLContext:
    """The system's authorities, or those of a file alone."""
    if ca is None:
        return httpx.create_ssl_context()
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class HttpxWire:
    """Thread-safe, since httpx.Client is."""

    def __init__(self, url: str, client: Optional[httpx.Client], ca: Optional[str] = None) -> None:
        self._url = url
        self._ca = ca
        self.given = client
        self._own: Optional[httpx.Client] = None
        self._pid = 0

    def client(self) -> httpx.Client:
        if self.given is not None:
            return self.given
        # Made on first use (a trust store takes 20 ms to load), and again after
        # a fork: two processes on one connection would read each other's replies.
        if self._own is None or self._pid != os.getpid():
            self._own = httpx.Client(limits=_limits(), follow_redirects=False, verify=trust(self._ca))
            self._pid = os.getpid()
        return self._own

    def send(self, request: Request) -> HttpxReply:
        assert not isinstance(request.body, AsyncIterable)
        message = httpx.Request(
            request.method,
            self._url + request.target,
            headers=request.headers,
            content=request.body,
            extensions={"timeout": _timeout(request)},
        )
        try:
            return HttpxReply(self._url, request, self.client().send(message, stream=True))
        except httpx.HTTPError as err:
            raise _translate(self._url, err, request) from err

    def close(self) -> None:
        if self._own is not None and self._pid == os.getpid():
            self._own.close()


class AsyncHttpxReply:
    def __init__(self, url: str, request: Request, response: httpx.Response) -> None:
        self.status = response.status_code
        self._url, self._request, self._response = url, request, response

    def header(self, name: str) -> Optional[str]:
        value: Optional[str] = self._response.headers.get(name)
        return value

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.aiter_raw():
                yield chunk
        except httpx.HTTPError as err:
            raise _translate(self._url, err, self._request) from err

    async def close(self) -> None:
        await self._response.aclose()


class AsyncHttpxWire:
    def __init__(self, url: str, client: Optional[httpx.AsyncClient], ca: Optional[str] = None) -> None:
        self._url = url
        self._ca = ca
        self.given = client
        self._own: Optional[httpx.AsyncClient] = None
        self._owner: Optional[tuple[int, asyncio.AbstractEventLoop]] = None

    def client(self) -> httpx.AsyncClient:
        if self.given is not None:
            return self.given
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._own is None or self._owner != owner:
            self._own = httpx.AsyncClient(limits=_limits(), follow_redirects=False, verify=trust(self._ca))
            self._owner = owner
        return self._own

    async def send(self, request: Request) -> AsyncHttpxReply:
        message = httpx.Request(
            request.method,
            self._url + request.target,
            headers=request.headers,
            content=request.body,
            extensions={"timeout": _timeout(request)},
        )
        try:
            return AsyncHttpxReply(self._url, request, await self.client().send(message, stream=True))
        except httpx.HTTPError as err:
            raise _translate(self._url, err, request) from err

    async def close(self) -> None:
        if self._own is not None and self._owner == (os.getpid(), asyncio.get_running_loop()):
            await self._own.aclose()
