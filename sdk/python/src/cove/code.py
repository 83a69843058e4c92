"""Code that runs in the kernels of a sandbox, which keep their variables: see docs/code-interpreter.md."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union
from urllib.parse import quote

from ._connect import error_of_json
from ._values import Seconds, to_seconds
from ._wire import Request
from .client import AsyncClient, Client, maybe, read_all
from .errors import CoveError, InvalidArgument, TooLarge, TransportError
from .models import Json

# One line: a picture is a few megabytes. What is longer was not meant to be read.
_MOST_LINE = 64 << 20


@dataclass(frozen=True)
class CodeContext:
    """A kernel: executions in it share variables."""

    id: str
    language: str
    cwd: str


class ExecutionError(CoveError):
    """An error that code raised. It is returned in Execution.error; Execution.check() raises it."""

    CODE = "code_failed"

    def __init__(self, name: str, value: str, traceback: str) -> None:
        super().__init__(f"{name}: {value}")
        self.name, self.value, self.traceback = name, value, traceback


@dataclass(frozen=True)
class CodeResult:
    """What a cell ended with (is_main_result) or displayed, in each form it has. Code inside wrote all of it."""

    text: Optional[str] = None
    html: Optional[str] = None
    markdown: Optional[str] = None
    svg: Optional[str] = None
    png: Optional[str] = None
    """Base64; see png_bytes."""
    jpeg: Optional[str] = None
    pdf: Optional[str] = None
    latex: Optional[str] = None
    json: Optional[Any] = None
    javascript: Optional[str] = None
    data: Optional[dict[str, Any]] = None
    """The columns of a pandas DataFrame."""
    chart: Optional[dict[str, Any]] = None
    """The data of a matplotlib figure: its type, title, axes and elements."""
    extra: dict[str, Any] = field(default_factory=dict)
    """By MIME type, what has no field of its own."""
    is_main_result: bool = False

    @property
    def png_bytes(self) -> Optional[bytes]:
        return None if self.png is None else base64.b64decode(self.png)

    def formats(self) -> list[str]:
        """The names of the forms it has."""
        return [n for n in _FORMS if getattr(self, n) is not None] + list(self.extra)


_FORMS = (
    "text",
    "html",
    "markdown",
    "svg",
    "png",
    "jpeg",
    "pdf",
    "latex",
    "json",
    "javascript",
    "data",
    "chart",
)


@dataclass
class Execution:
    """All that came of running code once."""

    results: list[CodeResult] = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    error: Optional[ExecutionError] = None
    execution_count: Optional[int] = None

    @property
    def text(self) -> Optional[str]:
        """The text of the main result."""
        return next((r.text for r in self.results if r.is_main_result), None)

    def check(self) -> Execution:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error
        return self


OnText = Callable[[str], Any]
OnResult = Callable[[CodeResult], Any]
OnError = Callable[[ExecutionError], Any]


class Cell:
    """One execution as its lines come. take() says which listener wants what, and only the front ends call."""

    def __init__(
        self,
        on_stdout: Optional[OnText],
        on_stderr: Optional[OnText],
        on_result: Optional[OnResult],
        on_error: Optional[OnError],
    ) -> None:
        self.execution = Execution()
        self.ended = False
        self._texts: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._listeners: dict[str, Any] = {
            "stdout": on_stdout,
            "stderr": on_stderr,
            "result": on_result,
            "error": on_error,
        }
        self._rest: list[bytes] = []
        self._held = 0

    def feed(self, chunk: bytes) -> list[tuple[Any, Any]]:
        """The listeners to call for a chunk, each with its argument."""
        first, *more = chunk.split(b"\n")
        self._rest.append(first)
        self._held += len(first)
        if self._held > _MOST_LINE:
            raise TooLarge("a result is larger than 64 MiB", hint="write it to a file, and read that")
        calls = []
        for part in more:
            line, self._rest, self._held = b"".join(self._rest), [part], len(part)
            if line:
                calls += self._take(json.loads(line))
        return calls

    def _take(self, line: Json) -> list[tuple[Any, Any]]:
        kind = line.get("type")
        value: Any = None
        if kind in ("stdout", "stderr"):
            value = str(line.get("text", ""))
            self._texts[kind].append(value)
        elif kind == "result":
            value = CodeResult(
                **{n: line.get(n) for n in _FORMS},
                extra=line.get("extra") or {},
                is_main_result=bool(line.get("is_main_result")),
            )
            self.execution.results.append(value)
        elif kind == "error":
            value = ExecutionError(*(str(line.get(n, "")) for n in ("name", "value", "traceback")))
            self.execution.error = value
        elif kind == "number_of_executions":
            self.execution.execution_count = line.get("execution_count")
        elif kind == "failure":
            raise error_of_json(line.get("error") or {})
        elif kind in ("end_of_execution", "unexpected_end_of_execution"):
            self.ended = True
        listener = self._listeners.get(str(kind))
        return [(listener, value)] if listener is not None else []

    def end(self) -> Execution:
        if not self.ended:
            raise TransportError("the answer broke off before the code had ended", sent=True)
        self.execution.stdout, self.execution.stderr = ("".join(self._texts[n]) for n in ("stdout", "stderr"))
        return self.execution


def _ask(client: Union[Client, AsyncClient], method: str, id: str, path: str, body: Optional[Json] = None) -> Request:
    data = b"" if body is None else json.dumps(body).encode()
    where = f"/v1/sandboxes/{quote(id, safe='')}/code{path}"
    return client._settings.plain(method, where, None, data, (("content-type", "application/json"),))


def _run(
    client: Union[Client, AsyncClient],
    id: str,
    code: str,
    language: Optional[str],
    context: Optional[Union[CodeContext, str]],
    env: Optional[Mapping[str, str]],
    timeout: Optional[Seconds],
) -> Request:
    if language is not None and context is not None:
        raise InvalidArgument("language: a context has its language; give one of both", field="language")
    body: dict[str, Any] = {"code": code}
    if language is not None:
        body["language"] = language
    if context is not None:
        body["context"] = _id(context)
    if env:
        body["env"] = dict(env)
    if timeout is not None:
        body["timeout"] = to_seconds("timeout", timeout)
    request = _ask(client, "POST", id, "", body)
    request.read_timeout = None  # code may be silent for as long as it likes, and its sandbox be paused
    return request


def _id(context: Union[CodeContext, str]) -> str:
    name = context.id if isinstance(context, CodeContext) else context
    if not name:
        raise InvalidArgument("context: must be a context or its id", field="context")
    return name


def _one(context: Union[CodeContext, str], what: str = "") -> str:
    return f"/contexts/{quote(_id(context), safe='')}{what}"


def _made(language: Optional[str], cwd: Optional[str]) -> Json:
    return {k: v for k, v in (("language", language), ("cwd", cwd)) if v is not None}


def _context(answer: Json) -> CodeContext:
    return CodeContext(*(str(answer.get(n, "")) for n in ("id", "language", "cwd")))


class Interpreter:
    """The code interpreter of one sandbox."""

    def __init__(self, client: Client, sandbox_id: str) -> None:
        self._client, self._sandbox = client, sandbox_id

    def run(self, cell: Cell, code: str, *options: Any) -> Execution:
        request = _run(self._client, self._sandbox, code, *options)
        reply = self._client.retrying(lambda: self._client.send(self._client._wire, request), repeatable=False)
        try:
            for chunk in reply.chunks():
                for listener, value in cell.feed(chunk):
                    listener(value)
        finally:
            reply.close()  # before its end, this interrupts the kernel
        return cell.end()

    def ask(self, method: str, path: str, body: Optional[Json] = None, repeatable: bool = False) -> Json:
        request = _ask(self._client, method, self._sandbox, path, body)

        def attempt() -> Json:
            reply = self._client.send(self._client._wire, request)
            answer: Json = json.loads(b"".join(reply.chunks()))
            return answer

        return self._client.retrying(attempt, repeatable=repeatable)

    def create_context(self, language: Optional[str], cwd: Optional[str]) -> CodeContext:
        return _context(self.ask("POST", "/contexts", _made(language, cwd)))

    def contexts(self) -> list[CodeContext]:
        return [_context(c) for c in self.ask("GET", "/contexts", repeatable=True)["contexts"]]

    def restart(self, context: Union[CodeContext, str]) -> None:
        self.ask("POST", _one(context, "/restart"))

    def remove(self, context: Union[CodeContext, str]) -> None:
        self.ask("DELETE", _one(context))


class AsyncInterpreter:
    """The code interpreter of one sandbox."""

    def __init__(self, client: AsyncClient, sandbox_id: str) -> None:
        self._client, self._sandbox = client, sandbox_id

    async def run(self, cell: Cell, code: str, *options: Any) -> Execution:
        request = _run(self._client, self._sandbox, code, *options)
        reply = await self._client.retrying(lambda: self._client.send(self._client._wire, request), repeatable=False)
        try:
            async for chunk in reply.chunks():
                for listener, value in cell.feed(chunk):
                    await maybe(listener(value))
        finally:
            await reply.close()  # before its end, this interrupts the kernel
        return cell.end()

    async def ask(self, method: str, path: str, body: Optional[Json] = None, repeatable: bool = False) -> Json:
        request = _ask(self._client, method, self._sandbox, path, body)

        async def attempt() -> Json:
            answer: Json = json.loads(await read_all(await self._client.send(self._client._wire, request)))
            return answer

        return await self._client.retrying(attempt, repeatable=repeatable)

    async def create_context(self, language: Optional[str], cwd: Optional[str]) -> CodeContext:
        return _context(await self.ask("POST", "/contexts", _made(language, cwd)))

    async def contexts(self) -> list[CodeContext]:
        return [_context(c) for c in (await self.ask("GET", "/contexts", repeatable=True))["contexts"]]

    async def restart(self, context: Union[CodeContext, str]) -> None:
        await self.ask("POST", _one(context, "/restart"))

    async def remove(self, context: Union[CodeContext, str]) -> None:
        await self.ask("DELETE", _one(context))
