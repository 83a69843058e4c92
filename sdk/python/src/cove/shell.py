"""A shell that keeps its directory, variables and functions from one command to the next."""

from __future__ import annotations

import secrets
import shlex
import time
from typing import Optional

from ._values import Seconds, to_seconds
from .errors import DeadlineExceeded, FailedPrecondition
from .models import End, Output, Result
from .process import AsyncProcess, Process

# Interactive, for then an interrupt ends the whole command and not the shell, as
# at a terminal. It prompts nobody.
SHELL = (
    "/bin/sh",
    "-c",
    "unset ENV; export PS1= PS2=; command -v bash >/dev/null || exec sh -i;"
    " exec bash --noprofile --norc --noediting -i",
)

# "!" is not special; what the shell says of having no terminal belongs to this.
_START = "set +H 2>/dev/null; unset PS1 PS2; PS1= PS2="

# How long a command that was interrupted at its timeout has before its shell is
# killed with it.
_GRACE = 2.0


class _Run:
    """One command in a shell, without I/O: what to write, and which of the output is its."""

    def __init__(self, command: str, exec_id: str) -> None:
        self.exec_id = exec_id
        mark = "cove-" + secrets.token_hex(16)
        self._end = f"\n{mark} ".encode()  # of either stream; behind it the exit code
        self._out, self._err = bytearray(), bytearray()
        self._out_end = self._err_end = -1
        self._began = time.monotonic()
        self.interrupted = False
        # "command" keeps a mistake in what is evaluated from ending a POSIX shell.
        self.script = (
            f"command eval {shlex.quote(command)} </dev/null\n"
            f"__cove_status=$?; printf '\\n{mark} %s\\n' $__cove_status; printf '\\n{mark} \\n' >&2;"
            " (exit $__cove_status)\n"
        )

    def take(self, output: Output) -> bool:
        """Whether that was all of it. Each byte is looked at once, however much there is."""
        is_err = output.stream == "stderr"
        buffer = self._err if is_err else self._out
        since = max(0, len(buffer) - len(self._end))
        buffer.extend(output.data)
        if is_err and self._err_end < 0:
            self._err_end = buffer.find(self._end, since)
        elif not is_err and self._out_end < 0:
            self._out_end = buffer.find(self._end, since)
        return self._err_end >= 0 and self._code() is not None

    def _code(self) -> Optional[int]:
        if self._out_end < 0:
            return None
        line, newline, _ = bytes(self._out[self._out_end + len(self._end) :]).partition(b"\n")
        return int(line) if newline else None

    def result(self, end: Optional[End]) -> Result:
        """end is the shell's own, if that has ended."""
        code = self._code()
        if self.interrupted:
            end = End("deadline", detail="the command had its time")
        elif code is not None:
            end = End("exited", exit_code=code)
        return Result(
            stdout_bytes=bytes(self._out if self._out_end < 0 else self._out[: self._out_end]),
            stderr_bytes=bytes(self._err if self._err_end < 0 else self._err[: self._err_end]),
            end=end or End("infra", detail="the shell ended without an answer"),
            exec_id=self.exec_id,
            duration=time.monotonic() - self._began,
        )


def _ended(end: Optional[End]) -> FailedPrecondition:
    return FailedPrecondition(f"the shell has ended: {end}", hint="sb.shell() opens another")


class Shell:
    """A shell in a sandbox, from Sandbox.shell(). One command at a time; for one thread at a time.

    >>> with sb.shell() as sh:
    ...     sh.run("cd /tmp && export A=1")
    ...     sh.run('echo "$PWD $A"').stdout
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.run(_START)

    def run(self, command: str, *, timeout: Optional[Seconds] = None) -> Result:
        """Run a command and return its output and exit code.

        At the timeout it is interrupted (SIGINT) and end.cause is "deadline"; what it
        printed is kept, and so is the shell, unless the command does not end: then
        both are killed. "exit" ends the shell; the result is then of the shell.
        """
        if self.process.end is not None:
            raise _ended(self.process.end)
        run = _Run(command, self.process.exec_id)
        self.process.write(run.script)
        until = None if timeout is None else time.monotonic() + to_seconds("timeout", timeout)
        while True:
            try:
                output = self.process.read(None if until is None else max(until - time.monotonic(), 0.001))
            except DeadlineExceeded:
                if run.interrupted:
                    self.process.kill()
                    until = None
                else:
                    run.interrupted, until = True, time.monotonic() + _GRACE
                    self.process.signal("SIGINT")
                continue
            if output is None or run.take(output):
                return run.result(self.process.end)

    def close(self) -> None:
        """End the shell and what it runs."""
        self.process.kill()
        self.process.close()

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncShell:
    """A shell in a sandbox, from AsyncSandbox.shell(); see Shell."""

    def __init__(self, process: AsyncProcess) -> None:
        self.process = process

    async def _open(self) -> AsyncShell:
        await self.run(_START)
        return self

    async def run(self, command: str, *, timeout: Optional[Seconds] = None) -> Result:
        """Run a command and return its output and exit code; see Shell.run."""
        if self.process.end is not None:
            raise _ended(self.process.end)
        run = _Run(command, self.process.exec_id)
        await self.process.write(run.script)
        until = None if timeout is None else time.monotonic() + to_seconds("timeout", timeout)
        while True:
            try:
                output = await self.process.read(None if until is None else max(until - time.monotonic(), 0.001))
            except DeadlineExceeded:
                if run.interrupted:
                    await self.process.kill()
                    until = None
                else:
                    run.interrupted, until = True, time.monotonic() + _GRACE
                    await self.process.signal("SIGINT")
                continue
            if output is None or run.take(output):
                return run.result(self.process.end)

    async def close(self) -> None:
        """End the shell and what it runs."""
        await self.process.kill()
        await self.process.close()

    async def __aenter__(self) -> AsyncShell:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
