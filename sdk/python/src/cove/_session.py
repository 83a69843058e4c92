"""One process as its reader sees it, without I/O: what to ask for, what came, where to go on.

A session outlives its HTTP streams. It remembers the offset of the next byte,
so that after a break the next stream starts there: no byte is lost or doubled,
and nothing runs twice, since an exec_id runs at most once.
"""

from __future__ import annotations

import codecs
import logging
from binascii import a2b_base64
from collections.abc import Iterable, Iterator
from typing import Any, Callable, NamedTuple, Optional, TypeVar

from ._connect import EnvelopeReader
from ._retry import Backoff
from ._values import parse_duration, parse_int
from .errors import Canceled, CoveError, TransportError, Unavailable
from .models import End, Output, Result
from .types import Standby, StreamName

_STREAMS: dict[str, StreamName] = {
    "OUTPUT_STREAM_STDOUT": "stdout",
    "OUTPUT_STREAM_STDERR": "stderr",
    "OUTPUT_STREAM_PTY": "pty",
}


log = logging.getLogger("cove")


class Piece(NamedTuple):
    """Output as it comes from the wire, not yet text."""

    stream: StreamName
    offset: int
    data: bytes


class ProcessSession:
    def __init__(self, sandbox_id: str, exec_id: str, spec: Optional[dict[str, Any]], offset: int = 0) -> None:
        """spec is None to attach to what was started before."""
        self.sandbox_id = sandbox_id
        self.exec_id = exec_id
        self.offset = offset
        self.pid = 0
        self.started = False
        self.replayed = False
        self.end: Optional[End] = None
        self.duration = 0.0
        self.egress_denied = 0
        self.replay_missed = 0
        self.standby: Standby = ""
        """Where its sandbox stands; not "" while it stands still."""
        self.lost: list[tuple[int, int]] = []
        self.kill_on_cancel = False
        """The server kills it when nobody reads it any more."""
        self._spec = spec
        self._envelopes = EnvelopeReader()
        self._backoff: Optional[Backoff] = None

    def open(self) -> tuple[str, dict[str, Any]]:
        """Method and message of the next stream.

        Until the server has confirmed the start this is Start, which is safe to
        send again. Afterwards it is Attach: shorter (no input to carry), and
        sure not to start anything.
        """
        self._envelopes = EnvelopeReader()
        self.standby = ""  # the next stream wakes it
        message: dict[str, Any] = {"sandboxId": self.sandbox_id}
        if self.kill_on_cancel:
            message["killOnCancel"] = True
        if self.offset:
            message["offset"] = str(self.offset)
        if self._spec is not None and not self.started:
            message["process"] = self._spec
            return "Processes/Start", message
        message["execId"] = self.exec_id
        return "Processes/Attach", message

    def receive(self, chunk: bytes) -> list[Piece]:
        """The output in chunk. Everything else it says is kept in the session's fields."""
        pieces: list[Piece] = []
        for event in self._envelopes.feed(chunk):
            output = event.get("output")
            if output is not None:
                piece = self._output(output)
                if piece is not None:
                    pieces.append(piece)
            elif "end" in event:
                self._ended(event["end"])
            elif "started" in event:
                self._started(event["started"])
            elif "standby" in event:
                self._stands(event["standby"].get("standby", ""))
            elif "lost" in event:
                self._skip_to(parse_int(event["lost"].get("to")))
        self._backoff = None  # the connection works: the next break has the whole budget again
        return pieces

    @property
    def patience(self) -> Optional[float]:
        """How long a reader waits for a process that stands still: as long as it may run. None: for ever."""
        return parse_duration((self._spec or {}).get("timeout")) or None

    def _stands(self, standby: Standby) -> None:
        self.standby = standby
        if standby:
            log.warning(
                "sandbox %s was paused (%s): exec %s stands still until resume() or any other call wakes it",
                self.sandbox_id, standby, self.exec_id,
            )  # fmt: skip

    def body_ended(self) -> None:
        """The HTTP body is over. TransportError if that was too early."""
        if self.end is None:
            raise TransportError("the stream ended before the process did", sent=True)

    def broke(self, error: CoveError, new_backoff: Callable[[CoveError], Backoff]) -> float:
        """How long to wait before opening the next stream; raises error if there shall be none."""
        # A server that drains cancels its streams; the caller of this SDK leaves
        # by closing the connection and never sees the answer.
        if not isinstance(error, (Unavailable, Canceled)):
            raise error
        if self._backoff is None:
            self._backoff = new_backoff(error)
        return self._backoff.delay_after(error)

    def _started(self, started: dict[str, Any]) -> None:
        if not self.started:
            # Only the first answer tells: after a break our own start is replayed too.
            self.replayed = bool(started.get("replayed")) and self._backoff is None
        self.started = True
        self.pid = started.get("pid", 0)
        self.exec_id = started.get("execId") or self.exec_id

    def _output(self, output: dict[str, Any]) -> Optional[Piece]:
        encoded = output.get("data")
        if not encoded:
            return None
        data = a2b_base64(encoded)
        offset = parse_int(output.get("offset"))
        if offset > self.offset:
            self._skip_to(offset)
        elif offset < self.offset:
            data = data[self.offset - offset :]  # seen before the break
            if not data:
                return None
            offset = self.offset
        self.offset += len(data)
        stream = output.get("stream", "")
        return Piece(_STREAMS.get(stream, "stdout"), offset, data)

    def _skip_to(self, offset: int) -> None:
        if offset > self.offset:
            self.lost.append((self.offset, offset))
            self.offset = offset

    def _ended(self, end: dict[str, Any]) -> None:
        self._skip_to(parse_int(end.get("outputBytes")))
        self.duration = parse_duration(end.get("duration"))
        self.egress_denied = parse_int(end.get("egressDenied"))
        self.replay_missed = parse_int(end.get("replayMissed"))
        self.end = End.parse(end.get("end") or {})


