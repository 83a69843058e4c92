"""What can be given as stdin, and how it travels.

Little input rides in the start request. More, or input that is made while the
process runs (a file, an iterator), is sent in pieces beside the output stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator
from typing import IO, Any, Optional, Union

from .errors import FailedPrecondition, InvalidArgument, NotFound

Stdin = Union[str, bytes, IO[bytes], IO[str], Iterable[bytes], Iterable[str]]
AsyncStdin = Union[Stdin, AsyncIterable[bytes], AsyncIterable[str]]

PIECE = 1 << 20

# What SendInput answers once nobody reads any more. It ends the sending, not
# the exec: a process may leave before it has read all, as `head` does.
NOBODY_READS = (NotFound, FailedPrecondition)


def as_bytes(data: Union[str, bytes, bytearray, memoryview]) -> bytes:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise InvalidArgument(f"stdin: {type(data).__name__} is neither text nor bytes", field="stdin")


def split(stdin: Optional[AsyncStdin]) -> tuple[Optional[bytes], Optional[Union[Iterator[bytes], AsyncIterable[Any]]]]:
    """(what goes with the start, what is sent afterwards); one of them is None."""
    if stdin is None:
        return None, None
    if isinstance(stdin, (str, bytes, bytearray, memoryview)):
        data = as_bytes(stdin)
        if len(data) <= PIECE:
            return data, None
        return None, cut(data)
    if hasattr(stdin, "read"):
        return None, read(stdin)
    if isinstance(stdin, AsyncIterable):
        return None, stdin
    if isinstance(stdin, Iterable):
        return None, (piece for item in stdin for piece in cut(as_bytes(item)))
    raise InvalidArgument(
        f"stdin: {type(stdin).__name__} cannot be read",
        field="stdin",
        hint="give str, bytes, an open file or an iterator of either",
    )


def cut(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


def read(file: Any) -> Iterator[bytes]:
    while True:
        data = file.read(PIECE)
        if not data:
            return
        yield from cut(as_bytes(data))  # a text file's read counts characters
