"""One command or function over many inputs, many sandboxes at a time."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import shlex
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, Callable, Optional, Union

from ._batch import FATAL, BatchResult, Function, Journal, judge, key_of, text_of
from ._calls import new_id
from ._values import Seconds
from .client import AsyncClient
from .errors import CoveError
from .sandbox import AsyncSandbox

Work = Union[str, Sequence[str], Callable[[Any], Any]]


class AsyncBatch:
    """Results of a command or function for each input, as they come, or in order.

    >>> async for result in AsyncBatch("wc -c", inputs, parallel=64, image="base"):
    ...     print(result.input, result.stdout)

    A command is a line for the shell, or an argument vector; an input (a line of text, or what JSON
    can say) is its stdin and takes the place of {} in its words. A function gets the input and returns
    what JSON can say; only its source travels, so it imports what it uses.

    reuse: a sandbox is reset and does the next input, instead of a new one for each. retries:
    further tries of what the platform failed; a command that fails is a result. journal: a file of
    results, with which the same call again does only what is left; that of `cove batch` too. What else
    there is goes to Sandbox.create. Sandboxes end with this process, whatever happens to it.
    """

    def __init__(
        self,
        work: Work,
        inputs: Iterable[Any],
        *,
        parallel: int = 16,
        timeout: Optional[Seconds] = None,
        retries: int = 3,
        reuse: bool = False,
        ordered: bool = False,
        journal: Optional[str] = None,
        client: Optional[AsyncClient] = None,
        **create: Any,
    ) -> None:
        self._function = Function(work) if callable(work) else None
        self._work, self._inputs = work, enumerate(inputs)
        self._parallel, self._timeout, self._retries = parallel, timeout, retries
        self._reuse, self._ordered = reuse, ordered
        self._journal_path, self._create = journal, {**create, "client": client}
        self._name = new_id()

    async def __aiter__(self) -> AsyncGenerator[BatchResult, None]:
        held: dict[int, BatchResult] = {}
        following = 0
        results = self._results()
        try:
            async for result in results:
                if not self._ordered:
                    yield result
                    continue
                held[result.index] = result
                while following in held:
                    yield held.pop(following)
                    following += 1
        finally:
            await results.aclose()  # not left to the collector: sandboxes end with it

    async def _results(self) -> AsyncGenerator[BatchResult, None]:
        journal = Journal(self._journal_path) if self._journal_path else None
        results: asyncio.Queue[Union[BatchResult, BaseException, None]] = asyncio.Queue(self._parallel)
        workers: list[asyncio.Task[None]] = []
        try:
            # One worker for each input at first, so that few inputs take few sandboxes.
            running = 0
            for _ in range(self._parallel):
                first = self._next(journal)
                while isinstance(first, BatchResult):
                    yield first
                    first = self._next(journal)
                if first is None:
                    break
                workers.append(asyncio.create_task(self._worker(first, journal, results)))
                running += 1
            while running:
                result = await results.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    running -= 1
                    continue
                if journal is not None and result.key and result.index not in journal.done:
                    journal.add(result)
                yield result
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            if journal is not None:
                journal.close()

    def _next(self, journal: Optional[Journal]) -> Union[tuple[int, Any, str], BatchResult, None]:
        """The next input, or its result from before."""
        for index, value in self._inputs:
            text = text_of(value)
            done = journal.get(index, text) if journal is not None else None
            return done or (index, value, text)
        return None

    async def _worker(self, first: tuple[int, Any, str], journal: Optional[Journal], results: Any) -> None:
        machine = _Machine(self._create)
        task: Union[tuple[int, Any, str], BatchResult, None] = first
        try:
            while task is not None:
                await results.put(task if isinstance(task, BatchResult) else await self._do(*task, machine))
                task = self._next(journal)
            await results.put(None)
        except Exception as e:
            await results.put(e)
        finally:
            await machine.remove()

    async def _do(self, index: int, value: Any, text: str, machine: _Machine) -> BatchResult:
        """An input until it has a result."""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(0.1 * 2 ** (attempt - 1), 5))
            try:
                sandbox = await machine.fresh()
                name = f"{self._name}-{index}-{attempt}"
                said = await sandbox.exec(self._command(text), stdin=text + "\n", timeout=self._timeout, exec_id=name)
                status, cause, detail = judge(said), said.end.cause, said.end.detail
                code, stdout, stderr, took = said.exit_code, said.stdout, said.stderr, said.duration
            except FATAL:
                raise
            except CoveError as e:
                status, cause, detail, code, stdout, stderr, took = "error", "infra", str(e), 0, "", "", 0.0
            id = machine.id
            if status == "error" or not self._reuse:
                await machine.remove()
            if status != "error":
                break
        returned = None
        if self._function is not None:
            stdout, returned = self._function.split(stdout)
        key = key_of(text)
        return BatchResult(
            index, value, status, cause, code, stdout, stderr, detail, attempt + 1, took, id, key, returned
        )

    def _command(self, text: str) -> Union[str, list[str]]:
        if self._function is not None:
            return ["python3", "-c", self._function.program]
        assert not callable(self._work)
        if isinstance(self._work, str):
            return self._work.replace("{}", shlex.quote(text))
        return [word.replace("{}", text) for word in self._work]


class _Machine:
    """The sandbox a worker has, if any."""

    def __init__(self, create: dict[str, Any]) -> None:
        self._create = create
        self._sandbox: Optional[AsyncSandbox] = None

    @property
    def id(self) -> str:
        return self._sandbox.id if self._sandbox is not None else ""

    async def fresh(self) -> AsyncSandbox:
        """One in which nothing has run since it was made or reset."""
        if self._sandbox is not None:
            try:
                await self._sandbox.reset()
                return self._sandbox
            except CoveError:
                await self.remove()
        self._sandbox = await AsyncSandbox.create(create_timeout=float("inf"), **self._create)
        return self._sandbox

    async def remove(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            killing = asyncio.ensure_future(sandbox.kill())
            with contextlib.suppress(CoveError):  # its lease ends it
                try:
                    await asyncio.shield(killing)
                except asyncio.CancelledError:
                    await killing  # another's error ends the batch: its loop would end before this did
                    raise


class Batch:
    """As AsyncBatch, without asyncio: iterate over it.

    >>> for result in Batch(lambda_free_function, inputs, parallel=64, reuse=True):
    ...     print(result.value)
    """

    def __init__(self, work: Work, inputs: Iterable[Any], **options: Any) -> None:
        self._batch = AsyncBatch(work, inputs, **options)

    def __iter__(self) -> Iterator[BatchResult]:
        results: queue.Queue[Any] = queue.Queue(64)
        left = threading.Event()

        async def run() -> None:
            client = AsyncClient()
            self._batch._create["client"] = client
            batch = self._batch.__aiter__()
            try:
                async for result in batch:
                    while not left.is_set():
                        try:
                            results.put_nowait(result)
                            break
                        except queue.Full:
                            await asyncio.sleep(0.01)  # whoever iterates is slower
                    if left.is_set():
                        return
            finally:
                await batch.aclose()
                await client.close()

        def thread() -> None:
            try:
                asyncio.run(run())
                results.put(None)
            except BaseException as e:
                results.put(e)

        worker = threading.Thread(target=thread, name="cove-batch", daemon=True)
        worker.start()
        try:
            while (result := results.get()) is not None:
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            left.set()
            while worker.is_alive():  # it may wait to be rid of its last result
                with contextlib.suppress(queue.Empty):
                    results.get(timeout=0.05)
