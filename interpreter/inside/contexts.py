"""Contexts: each is a Jupyter kernel with its own variables."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import sys
import uuid
from typing import Any, Callable

from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

HERE = os.path.dirname(os.path.abspath(__file__))
MOST_CONTEXTS = 64
# A kernel that was interrupted and goes on for so long is killed.
PATIENCE = 5.0
START_TIMEOUT = 60.0
# How often a kernel under way is looked at: its death closes no connection of ours.
LOOK = 0.25


class Unknown(KeyError):
    """There is no such context."""


class Busy(Exception):
    """There are too many contexts."""


class Specs(KernelSpecManager):
    """The kernels there are. Deno's is that of JavaScript and of TypeScript."""

    def get_kernel_spec(self, name: str) -> KernelSpec:
        argv, extra = {
            "python": ([sys.executable, os.path.join(HERE, "kernel.py"), "-f", "{connection_file}"], {}),
            "javascript": (["deno", "jupyter", "--kernel", "--conn", "{connection_file}"], {"interrupt_mode": "message"}),
            "bash": ([sys.executable, "-m", "bash_kernel", "-f", "{connection_file}"], {}),
        }[kernel_of(normal(name))]
        env = {"NO_COLOR": "1", "DENO_NO_UPDATE_CHECK": "1", "DENO_NO_PACKAGE_JSON": "1"}
        return KernelSpec(argv=argv, display_name=name, language=name, env=env, **extra)


def kernel_of(language: str) -> str:
    return "javascript" if language == "typescript" else language