class TextDecoder:
    """Pieces to text, per stream: a character may be cut by the border of two pieces."""

    def __init__(self) -> None:
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}

    def output(self, piece: Piece) -> Output:
        return Output(piece.stream, piece.data, piece.offset, self.text(piece))

    def text(self, piece: Piece) -> str:
        decoder = self._decoders.get(piece.stream)
        if decoder is None:
            decoder = self._decoders[piece.stream] = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(piece.data)

    def rest(self) -> Iterator[tuple[str, str]]:
        """What was cut by the very end, per stream."""
        for stream, decoder in self._decoders.items():
            text = decoder.decode(b"", True)
            if text:
                yield stream, text


C = TypeVar("C")


class Collector:
    """Gathers output for a Result. A terminal's output counts as stdout."""

    def __init__(self) -> None:
        self._stdout: list[bytes] = []
        self._stderr: list[bytes] = []

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            (self._stderr if piece.stream == "stderr" else self._stdout).append(piece.data)

    def result(self, session: ProcessSession) -> Result:
        assert session.end is not None
        return Result(
            stdout_bytes=b"".join(self._stdout),
            stderr_bytes=b"".join(self._stderr),
            end=session.end,
            exec_id=session.exec_id,
            duration=session.duration,
            lost=tuple(session.lost),
            replayed=session.replayed,
            egress_denied=session.egress_denied,
            replay_missed=session.replay_missed,
        )


class Listeners:
    """Callbacks for text as it comes; generic over sync and async callbacks, which only the front ends call."""

    def __init__(self, on_stdout: Optional[C], on_stderr: Optional[C]) -> None:
        self._on_stdout: Any = on_stdout
        self._on_stderr: Any = on_stderr
        self._decoder = TextDecoder()

    def __bool__(self) -> bool:
        return self._on_stdout is not None or self._on_stderr is not None

    def calls(self, pieces: Iterable[Piece]) -> Iterator[tuple[Any, str]]:
        """Each callback to call, with its text, in order."""
        for piece in pieces:
            callback = self._on_stderr if piece.stream == "stderr" else self._on_stdout
            if callback is not None:
                text = self._decoder.text(piece)
                if text:
                    yield callback, text

    def last_calls(self) -> Iterator[tuple[Any, str]]:
        for stream, text in self._decoder.rest():
            callback = self._on_stderr if stream == "stderr" else self._on_stdout
            if callback is not None:
                yield callback, text
