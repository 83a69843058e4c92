"""Sessions of Python without I/O: frames, what is kept of the output, and the budget of calls to the host."""

from __future__ import annotations

import importlib.resources
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from ._callback import Asked, Response
from .errors import CoveError, FailedPrecondition, InvalidArgument
from .models import End, Output

_HEAD = 1 << 20  # a frame's head has an answer in it
_FRAME = 64 << 20


class BudgetExceeded(CoveError):
    """No more calls to the model: the budget is used up, or the depth is reached."""

    CODE = "budget_exceeded"


@dataclass
class Budget:
    """How much a session, its forks and those below it may ask of the model together. Kept here, where
    code inside does not reach it. None: no bound. Safe for concurrent use."""

    calls: Optional[int] = None
    chars: Optional[int] = None
    """Of all prompts."""
    seconds: Optional[float] = None
    """From the first call on."""
    used_calls: int = 0
    used_chars: int = 0
    _until: Optional[float] = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def take(self, prompts: list[str]) -> None:
        """Count these, or raise BudgetExceeded and count nothing."""
        chars = sum(map(len, prompts))
        with self._lock:
            now = time.monotonic()
            if self._until is None and self.seconds is not None:
                self._until = now + self.seconds
            if self.calls is not None and self.used_calls + len(prompts) > self.calls:
                raise BudgetExceeded(f"{self.used_calls} of {self.calls} calls are used, {len(prompts)} more asked for")
            if self.chars is not None and self.used_chars + chars > self.chars:
                raise BudgetExceeded(f"{self.used_chars} of {self.chars} characters are used, {chars} more asked for")
            if self._until is not None and now > self._until:
                raise BudgetExceeded(f"the {self.seconds:g} seconds are over")
            self.used_calls += len(prompts)
            self.used_chars += chars


@dataclass(frozen=True)
class ReplResult:
    """What a piece of code printed, its value, or why it failed."""

    stdout: str
    stderr: str
    value: Optional[str]
    """repr() of the expression at its end; None if there is none, or it is None."""
    error: str = ""
    """The name of the exception; empty: none."""
    traceback: str = ""
    answer: Any = None
    """What the code gave to answer()."""
    answered: bool = False
    timed_out: bool = False
    truncated: bool = False
    """Something of the output was left out, as its text says."""
    duration: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def output(self) -> str:
        """All of it as a model is shown it."""
        return "".join(part if part.endswith("\n") else part + "\n"
                       for part in (self.stdout, self.stderr, self.value or "", self.traceback) if part)  # fmt: skip


