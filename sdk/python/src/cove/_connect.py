"""The Connect protocol with JSON, without I/O: envelopes, error bodies, error details.

A unary call is one POST of application/json. A server stream is one POST of
application/connect+json whose bodies are envelopes: one byte of flags, four
bytes of big-endian length, the message. The last envelope has flag 0x02 and
holds {"error": …} where the call failed.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from . import errors
from .errors import CoveError

UNARY = "application/json"
STREAM = "application/connect+json"

_COMPRESSED = 0x01
_END_STREAM = 0x02

# The server sends output in pieces far below this; a longer length means that
# we are not reading envelopes at all.
_MAX_ENVELOPE = 64 << 20

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def encode_unary(message: Mapping[str, Any]) -> bytes:
    return _encode(message).encode()


def encode_stream(message: Mapping[str, Any]) -> bytes:
    body = _encode(message).encode()
    return b"\0" + len(body).to_bytes(4, "big") + body


class EnvelopeReader:
    """Cuts a body into messages. Each byte is copied a fixed number of times, however chunks fall."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.ended = False
        """The end-of-stream envelope has come, and it held no error."""

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """The messages completed by chunk. Raises the error the stream ended with."""
        buffer = self._buffer
        buffer += chunk
        position, available = 0, len(buffer)
        try:
            while available - position >= 5:
                length = int.from_bytes(buffer[position + 1 : position + 5], "big")
                if length > _MAX_ENVELOPE:
                    raise errors.Internal(f"the server sent an envelope of {length} bytes")
                stop = position + 5 + length
                if stop > available:
                    break
                flags = buffer[position]
                body = buffer[position + 5 : stop]
                position = stop
                if flags & _COMPRESSED:
                    raise errors.Internal("the server sent a compressed envelope, which was not asked for")
                if flags & _END_STREAM:
                    error = (json.loads(body) if body else {}).get("error")
                    if error is not None:
                        raise error_of_json(error)
                    self.ended = True
                    return
                yield json.loads(body)
        finally:
            del buffer[:position]


# Codes of Connect itself, for an error that carries no ErrorDetail (one made by
# the Connect library or a proxy on the way, not by Cove).
_PLAIN = {
    "resource_exhausted": "too_large",  # the library's own message size limit
    "out_of_range": "too_large",
    "aborted": "conflict",
    "unimplemented": "unsupported",
    "data_loss": "corrupt",
    "unknown": "internal",
}

_STATUS = {
    400: "invalid_argument",
    401: "unauthenticated",
    403: "permission_denied",
    404: "unsupported",
    405: "unsupported",
    408: "deadline_exceeded",
    409: "conflict",
    413: "too_large",
    429: "unavailable",
    499: "canceled",
    501: "unsupported",
    502: "unavailable",
    503: "unavailable",
    504: "unavailable",
    507: "disk_full",
}


def error_of_reply(status: int, body: bytes, retry_after: Optional[str] = None) -> CoveError:
    """The error of an HTTP reply that is not a success."""
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict) and "code" in parsed:
        error = error_of_json(parsed)
    else:
        text = body[:200].decode("utf-8", "replace").strip() or "empty body"
        error = errors.make(
            _STATUS.get(status, "internal"),
            f"HTTP status {status}: {text}",
            hint="the answer is not from the Cove API; check COVE_URL and what stands in between",
        )
    if error.retry_after is None and retry_after is not None and retry_after.isdigit():
        error.retry_after = float(retry_after)
        if isinstance(parsed, dict) and parsed.get("code") == "resource_exhausted" and error.code == "too_large":
            return errors.make("no_capacity", error.message, hint=error.hint, retry_after=error.retry_after)
    return error


def error_of_json(body: Mapping[str, Any]) -> CoveError:
    """The error of a Connect error object."""
    connect_code = str(body.get("code", "unknown"))
    message = str(body.get("message") or connect_code.replace("_", " "))
    for detail in body.get("details") or ():
        # "debug" may be left out by any server, so only "value" counts.
        if str(detail.get("type", "")).rpartition("/")[2] == "cove.v1.ErrorDetail":
            code, op, field, hint, reason, retry_after_ms = _decode_error_detail(decode_base64(detail.get("value", "")))
            return errors.make(
                code or connect_code,
                message,
                op=op,
                field=field,
                hint=hint,
                reason=reason,
                retry_after=retry_after_ms / 1000 if retry_after_ms else None,
            )
    return errors.make(_PLAIN.get(connect_code, connect_code), message)


def decode_base64(text: str) -> bytes:
    """Standard base64, padded (protobuf JSON) or not (Connect error details)."""
    return binascii.a2b_base64(text + "=" * (-len(text) % 4))


def encode_base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _decode_error_detail(data: bytes) -> tuple[str, str, str, str, str, int]:
    """cove.v1.ErrorDetail: strings code, op, field, hint (1-4), int64 retry_after_ms (5), string reason (6).

    Fields of a newer server are skipped.
    """
    strings = {1: "", 2: "", 3: "", 4: "", 6: ""}
    retry_after_ms = 0
    position = 0
    try:
        while position < len(data):
            tag, position = _varint(data, position)
            number, kind = tag >> 3, tag & 7
            if kind == 0:
                value, position = _varint(data, position)
                if number == 5:
                    retry_after_ms = value
            elif kind == 2:
                length, position = _varint(data, position)
                if number in strings:
                    strings[number] = data[position : position + length].decode("utf-8", "replace")
                position += length
            elif kind == 1:
                position += 8
            elif kind == 5:
                position += 4
            else:
                break
    except IndexError:
        pass  # cut short: what was read still helps more than a second error
    return strings[1], strings[2], strings[3], strings[4], strings[6], retry_after_ms


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
