"""Connections to a server. One client serves any number of sandboxes, threads (Client) and tasks (AsyncClient)."""

from __future__ import annotations

import asyncio
import builtins
import inspect
import json
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from typing import Any, BinaryIO, Callable, Optional, TypeVar, Union, cast

import httpx

from . import _calls
from ._calls import Call
from ._config import resolve_ca, resolve_key, resolve_url
from ._connect import EnvelopeReader, error_of_reply
from ._core import Attempts, Settings
from ._http1 import AsyncHttp1Wire, Http1Wire
from ._retry import Clock
from ._values import parse_int
from ._wire import AsyncHttpxWire, AsyncReply, AsyncWire, HttpxWire, Reply, Request, Wire, behind_proxy
from .errors import CoveError, NotFound, TransportError
from .models import Image, Json, PullProgress, RegistryLogin, ServerInfo

T = TypeVar("T")


class Client:
    """A server and its key, with the connections to it. Thread-safe; survives a fork.

    request_timeout: seconds a single request may stay without an answer. Those
    that move memory or trees of files (fork, restore, pause, clone, …) have a
    quarter of an hour at least.
    retry_timeout: seconds to ride out a server that restarts.
    create_timeout: seconds Sandbox.create waits for a full server.
    ca: file with the authority to trust, for a server with a certificate of its
    own (COVE_CA).
    keep: its sandboxes outlive this process, unless create() says otherwise.
    http_client: an httpx.Client to use for everything (proxies, client
    certificates, custom trust); it stays yours to close.
    """

    def __init__(
        self,
        url: Optional[str] = None,
        key: Optional[str] = None,
        *,
        request_timeout: float = 120.0,
        retry_timeout: float = 30.0,
        create_timeout: float = 60.0,
        ca: Optional[str] = None,
        keep: bool = False,
        http_client: Optional[httpx.Client] = None,
        _clock: Optional[Clock] = None,
    ) -> None:
        self._settings = Settings(url, key, request_timeout, retry_timeout, create_timeout, _clock)
        self._ca = ca = resolve_ca(ca)
        self.keep = keep
        self._bulk = HttpxWire(self.url, http_client, ca)
        direct = http_client is None and not behind_proxy(self.url)
        self._wire: Wire = Http1Wire(self.url, ca) if direct else self._bulk
        self.images = Images(self)

    @property
    def url(self) -> str:
        return self._settings.url

    def info(self) -> ServerInfo:
        """Version, capacity and use of the installation."""
        return self.call(_calls.server_info())

    def close(self) -> None:
        self._wire.close()
        self._bulk.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _client_again, _pickled(self, self._settings, self._bulk.given)

    def http(self) -> httpx.Client:
        """The httpx client that files travel over: it trusts whom this client trusts, and adds no key."""
        return self._bulk.client()

    def call(self, call: Call[T], wait_capacity: Optional[float] = None) -> T:
        """Run a unary call, again where that is safe."""
        settings = self._settings
        if call.wait_capacity and wait_capacity is None:
            wait_capacity = settings.create_timeout
        attempts = Attempts(settings, repeatable=call.repeatable, wait_capacity=wait_capacity, slow=call.slow)
        while True:
            try:
                reply = self.send(self._wire, settings.unary(call, attempts.read_timeout()))
                return call.parse(json.loads(b"".join(reply.chunks())))
            except CoveError as err:
                if call.removes and attempts.maybe_done and isinstance(err, NotFound):
                    return call.parse({})
                delay = attempts.delay_after(err)
            settings.clock.sleep(delay)

    def stream(self, method: str, message: Mapping[str, Any], read_timeout: Optional[float]) -> Reply:
        return self.send(self._wire, self._settings.stream(method, message, read_timeout))

    def follow(self, method: str, message: Mapping[str, Any], on_event: Callable[[Json], Any]) -> None:
        """Read a server stream to its end. It may be silent for as long as it likes."""
        envelopes = EnvelopeReader()
        reply = self.stream(method, message, None)
        try:
            for chunk in reply.chunks():
                for event in envelopes.feed(chunk):
                    on_event(event)
        finally:
            reply.close()

    def content(self, request: Request) -> Reply:
        """One attempt at a request for content, over httpx."""
        return self.send(self._bulk, request)

    def send(self, wire: Wire, request: Request) -> Reply:
        """A successful reply; the error of any other."""
        reply = wire.send(request)
        self._settings.reached = True
        if reply.status in (200, 201, 204, 206):
            return reply
        try:
            body = b"".join(reply.chunks())
        finally:
            reply.close()
        raise error_of_reply(reply.status, body, reply.header("retry-after"))

    def retrying(self, attempt: Callable[[], T], *, repeatable: bool, server_retries: bool = False) -> T:
        """Run something that makes requests, again where that is safe."""
        attempts = Attempts(self._settings, repeatable=repeatable, server_retries=server_retries)
        while True:
            try:
                return attempt()
            except CoveError as err:
                delay = attempts.delay_after(err)
            self._settings.clock.sleep(delay)