LANGUAGES = ("python", "javascript", "typescript", "bash")
ALIASES = {"py": "python", "python3": "python", "js": "javascript", "node": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash"}


def normal(language: str) -> str:
    """The language by its full name; KeyError if there is none."""
    name = language.strip().lower()
    name = ALIASES.get(name, name)
    if name not in LANGUAGES:
        raise KeyError(language)
    return name


# Code that sets variables (None: takes them away), by kernel.


def _python_env(changes: dict[str, str | None]) -> str:
    return f"(lambda e, c: [e.pop(k, None) if v is None else e.__setitem__(k, v) for k, v in c.items()])(__import__('os').environ, {changes!r})"


def _javascript_env(changes: dict[str, str | None]) -> str:
    return f"for (const [k, v] of Object.entries({json.dumps(changes)})) {{ if (v === null) delete process.env[k]; else process.env[k] = v }}"


def _bash_env(changes: dict[str, str | None]) -> str:
    return "\n".join(f"unset {k}" if v is None else f"export {k}={shlex.quote(v)}" for k, v in changes.items())


ENV: dict[str, Callable[[dict[str, str | None]], str]] = {"python": _python_env, "javascript": _javascript_env, "bash": _bash_env}


# Deno's kernel says that it is idle before all that the code said has come. What is broadcast comes
# behind that, in the same queue.
MARK_TYPE = "cove_mark"
MARK = {"javascript": f"await Deno.jupyter.broadcast({MARK_TYPE!r}, {{}})"}

# Run in a kernel that has just been started. Code for Node expects to have require.
FIRST = {"javascript": "globalThis.require = (await import('node:module')).createRequire(process.cwd() + '/')"}


class Context:
    """One kernel. It is started by the first who needs it; executions queue."""

    def __init__(self, language: str, cwd: str) -> None:
        self.id = str(uuid.uuid4())
        self.language, self.cwd = language, cwd
        self._turn = asyncio.Lock()  # guards what follows: one execution at a time
        self._manager: AsyncKernelManager | None = None
        self._client: AsyncKernelClient | None = None
        self._given: dict[str, str] = {}  # variables that executions were given, as the kernel has them
        self._readers: list[asyncio.Task] = []
        self._under: Execution | None = None
        self._closed = False

    def told(self) -> dict[str, str]:
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def warm(self) -> None:
        async with self._turn:
            await self._start()

    async def execute(self, code: str, env: dict[str, str], out: Any) -> None:
        """Run code and pass on what it says. Cancelled, the kernel is interrupted."""
        async with self._turn:
            if self._closed:
                out.put(_error("ContextRemoved", "the context was removed before the code's turn came"))
                out.put({"type": "unexpected_end_of_execution"})
                return
            try:
                await self._start()
                await self._give(env)
                end = await self._run(code, out)
            except Died as died:
                out.put(_error("KernelDied", f"{died}; the context was restarted and its variables are gone"))
                out.put({"type": "unexpected_end_of_execution"})
                await self._stop()
                return
            except asyncio.CancelledError:
                calm = asyncio.ensure_future(self._calm())
                while not calm.done():  # whoever cancels again: the next in line needs a kernel at rest
                    try:
                        await asyncio.shield(calm)
                    except asyncio.CancelledError:
                        pass
                raise
            for line in end:
                out.put(line)
            out.put({"type": "end_of_execution"})

    async def restart(self) -> None:
        """A new kernel, at once: what runs in the old one ends with it."""
        if self._manager is not None and self._turn.locked():
            await self._manager.signal_kernel(9)
        async with self._turn:
            await self._stop()
            await self._start()

    async def close(self) -> None:
        self._closed = True
        if self._manager is not None and self._turn.locked():
            await self._manager.signal_kernel(9)
        async with self._turn:
            await self._stop()

    async def _start(self) -> None:
        if self._manager is not None:
            if await self._manager.is_alive():
                return
            await self._stop()
        manager = AsyncKernelManager(kernel_name=self.language, kernel_spec_manager=Specs())
        self._given = {}
        try:
            await manager.start_kernel(cwd=self.cwd if os.path.isdir(self.cwd) else "/")
            client = manager.client()
            client.start_channels(hb=False)
            self._manager, self._client = manager, client
            await client.wait_for_ready(timeout=START_TIMEOUT)
        except (RuntimeError, OSError) as err:
            await self._stop()
            raise Died(f"the kernel of {self.language} did not start: {err}") from None
        self._readers = [asyncio.ensure_future(self._read(get)) for get in (client.get_iopub_msg, client.get_shell_msg)]
        first = FIRST.get(kernel_of(self.language))
        if first is not None:
            await self._run(first, None)

    async def _stop(self) -> None:
        manager, client, readers = self._manager, self._client, self._readers
        self._manager, self._client, self._readers = None, None, []
        for r in readers:
            r.cancel()
        if client is not None:
            client.stop_channels()
        if manager is not None:
            await manager.shutdown_kernel(now=True)

    async def _read(self, get: Callable[[], Any]) -> None:
        while True:
            message = await get()
            under = self._under
            if under is None:
                continue
            parent = message["parent_header"].get("msg_id")
            if parent == under.id:
                under.take(message)
            elif parent == under.mark and (message["msg_type"] == MARK_TYPE or message["content"].get("status") == "error"):
                under.marked.set_result(None)

    async def _give(self, env: dict[str, str]) -> None:
        changes: dict[str, str | None] = {k: v for k, v in env.items() if self._given.get(k) != v}
        changes.update({k: os.environ.get(k) for k in self._given if k not in env})
        if changes:
            await self._run(ENV[kernel_of(self.language)](changes), None)
            self._given = dict(env)

    async def _run(self, code: str, out: Any) -> list[dict]:
        """Run code to its end. out None: silently, as no execution of the caller's."""
        assert self._client is not None
        mark = MARK.get(kernel_of(self.language)) if out is not None else None
        self._under = under = Execution(out)
        try:
            under.id = self._client.execute(code, silent=out is None, store_history=out is not None, allow_stdin=False, stop_on_error=False)
            await self._until(under.over)
            if mark is not None:
                under.mark = self._client.execute(mark, silent=True, store_history=False, allow_stdin=False)
                await self._until(under.marked)
            return under.last
        finally:
            self._under = None

    async def _until(self, future: asyncio.Future[None]) -> None:
        assert self._manager is not None
        while not future.done():
            await asyncio.wait([future], timeout=LOOK)
            if not future.done() and not await self._manager.is_alive():
                raise Died(_why(self._manager))

    async def _calm(self) -> None:
        """Interrupt the kernel, and take another if it does not heed that."""
        if self._manager is None or self._client is None:
            return
        try:
            await self._manager.interrupt_kernel()
            await asyncio.wait_for(self._run("", None), PATIENCE)
        except (asyncio.TimeoutError, Died, RuntimeError):
            await self._stop()


class Died(Exception):
    """The kernel ended by itself."""


def _why(manager: AsyncKernelManager) -> str:
    process = getattr(manager.provisioner, "process", None)
    code = process.returncode if process is not None else None
    if code == -9:
        return "the kernel was killed (signal 9), as happens when memory runs out"
    if code is not None and code < 0:
        return f"the kernel was ended by signal {-code}"
    return f"the kernel ended with code {code}"


class Execution:
    """The messages of one execution, turned into lines."""

    def __init__(self, out: Any) -> None:
        self.id = ""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.mark = ""  # the id of what is run behind it, for kernels that need it
        self.marked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last: list[dict] = []  # said at the very end
        self._out = out
        self._failed = self._idle = self._replied = False

    def take(self, message: dict) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            self._idle = True
        elif kind == "execute_reply":
            self._replied = True
            if content["status"] != "ok":
                self._fail(content, last=True)
        elif self._out is not None:
            self._say(kind, content, message)
        if self._idle and self._replied and not self.over.done():
            self.over.set_result(None)

    def _say(self, kind: str, content: dict, message: dict) -> None:
        if kind == "stream":
            text = content["text"]
            self._out.put({"type": content["name"], "text": text, "timestamp": str(message["header"]["date"])}, len(text))
        elif kind in ("display_data", "execute_result"):
            line = result(content["data"], kind == "execute_result")
            self._out.put(line, sum(len(v) for v in line.values() if isinstance(v, str)) + 1000)
        elif kind == "execute_input":
            self._out.put({"type": "number_of_executions", "execution_count": content["execution_count"]})
        elif kind == "error":
            self._fail(content)

    def _fail(self, content: dict, last: bool = False) -> None:
        if self._failed or self._out is None:
            return
        if last:  # the reply may come before the message on the other channel, which has more
            self.last = [_error(content.get("ename") or "ExecutionAborted", content.get("evalue") or "", content.get("traceback"))]
            return
        self._failed = True
        self._out.put(_error(content["ename"] or "ExitStatus", content["evalue"], content["traceback"]))
        self.last = []


def _error(name: str, value: str, traceback: list[str] | None = None) -> dict:
    return {"type": "error", "name": name, "value": value, "traceback": "\n".join(traceback or [])}


FORMATS = {
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}


def result(data: dict[str, Any], main: bool) -> dict:
    """A display as the SDKs know one. A text that is a string loses its quotes, as with E2B."""
    line: dict[str, Any] = {"type": "result", "is_main_result": main}
    extra = {}
    for kind, value in data.items():
        if kind == "text/plain":
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
                value = value[1:-1]
            line["text"] = value
        elif kind in FORMATS:
            line[FORMATS[kind]] = plain(value)
        else:
            extra[kind] = plain(value)
    if extra:
        line["extra"] = extra
    return line


def plain(value: Any) -> Any:
    """Without numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value


class Contexts:
    """Those there are, in the order they were made: one for each language that needs no id, and the callers' own."""

    languages = LANGUAGES

    def __init__(self, home: str) -> None:
        self._default = {language: Context(language, home) for language in ("python", "javascript")}
        self._all = {c.id: c for c in self._default.values()}
        self._home = home

    def get(self, context_id: str) -> Context:
        try:
            return self._all[context_id]
        except KeyError:
            raise Unknown(context_id) from None

    def default(self, language: str) -> Context:
        context = self._default.get(language)
        if context is None or context.id not in self._all:
            context = self._default[language] = Context(language, self._home)
            self._all[context.id] = context
        return context

    def all(self) -> list[Context]:
        return list(self._all.values())

    async def create(self, language: str, cwd: str) -> Context:
        if len(self._all) >= MOST_CONTEXTS:
            raise Busy(f"there are {len(self._all)} contexts; at most that many are kept: remove one")
        context = Context(language, cwd)
        self._all[context.id] = context
        try:
            await context.warm()
        except BaseException:
            del self._all[context.id]
            raise
        return context

    async def remove(self, context: Context) -> None:
        self._all.pop(context.id, None)
        await context.close()

    async def warm(self, languages: list[str]) -> None:
        for language in languages:
            await self.default(language).warm()

    async def close(self) -> None:
        for context in self.all():
            await context.close()
