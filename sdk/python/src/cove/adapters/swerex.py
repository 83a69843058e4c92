"""SWE-ReX: a deployment, so that SWE-agent and mini-swe-agent's swerex environments run on Cove.

    deployment = CoveDeployment(image="base")
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="ls"))

No server runs inside and nothing is installed there: sessions are shells on
terminals of the sandbox, driven from here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shlex
import time
from typing import Any, Optional

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NoExitCodeError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    Action,
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionResponse,
    CloseResponse,
    CloseSessionRequest,
    CloseSessionResponse,
    Command,
    CommandResponse,
    CreateBashSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    IsAliveResponse,
    Observation,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

from .. import AsyncProcess, AsyncSandbox, CoveError, DeadlineExceeded

_CONTROL = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")


class _Session:
    """A bash on a terminal. Its prompt is a word nobody can know, with the exit code behind it."""

    def __init__(self, sandbox: AsyncSandbox, process: AsyncProcess) -> None:
        self._sandbox, self._process = sandbox, process
        word = secrets.token_hex(16)
        self._prompt = re.compile(rf"{word} (\d+) \Z|{word} (\d+) ")
        self._script = f"/tmp/.cove-rex-{word[:8]}"
        # The word is not in what is typed: the terminal shows that until it is told not to.
        self._begin = f"stty -echo -onlcr; PS0= PS2=; PS1='{word[:16]}''{word[16:]} $? '\n"
        self._seen = ""

    async def start(self, sources: list[str], timeout: float) -> str:
        await self._process.write(self._begin)
        await self._until([], timeout, self._begin)
        said = ""
        for path in sources:
            said += (await self.run(BashAction(command=f"source {shlex.quote(path)}", check="ignore"))).output
            await self._process.write(self._begin)  # what was sourced may have changed the prompt
            await self._until([], timeout, path)
        return said

    async def _until(self, expect: list[str], timeout: Optional[float], what: str) -> tuple[str, str, Optional[int]]:
        """What is printed until one of expect or the prompt, which of them came, and the exit code."""
        patterns = [(word, re.compile(word)) for word in expect]
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            found = [(m.start(), m, word) for word, p in patterns if (m := p.search(self._seen))]
            if m := self._prompt.search(self._seen):
                found.append((m.start(), m, ""))
            if found:
                at, match, word = min(found, key=lambda f: f[0])
                before, self._seen = self._seen[:at], self._seen[match.end() :]
                code = int(next(filter(None, match.groups()))) if not word else None
                return _CONTROL.sub("", before).replace("\r\n", "\n"), word, code
            try:
                output = await self._process.read(None if until is None else max(until - time.monotonic(), 0.001))
            except DeadlineExceeded as e:
                raise CommandTimeoutError(f"timeout after {timeout} seconds while running command {what!r}") from e
            if output is None:
                raise NoExitCodeError(f"the shell ended ({self._process.end}) while running command {what!r}")
            self._seen += output.data.decode("utf-8", "backslashreplace")

    async def run(self, action: BashAction) -> BashObservation:
        if action.is_interactive_command or action.is_interactive_quit:
            await self._process.write(action.command + "\n")
            output, word, code = await self._until(action.expect, action.timeout, action.command)
            return BashObservation(output=output.strip(), exit_code=0 if code is None else code, expect_string=word)
        # By a file: a line of a terminal holds 4,096 bytes, and a command may have many lines.
        await self._sandbox.files.write(self._script, action.command)
        checked = await self._sandbox.exec(["bash", "-n", self._script])
        if not checked.ok:
            raise BashIncorrectSyntaxError(
                f"bash does not take the command {action.command!r}: {checked.stderr}",
                extra_info={"bash_stdout": checked.stdout, "bash_stderr": checked.stderr},
            )
        await self._process.write(f". {self._script}\n")
        output, word, code = await self._until(action.expect, action.timeout, action.command)
        if action.check == "ignore":
            code = None
        elif action.check == "raise" and not word and code != 0:
            msg = f"Command {action.command!r} failed with exit code {code}. Here is the output:\n{output!r}"
            raise NonZeroExitCodeError(f"{action.error_msg}: {msg}" if action.error_msg else msg)
        return BashObservation(output=output, exit_code=code, expect_string=word)

    async def interrupt(self, action: BashInterruptAction) -> BashObservation:
        for attempt in range(action.n_retry):
            await self._process.write("\x03")
            try:
                output, word, _ = await self._until(action.expect, action.timeout, "interrupt")
            except CommandTimeoutError:
                if attempt + 1 == action.n_retry:
                    raise
                continue
            return BashObservation(output=output.strip(), exit_code=0, expect_string=word)
        raise CommandTimeoutError("n_retry is 0")

    async def close(self) -> None:
        await self._process.kill()
        await self._process.close()


class CoveRuntime(AbstractRuntime):
    def __init__(self, sandbox: AsyncSandbox, *, logger: Optional[logging.Logger] = None) -> None:
        self.sandbox = sandbox
        self.logger = logger or logging.getLogger("rex-runtime")
        self._sessions: dict[str, _Session] = {}

    async def is_alive(self, *, timeout: Optional[float] = None) -> IsAliveResponse:
        try:
            info = await self.sandbox.info()
        except CoveError as e:
            return IsAliveResponse(is_alive=False, message=str(e))
        return IsAliveResponse(is_alive=info.end is None, message="" if info.end is None else str(info.end))

    async def create_session(self, request: CreateSessionRequest) -> CreateSessionResponse:
        if request.session in self._sessions:
            raise SessionExistsError(f"session {request.session} already exists")
        process = await self.sandbox.start(["bash", "--noediting"], pty=(24, 200))
        session = _Session(self.sandbox, process)
        try:
            # SWE-ReX allows one second, for a shell of its own machine.
            output = await session.start(request.startup_source, max(request.startup_timeout, 10))
        except BaseException:
            await session.close()
            raise
        self._sessions[request.session] = session
        return CreateBashSessionResponse(output=output)

    def _session(self, name: str) -> _Session:
        if name not in self._sessions:
            raise SessionDoesNotExistError(f"session {name!r} does not exist")
        return self._sessions[name]

    async def run_in_session(self, action: Action) -> Observation:
        session = self._session(action.session)
        if isinstance(action, BashInterruptAction):
            return await session.interrupt(action)
        return await session.run(action)

    async def close_session(self, request: CloseSessionRequest) -> CloseSessionResponse:
        await self._session(request.session).close()
        del self._sessions[request.session]
        return CloseBashSessionResponse()

    async def execute(self, command: Command) -> CommandResponse:
        cmd = command.command
        if command.shell:
            cmd = cmd if isinstance(cmd, str) else shlex.join(cmd)
        elif isinstance(cmd, str):
            cmd = [cmd]  # as subprocess.run takes it
        both: list[str] = []
        one = both.append if command.merge_output_streams else None
        result = await self.sandbox.exec(
            cmd, cwd=command.cwd, env=command.env, timeout=command.timeout, on_stdout=one, on_stderr=one
        )
        if result.end.cause == "deadline":
            raise CommandTimeoutError(f"Timeout ({command.timeout}s) exceeded while running command")
        out, err = ("".join(both), "") if command.merge_output_streams else (result.stdout, result.stderr)
        if command.check and not result.ok:
            msg = f"Command {cmd!r} failed with exit code {result.exit_code}. Stdout:\n{out!r}\nStderr:\n{err!r}"
            raise NonZeroExitCodeError(f"{command.error_msg}: {msg}" if command.error_msg else msg)
        return CommandResponse(stdout=out, stderr=err, exit_code=result.exit_code)

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        content = await self.sandbox.files.read(
            request.path, encoding=request.encoding or "utf-8", errors=request.errors or "strict"
        )
        return ReadFileResponse(content=content)

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        await self.sandbox.files.write(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        if await asyncio.to_thread(os.path.isdir, request.source_path):
            await self.sandbox.files.upload_dir(request.source_path, request.target_path)
        else:
            await self.sandbox.files.upload(request.source_path, request.target_path)
        return UploadResponse()

    async def close(self) -> CloseResponse:
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()
        return CloseResponse()


class CoveDeployment(AbstractDeployment):
    """What Sandbox.create takes; the sandbox is made by start() and ends with stop()."""

    def __init__(self, image: Optional[str] = None, *, logger: Optional[logging.Logger] = None, **create: Any) -> None:
        self.logger = logger or logging.getLogger("rex-deploy")
        self._create = {"image": image, **create}
        self._runtime: Optional[CoveRuntime] = None
        self._hooks = CombinedDeploymentHook()

    def add_hook(self, hook: DeploymentHook) -> None:
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: Optional[float] = None) -> IsAliveResponse:
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self, *args: Any, **kwargs: Any) -> None:
        if self._runtime is not None:
            return
        self._hooks.on_custom_step("Creating a sandbox")
        self._runtime = CoveRuntime(await AsyncSandbox.create(**self._create), logger=self.logger)

    async def stop(self, *args: Any, **kwargs: Any) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.sandbox.kill()

    @property
    def runtime(self) -> CoveRuntime:
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime
