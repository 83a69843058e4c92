"""Callbacks: what the stream of requests means, and what a handler's result becomes."""

from __future__ import annotations

import base64
import json
from typing import Any, Optional

import pytest

import cove
from cove._callback import Asked, Serving, answer_of, chunk_of
from cove._connect import encode_stream
from cove._retry import Backoff
from cove.errors import Conflict, SandboxEnded, TransportError, Unavailable

from .conftest import FakeTime


def _serving(**options: Any) -> Serving:
    return Serving("sb1", "llm", options.get("port"), options.get("replace", False), Asked)


def _request(id: str, **fields: Any) -> bytes:
    return encode_stream({"request": {"id": id, "method": "POST", **fields}})


def test_first_stream_and_the_next() -> None:
    serving = _serving(port=8081, replace=True)
    first = serving.open()
    assert first == {"sandboxId": "sb1", "name": "llm", "owner": serving.owner, "port": 8081, "replace": True}
    assert serving.receive(encode_stream({"serving": {"url": "http://cove.internal:8081/llm"}})) == []
    assert serving.url == "http://cove.internal:8081/llm"
    # Who took it over meanwhile keeps it; who we are is known by the owner.
    assert serving.open() == {"sandboxId": "sb1", "name": "llm", "owner": serving.owner, "port": 8081}


def test_a_request_is_handled_once_however_often_it_is_sent() -> None:
    serving = _serving()
    serving.open()
    (one,) = serving.receive(_request("1", path="/a"))
    serving.open()  # after a break
    (two,) = serving.receive(_request("1", path="/a") + _request("2", path="/b"))
    assert (one.path, two.path) == ("/a", "/b")
    serving.receive(
        encode_stream({"gone": {"id": "2"}}) + encode_stream({"gone": {"id": "nobody"}}) + encode_stream({})
    )
    assert two.gone
    assert not one.gone
    serving.done(one)
    serving.done(one)


def test_what_a_request_holds() -> None:
    asked = Asked(
        {
            "id": "1",
            "method": "PUT",
            "path": "/x%2Fy",
            "query": "a=1&a=2&b=&c=%20",
            "headers": [{"name": "X-A", "value": "1"}, {"name": "X-A", "value": "2"}, {"name": "Accept", "value": "é"}],
            "body": base64.b64encode(b"hi").decode(),
        }
    )
    assert asked.query == {"a": "2", "b": "", "c": " "}
    assert asked.headers["x-a"] == "1, 2"
    assert asked.headers.get("ACCEPT") == "é"
    assert "nothing" not in asked.headers
    assert asked._inline == b"hi"
    assert Asked({"id": "1", "bodyFollows": True})._inline is None
    assert Asked({"id": "1"})._inline == b""


@pytest.mark.parametrize(
    ("result", "status", "kind", "body"),
    [
        ("grüße", 200, "text/plain; charset=utf-8", "grüße".encode()),
        (b"\x00", 200, "application/octet-stream", b"\x00"),
        (bytearray(b"x"), 200, "application/octet-stream", b"x"),
        ({"a": ["é"]}, 200, "application/json", json.dumps({"a": ["é"]}, ensure_ascii=False).encode()),
        ([1], 200, "application/json", b"[1]"),
        (None, 204, None, b""),
        (cove.Response({"a": 1}, 201), 201, "application/json", b'{"a": 1}'),
        (cove.Response("x", 404, {"Content-Type": "text/odd"}), 404, "text/odd", b"x"),
    ],
)
def test_results(result: Any, status: int, kind: Optional[str], body: bytes) -> None:
    answer = answer_of(result)
    assert (answer.status, answer.body) == (status, body)
    assert {name.lower(): value for name, value in answer.headers}.get("cove-answer-content-type") == kind


@pytest.mark.parametrize(
    "result", [object(), 7, cove.Response("x", 100), cove.Response("x", 600), cove.Response("x", True)]
)
def test_what_is_no_result(result: Any) -> None:
    with pytest.raises(cove.InvalidArgument):
        answer_of(result)


def test_chunks() -> None:
    assert [chunk_of(c) for c in ("é", b"x", bytearray(b"y"))] == ["é".encode(), b"x", b"y"]
    with pytest.raises(cove.InvalidArgument):
        chunk_of(7)


def test_a_break_is_never_given_up_on_and_a_no_is() -> None:
    serving, time = _serving(), FakeTime()
    clock = time.clock()
    delays = [
        serving.broke(error, clock) for error in [TransportError("gone", sent=True), Unavailable("stopping")] * 50
    ]
    assert delays[0] < delays[3] <= Backoff.LAST
    assert max(delays) <= Backoff.LAST
    with pytest.raises(TransportError):
        serving.receive(None)
    for error in (SandboxEnded("over"), Conflict("another has it")):
        with pytest.raises(type(error)):
            serving.broke(error, clock)
    # One that works again starts anew.
    serving.receive(encode_stream({}))
    assert serving.broke(TransportError("gone", sent=True), clock) == delays[0]
