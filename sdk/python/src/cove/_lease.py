"""What this process leaves behind on a server, and what it does not.

Sandboxes that this process makes carry its lease: a daemon thread renews it,
and when the process is gone (or ends) the server ends them. One lease serves
every client of a server and key. The same thread's neighbours run errands: the
kill of what was asked for by a call that was cancelled.

Renewing is a thread's work and not the event loop's, so that a loop that is
blocked does not lose its sandboxes. The lease lasts five minutes because a
thread, too, must wait for code in C that holds the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import socket
import sys
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Callable, Optional

from . import _calls
from ._calls import Call, Created
from .errors import CoveError, DeadlineExceeded, NotFound, TransportError, Unavailable, Unsupported

if TYPE_CHECKING:
    from .client import AsyncClient, Client
    from .state import Forked

TTL = 300.0
BEAT = 30.0

# How long a cancelled call waits for its errand before it goes on without.
_PATIENCE = 1.0
# How long the end of the process may take because of us.
_AT_EXIT = 3.0
_RUNNERS = 4

Send = Callable[[Call[Any]], Any]


class _Errands:
    """Calls made in the background, by a few daemon threads that are started when needed."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Send, Call[Any], Future[None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._open: set[Future[None]] = set()

    def add(self, send: Send, call: Call[Any]) -> Future[None]:
        done: Future[None] = Future()
        with self._lock:
            self._open.add(done)
            if self._threads < min(_RUNNERS, len(self._open)):
                self._threads += 1
                threading.Thread(target=self._run, name="cove-errands", daemon=True).start()
        self._queue.put((send, call, done))
        return done

    def _run(self) -> None:
        while True:
            send, call, done = self._queue.get()
            with contextlib.suppress(Exception):  # nobody is there to hear it; leases and timeouts come after
                send(call)
            with self._lock:
                self._open.discard(done)
            done.set_result(None)

    def finish(self, seconds: float) -> None:
        with self._lock:
            left = list(self._open)
        until = time.monotonic() + seconds
        for done in left:
            with contextlib.suppress(Exception):
                done.result(max(0.0, until - time.monotonic()))


class Keeper:
    """The lease of this process at one server, made with the first sandbox that needs it."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.id: Optional[str] = None
        self._unknown = False  # a server from before there were leases
        self._lock = threading.Lock()

    def lease(self) -> Optional[str]:
        if self.id is not None or self._unknown:
            return self.id
        with self._lock:
            if self.id is None and not self._unknown:
                try:
                    self.id = self.send(_calls.create_lease(TTL, _name()))
                except Unsupported:
                    self._unknown = True
                else:
                    _beat()
            return self.id

    async def async_lease(self) -> Optional[str]:
        if self.id is not None or self._unknown:
            return self.id
        return await asyncio.get_running_loop().run_in_executor(None, self.lease)

    def lost(self, id: str) -> None:
        """The server has ended it."""
        with self._lock:
            if self.id == id:
                self.id = None

    def beat(self) -> None:
        id = self.id
        if id is None:
            return
        try:
            self.send(_calls.heartbeat(id))
        except NotFound:
            self.lost(id)
        except Exception:
            return  # the next one may get through

    def undo(self, call: Call[Any]) -> Future[None]:
        return _state.errands.add(self.send, call)


class _State:
    """What is a process's own: a fork's child has none of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.keepers: dict[tuple[str, str, int], Keeper] = {}
        self.errands = _Errands()
        self.beating: Optional[threading.Thread] = None


_state = _State()


def _forget() -> None:
    global _state
    _state = _State()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _beat() -> None:
    with _state.lock:
        if _state.beating is None:
            _state.beating = threading.Thread(target=_beats, args=(_state,), name="cove-lease", daemon=True)
            _state.beating.start()


def _beats(state: _State) -> None:
    while True:
        time.sleep(BEAT)
        with state.lock:
            keepers = list(state.keepers.values())
        for keeper in keepers:
            keeper.beat()


def _name() -> str:
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    printable = "".join(
        c if c.isprintable() else "?" for c in f"{program}, pid {os.getpid()} on {socket.gethostname()}"
    )
    return printable.encode("utf-8", "replace")[:200].decode("utf-8", "ignore")


@atexit.register
def _end() -> None:
    """A process that ends has its sandboxes end now, and not when the lease runs out."""
    state = _state
    until = time.monotonic() + _AT_EXIT
    state.errands.finish(_AT_EXIT)
    ends = [state.errands.add(k.send, _calls.end_lease(k.id)) for k in list(state.keepers.values()) if k.id is not None]
    for done in ends:
        with contextlib.suppress(Exception):
            done.result(max(0.0, until - time.monotonic()))


