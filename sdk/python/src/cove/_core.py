"""What the sync and the async client share: settings, requests, the decision to send again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any, Optional, Union
from urllib.parse import quote, urlencode

from ._calls import Call
from ._config import resolve_key, resolve_url
from ._connect import STREAM, UNARY, encode_stream, encode_unary
from ._retry import Backoff, Clock, is_full, may_retry
from ._version import VERSION
from ._wire import Request
from .errors import CoveError, TransportError

# The server sends a keep-alive on a quiet process stream; one that is silent
# for this long is dead and gets replaced. A false alarm costs one Attach.
STREAM_SILENCE = 60.0

# How long a call that moves memory or trees of files may take: above the 15
# minutes a server gives itself, so that its answer comes first. A server that is
# gone shows earlier, by TCP keep-alive.
_SLOW = 960.0

# How long a client that never reached its server keeps trying: a mistyped URL
# should not take half a minute to show.
_FIRST_CONTACT = 2.0

log = logging.getLogger("cove")


class Settings:
    def __init__(
        self,
        url: Optional[str],
        key: Optional[str],
        request_timeout: float,
        retry_timeout: float,
        create_timeout: float,
        clock: Optional[Clock],
    ) -> None:
        self.url = resolve_url(url)
        self.key = resolve_key(key, self.url)
        self.request_timeout = request_timeout
        self.retry_timeout = retry_timeout
        self.create_timeout = create_timeout
        self.clock = clock or Clock()
        self.reached = False
        """Whether the server has ever answered."""
        self.key = resolve_key(key, self.url)
        self._base = [
            ("authorization", "Bearer " + self.key),
            ("user-agent", "cove-python/" + VERSION),
            ("accept-encoding", "identity"),  # local traffic: compressing costs more than it saves
        ]
        protocol = ("connect-protocol-version", "1")
        self._unary = [*self._base, protocol, ("content-type", UNARY)]
        self._stream = [*self._base, protocol, ("content-type", STREAM)]

    def unary(self, call: Call[Any], read_timeout: float) -> Request:
        return Request("POST", "/cove.v1." + call.method, self._unary, encode_unary(call.message), read_timeout)

    def stream(self, method: str, message: Mapping[str, Any], read_timeout: Optional[float]) -> Request:
        return Request("POST", "/cove.v1." + method, self._stream, encode_stream(message), read_timeout)

    def content(
        self,
        method: str,
        owner: str,
        id: str,
        kind: str,
        query: Optional[Mapping[str, str]] = None,
        body: Union[bytes, Iterable[bytes], AsyncIterable[bytes]] = b"",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> Request:
        """A plain HTTP request for content: owner is "sandboxes", "snapshots" or "volumes", kind "files" or "tar"."""
        return self.plain(method, f"/v1/{owner}/{quote(id, safe='')}/{kind}", query, body, headers)

    def plain(
        self,
        method: str,
        path: str,
        query: Optional[Mapping[str, str]],
        body: Union[bytes, Iterable[bytes], AsyncIterable[bytes]],
        headers: tuple[tuple[str, str], ...],
    ) -> Request:
        target = path + (f"?{urlencode(query)}" if query else "")
        if method == "PUT":
            headers = (*headers, ("content-type", "application/octet-stream"))
        return Request(method, target, [*self._base, *headers], body, self.request_timeout)

    def backoff(self, error: CoveError) -> Backoff:
        """The time a call has to recover from its first failure."""
        lost = isinstance(error, TransportError) and not self.reached
        return Backoff(min(_FIRST_CONTACT, self.retry_timeout) if lost else self.retry_timeout, self.clock)


class Attempts:
    """The attempts of one call."""

    def __init__(
        self,
        settings: Settings,
        *,
        repeatable: bool,
        wait_capacity: Optional[float] = None,
        server_retries: bool = False,
        slow: bool = False,
    ) -> None:
        """wait_capacity: seconds to wait for a full server; None means not at all."""
        self.maybe_done = False
        """An attempt whose outcome is not known went before."""
        self._slow = slow
        self._server_retries = server_retries
        self._settings = settings
        self._repeatable = repeatable
        self._capacity = None if wait_capacity is None else Backoff(wait_capacity, settings.clock)
        self._recovery: Optional[Backoff] = None

    def read_timeout(self) -> float:
        """A create answers within its own time or not at all: who hangs up loses its place in the line for a kernel."""
        if self._capacity is None:
            return max(self._settings.request_timeout, _SLOW if self._slow else 0.0)
        return min(max(self._capacity.remaining(), 1.0), _SLOW)  # above the time a server lets one wait in line

    def delay_after(self, error: CoveError) -> float:
        """Seconds until the next attempt; raises error if there shall be none."""
        if not may_retry(
            error,
            repeatable=self._repeatable,
            wait_capacity=self._capacity is not None,
            server_retries=self._server_retries,
        ):
            raise error
        if not isinstance(error, TransportError) or error.sent:
            self.maybe_done = True
        if self._capacity is not None and is_full(error):
            delay = self._capacity.delay_after(error)
            log.info("waiting for room, %.0f s more at most: %s", self._capacity.remaining(), error.message)
            return delay
        if self._recovery is None:
            self._recovery = self._settings.backoff(error)
        return self._recovery.delay_after(error)