class Images:
    """The images of a server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(self) -> builtins.list[Image]:
        return self._client.call(_calls.list_images())

    def get(self, name: str) -> Image:
        """By name or id."""
        return self._client.call(_calls.get_image(name))

    def remove(self, name: str) -> None:
        """Forget a name; content goes when no name and no sandbox uses it."""
        self._client.call(_calls.remove_image(name))

    def pull(
        self,
        reference: str,
        *,
        platform: Optional[str] = None,
        name: Optional[str] = None,
        username: Optional[str] = None,
        password: Optional[str] = None,
        on_progress: Optional[Callable[[PullProgress], None]] = None,
    ) -> Image:
        """Fetch an image from its registry, as a user of it, else as the tenant's login there."""
        message = _pull_message(reference, platform, name, username, password)

        def attempt() -> Image:
            pull = _Pull(on_progress)
            self._client.follow("Images/Pull", message, pull.receive)
            return pull.result()

        return self._client.retrying(attempt, repeatable=True, server_retries=True)

    def login(self, registry: str, *, username: str, password: str) -> RegistryLogin:
        """Keep who the tenant is to a registry, for pulls that name no credentials; again, it replaces them."""
        return self._client.call(_calls.login_registry(registry, username, password))

    def logins(self) -> builtins.list[RegistryLogin]:
        """The registries that the tenant has credentials for."""
        return self._client.call(_calls.list_logins())

    def logout(self, registry: str) -> None:
        """Forget the credentials of a registry."""
        self._client.call(_calls.logout_registry(registry))

    def import_(
        self,
        source: Union[str, os.PathLike[str], BinaryIO],
        name: str,
        *,
        on_progress: Optional[Callable[[PullProgress], None]] = None,
    ) -> Image:
        """Make an image of a tar: a file system, or what `docker save` and `docker export` write. source is a path or
        a file opened for reading bytes. Not sent again after a break where it cannot be read again."""
        upload = _Upload(source, on_progress)

        def attempt() -> Image:
            request = self._client._settings.plain("PUT", "/v1/images", {"name": name}, upload.chunks(), ())
            return Image.parse(json.loads(b"".join(self._client.content(request).chunks())))

        with upload:
            return self._client.retrying(attempt, repeatable=upload.repeatable)


class AsyncClient:
    """Client for asyncio. For one event loop at a time."""

    def __init__(
        self,
        url: Optional[str] = None,
        key: Optional[str] = None,
        *,
        request_timeout: float = 120.0,
        retry_timeout: float = 30.0,
        create_timeout: float = 60.0,
        ca: Optional[str] = None,
        keep: bool = False,
        http_client: Optional[httpx.AsyncClient] = None,
        _clock: Optional[Clock] = None,
    ) -> None:
        self._settings = Settings(url, key, request_timeout, retry_timeout, create_timeout, _clock)
        self._ca = ca = resolve_ca(ca)
        self.keep = keep
        self._bulk = AsyncHttpxWire(self.url, http_client, ca)
        direct = http_client is None and not behind_proxy(self.url)
        self._wire: AsyncWire = AsyncHttp1Wire(self.url, ca) if direct else self._bulk
        self.images = AsyncImages(self)

    @property
    def url(self) -> str:
        return self._settings.url

    async def info(self) -> ServerInfo:
        """Version, capacity and use of the installation."""
        return await self.call(_calls.server_info())

    async def close(self) -> None:
        await self._wire.close()
        await self._bulk.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _async_client_again, _pickled(self, self._settings, self._bulk.given)

    def http(self) -> httpx.AsyncClient:
        """The httpx client that files travel over: it trusts whom this client trusts, and adds no key."""
        return self._bulk.client()

    async def call(self, call: Call[T], wait_capacity: Optional[float] = None) -> T:
        """Run a unary call, again where that is safe."""
        settings = self._settings
        if call.wait_capacity and wait_capacity is None:
            wait_capacity = settings.create_timeout
        attempts = Attempts(settings, repeatable=call.repeatable, wait_capacity=wait_capacity, slow=call.slow)
        while True:
            try:
                reply = await self.send(self._wire, settings.unary(call, attempts.read_timeout()))
                return call.parse(json.loads(await read_all(reply)))
            except CoveError as err:
                if call.removes and attempts.maybe_done and isinstance(err, NotFound):
                    return call.parse({})
                delay = attempts.delay_after(err)
            await settings.clock.async_sleep(delay)

    async def stream(self, method: str, message: Mapping[str, Any], read_timeout: Optional[float]) -> AsyncReply:
        return await self.send(self._wire, self._settings.stream(method, message, read_timeout))

    async def follow(self, method: str, message: Mapping[str, Any], on_event: Callable[[Json], Any]) -> None:
        """Read a server stream to its end. on_event may return something to await."""
        envelopes = EnvelopeReader()
        reply = await self.stream(method, message, None)
        try:
            async for chunk in reply.chunks():
                for event in envelopes.feed(chunk):
                    await maybe(on_event(event))
        finally:
            await reply.close()

    async def content(self, request: Request) -> AsyncReply:
        """One attempt at a request for content, over httpx."""
        return await self.send(self._bulk, request)

    async def send(self, wire: AsyncWire, request: Request) -> AsyncReply:
        """A successful reply; the error of any other."""
        reply = await wire.send(request)
        self._settings.reached = True
        if reply.status in (200, 201, 204, 206):
            return reply
        raise error_of_reply(reply.status, await read_all(reply), reply.header("retry-after"))

    async def retrying(
        self, attempt: Callable[[], Awaitable[T]], *, repeatable: bool, server_retries: bool = False
    ) -> T:
        """Run something that makes requests, again where that is safe."""
        attempts = Attempts(self._settings, repeatable=repeatable, server_retries=server_retries)
        while True:
            try:
                return await attempt()
            except CoveError as err:
                delay = attempts.delay_after(err)
            await self._settings.clock.async_sleep(delay)


