"""A live Python session in a sandbox, which keeps its variables, calls a model of the host, and forks with them."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import secrets
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

from . import _repl
from ._callback import Response
from ._repl import Budget, BudgetExceeded, ReplResult
from ._values import Seconds, to_seconds
from .callback import AsyncCallback, AsyncCallbackRequest, Callback, CallbackRequest
from .errors import DeadlineExceeded, FailedPrecondition
from .models import End
from .process import AsyncProcess, Process

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox, Sandbox

log = logging.getLogger("cove.repl")

Model = Callable[..., str]
AsyncModel = Callable[..., Union[str, Awaitable[str]]]
Solver = Callable[["Repl", str], Any]
AsyncSolver = Callable[["AsyncRepl", str], Any]

# How long code that was interrupted at its timeout has before the session is killed with it.
_GRACE = 2.0
_AT_ONCE = 16  # prompts of one llm_batch


def _ended(end: Optional[End]) -> FailedPrecondition:
    return FailedPrecondition(f"the session has ended: {end}", hint="sb.repl() opens another")


class Repl:
    """A Python session, from Sandbox.repl(). One call at a time; for one thread at a time.

    >>> with sb.repl(llm=model) as repl:
    ...     repl.load("context", text)
    ...     repl.run("hits = [l for l in context.splitlines() if 'cove' in l]; len(hits)").value
    """

    def __init__(self, sandbox: Sandbox, llm: Optional[Model], solver: Optional[Solver], depth: int, budget: Budget, output_limit: int) -> None:  # fmt: skip # noqa: E501
        self.sandbox, self.budget = sandbox, budget
        self._llm, self._solver, self._depth, self._limit = llm, solver, depth, output_limit
        self._callback: Optional[Callback] = None
        self._process: Optional[Process] = None
        self._name = f"repl-{secrets.token_hex(6)}"
        self._session = _repl.Session(output_limit)

    def _open(self, python: str) -> Repl:
        url = self._serve()
        offers = [o for o, there in (("llm", self._llm), ("rlm", self._solver)) if there]
        try:
            self._process = self.sandbox.start([python, "-u", "-c", _repl.program(url, offers)], stdin=True)
            while not self._session.ready:
                output = self._process.read(30)
                if output is None:
                    raise _ended(self._process.end)
                self._session.take(output)
        except BaseException:
            self.close()
            raise
        return self

    def _serve(self) -> str:
        if not self._llm and not self._solver:
            return ""
        self._callback = self.sandbox.serve(self._name, self._answer)
        return self._callback.url

    @property
    def process(self) -> Process:
        if self._process is None or self._process.end is not None:
            raise _ended(self._process.end if self._process is not None else None)
        return self._process

    def run(
        self,
        code: str,
        *,
        timeout: Optional[Seconds] = None,
        on_stdout: Optional[Callable[[str], Any]] = None,
        on_stderr: Optional[Callable[[str], Any]] = None,
    ) -> ReplResult:
        """Run code with the variables of what ran before. Code that fails raises nothing: look at error.

        At the timeout it is interrupted, and the session stays as it is; code that
        does not take the interrupt ends with the session.
        """
        request = _repl.Request(self._session, "run", code.encode("utf-8", "surrogateescape"))
        self._exchange(request, timeout, {"stdout": on_stdout, "stderr": on_stderr})
        return request.result(self._process.end if self._process is not None else None)

    def _exchange(
        self, request: _repl.Request, timeout: Optional[Seconds] = None, listeners: Optional[dict[str, Any]] = None
    ) -> None:
        process = self.process
        process.write(request.data)
        until = None if timeout is None else time.monotonic() + to_seconds("timeout", timeout)
        while not request.done:
            try:
                output = process.read(None if until is None else max(until - time.monotonic(), 0.001))
            except DeadlineExceeded:
                if request.timed_out:
                    process.kill()
                    until = None
                else:
                    request.timed_out, until = True, time.monotonic() + _GRACE
                    process.signal("SIGINT")
                continue
            if output is None:
                return
            for stream, text in request.take(output):
                if listeners and listeners[stream]:
                    listeners[stream](text)

    def _ask(self, op: str, **head: Any) -> Any:
        request = _repl.Request(self._session, op, **head)
        self._exchange(request)
        if not request.done:
            raise _ended(self.process.end)
        return request.value()

    def load(self, name: str, value: Any) -> None:
        """Give a variable a value: str, bytes, or what JSON can say. Of any size: 50 MB take about a second."""
        kind, data = _repl.encoded(value)
        path = f"/tmp/.cove-{self._name}-{self._session.next_id}"
        self.sandbox.files.write(path, data, mode=0o644)
        self._ask("load", name=_repl.name_of(name), path=path, **{"as": kind})

    def get(self, name: str) -> Any:
        """The value of a variable, through JSON. Code inside decides what it is: treat it as a stranger's."""
        return self._ask("get", name=_repl.name_of(name))

    def names(self) -> dict[str, str]:
        """The variables there are, with their types."""
        return dict(self._ask("names"))

    def fork(self, n: int = 1) -> list[Repl]:
        """n sessions that go on from here, each with all the variables, in sandboxes of their own.

        They share the budget. Closing one ends its sandbox.
        """
        children = self.sandbox.fork(n)
        repls = []
        try:
            for sandbox in children:
                repl = _Fork(sandbox, self._llm, self._solver, self._depth, self.budget, self._limit)
                repl._name = self._name
                repl._session.next_id = self._session.next_id
                repls.append(repl)
                repl._serve()
                repl._process = sandbox.attach(self.process.exec_id, self.process.offset)
        except BaseException:
            for sandbox in children:
                sandbox.kill()
            raise
        return list(repls)

    def close(self) -> None:
        """End the session; the sandbox stays."""
        if self._callback is not None:
            self._callback.close()
        if self._process is not None:
            self._process.kill()
            self._process.close()

    def __enter__(self) -> Repl:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, request: CallbackRequest) -> Response:
        try:
            if request.path == "/llm" and self._llm is not None:
                return Response({"results": self._complete(*_repl.prompts_of(request, request.body))})
            if request.path == "/rlm" and self._solver is not None:
                return Response({"results": self._below(request.json())})
        except Exception as e:
            if not isinstance(e, BudgetExceeded):
                log.warning("a call of session %s failed", self._name, exc_info=True)
            return _repl.refusal(e)
        return Response({"error": "no such call"}, status=404)

    def _complete(self, prompts: list[str], options: dict[str, Any]) -> list[str]:
        assert self._llm is not None
        model = self._llm
        self.budget.take(prompts)
        if len(prompts) == 1:
            return [model(prompts[0], **options)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda p: model(p, **options), prompts))

    def _below(self, asked: Any) -> Any:
        assert self._solver is not None
        prompt, context = _repl.task_of(asked, self._depth)
        self.budget.take([prompt])
        below = Repl(self.sandbox, self._llm, self._solver, self._depth - 1, self.budget, self._limit)
        with below._open("python3") as repl:
            if context is not None:
                repl.load("context", context)
            return self._solver(repl, prompt)


