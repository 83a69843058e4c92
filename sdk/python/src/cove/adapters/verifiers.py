"""verifiers (Prime Intellect, v1): a Runtime to place runs into.

    async with provision(CoveConfig(image="base")) as box:
        trace = await agent.run(task, runtime=box)

verifiers' own union of runtime configs is closed, so a box is borrowed (Agent.run's
runtime=) rather than named in a config. What a program inside asks of the trainer's
process (model calls, tools) goes through the sandbox's callback, not over a network:
no tunnel, and it works with all egress denied.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Literal, Optional
from urllib.parse import urlsplit

import httpx
from pydantic import Field
from verifiers.v1.configs.runtime import NetworkPolicyConfig, parse_network_rule
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime, RuntimeProcess, register

from .. import AsyncCallbackRequest, AsyncProcess, AsyncSandbox, CoveError, Network, Response, Rule, Sandbox

_HOST = "host"  # the callback that leads to this process's own ports
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}


class CoveConfig(NetworkPolicyConfig):
    type: Literal["cove"] = "cove"
    image: Optional[str] = None
    workdir: str = "/app"
    create: dict[str, Any] = Field(default_factory=dict)
    """What else Sandbox.create takes: memory, cpu, disk, template, ..."""


class CoveRuntimeInfo(CoveConfig, BaseRuntimeInfo):
    pass


class CoveRuntime(Runtime):
    is_local = True  # URLs of this host are reached by host_url, without a tunnel
    supports_user: ClassVar[bool] = True

    def __init__(self, config: CoveConfig, name: Optional[str] = None) -> None:
        super().__init__(name)
        self.config = config
        self.info = CoveRuntimeInfo(**config.model_dump())
        self._sandbox: Optional[AsyncSandbox] = None
        # Ports of this host that host_url was asked for; code inside reaches no others.
        self._ports: set[int] = set()

    @property
    def sandbox(self) -> AsyncSandbox:
        if self._sandbox is None:
            raise SandboxError("the sandbox is not started, or stopped")
        return self._sandbox

    async def start(self) -> None:
        with _as_sandbox_error("start"):
            self._sandbox = await AsyncSandbox.create(
                self.config.image, labels={"verifiers": self.name}, network="public", **self.config.create
            )
            self.info.id = self._sandbox.id
            await self._sandbox.files.mkdir(self.config.workdir)
            await self._sandbox.serve(_HOST, self._to_host)

    async def teardown(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.kill()
            self._sandbox = None

    def cleanup(self) -> None:
        """At interpreter exit, where no loop runs any more; without it the sandbox's lease ends it."""
        if self._sandbox is not None:
            with contextlib.suppress(CoveError):
                Sandbox.connect(self._sandbox.id).kill()
            self._sandbox = None

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        with _as_sandbox_error("run"):
            result = await self.sandbox.exec(
                argv, env=self.process_env(env), cwd=self.config.workdir, user=self.user, kill_on_cancel=True
            )
        if result.end.cause not in ("exited", "signalled", "oom"):
            raise SandboxError(f"run: {result.end}")  # not the program's own doing, so not its result
        return ProgramResult(result.exit_code, result.stdout, result.stderr)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        with _as_sandbox_error("open_process"):
            process = await self.sandbox.start(
                argv, env=self.process_env(env), cwd=self.config.workdir, user=self.user, stdin=True
            )
        return CoveProcess(process)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        with _as_sandbox_error("run_background"):
            process = await self.sandbox.start(
                f"exec {shlex.join(argv)} > {shlex.quote(log)} 2>&1",
                env=self.process_env(env),
                cwd=self.config.workdir,
                user=self.user,
            )
            await process.close()  # it runs on

    def _abs(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.config.workdir.rstrip('/')}/{path}"

    async def _read(self, path: str, max_bytes: Optional[int] = None) -> bytes:
        with _as_sandbox_error(f"read {path!r}"):
            return await self.sandbox.files.read_bytes(self._abs(path), length=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        with _as_sandbox_error(f"write {path!r}"):
            await self.sandbox.files.write(self._abs(path), data, user=self.user)

    async def expose(self, port: int) -> str:
        with _as_sandbox_error("expose"):
            return await self.sandbox.url(port)

    async def prepare_execution(self, routes: Optional[list[str]]) -> None:
        """Put the policy in force and return when it is; None opens the network for trusted setup.

        routes need no opening: they are host_url's.
        """
        if not self.network_restricted:
            return
        network = Network(mode="public") if routes is None else self._policy()
        with _as_sandbox_error("prepare_execution"):
            await self.sandbox.set_network(network)

    def _policy(self) -> Network:
        if self.config.block == ["*"]:
            return Network(mode="none")
        if "*" in self.config.allow:
            # A bare domain covers what is below it, for verifiers.
            names = [n for b in self.config.block for n in ((b,) if b.startswith("*.") else (b, f"*.{b}"))]
            return Network(mode="public", rules=tuple(_rule("deny", n) for n in names))
        return Network(mode="rules", rules=tuple(_rule("allow", a) for a in self.config.allow))

    def host_url(self, url: str) -> str:
        parts = urlsplit(url)
        if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            return url
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ports.add(port)
        query = f"?{parts.query}" if parts.query else ""
        return f"http://cove.internal/{_HOST}/{port}{parts.path}{query}"

    async def _to_host(self, request: AsyncCallbackRequest) -> Response:
        port, _, path = request.path.lstrip("/").partition("/")
        if not port.isdigit() or int(port) not in self._ports:
            return Response("no such port", status=404)
        headers = {k: v for k, v in request.headers.items() if k not in _HOP}
        query = f"?{request.raw_query}" if request.raw_query else ""
        client = httpx.AsyncClient(timeout=None, trust_env=False)
        try:
            body = [chunk async for chunk in request.stream()]
            asked = client.build_request(
                request.method, f"http://127.0.0.1:{port}/{path}{query}", headers=headers, content=b"".join(body)
            )
            answer = await client.send(asked, stream=True)
        except httpx.HTTPError:
            await client.aclose()
            return Response("nothing answers there", status=502)

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()
                await client.aclose()

        kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
        return Response(chunks(), status=answer.status_code, headers=kept)


def _rule(action: str, target: str) -> Rule:
    _, host, port = parse_network_rule(target)
    return Rule.parse(f"{action} {host}" + (f" tcp {port}" if port else ""))


class CoveProcess(RuntimeProcess):
    """A process whose two streams are read apart."""

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process
        self._queues: dict[str, asyncio.Queue[Optional[bytes]]] = {"stdout": asyncio.Queue(), "stderr": asyncio.Queue()}
        self.stdout, self.stderr = (self._drain(q) for q in self._queues.values())
        self._pump = asyncio.create_task(self._read())

    async def _read(self) -> int:
        try:
            async for output in self._process:
                self._queues["stderr" if output.stream == "stderr" else "stdout"].put_nowait(output.data)
        finally:
            for queue in self._queues.values():
                queue.put_nowait(None)
        end = self._process.end
        if end is None or end.cause not in ("exited", "signalled", "oom", "killed_by_user"):
            raise SandboxError(f"the process ended by {end}")
        return end.exit_code if end.exit_code or end.cause == "exited" else -1

    @staticmethod
    async def _drain(queue: asyncio.Queue[Optional[bytes]]) -> AsyncIterator[bytes]:
        while (chunk := await queue.get()) is not None:
            yield chunk

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def wait(self) -> int:
        with _as_sandbox_error("wait"):
            return await asyncio.shield(self._pump)

    async def poll(self) -> Optional[int]:
        return await self.wait() if self._pump.done() else None

    async def terminate(self) -> None:
        await self._process.signal("SIGTERM")

    async def kill(self) -> None:
        await self._process.kill()


@contextlib.contextmanager
def _as_sandbox_error(what: str) -> Any:
    """verifiers blames the box, not the harness or the task, for these alone."""
    try:
        yield
    except CoveError as e:
        raise SandboxError(f"{what}: {e}") from e


@contextlib.asynccontextmanager
async def provision(
    config: Optional[CoveConfig] = None, name: Optional[str] = None, env: Optional[dict[str, str]] = None
) -> AsyncIterator[CoveRuntime]:
    """A started box, stopped on the way out; also at interpreter exit."""
    runtime = CoveRuntime(config or CoveConfig(), name)
    register(runtime)
    runtime.env = dict(env or {})
    try:
        await runtime.start()
        yield runtime
    finally:
        await runtime.stop()
