"""inspect_ai: the sandbox type "cove".

    Task(..., sandbox="cove")
    Task(..., sandbox=SandboxEnvironmentSpec("cove", CoveConfig(image="base", memory="1GiB", network="none")))
    Task(..., sandbox=("cove", "cove.yaml"))    # the same fields, in a file beside the task

inspect_ai finds it by the package's entry point: `pip install cove[inspect]` is all.
"""

from __future__ import annotations

import asyncio
import os.path
import shlex
from pathlib import Path
from typing import Any, Optional, Union

import yaml
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from .. import AsyncSandbox, End, PermissionDenied, Result, SandboxEnded, errors

LABEL = "inspect-task"


class CoveConfig(BaseModel):
    """What a sample's sandbox starts from and may use; see Sandbox.create."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: Optional[str] = None
    template: Optional[str] = None
    snapshot: Optional[str] = None
    cpu: Optional[float] = None
    memory: Optional[str] = None
    disk: Optional[str] = None
    network: Union[str, tuple[str, ...], None] = None
    env: Optional[dict[str, str]] = None
    user: Optional[str] = None
    """Who commands run as, and whose rights files are read and written with. Default: the image's."""
    workdir: Optional[str] = None
    """Made where missing, for that user. Default: the image's."""


@sandboxenv(name="cove")
class CoveSandboxEnvironment(SandboxEnvironment):
    def __init__(self, sandbox: AsyncSandbox, user: Optional[str], workdir: str) -> None:
        super().__init__()
        self.sandbox, self._user, self._workdir = sandbox, user, workdir

    @classmethod
    def config_files(cls) -> list[str]:
        return ["cove.yaml"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> CoveConfig:
        return CoveConfig(**config)

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        if config is None:
            config = CoveConfig()
        elif isinstance(config, str):
            config = CoveConfig(**yaml.safe_load(await asyncio.to_thread(Path(config).read_text)))
        elif not isinstance(config, CoveConfig):
            raise TypeError(f"the sandbox 'cove' takes a file or a CoveConfig, not {type(config).__name__}")
        start = config.model_dump(exclude={"user", "workdir"}, exclude_none=True)
        sandbox = await AsyncSandbox.create(labels={LABEL: task_name[:63]}, **start)
        try:
            if config.workdir:
                await sandbox.files.mkdir(config.workdir, user=config.user)
            workdir = config.workdir or (await sandbox.exec(["pwd"])).check().stdout.rstrip("\n")
        except BaseException:
            await sandbox.kill()
            raise
        return {"default": cls(sandbox, config.user, workdir)}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        # An interrupted sample's go as well: what outlives the eval is for --no-sandbox-cleanup,
        # under which inspect_ai does not call this.
        for env in environments.values():
            sandbox = env.as_type(cls).sandbox
            await sandbox.kill()

    @classmethod
    async def cli_cleanup(cls, id: Optional[str]) -> None:
        if id is not None:
            await (await AsyncSandbox.connect(id)).kill()
            return
        async for sandbox in AsyncSandbox.list():
            if LABEL in (await sandbox.info()).labels:
                await sandbox.kill()

    async def connection(self, *, user: Optional[str] = None) -> SandboxConnection:
        as_user = ["--user", shlex.quote(user)] if user else []
        command = " ".join(["cove", "exec", "-it", *as_user, self.sandbox.id, "sh"])
        return SandboxConnection(type="cove", command=command, container=self.sandbox.id)

    def _path(self, path: str) -> str:
        return os.path.join(self._workdir, path)

    async def exec(
        self,
        cmd: list[str],
        input: Union[str, bytes, None] = None,
        cwd: Optional[str] = None,
        env: Optional[dict[str, str]] = None,
        user: Optional[str] = None,
        timeout: Optional[int] = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        result = await self._run(cmd, input, cwd, env, user, timeout)
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        out, err = (data[-limit:].decode("utf-8", "replace") for data in (result.stdout_bytes, result.stderr_bytes))
        return ExecResult(result.ok, result.exit_code, out, err)

    async def _run(
        self,
        cmd: list[str],
        input: Union[str, bytes, None] = None,
        cwd: Optional[str] = None,
        env: Optional[dict[str, str]] = None,
        user: Optional[str] = None,
        timeout: Optional[int] = None,
    ) -> Result:
        # timeout_retry is not followed: a command that had its time may have had its effects.
        try:
            result = await self.sandbox.exec(
                cmd,
                stdin=input,
                cwd=self._path(cwd or ""),
                env=env,
                user=user or self._user,
                timeout=timeout,
            )
        except errors.CommandNotFound as e:
            return _failed(127, str(e))
        except PermissionDenied as e:
            raise PermissionError(str(e)) from e
        except errors.InvalidArgument as e:
            if e.field == "process.user":
                raise SandboxUserUnsupportedError(str(e)) from e
            raise
        except (SandboxEnded, errors.Unavailable) as e:
            raise SandboxUnavailableError(str(e)) from e
        if result.end.cause == "deadline":
            raise TimeoutError(f"{cmd[0]}: not done after {timeout} s")
        return result

    async def write_file(self, file: str, contents: Union[str, bytes]) -> None:
        self._check(file, await self._run(["sh", "-c", _WRITE, "sh", self._path(file)], contents))

    async def read_file(self, file: str, text: bool = True) -> Union[str, bytes]:  # type: ignore[override]
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        result = await self._run(["sh", "-c", _READ, "sh", self._path(file), str(limit + 1)])
        data = self._check(file, result).stdout_bytes
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode("utf-8") if text else data

    @staticmethod
    def _check(file: str, result: Result) -> Result:
        if result.exit_code == _IS_DIR:
            raise IsADirectoryError(f"{file} is a directory")
        if result.exit_code == _MISSING:
            raise FileNotFoundError(f"{file}: no such file")
        if result.exit_code == _DENIED:
            raise PermissionError(f"{file}: permission denied")
        return result.check()


# Cove's own file calls read and write whatever a file's mode; inspect_ai wants the rights
# of the user that commands have.
_IS_DIR, _MISSING, _DENIED = 101, 102, 103
_READ = f"""
[ -e "$1" ] || exit {_MISSING}
[ -d "$1" ] && exit {_IS_DIR}
[ -r "$1" ] || exit {_DENIED}
exec head -c "$2" -- "$1"
"""
_WRITE = f"""
[ -d "$1" ] && exit {_IS_DIR}
in=$(dirname -- "$1")
mkdir -p -- "$in" || exit {_DENIED}
if [ -e "$1" ]; then [ -w "$1" ]; else [ -w "$in" ]; fi || exit {_DENIED}
exec cat > "$1"
"""


def _failed(code: int, why: str) -> Result:
    return Result(stdout_bytes=b"", stderr_bytes=why.encode(), end=End("exited", exit_code=code), exec_id="")