async def read_all(reply: AsyncReply) -> bytes:
    try:
        return b"".join([chunk async for chunk in reply.chunks()])
    finally:
        await reply.close()


async def maybe(value: Any) -> None:
    """What a callback returned, which may be a coroutine function."""
    if inspect.isawaitable(value):
        await value


class AsyncImages:
    """The images of a server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(self) -> builtins.list[Image]:
        return await self._client.call(_calls.list_images())

    async def get(self, name: str) -> Image:
        """By name or id."""
        return await self._client.call(_calls.get_image(name))

    async def remove(self, name: str) -> None:
        """Forget a name; content goes when no name and no sandbox uses it."""
        await self._client.call(_calls.remove_image(name))

    async def pull(
        self,
        reference: str,
        *,
        platform: Optional[str] = None,
        name: Optional[str] = None,
        username: Optional[str] = None,
        password: Optional[str] = None,
        on_progress: Optional[Callable[[PullProgress], None]] = None,
    ) -> Image:
        """Fetch an image from its registry, as a user of it, else as the tenant's login there."""
        message = _pull_message(reference, platform, name, username, password)

        async def attempt() -> Image:
            pull = _Pull(on_progress)
            await self._client.follow("Images/Pull", message, pull.receive)
            return pull.result()

        return await self._client.retrying(attempt, repeatable=True, server_retries=True)

    async def login(self, registry: str, *, username: str, password: str) -> RegistryLogin:
        """Keep who the tenant is to a registry, for pulls that name no credentials; again, it replaces them."""
        return await self._client.call(_calls.login_registry(registry, username, password))

    async def logins(self) -> builtins.list[RegistryLogin]:
        """The registries that the tenant has credentials for."""
        return await self._client.call(_calls.list_logins())

    async def logout(self, registry: str) -> None:
        """Forget the credentials of a registry."""
        await self._client.call(_calls.logout_registry(registry))

    async def import_(
        self,
        source: Union[str, os.PathLike[str], BinaryIO],
        name: str,
        *,
        on_progress: Optional[Callable[[PullProgress], Any]] = None,
    ) -> Image:
        """Make an image of a tar: a file system, or what `docker save` and `docker export` write. source is a path or
        a file opened for reading bytes. Not sent again after a break where it cannot be read again."""
        upload = _Upload(source, on_progress)

        async def attempt() -> Image:
            request = self._client._settings.plain("PUT", "/v1/images", {"name": name}, upload.achunks(), ())
            return Image.parse(json.loads(await read_all(await self._client.content(request))))

        with upload:
            return await self._client.retrying(attempt, repeatable=upload.repeatable)


def _pull_message(
    reference: str,
    platform: Optional[str],
    name: Optional[str],
    username: Optional[str],
    password: Optional[str],
) -> dict[str, Any]:
    given = {"platform": platform, "name": name, "username": username, "password": password}
    message = {"reference": reference, **{k: v for k, v in given.items() if v}}
    return message


