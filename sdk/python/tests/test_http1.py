"""The response parser: every way a reply can be cut, and replies that are none."""

from __future__ import annotations

import pytest

from cove import TransportError
from cove._connect import EnvelopeReader
from cove._http1 import ResponseParser

from .fake_cove import envelope

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n \r\n00b\r\nworld\r\nagain\r\n0\r\nTrailer: t\r\n\r\n"
)
SIZED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length:   17\r\n\r\nhello world\r\nagai"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize(("raw", "body"), [(CHUNKED, b"hello world\r\nagai"), (SIZED, b"hello world\r\nagai")])
def test_a_reply_cut_anywhere_is_the_same(raw: bytes, body: bytes, size: int) -> None:
    parser = ResponseParser()
    got = []
    for start in range(0, len(raw), size):
        assert not parser.complete
        got += parser.feed(raw[start : start + size])
    assert b"".join(got) == body
    assert parser.complete
    assert parser.keep_alive
    assert parser.status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_no_reply_is_refused(raw: bytes) -> None:
    with pytest.raises(TransportError):
        ResponseParser().feed(raw)


def test_a_connection_with_bytes_nobody_asked_for_is_not_used_again() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n")
    assert parser.complete
    assert not parser.keep_alive


@pytest.mark.parametrize("size", [1, 4, 5, 6, 11, 10_000])
def test_envelopes_cut_anywhere_are_the_same(size: int) -> None:
    raw = envelope({"a": 1}) + envelope({"b": "ü" * 50}) + envelope({}) + envelope({}, flags=2)
    reader = EnvelopeReader()
    got = []
    for start in range(0, len(raw), size):
        got += list(reader.feed(raw[start : start + size]))
    assert got == [{"a": 1}, {"b": "ü" * 50}, {}]
    assert reader.ended