class _Fork(Repl):
    """A session in a sandbox that is there for it alone."""

    def close(self) -> None:
        super().close()
        self.sandbox.kill()


class AsyncRepl:
    """A Python session for asyncio, from AsyncSandbox.repl(); see Repl. One call at a time."""

    def __init__(self, sandbox: AsyncSandbox, llm: Optional[AsyncModel], solver: Optional[AsyncSolver], depth: int, budget: Budget, output_limit: int) -> None:  # fmt: skip # noqa: E501
        self.sandbox, self.budget = sandbox, budget
        self._llm, self._solver, self._depth, self._limit = llm, solver, depth, output_limit
        self._callback: Optional[AsyncCallback] = None
        self._process: Optional[AsyncProcess] = None
        self._name = f"repl-{secrets.token_hex(6)}"
        self._session = _repl.Session(output_limit)

    async def _open(self, python: str) -> AsyncRepl:
        url = await self._serve()
        offers = [o for o, there in (("llm", self._llm), ("rlm", self._solver)) if there]
        try:
            self._process = await self.sandbox.start([python, "-u", "-c", _repl.program(url, offers)], stdin=True)
            while not self._session.ready:
                output = await self._process.read(30)
                if output is None:
                    raise _ended(self._process.end)
                self._session.take(output)
        except BaseException:
            await self.close()
            raise
        return self

    async def _serve(self) -> str:
        if not self._llm and not self._solver:
            return ""
        self._callback = await self.sandbox.serve(self._name, self._answer)
        return self._callback.url

    @property
    def process(self) -> AsyncProcess:
        if self._process is None or self._process.end is not None:
            raise _ended(self._process.end if self._process is not None else None)
        return self._process

    async def run(
        self,
        code: str,
        *,
        timeout: Optional[Seconds] = None,
        on_stdout: Optional[Callable[[str], Any]] = None,
        on_stderr: Optional[Callable[[str], Any]] = None,
    ) -> ReplResult:
        """Run code with the variables of what ran before; see Repl.run."""
        request = _repl.Request(self._session, "run", code.encode("utf-8", "surrogateescape"))
        await self._exchange(request, timeout, {"stdout": on_stdout, "stderr": on_stderr})
        return request.result(self._process.end if self._process is not None else None)

    async def _exchange(
        self, request: _repl.Request, timeout: Optional[Seconds] = None, listeners: Optional[dict[str, Any]] = None
    ) -> None:
        process = self.process
        await process.write(request.data)
        until = None if timeout is None else time.monotonic() + to_seconds("timeout", timeout)
        while not request.done:
            try:
                output = await process.read(None if until is None else max(until - time.monotonic(), 0.001))
            except DeadlineExceeded:
                if request.timed_out:
                    await process.kill()
                    until = None
                else:
                    request.timed_out, until = True, time.monotonic() + _GRACE
                    await process.signal("SIGINT")
                continue
            if output is None:
                return
            for stream, text in request.take(output):
                if listeners and listeners[stream]:
                    listeners[stream](text)

    async def _ask(self, op: str, **head: Any) -> Any:
        request = _repl.Request(self._session, op, **head)
        await self._exchange(request)
        if not request.done:
            raise _ended(self.process.end)
        return request.value()

    async def load(self, name: str, value: Any) -> None:
        """Give a variable a value; see Repl.load."""
        kind, data = _repl.encoded(value)
        path = f"/tmp/.cove-{self._name}-{self._session.next_id}"
        await self.sandbox.files.write(path, data, mode=0o644)
        await self._ask("load", name=_repl.name_of(name), path=path, **{"as": kind})

    async def get(self, name: str) -> Any:
        """The value of a variable, through JSON; see Repl.get."""
        return await self._ask("get", name=_repl.name_of(name))

    async def names(self) -> dict[str, str]:
        """The variables there are, with their types."""
        return dict(await self._ask("names"))

    async def fork(self, n: int = 1) -> list[AsyncRepl]:
        """n sessions that go on from here; see Repl.fork."""
        children = await self.sandbox.fork(n)
        repls: list[AsyncRepl] = []
        try:
            for sandbox in children:
                repl = _AsyncFork(sandbox, self._llm, self._solver, self._depth, self.budget, self._limit)
                repl._name = self._name
                repl._session.next_id = self._session.next_id
                repls.append(repl)
                await repl._serve()
                repl._process = await sandbox.attach(self.process.exec_id, self.process.offset)
        except BaseException:
            for sandbox in children:
                await sandbox.kill()
            raise
        return repls

    async def close(self) -> None:
        """End the session; the sandbox stays."""
        if self._callback is not None:
            await self._callback.close()
        if self._process is not None:
            await self._process.kill()
            await self._process.close()

    async def __aenter__(self) -> AsyncRepl:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answer(self, request: AsyncCallbackRequest) -> Response:
        try:
            if request.path == "/llm" and self._llm is not None:
                return Response({"results": await self._complete(*_repl.prompts_of(request, await request.body()))})
            if request.path == "/rlm" and self._solver is not None:
                return Response({"results": await self._below(json.loads(await request.body()))})
        except Exception as e:
            if not isinstance(e, BudgetExceeded):
                log.warning("a call of session %s failed", self._name, exc_info=True)
            return _repl.refusal(e)
        return Response({"error": "no such call"}, status=404)

    async def _complete(self, prompts: list[str], options: dict[str, Any]) -> list[str]:
        assert self._llm is not None
        model, slots = self._llm, asyncio.Semaphore(_AT_ONCE)
        self.budget.take(prompts)

        async def one(prompt: str) -> str:
            async with slots:
                if not inspect.iscoroutinefunction(model):
                    said = await asyncio.to_thread(model, prompt, **options)
                    return await said if inspect.isawaitable(said) else said
                return str(await model(prompt, **options))

        return list(await asyncio.gather(*map(one, prompts)))

    async def _below(self, asked: Any) -> Any:
        assert self._solver is not None
        prompt, context = _repl.task_of(asked, self._depth)
        self.budget.take([prompt])
        below = AsyncRepl(self.sandbox, self._llm, self._solver, self._depth - 1, self.budget, self._limit)
        async with await below._open("python3") as repl:
            if context is not None:
                await repl.load("context", context)
            return await self._solver(repl, prompt)


class _AsyncFork(AsyncRepl):
    """A session in a sandbox that is there for it alone."""

    async def close(self) -> None:
        await super().close()
        await self.sandbox.kill()