class _Upload:
    """A tar on its way, which may be asked for again."""

    def __init__(
        self, source: Union[str, os.PathLike[str], BinaryIO], on_progress: Optional[Callable[[PullProgress], Any]]
    ) -> None:
        self._own = isinstance(source, (str, os.PathLike))
        self._file: BinaryIO = open(source, "rb") if isinstance(source, (str, os.PathLike)) else source  # noqa: SIM115
        self.repeatable = self._file.seekable()
        self._start = self._file.tell() if self.repeatable else 0
        self._total = 0
        if self.repeatable:
            self._total = self._file.seek(0, os.SEEK_END) - self._start
        self._on_progress = on_progress

    def _pieces(self) -> Iterator[tuple[bytes, Any]]:
        if self.repeatable:
            self._file.seek(self._start)
        sent = 0
        while piece := self._file.read(1 << 20):
            sent += len(piece)
            told = self._on_progress(PullProgress("upload", sent, self._total)) if self._on_progress else None
            yield piece, told

    def chunks(self) -> Iterator[bytes]:
        for piece, _ in self._pieces():
            yield piece

    async def achunks(self) -> AsyncIterator[bytes]:
        pieces = self._pieces()
        while True:  # a disk may be slow: not on the event loop
            item = await asyncio.get_running_loop().run_in_executor(None, next, pieces, None)
            if item is None:
                return
            await maybe(item[1])
            yield item[0]

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own:
            self._file.close()


class _Pull:
    """The events of one pull, without I/O."""

    def __init__(self, on_progress: Optional[Callable[[PullProgress], Any]]) -> None:
        self._on_progress = on_progress
        self._image: Optional[Image] = None

    def receive(self, event: Json) -> Any:
        if event.get("image"):
            self._image = Image.parse(event["image"])
        if self._on_progress is None:
            return None
        return self._on_progress(
            PullProgress(event.get("step", ""), parse_int(event.get("done")), parse_int(event.get("total")))
        )

    def result(self) -> Image:
        if self._image is None:
            raise TransportError("the pull ended without an image", sent=True)
        return self._image


# Pickling: what Ray, multiprocessing and the like send to other processes. The
# key goes along, since the other side may be a machine without COVE_KEY: such a
# pickle is as secret as the key.

_Pickled = tuple[str, str, float, float, float, Optional[str], bool]


def _pickled(client: Union[Client, AsyncClient], s: Settings, given: Optional[object]) -> _Pickled:
    if given is not None:
        raise TypeError("a client with an http_client of yours cannot be pickled: make one over there")
    return s.url, s.key, s.request_timeout, s.retry_timeout, s.create_timeout, client._ca, client.keep


_again: dict[tuple[int, _Pickled], Client] = {}


def _client_again(*made_of: Any) -> Client:
    """One for all sandboxes that come with the same client: connections are shared as they were."""
    name = os.getpid(), cast("_Pickled", made_of)
    with _lock:
        client = _again.get(name)
        if client is None:
            url, key, request, retry, create, ca, keep = made_of
            client = _again[name] = Client(
                url, key, request_timeout=request, retry_timeout=retry, create_timeout=create, ca=ca, keep=keep
            )
        return client


def _async_client_again(*made_of: Any) -> AsyncClient:
    url, key, request, retry, create, ca, keep = made_of
    return AsyncClient(url, key, request_timeout=request, retry_timeout=retry, create_timeout=create, ca=ca, keep=keep)


# The default clients. One per server and key, so that a changed COVE_URL takes
# effect; async ones also per event loop, to which connections belong.

_lock = threading.Lock()
_clients: dict[tuple[int, str, str], Client] = {}
_async_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[int, str, str], AsyncClient]]
_async_clients = weakref.WeakKeyDictionary()


def _default_name() -> tuple[int, str, str]:
    return os.getpid(), resolve_url(None), resolve_key(None, resolve_url(None))


def default_client() -> Client:
    """The client of COVE_URL and COVE_KEY, or of the server on this machine."""
    name = _default_name()
    with _lock:
        client = _clients.get(name)
        if client is None:
            client = _clients[name] = Client(url=name[1], key=name[2])
        return client


def default_async_client() -> AsyncClient:
    """The same for the running event loop."""
    name = _default_name()
    with _lock:
        clients = _async_clients.setdefault(asyncio.get_running_loop(), {})
        client = clients.get(name)
        if client is None:
            client = clients[name] = AsyncClient(url=name[1], key=name[2])
        return client