class _Kept:
    """The first and the last of a stream, each half of a limit."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._first, self._last, self.left_out = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._first)
        self._first += data[:room] if room > 0 else b""
        self._last += data[max(room, 0) :]
        if (over := len(self._last) - self._half) > 0:
            self.left_out += over
            del self._last[:over]

    def text(self) -> str:
        middle = f"\n[... {self.left_out} bytes left out ...]\n" if self.left_out else ""
        return self._first.decode("utf-8", "replace") + middle + self._last.decode("utf-8", "replace")


def program(callback: str, offers: list[str]) -> str:
    source = importlib.resources.files(__package__).joinpath("_repl_inside.py").read_text("utf-8")
    return f"CALLBACK, OFFERS = {callback!r}, {offers!r}\n{source}"


class Session:
    """One program inside: what to write to it, and what it says. Not safe for concurrent use."""

    def __init__(self, limit: int, buffered: bytes = b"", next_id: int = 1) -> None:
        self.limit = limit
        self.next_id = next_id
        self.ready = False
        self._buffer = bytearray(buffered)

    def take(self, output: Output) -> list[tuple[dict[str, Any], bytes]]:
        """The frames that are complete with this. What the interpreter itself says on stderr is none."""
        if output.stream == "stderr":
            return []
        self._buffer += output.data
        frames: list[tuple[dict[str, Any], bytes]] = []
        while (end := self._buffer.find(b"\n", 0, _HEAD)) >= 0:
            try:
                head = json.loads(self._buffer[:end])
                size, kind = head["size"], head["kind"]
            except (ValueError, TypeError, KeyError):
                raise self.broken() from None
            if type(size) is not int or not 0 <= size <= _FRAME:
                raise self.broken()
            if len(self._buffer) < end + 1 + size:
                return frames
            frames.append((head, bytes(self._buffer[end + 1 : end + 1 + size])))
            del self._buffer[: end + 1 + size]
            self.ready = self.ready or kind == "ready"
        if len(self._buffer) > _HEAD + _FRAME:
            raise self.broken()
        return frames

    def broken(self) -> FailedPrecondition:
        return FailedPrecondition(
            "what the session says cannot be read: code in it wrote where its answers go",
            hint="sb.repl() opens another",
        )


class Request:
    """One request, and its answer as it comes."""

    def __init__(self, session: Session, op: str, body: bytes = b"", **head: Any) -> None:
        self._session = session
        self._id = session.next_id
        session.next_id += 1
        head.update(id=self._id, op=op, size=len(body), limit=session.limit)
        self.data = json.dumps(head).encode() + b"\n" + body
        self.began = time.monotonic()
        self.timed_out = False
        self.streams = {"stdout": _Kept(session.limit), "stderr": _Kept(session.limit)}
        self._done: Optional[tuple[dict[str, Any], bytes]] = None

    def take(self, output: Output) -> list[tuple[str, str]]:
        """The output that came, as (stream, text); `done` says whether that was all."""
        said = []
        for head, data in self._session.take(output):
            kind = head["kind"]
            if kind in self.streams:
                self.streams[kind].add(data)
                said.append((kind, data.decode("utf-8", "replace")))
            elif kind == "done" and head.get("id") == self._id:
                self._done = head, data
        return said

    @property
    def done(self) -> bool:
        return self._done is not None

    def value(self) -> Any:
        """The answer to anything but code."""
        assert self._done is not None
        head, data = self._done
        if head.get("error"):
            raise InvalidArgument(data.decode("utf-8", "replace").strip() or str(head["error"]))
        try:
            return json.loads(data) if data else None
        except ValueError:
            raise self._session.broken() from None

    def result(self, end: Optional[End]) -> ReplResult:
        head, data = self._done or ({"error": "Ended"}, f"the session has ended: {end}".encode())
        text, error = data[: _FRAME].decode("utf-8", "replace"), str(head.get("error") or "")
        try:
            answer = json.loads(head["answer"]) if "answer" in head else None
        except (ValueError, TypeError):
            raise self._session.broken() from None
        if self.timed_out:
            error = "TimeoutError"
        return ReplResult(
            stdout=self.streams["stdout"].text(),
            stderr=self.streams["stderr"].text(),
            value=None if error or not data else text,
            error=error,
            traceback=text if error else "",
            answer=answer,
            answered="answer" in head,
            timed_out=self.timed_out,
            truncated=any(kept.left_out for kept in self.streams.values()),
            duration=time.monotonic() - self.began,
        )


def encoded(value: Any) -> tuple[str, bytes]:
    """How a value travels: text and bytes as they are, the rest as JSON."""
    if isinstance(value, bytes):
        return "bytes", value
    if isinstance(value, str):
        return "text", value.encode("utf-8", "surrogateescape")
    try:
        return "json", json.dumps(value).encode()
    except (TypeError, ValueError) as e:
        raise InvalidArgument(f"value: {e}", field="value", hint="str, bytes, or what JSON can say") from None


def name_of(name: str) -> str:
    if not name.isidentifier():
        raise InvalidArgument(f"name: {name!r} is no name of a variable", field="name")
    return name


def prompts_of(asked: Union[Asked, Any], body: bytes) -> tuple[list[str], dict[str, Any]]:
    """The prompts and options of a call from inside, which may be anything."""
    try:
        j = json.loads(body)
        prompts, options = j["prompts"], j.get("options") or {}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InvalidArgument("the call cannot be read") from None
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts) or not isinstance(options, dict):
        raise InvalidArgument("a prompt must be text")
    return prompts, options


def refusal(error: Exception) -> Response:
    """What code inside is told. Of the host's own failures, only that there was one."""
    if isinstance(error, BudgetExceeded):
        return Response({"error": str(error)}, status=429)
    if isinstance(error, InvalidArgument):
        return Response({"error": str(error)}, status=400)
    return Response({"error": f"the host failed to answer: {type(error).__name__}"}, status=500)


def task_of(asked: Any, depth: int) -> tuple[str, Any]:
    """The prompt and context of a call to rlm(), which may be anything."""
    if not isinstance(asked, dict) or not isinstance(asked.get("prompt"), str):
        raise InvalidArgument("a prompt must be text")
    if depth <= 0:
        raise BudgetExceeded("the depth is reached: no session below this one")
    return asked["prompt"], asked.get("context")
