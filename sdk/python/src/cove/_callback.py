"""Callbacks without I/O: what a stream of requests says, what a handler's result means on the wire."""

from __future__ import annotations

import json
import logging
import threading
from binascii import a2b_base64
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union
from urllib.parse import parse_qsl

from ._calls import new_id
from ._connect import EnvelopeReader
from ._port_calls import _port
from ._retry import Backoff, Clock
from .errors import CoveError, InvalidArgument, TransportError, Unavailable

log = logging.getLogger("cove.callback")

Chunks = Union[Iterable[Union[bytes, str]], AsyncIterable[Union[bytes, str]]]
Body = Union[str, bytes, Mapping[str, Any], list[Any], Chunks, None]


@dataclass
class Response:
    """What a handler answers with, where the body alone does not say it."""

    body: Body = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class Headers(Mapping[str, str]):
    """Headers by name, in any case. Of one that was sent several times, the values are joined by commas."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._values: dict[str, str] = {}
        for name, value in pairs:
            name = name.lower()
            self._values[name] = f"{self._values[name]}, {value}" if name in self._values else value

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


class Asked:
    """One request as its event told it. Everything in it was written by code inside."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        self.id: str = event.get("id", "")
        self.method: str = event.get("method", "GET")
        self.path: str = event.get("path", "/")
        """Behind the name, percent-encoded as it was sent: "/" or "/v1/models"."""
        self.raw_query: str = event.get("query", "")
        self.headers = Headers((h.get("name", ""), h.get("value", "")) for h in event.get("headers", ()))
        self._inline: Optional[bytes] = None if event.get("bodyFollows") else a2b_base64(event.get("body", ""))
        self._gone = threading.Event()

    @property
    def query(self) -> dict[str, str]:
        """The last value of each parameter; raw_query has all."""
        return dict(parse_qsl(self.raw_query, keep_blank_values=True))

    @property
    def gone(self) -> bool:
        """Whether the caller inside has left, so that nobody waits for the answer."""
        return self._gone.is_set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.method} {self.path}>"


class Serving:
    """One name over all its streams."""

    def __init__(
        self, sandbox_id: str, name: str, port: Optional[int], replace: bool, new: Callable[[Any], Asked]
    ) -> None:
        self.sandbox_id, self.name, self.owner = sandbox_id, name, new_id()
        self.url = ""
        self.closed = False
        self._port = None if port is None else _port(port)
        self._replace = replace
        self._new = new
        self._envelopes = EnvelopeReader()
        # Under way here. The reader adds and handlers take out, each in one step.
        self._asked: dict[str, Asked] = {}
        self._backoff: Optional[Backoff] = None

    def open(self) -> dict[str, Any]:
        self._envelopes = EnvelopeReader()
        message: dict[str, Any] = {"sandboxId": self.sandbox_id, "name": self.name, "owner": self.owner}
        if self._port is not None:
            message["port"] = self._port
        if self._replace and not self.url:  # later on, who has taken it over may keep it
            message["replace"] = True
        return message

    def receive(self, chunk: Optional[bytes]) -> list[Asked]:
        """The requests in chunk that are new here: after a break the server sends all again."""
        if chunk is None:
            raise TransportError("the stream of requests ended", sent=True)
        fresh = []
        for event in self._envelopes.feed(chunk):
            self._backoff = None
            if "serving" in event:
                self.url = event["serving"].get("url", "")
            elif "request" in event:
                asked = self._new(event["request"])
                if self._asked.setdefault(asked.id, asked) is asked:
                    fresh.append(asked)
            elif "gone" in event:
                gone = self._asked.get(event["gone"].get("id", ""))
                if gone is not None:
                    gone._gone.set()
        return fresh

    def done(self, asked: Asked) -> None:
        self._asked.pop(asked.id, None)

    def broke(self, error: CoveError, clock: Clock) -> float:
        """Seconds until the next stream; raises error if there shall be none.

        A server that is away may come back at any time, so this never gives up
        on one that cannot be reached: only on an answer that says no.
        """
        if not isinstance(error, (TransportError, Unavailable)):
            raise error
        if self._backoff is None:
            self._backoff = Backoff(float("inf"), clock)
            log.warning("callback %s of sandbox %s: %s; trying again", self.name, self.sandbox_id, error)
        return self._backoff.delay_after(error)

    def close_message(self) -> dict[str, Any]:
        return {"sandboxId": self.sandbox_id, "name": self.name, "owner": self.owner}


FAILED = Response({"code": "handler_failed", "message": "the handler of this call failed"}, 500)
"""For code inside: why it failed is the client's own business, and in its log."""


@dataclass
class Answer:
    """A handler's result as the server wants it."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: Union[bytes, Chunks]
    """bytes, or chunks that are still of either kind."""


def answer_of(result: Any) -> Answer:
    response = result if isinstance(result, Response) else Response(result, 204 if result is None else 200)
    if isinstance(response.status, bool) or not isinstance(response.status, int) or not 200 <= response.status <= 599:
        raise InvalidArgument(f"status: {response.status!r} is not accepted; 200 to 599 are", field="status")
    body, kind = _encode(response.body)
    names = {name.lower() for name in response.headers}
    headers = [("cove-answer-" + name, str(value)) for name, value in response.headers.items()]
    if kind and "content-type" not in names:
        headers.append(("cove-answer-content-type", kind))
    return Answer(response.status, tuple(headers), body)


def _encode(body: Any) -> tuple[Union[bytes, Chunks], str]:
    if body is None:
        return b"", ""
    if isinstance(body, str):
        return body.encode(), "text/plain; charset=utf-8"
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body), "application/octet-stream" if body else ""
    if isinstance(body, (Mapping, list, tuple)):
        return json.dumps(body, ensure_ascii=False).encode(), "application/json"
    if isinstance(body, (Iterable, AsyncIterable)):
        return body, ""
    raise InvalidArgument(
        f"a handler answered with {type(body).__name__}",
        field="body",
        hint="return str, bytes, a dict, cove.Response or an iterator of str or bytes",
    )


def chunk_of(chunk: Any) -> bytes:
    if isinstance(chunk, str):
        return chunk.encode()
    if isinstance(chunk, (bytes, bytearray, memoryview)):
        return bytes(chunk)
    raise InvalidArgument(f"a handler's iterator gave {type(chunk).__name__}; str or bytes are accepted", field="body")


def kind_of(first: Any) -> tuple[tuple[str, str], ...]:
    """The content type of a stream, by its first chunk."""
    kind = "text/plain; charset=utf-8" if isinstance(first, str) else "application/octet-stream"
    return (("cove-answer-content-type", kind),)


def has_kind(answer: Answer) -> bool:
    return any(name.lower() == "cove-answer-content-type" for name, _ in answer.headers)
