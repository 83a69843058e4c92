"""tinker-cookbook: a SandboxInterface, and the factory its recipes take.

    cli_main(config, env_dir, sandbox_factory=cove.adapters.tinker.sandbox_factory(image="base"))
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Callable, Optional, Union

from tinker_cookbook.sandbox import SandboxResult, SandboxTerminatedError

from .. import AsyncSandbox, CoveError, NotFound, Result, SandboxEnded

_OUTPUT = 128 << 10  # what the other backends keep of a stream


class CoveSandbox:
    """One sandbox. Its lease is renewed by this process, so a heartbeat has nothing to do but look."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self.sandbox = sandbox

    @property
    def sandbox_id(self) -> str:
        return self.sandbox.id

    async def send_heartbeat(self, timeout: int = 30) -> None:
        info = await self.sandbox.info()
        if info.end is not None:
            raise SandboxTerminatedError(f"sandbox {self.sandbox.id} has ended: {info.end}")

    async def run_command(
        self, command: str, workdir: Optional[str] = None, timeout: int = 60, max_output_bytes: Optional[int] = None
    ) -> SandboxResult:
        with _terminated():
            result = await self.sandbox.exec(command, cwd=workdir, timeout=timeout)
        return _result(result, _OUTPUT if max_output_bytes is None else max_output_bytes)

    async def read_file(self, path: str, max_bytes: Optional[int] = None, timeout: int = 60) -> SandboxResult:
        try:
            with _terminated():
                data = await self.sandbox.files.read_bytes(path, length=max_bytes)
        except NotFound as e:
            return SandboxResult(stdout="", stderr=str(e), exit_code=1)
        return SandboxResult(stdout=data.decode("utf-8", "replace"), stderr="", exit_code=0)

    async def write_file(
        self, path: str, content: Union[str, bytes], executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        try:
            with _terminated():
                await self.sandbox.files.write(path, content, mode=0o755 if executable else None)
        except CoveError as e:
            return SandboxResult(stdout="", stderr=str(e), exit_code=1)
        return SandboxResult(stdout="", stderr="", exit_code=0)

    async def cleanup(self) -> None:
        await self.sandbox.kill()


class _terminated:
    """SandboxEnded as the cookbook knows it: an infrastructure fault, never an observation."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, SandboxEnded):
            raise SandboxTerminatedError(str(error)) from error


def _result(result: Result, limit: int) -> SandboxResult:
    def kept(data: bytes) -> str:
        return data[:limit].decode("utf-8", "replace")

    # By convention of the other backends, a command that had its time exits with 124.
    late = result.end.cause == "deadline"
    return SandboxResult(
        stdout=kept(result.stdout_bytes),
        stderr=kept(result.stderr_bytes),
        exit_code=124 if late else result.exit_code,
        metrics={"end": result.end.cause, "seconds": result.duration},
    )


def sandbox_factory(image: Optional[str] = None, **create: Any) -> Callable[[Path, int], Awaitable[CoveSandbox]]:
    """A SandboxFactory: what each task's sandbox starts from and may use; see Sandbox.create.

    The timeout the recipe gives is how long the sandbox lives. An environment directory of a task
    that holds a Dockerfile needs an image built from it, named here.
    """

    async def make(env_dir: Path, timeout: int) -> CoveSandbox:
        return CoveSandbox(await AsyncSandbox.create(image, timeout=timeout, **create))

    return make