def keeper_of(client: Client | AsyncClient) -> Keeper:
    settings, http = client._settings, client._bulk.given
    where = (settings.url, settings.key, id(http) if http is not None else 0)
    with _state.lock:
        keeper = _state.keepers.get(where)
        if keeper is None:
            keeper = _state.keepers[where] = Keeper(_sender(client))
        return keeper


def _sender(client: Client | AsyncClient) -> Send:
    """Runs calls from any thread, apart from the client, which may be closed or of an event loop."""
    from .client import AsyncClient, Client

    settings, http = client._settings, client._bulk.given
    if isinstance(client, AsyncClient) and http is not None:
        # Proxies and certificates are known to that httpx client alone.
        loop, of = asyncio.get_running_loop(), client

        def send(call: Call[Any]) -> Any:
            if not loop.is_running():
                raise Unavailable("the event loop of this client does not run")
            return asyncio.run_coroutine_threadsafe(of.call(call), loop).result(60.0)

        return send
    own = Client(settings.url, settings.key, request_timeout=60.0, retry_timeout=15.0, ca=client._ca, http_client=http)  # type: ignore[arg-type]
    own._settings.reached = settings.reached
    return own.call


def _outcome_unknown(err: BaseException) -> bool:
    """Whether a create that failed with err may have made a sandbox."""
    if isinstance(err, TransportError):
        return err.sent
    return not isinstance(err, CoveError) or isinstance(err, (Unavailable, DeadlineExceeded))


def _stale(err: CoveError, lease: Optional[str]) -> bool:
    return lease is not None and isinstance(err, NotFound) and err.field in ("spec.lease", "lease")


def create(
    client: Client, spec: dict[str, Any], key: Optional[str], wait: Optional[float], keep: Optional[bool]
) -> Created:
    """Make a sandbox that does not outlive this process, unless it is to be kept."""
    keeper = keeper_of(client)
    while True:
        lease = None if _kept(client, keep) else keeper.lease()
        call = _calls.create_sandbox({**spec, "lease": lease} if lease else spec, key)
        try:
            return client.call(call, wait)
        except BaseException as err:
            if isinstance(err, CoveError) and _stale(err, lease):
                keeper.lost(lease)  # type: ignore[arg-type]
                continue
            if key is None and _outcome_unknown(err):
                keeper.undo(_calls.kill_by_key(call.message["idempotencyKey"]))
            raise


async def async_create(
    client: AsyncClient, spec: dict[str, Any], key: Optional[str], wait: Optional[float], keep: Optional[bool]
) -> Created:
    keeper = keeper_of(client)
    while True:
        lease = None if _kept(client, keep) else await keeper.async_lease()
        call = _calls.create_sandbox({**spec, "lease": lease} if lease else spec, key)
        try:
            return await client.call(call, wait)
        except BaseException as err:
            if isinstance(err, CoveError) and _stale(err, lease):
                keeper.lost(lease)  # type: ignore[arg-type]
                continue
            if key is None and _outcome_unknown(err):
                await settled(keeper.undo(_calls.kill_by_key(call.message["idempotencyKey"])))
            raise


async def settled(errand: Future[None]) -> None:
    """Wait for an errand, not for long: who was cancelled wants to go."""
    await asyncio.wait([asyncio.wrap_future(errand)], timeout=_PATIENCE)


def _kept(client: Client | AsyncClient, keep: Optional[bool]) -> bool:
    return client.keep if keep is None else keep


def fork_lease(client: Client, keep: Optional[bool], run: str = "") -> Optional[str]:
    """For a fork's message: the lease of the children; "" is none, None the source's, as of what ends with its run."""
    if run and not keep:
        return None
    return "" if _kept(client, keep) else keeper_of(client).lease() or ""


async def async_fork_lease(client: AsyncClient, keep: Optional[bool], run: str = "") -> Optional[str]:
    if run and not keep:
        return None
    return "" if _kept(client, keep) else await keeper_of(client).async_lease() or ""


def fork(client: Client, call: Call[Forked]) -> Forked:
    """Make children, or none: those of a call that was cut off are nobody's, and go."""
    try:
        return client.call(call)
    except BaseException as err:
        if _outcome_unknown(err):
            keeper_of(client).undo(_calls.kill_by_key(call.message["idempotencyKey"]))
        raise


async def async_fork(client: AsyncClient, call: Call[Forked]) -> Forked:
    try:
        return await client.call(call)
    except BaseException as err:
        if _outcome_unknown(err):
            await settled(keeper_of(client).undo(_calls.kill_by_key(call.message["idempotencyKey"])))
        raise
