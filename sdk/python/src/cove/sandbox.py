"""Sandboxes: isolated Linux machines that run code nobody has read."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Optional, Union, cast

from . import _calls, _lease, _port_calls, _state_calls, grade
from ._calls import Command, Created
from ._opening import opening
from ._repl import Budget
from ._session import ProcessSession
from ._stdin import AsyncStdin, Stdin, split
from ._values import Seconds, Size
from .callback import AsyncCallback, AsyncHandler, Callback, Handler
from .changes import Deterministic, Diff
from .client import AsyncClient, Client, default_async_client, default_client
from .code import AsyncInterpreter, Cell, CodeContext, Execution, Interpreter, OnError, OnResult, OnText
from .errors import CoveError, SandboxEnded
from .files import AsyncFiles, Files
from .grade import Tests, Verdict
from .models import End, ProcessList, Result, SandboxInfo, Stats
from .network import Flow, NetworkLike, NetworkStatus
from .port import AsyncPort, Port
from .process import AsyncListener, AsyncProcess, AsyncStdinPump, Listener, Process, StdinPump
from .recording import RecordingState
from .repl import AsyncModel, AsyncRepl, AsyncSolver, Model, Repl, Solver
from .replay import RecordLike, Replay
from .shell import SHELL, AsyncShell, Shell
from .snapshot import AsyncSnapshot, OnProgress, Snapshot, Taking
from .state import Forks, SnapshotInfo, Tree
from .template import AsyncTemplate, Template
from .types import IfBusy, OnIdle, StateName
from .volume import Mounts

User = Union[str, int]
TermSize = tuple[int, int]
"""Rows and columns."""


class _SandboxState:
    """What a sandbox object knows without asking."""

    def __init__(self, info: SandboxInfo, node_time: float = 0.0) -> None:
        self.last_info = info
        """The sandbox as this object last saw it; info() asks again."""
        self.node_time = node_time
        """Seconds the node itself took for the create or the latest reset, restore or resume made by this object."""

    @property
    def id(self) -> str:
        return self.last_info.id

    @property
    def standby(self) -> str:
        """hot (frozen in memory), cold (on disk) or, awake, empty; as last seen. info() asks and does not wake it."""
        return self.last_info.standby

    @property
    def parent(self) -> str:
        """The snapshot or sandbox it came from, or the snapshot last taken of it; as last seen. Empty: an image."""
        return self.last_info.parent

    def _created(self, created: Created) -> SandboxInfo:
        self.last_info, self.node_time = created.info, created.node_time
        return created.info

    def _seen(self, info: SandboxInfo) -> SandboxInfo:
        self.last_info = info
        return info

    def __getstate__(self) -> dict[str, Any]:
        """Pickled, it is the same sandbox elsewhere; what this process serves for it stays here. See Client."""
        return {**self.__dict__, "_served": []}

    def __repr__(self) -> str:
        info = self.last_info
        source = info.snapshot or info.template or info.image
        return f"<{type(self).__name__} {self.id} {source} {info.standby or info.state}>"


def _alive(info: SandboxInfo) -> SandboxInfo:
    if info.end is not None or info.state == "ended":
        raise SandboxEnded(f"sandbox {info.id} has ended: {info.end}", hint="create a new one")
    return info


def _end(info: SandboxInfo) -> End:
    return info.end if info.end is not None else End(cause="")


class Sandbox(_SandboxState):
    """A sandbox. As a context manager it is killed on the way out.

    >>> with Sandbox.create() as sb:
    ...     print(sb.exec("uname -a").stdout)
    """

    def __init__(self, client: Client, info: SandboxInfo, node_time: float = 0.0) -> None:
        """Use create(), connect() or list()."""
        super().__init__(info, node_time)
        self._client = client
        self.files = Files(client, info.id)
        self._served: builtins.list[Callback] = []

    @classmethod
    def create(
        cls,
        image: Optional[str] = None,
        *,
        snapshot: Optional[Union[Snapshot, str]] = None,
        template: Optional[Union[Template, str]] = None,
        cpu: Optional[float] = None,
        memory: Optional[Size] = None,
        memory_limit: Optional[Size] = None,
        disk: Optional[Size] = None,
        pids: Optional[int] = None,
        timeout: Optional[Seconds] = None,
        idle_timeout: Optional[Seconds] = None,
        on_idle: Optional[OnIdle] = None,
        on_timeout: Optional[OnIdle] = None,
        env: Optional[Mapping[str, str]] = None,
        labels: Optional[Mapping[str, str]] = None,
        volumes: Optional[Mounts] = None,
        network: Optional[NetworkLike] = None,
        secrets: Optional[Sequence[str]] = None,
        record: Optional[RecordLike] = None,
        replay: Optional[Union[RecordingState, Replay, str]] = None,
        reuse: Optional[str] = None,
        deterministic: Union[bool, Deterministic, None] = None,
        keep: Optional[bool] = None,
        idempotency_key: Optional[str] = None,
        create_timeout: Optional[float] = None,
        client: Optional[Client] = None,
    ) -> Sandbox:
        """Make a sandbox; it is running when this returns.

        It starts from an image (default "base"), a snapshot or a template, by
        object, name or id. memory is how large it may be; above memory_limit the
        largest process ends with oom (default: the same), and with both given the
        memory is reserved. It ends with this process, or
        five minutes after that was killed, unless keep=True: then it lives for
        timeout, or what the server gives it. timeout: seconds it lives (0: no limit)
        before on_timeout happens; idle_timeout: seconds it may do nothing before
        on_idle happens. Both are "kill" (the default) or "pause", out of which any
        call wakes it. volumes: by
        path inside, a volume or its name, or (volume, mode) with the mode "rw"
        (the default, alone), "ro" or "shared". network: "none", "public", rules
        such as ["allow pypi.org", "allow *.pythonhosted.org tcp 443"], or a
        Network; without, the server's default. secrets: names of those its
        requests leave with; it holds their placeholders only. record: True or a
        name, under which all its HTTP and HTTPS is kept; replay: a recording, its
        name or id, or a Replay, that answers instead of the network. reuse: the name of a
        trust group, whose sandboxes may have one kernel one after another, reset in
        between: far cheaper, for those that need no wall between them. deterministic: True, or
        a Deterministic with another clock or seed: what can be fixed is, so that the same
        commands see the same; info().not_fixed says what cannot. The same idempotency_key gives
        the same sandbox. create_timeout: seconds to wait while the server is full.
        """
        client = client or default_client()
        spec = _calls.sandbox_spec(
            image=image,
            snapshot=snapshot,
            template=template,
            cpu=cpu,
            memory=memory,
            memory_limit=memory_limit,
            disk=disk,
            pids=pids,
            timeout=timeout,
            idle_timeout=idle_timeout,
            on_idle=on_idle,
            on_timeout=on_timeout,
            env=env,
            labels=labels,
            volumes=volumes,
            network=network,
            secrets=secrets,
            record=record,
            replay=replay,
            reuse=reuse,
            deterministic=deterministic,
        )
        created = _lease.create(client, spec, idempotency_key, create_timeout, keep)
        return cls(client, created.info, created.node_time)

    @classmethod
    def connect(cls, id: str, *, client: Optional[Client] = None) -> Sandbox:
        """A sandbox that lives; SandboxEnded if it does not any more."""
        client = client or default_client()
        return cls(client, _alive(client.call(_calls.get_sandbox(id))))

    @staticmethod
    def get_info(id: str, *, client: Optional[Client] = None) -> SandboxInfo:
        """What is known of a sandbox, ended or not."""
        return (client or default_client()).call(_calls.get_sandbox(id))

    @classmethod
    def list(
        cls,
        labels: Optional[Mapping[str, str]] = None,
        *,
        states: Optional[Sequence[StateName]] = None,
        page_size: int = 100,
        client: Optional[Client] = None,
    ) -> Iterator[Sandbox]:
        """Every sandbox that has all the labels, newest first; page by page as you iterate.

        states: creating, running, ending, ended; default is every one but ended.
        """
        client = client or default_client()
        token = ""
        while True:
            page = client.call(_calls.list_sandboxes(labels, states, page_size, token))
            for info in page.sandboxes:
                yield cls(client, info)
            token = page.next_token
            if not token:
                return

    @staticmethod
    def kill_by_label(labels: Mapping[str, str], *, client: Optional[Client] = None) -> builtins.list[str]:
        """End every live sandbox that has all the labels; their ids."""
        return (client or default_client()).call(_calls.kill_by_label(labels))

    def exec(
        self,
        cmd: Command,
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        user: Optional[User] = None,
        timeout: Optional[Seconds] = None,
        stdin: Optional[Stdin] = None,
        exec_id: Optional[str] = None,
        pty: Optional[TermSize] = None,
        on_stdout: Optional[Listener] = None,
        on_stderr: Optional[Listener] = None,
        kill_on_cancel: Optional[bool] = None,
    ) -> Result:
        """Run a command to its end: a str by the shell, a list as an argument vector.

        A non-zero exit does not raise. At the timeout the whole process tree is
        killed, what was printed is kept, and end.cause is "deadline". The same
        exec_id runs once: again, it returns the first run's result.

        A pause meanwhile freezes the command, its timeout too; the logger "cove" warns, and this
        waits on for the sandbox to wake, with a timeout for that long at most: then it raises
        DeadlineExceeded with reason "asleep".

        Ctrl-C here kills the command, and so does an on_stdout or on_stderr that
        raises, which this raises too; a process that dies leaves it running.
        kill_on_cancel=True has the server kill it then too, after 30 s; False
        leaves it running in all of these cases.
        """
        input, source = split(stdin)
        process = self._process(cmd, exec_id, cwd, env, user, timeout, input, source is not None, pty)
        process._kill_on_cancel(kill_on_cancel)
        with process:
            if source is None:
                return process.wait(on_stdout=on_stdout, on_stderr=on_stderr)
            pump = StdinPump(process._open(), cast("Iterator[bytes]", source))
            try:
                result = process.wait(on_stdout=on_stdout, on_stderr=on_stderr)
            except BaseException:
                pump.abandon()
                raise
            pump.finish()
            return result

    def start(
        self,
        cmd: Command,
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        user: Optional[User] = None,
        timeout: Optional[Seconds] = None,
        stdin: Union[bool, str, bytes] = False,
        exec_id: Optional[str] = None,
        pty: Optional[TermSize] = None,
    ) -> Process:
        """Start a process and return when it exists.

        stdin=True keeps stdin open for write(); text or bytes are the whole of
        it. pty=(rows, cols) runs it on a terminal, which can always be written to.
        """
        input, keep_open = _start_stdin(stdin, pty)
        return self._process(cmd, exec_id, cwd, env, user, timeout, input, keep_open, pty)._open()

    def attach(self, exec_id: str, offset: int = 0) -> Process:
        """Read a process that was started before, from a byte of its output on."""
        return Process(self._client, ProcessSession(self.id, exec_id, None, offset))._open()

    def _process(
        self,
        cmd: Command,
        exec_id: Optional[str],
        cwd: Optional[str],
        env: Optional[Mapping[str, str]],
        user: Optional[User],
        timeout: Optional[Seconds],
        input: Optional[bytes],
        open_stdin: bool,
        pty: Optional[TermSize],
    ) -> Process:
        spec = _calls.process_spec(
            cmd,
            exec_id=exec_id,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            input=input,
            open_stdin=open_stdin,
            pty=pty,
        )
        return Process(self._client, ProcessSession(self.id, spec["execId"], spec))

    def processes(self) -> ProcessList:
        """Processes started through the API, and every task inside."""
        return self._client.call(_calls.list_processes(self.id))

    def reset(self) -> SandboxInfo:
        """Back to a pristine image: no file, process, socket or variable of before is left."""
        return self._created(self._client.call(_calls.reset(self.id)))

    def snapshot(
        self,
        *,
        memory: bool = True,
        path: Optional[str] = None,
        name: Optional[str] = None,
        labels: Optional[Mapping[str, str]] = None,
        stop: bool = False,
        ttl: Optional[Seconds] = None,
        on_progress: Optional[OnProgress] = None,
    ) -> Snapshot:
        """Freeze what it is; the sandbox stands still for milliseconds and goes on.

        memory: processes, memory and files; without it, files alone. path: one
        directory alone, for other sandboxes. name: unique; one in use moves to
        the new snapshot. stop: end the sandbox with it. ttl: delete the snapshot
        after that many seconds, a minute at least. It is complete when this
        returns, and taken once, however often the connection breaks.
        """
        message = _state_calls.new_snapshot(
            self.id, memory=memory, path=path, name=name, labels=labels, stop=stop, ttl=ttl
        )

        def attempt() -> tuple[SnapshotInfo, bool, float]:
            taking = Taking(self.id, on_progress)
            self._client.follow("Snapshots/Create", message, taking.receive)
            return taking.result()

        return Snapshot(self._client, *self._client.retrying(attempt, repeatable=True))

    def grade(
        self,
        tests: Optional[Tests] = None,
        command: Optional[Command] = None,
        artifacts: Sequence[str] = (),
        *,
        timeout: Optional[Seconds] = None,
        results: Optional[str] = None,
        separate: bool = False,
        expected: Optional[Sequence[str]] = None,
        image: Optional[str] = None,
        snapshot: Optional[Union[Snapshot, str]] = None,
        tests_path: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        cwd: Optional[str] = None,
        cpu: Optional[float] = None,
        memory: Optional[Size] = None,
        disk: Optional[Size] = None,
        stop: bool = False,
        wait: bool = True,
        labels: Optional[Mapping[str, str]] = None,
        idempotency_key: Optional[str] = None,
    ) -> Verdict:
        """What the work is worth, decided in a clean machine that has only the artifacts of this one.

        tests: a local directory, or a directory snapshot; the grader has it at
        tests_path (/tests), read-only, this sandbox never. artifacts: absolute
        paths that are carried over. command: what judges; pytest (the default)
        is run by Cove itself, which tells a run that was cut short or tampered
        with. results: where the reward comes from: "exit", "pytest", and with
        separate=True "reward", "junit" or "pytest-json". separate: the command is
        root in the grader and runs the work by $COVE_JUDGED, as another user, so
        that nothing the work does can touch the verdict. expected: ids of tests
        that must have passed. image, snapshot: what to grade on instead of this
        sandbox's image. timeout: of the command. stop: end this sandbox once it
        is graded. wait=False: the verdict is still "running"; Verdict.wait().

        The verdict's reward is None where there is none: a fault of the grader
        or of the machine is never a 0.
        """
        call = grade.create(
            self.id,
            None if tests is None else grade.send_tests(self._client, tests),
            command,
            artifacts,
            timeout=timeout,
            results=results,
            separate=separate,
            expected=expected,
            image=image,
            snapshot=snapshot,
            tests_path=tests_path,
            env=env,
            cwd=cwd,
            cpu=cpu,
            memory=memory,
            disk=disk,
            stop=stop,
            labels=labels,
            idempotency_key=idempotency_key,
        )
        verdict = self._client.call(call)
        return verdict.wait(client=self._client) if wait else verdict

    def fork(
        self,
        n: int,
        *,
        min_ready: Optional[int] = None,
        labels: Optional[Mapping[str, str]] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[Seconds] = None,
        keep: Optional[bool] = None,
    ) -> Forks[Sandbox]:
        """n children that go on from here, each for itself; the sandbox goes on too.

        Those that are ready come back; with fewer than min_ready (default: all
        of them) none is left and this raises. labels and env go over the
        parent's, env for processes started later; timeout and keep as in create.
        One that is cancelled or interrupted leaves none.
        """
        lease = _lease.fork_lease(self._client, keep, self.last_info.run)
        call = _state_calls.fork(
            {"id": self.id}, n, min_ready=min_ready, labels=labels, env=env, timeout=timeout, lease=lease
        )
        forked = _lease.fork(self._client, call)
        return Forks([Sandbox(self._client, info) for info in forked.ready], forked.errors, forked.paused)

    def restore(self, snapshot: Union[Snapshot, str]) -> SandboxInfo:
        """Back to a snapshot, in place: it keeps its id. If it fails, the sandbox is as it was."""
        return self._created(self._client.call(_state_calls.restore(self.id, snapshot)))

    def pause(self, *, cold: bool = False, if_busy: IfBusy = "freeze") -> SandboxInfo:
        """Freeze it in memory or, with cold, put it on disk. Any call that needs it wakes it and takes that longer.

        Who waits for a process of it is told (Process.standby). if_busy="refuse" raises
        FailedPrecondition with reason "busy" instead, and names the processes that run.
        """
        return self._seen(self._client.call(_state_calls.pause(self.id, cold, if_busy)))

    def resume(self) -> SandboxInfo:
        """Wake it; it runs when this returns."""
        return self._created(self._client.call(_state_calls.resume(self.id)))

    def url(self, port: int, path: str = "", *, ttl: Optional[Seconds] = None) -> str:
        """Where a port, or a path there, is reached from outside, with a token that opens it for ttl seconds
        (default: an hour). A path put behind it would end up behind the token: give it here, or use port()."""
        answer = self._client.call(_port_calls.url(self.id, port, ttl))
        return _port_calls.whole(self._client.url, answer, path)

    def port(self, port: int, *, ttl: Optional[Seconds] = None) -> Port:
        """A port as any HTTP client reaches it: .url, .headers with the token, and .fetch(path)."""
        return Port(self._client, port, self._client.call(_port_calls.url(self.id, port, ttl)))

    def shell(
        self,
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        user: Optional[User] = None,
    ) -> Shell:
        """A shell that keeps its directory, variables and functions between run()s; with a block ends it."""
        process = self.start([*SHELL], cwd=cwd, env=env, user=user, stdin=True)
        return Shell(process)

    def repl(
        self,
        *,
        llm: Optional[Model] = None,
        solver: Optional[Solver] = None,
        depth: int = 1,
        budget: Optional[Budget] = None,
        output_limit: int = 20_000,
        python: str = "python3",
    ) -> Repl:
        """A Python session that keeps its variables between run()s; a with block ends it.

        llm(prompt, **options) is a function here that code inside calls as llm(prompt) and
        llm_batch(prompts), with all network off too. solver(repl, prompt) works on what code
        inside gives to rlm(prompt, context): it gets a session of its own, whose context is a
        variable there, and its result is the call's; depth is how many levels there may be. budget
        bounds all calls together. Of each stream of a run the first and last output_limit/2 bytes are kept.
        """
        return Repl(self, llm, solver, depth, budget or Budget(), output_limit)._open(python)

    def set_public(self, port: int, public: bool = True) -> None:
        """Let anyone who knows its address reach a port, without a token; or no longer."""
        self._client.call(_port_calls.set_public(self.id, port, public))

    def wait_port(self, port: int, timeout: Seconds = 60) -> None:
        """Return when something inside listens on a port; DeadlineExceeded after timeout seconds."""
        self._client.call(_port_calls.wait_ready(self.id, port=port, command=None, timeout=timeout))

    def wait_command(self, command: str, timeout: Seconds = 60) -> None:
        """Return when a shell command inside has exited with 0; DeadlineExceeded after timeout seconds."""
        self._client.call(_port_calls.wait_ready(self.id, port=None, command=command, timeout=timeout))

    def run_code(
        self,
        code: str,
        *,
        language: Optional[str] = None,
        context: Optional[Union[CodeContext, str]] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[Seconds] = None,
        on_stdout: Optional[OnText] = None,
        on_stderr: Optional[OnText] = None,
        on_result: Optional[OnResult] = None,
        on_error: Optional[OnError] = None,
    ) -> Execution:
        """Run code in a kernel, which keeps its variables for the next.

        The sandbox needs a code interpreter: create it with
        template="code-interpreter-v1", which `cove code setup` makes. Without a
        context, each language has one of its own; executions in one context
        queue. An error that the code raises is in the result's error, and raised
        only by its check(). After timeout seconds, or when this is interrupted,
        so is the kernel: DeadlineExceeded, and its variables are still there.
        """
        cell = Cell(on_stdout, on_stderr, on_result, on_error)
        return Interpreter(self._client, self.id).run(cell, code, language, context, env, timeout)

    def create_code_context(self, language: Optional[str] = None, *, cwd: Optional[str] = None) -> CodeContext:
        """Start a kernel of its own for run_code: python (the default), javascript, typescript or bash."""
        return Interpreter(self._client, self.id).create_context(language, cwd)

    def list_code_contexts(self) -> builtins.list[CodeContext]:
        """Those there are: the languages' own first, then those that were created."""
        return Interpreter(self._client, self.id).contexts()

    def restart_code_context(self, context: Union[CodeContext, str]) -> None:
        """Give a context a new kernel. Its variables are gone, and what runs in it ends."""
        Interpreter(self._client, self.id).restart(context)

    def remove_code_context(self, context: Union[CodeContext, str]) -> None:
        """End a context."""
        Interpreter(self._client, self.id).remove(context)

    def serve(
        self,
        name: str,
        handler: Handler,
        *,
        concurrency: int = 32,
        port: Optional[int] = None,
        replace: bool = False,
    ) -> Callback:
        """Have code inside call handler at http://cove.internal/NAME, without any network.

        handler(request) runs in up to concurrency threads and returns str, bytes, a dict
        or list (JSON), a Response, or an iterator of str or bytes, which is
        sent as it comes. What a request holds was written by code inside: treat
        it as input from a stranger. An exception is 500 inside, without its
        text. More requests wait. replace takes the
        name over from another process; port is for an image that needs 80 on
        all addresses for itself (FailedPrecondition says so). Ends with
        close(), a with block, or the sandbox.
        """
        served = Callback(self._client, self.id, name, handler, port, replace, concurrency)._open()
        self._served.append(served)
        return served

    def tree(self) -> Tree:
        """Every snapshot and sandbox it hangs together with; print() draws it."""
        return self._client.call(_state_calls.tree(self.id))

    def kill(self) -> End:
        """End the sandbox; nothing of it is left on return. An ended one answers with its first end."""
        self._stop_serving()
        return _end(self._seen(self._client.call(_calls.kill(self.id))))

    def _stop_serving(self) -> None:
        while self._served:
            self._served.pop().close()

    def set_timeout(self, timeout: Optional[Seconds]) -> SandboxInfo:
        """Let it live for so many seconds from now; None or 0: until it is killed."""
        return self._seen(self._client.call(_calls.set_timeout(self.id, timeout)))

    def keep(self) -> SandboxInfo:
        """Let it outlive the process that made it: no lease ends it any more, but the server's default timeout may."""
        return self._seen(self._client.call(_calls.set_lease(self.id, "")))

    def set_network(self, network: NetworkLike) -> int:
        """Put another network policy in force and return its generation: nothing that it denies is open any more."""
        return self._client.call(_calls.set_network(self.id, network))

    def set_secrets(self, secrets: Sequence[str]) -> None:
        """Say which secrets its requests leave with from now on, by name; [] is none."""
        self._client.call(_calls.set_secrets(self.id, secrets))

    def network(self) -> NetworkStatus:
        """The network policy in force, and how much it allowed and denied."""
        return self._client.call(_calls.get_network(self.id, 0))

    def flows(self, last: int = 100) -> Sequence[Flow]:
        """What the sandbox tried to reach last, oldest first; at most 512."""
        return (self._client.call(_calls.get_network(self.id, last))).flows

    def diff(self, since: Union[Snapshot, str] = "create", *, hash: bool = False, limit: Optional[int] = None) -> Diff:
        """What changed in its files since "create" (or "reset": the same), "image", or a filesystem snapshot.

        hash=True: with the SHA-256 of files. limit: how many changes are listed (1000 unless
        told, at most 100,000); they are all counted. Volumes and times are not compared.
        """
        return self._client.call(_calls.diff(self.id, _calls.ref("since", since), hash, limit))

    def stats(self) -> Stats:
        return self._client.call(_calls.stats(self.id))

    def info(self) -> SandboxInfo:
        return self._seen(self._client.call(_calls.get_sandbox(self.id)))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.kill()
            return
        with contextlib.suppress(CoveError):  # the error under way tells more
            self.kill()


class AsyncSandbox(_SandboxState):
    """A sandbox for asyncio. As an async context manager it is killed on the way out.

    >>> async with AsyncSandbox.create() as sb:
    ...     print((await sb.exec("uname -a")).stdout)
    """

    def __init__(self, client: AsyncClient, info: SandboxInfo, node_time: float = 0.0) -> None:
        """Use create(), connect() or list()."""
        super().__init__(info, node_time)
        self._client = client
        self.files = AsyncFiles(client, info.id)
        self._served: builtins.list[AsyncCallback] = []

    @classmethod
    @opening
    async def create(
        cls,
        image: Optional[str] = None,
        *,
        snapshot: Optional[Union[AsyncSnapshot, str]] = None,
        template: Optional[Union[AsyncTemplate, str]] = None,
        cpu: Optional[float] = None,
        memory: Optional[Size] = None,
        memory_limit: Optional[Size] = None,
        disk: Optional[Size] = None,
        pids: Optional[int] = None,
        timeout: Optional[Seconds] = None,
        idle_timeout: Optional[Seconds] = None,
        on_idle: Optional[OnIdle] = None,
        on_timeout: Optional[OnIdle] = None,
        env: Optional[Mapping[str, str]] = None,
        labels: Optional[Mapping[str, str]] = None,
        volumes: Optional[Mounts] = None,
        network: Optional[NetworkLike] = None,
        secrets: Optional[Sequence[str]] = None,
        record: Optional[RecordLike] = None,
        replay: Optional[Union[RecordingState, Replay, str]] = None,
        reuse: Optional[str] = None,
        deterministic: Union[bool, Deterministic, None] = None,
        keep: Optional[bool] = None,
        idempotency_key: Optional[str] = None,
        create_timeout: Optional[float] = None,
        client: Optional[AsyncClient] = None,
    ) -> AsyncSandbox:
        """Make a sandbox; see Sandbox.create."""
        client = client or default_async_client()
        spec = _calls.sandbox_spec(
            image=image,
            snapshot=snapshot,
            template=template,
            cpu=cpu,
            memory=memory,
            memory_limit=memory_limit,
            disk=disk,
            pids=pids,
            timeout=timeout,
            idle_timeout=idle_timeout,
            on_idle=on_idle,
            on_timeout=on_timeout,
            env=env,
            labels=labels,
            volumes=volumes,
            network=network,
            secrets=secrets,
            record=record,
            replay=replay,
            reuse=reuse,
            deterministic=deterministic,
        )
        created = await _lease.async_create(client, spec, idempotency_key, create_timeout, keep)
        return cls(client, created.info, created.node_time)

    @classmethod
    async def connect(cls, id: str, *, client: Optional[AsyncClient] = None) -> AsyncSandbox:
        """A sandbox that lives; SandboxEnded if it does not any more."""
        client = client or default_async_client()
        return cls(client, _alive(await client.call(_calls.get_sandbox(id))))

    @staticmethod
    async def get_info(id: str, *, client: Optional[AsyncClient] = None) -> SandboxInfo:
        """What is known of a sandbox, ended or not."""
        return await (client or default_async_client()).call(_calls.get_sandbox(id))

    @classmethod
    async def list(
        cls,
        labels: Optional[Mapping[str, str]] = None,
        *,
        states: Optional[Sequence[StateName]] = None,
        page_size: int = 100,
        client: Optional[AsyncClient] = None,
    ) -> AsyncIterator[AsyncSandbox]:
        """Every sandbox that has all the labels, newest first; see Sandbox.list."""
        client = client or default_async_client()
        token = ""
        while True:
            page = await client.call(_calls.list_sandboxes(labels, states, page_size, token))
            for info in page.sandboxes:
                yield cls(client, info)
            token = page.next_token
            if not token:
                return

    @staticmethod
    async def kill_by_label(labels: Mapping[str, str], *, client: Optional[AsyncClient] = None) -> builtins.list[str]:
        """End every live sandbox that has all the labels; their ids."""
        return await (client or default_async_client()).call(_calls.kill_by_label(labels))

    async def exec(
        self,
        cmd: Command,
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        user: Optional[User] = None,
        timeout: Optional[Seconds] = None,
        stdin: Optional[AsyncStdin] = None,
        exec_id: Optional[str] = None,
        pty: Optional[TermSize] = None,
        on_stdout: Optional[AsyncListener] = None,
        on_stderr: Optional[AsyncListener] = None,
        kill_on_cancel: Optional[bool] = None,
    ) -> Result:
        """Run a command to its end; see Sandbox.exec.

        Cancelling it kills the command, unless kill_on_cancel=False.
        """
        input, source = split(stdin)
        process = self._process(cmd, exec_id, cwd, env, user, timeout, input, source is not None, pty)
        process._kill_on_cancel(kill_on_cancel)
        async with process:
            if source is None:
                return await process.wait(on_stdout=on_stdout, on_stderr=on_stderr)
            pump = AsyncStdinPump(await process._open(), source)
            try:
                result = await process.wait(on_stdout=on_stdout, on_stderr=on_stderr)
            except BaseException:
                pump.abandon()
                raise
            await pump.finish()
            return result

    async def start(
        self,
        cmd: Command,
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        user: Optional[User] = None,
        timeout: Optional[Seconds] = None,
        stdin: Union[bool, str, bytes] = False,
        exec_id: Optional[str] = None,
        pty: Optional[TermSize] = None,
    ) -> AsyncProcess:
        """Start a process and return when it exists; see Sandbox.start."""
        input, keep_open = _start_stdin(stdin, pty)
        return await self._process(cmd, exec_id, cwd, env, user, timeout, input, keep_open, pty)._open()

    async def attach(self, exec_id: str, offset: int = 0) -> AsyncProcess:
        """Read a process that was started before, from a byte of its output on."""
        return await AsyncProcess(self._client, ProcessSession(self.id, exec_id, None, offset))._open()

    def _process(
        self,
        cmd: Command,
        exec_id: Optional[str],
        cwd: Optional[str],
        env: Optional[Mapping[str, str]],
        user: Optional[User],
        timeout: Optional[Seconds],
        input: Optional[bytes],
        open_stdin: bool,
        pty: Optional[TermSize],
    ) -> AsyncProcess:
        spec = _calls.process_spec(
            cmd,
            exec_id=exec_id,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            input=input,
            open_stdin=open_stdin,
            pty=pty,
        )
        return AsyncProcess(self._client, ProcessSession(self.id, spec["execId"], spec))

    async def processes(self) -> ProcessList:
        """Processes started through the API, and every task inside."""
        return await self._client.call(_calls.list_processes(self.id))

    async def reset(self) -> SandboxInfo:
        """Back to a pristine image: no file, process, socket or variable of before is left."""
        return self._created(await self._client.call(_calls.reset(self.id)))

    async def snapshot(
        self,
        *,
        memory: bool = True,
        path: Optional[str] = None,
        name: Optional[str] = None,
        labels: Optional[Mapping[str, str]] = None,
        stop: bool = False,
        ttl: Optional[Seconds] = None,
        on_progress: Optional[OnProgress] = None,
    ) -> AsyncSnapshot:
        """Freeze what it is; see Sandbox.snapshot. on_progress may be a coroutine function."""
        message = _state_calls.new_snapshot(
            self.id, memory=memory, path=path, name=name, labels=labels, stop=stop, ttl=ttl
        )

        async def attempt() -> tuple[SnapshotInfo, bool, float]:
            taking = Taking(self.id, on_progress)
            await self._client.follow("Snapshots/Create", message, taking.receive)
            return taking.result()

        return AsyncSnapshot(self._client, *await self._client.retrying(attempt, repeatable=True))

    async def grade(
        self,
        tests: Optional[Tests] = None,
        command: Optional[Command] = None,
        artifacts: Sequence[str] = (),
        *,
        timeout: Optional[Seconds] = None,
        results: Optional[str] = None,
        separate: bool = False,
        expected: Optional[Sequence[str]] = None,
        image: Optional[str] = None,
        snapshot: Optional[Union[AsyncSnapshot, str]] = None,
        tests_path: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        cwd: Optional[str] = None,
        cpu: Optional[float] = None,
        memory: Optional[Size] = None,
        disk: Optional[Size] = None,
        stop: bool = False,
        wait: bool = True,
        labels: Optional[Mapping[str, str]] = None,
        idempotency_key: Optional[str] = None,
    ) -> Verdict:
        """What the work is worth; see Sandbox.grade."""
        call = grade.create(
            self.id,
            None if tests is None else await grade.async_send_tests(self._client, tests),
            command,
            artifacts,
            timeout=timeout,
            results=results,
            separate=separate,
            expected=expected,
            image=image,
            snapshot=snapshot,
            tests_path=tests_path,
            env=env,
            cwd=cwd,
            cpu=cpu,
            memory=memory,
            disk=disk,
            stop=stop,
            labels=labels,
            idempotency_key=idempotency_key,
        )
        verdict = await self._client.call(call)
        return await verdict.await_(client=self._client) if wait else verdict

    async def fork(
        self,
        n: int,
        *,
        min_ready: Optional[int] = None,
        labels: Optional[Mapping[str, str]] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[Seconds] = None,
        keep: Optional[bool] = None,
    ) -> Forks[AsyncSandbox]:
        """n children that go on from here, each for itself; see Sandbox.fork."""
        lease = await _lease.async_fork_lease(self._client, keep, self.last_info.run)
        call = _state_calls.fork(
            {"id": self.id}, n, min_ready=min_ready, labels=labels, env=env, timeout=timeout, lease=lease
        )
        forked = await _lease.async_fork(self._client, call)
        return Forks([AsyncSandbox(self._client, info) for info in forked.ready], forked.errors, forked.paused)

    async def restore(self, snapshot: Union[AsyncSnapshot, str]) -> SandboxInfo:
        """Back to a snapshot, in place: it keeps its id. If it fails, the sandbox is as it was."""
        return self._created(await self._client.call(_state_calls.restore(self.id, snapshot)))

    async def pause(self, *, cold: bool = False, if_busy: IfBusy = "freeze") -> SandboxInfo:
        """Freeze it in memory or, with cold, put it on disk; see Sandbox.pause."""
        return self._seen(await self._client.call(_state_calls.pause(self.id, cold, if_busy)))

    async def resume(self) -> SandboxInfo:
        """Wake it; it runs when this returns."""
        return self._created(await self._client.call(_state_calls.resume(self.id)))

    async def url(self, port: int, path: str = "", *, ttl: Optional[Seconds] = None) -> str:
        """Where a port, or a path there, is reached from outside, with a token that opens it for ttl seconds
        (default: an hour). A path put behind it would end up behind the token: give it here, or use port()."""
        answer = await self._client.call(_port_calls.url(self.id, port, ttl))
        return _port_calls.whole(self._client.url, answer, path)

    async def port(self, port: int, *, ttl: Optional[Seconds] = None) -> AsyncPort:
        """A port as any HTTP client reaches it: .url, .headers with the token, and .fetch(path)."""
        return AsyncPort(self._client, port, await self._client.call(_port_calls.url(self.id, port, ttl)))

    async def shell(
        self,
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        user: Optional[User] = None,
    ) -> AsyncShell:
        """A shell that keeps its directory, variables and functions between run()s; with a block ends it."""
        process = await self.start([*SHELL], cwd=cwd, env=env, user=user, stdin=True)
        return await AsyncShell(process)._open()

    @opening
    async def repl(
        self,
        *,
        llm: Optional[AsyncModel] = None,
        solver: Optional[AsyncSolver] = None,
        depth: int = 1,
        budget: Optional[Budget] = None,
        output_limit: int = 20_000,
        python: str = "python3",
    ) -> AsyncRepl:
        """A Python session that keeps its variables; see Sandbox.repl."""
        return await AsyncRepl(self, llm, solver, depth, budget or Budget(), output_limit)._open(python)

    async def set_public(self, port: int, public: bool = True) -> None:
        """Let anyone who knows its address reach a port, without a token; or no longer."""
        await self._client.call(_port_calls.set_public(self.id, port, public))

    async def wait_port(self, port: int, timeout: Seconds = 60) -> None:
        """Return when something inside listens on a port; DeadlineExceeded after timeout seconds."""
        await self._client.call(_port_calls.wait_ready(self.id, port=port, command=None, timeout=timeout))

    async def wait_command(self, command: str, timeout: Seconds = 60) -> None:
        """Return when a shell command inside has exited with 0; DeadlineExceeded after timeout seconds."""
        await self._client.call(_port_calls.wait_ready(self.id, port=None, command=command, timeout=timeout))

    async def run_code(
        self,
        code: str,
        *,
        language: Optional[str] = None,
        context: Optional[Union[CodeContext, str]] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[Seconds] = None,
        on_stdout: Optional[OnText] = None,
        on_stderr: Optional[OnText] = None,
        on_result: Optional[OnResult] = None,
        on_error: Optional[OnError] = None,
    ) -> Execution:
        """Run code in a kernel; see Sandbox.run_code. Listeners may be coroutine functions."""
        cell = Cell(on_stdout, on_stderr, on_result, on_error)
        return await AsyncInterpreter(self._client, self.id).run(cell, code, language, context, env, timeout)

    async def create_code_context(self, language: Optional[str] = None, *, cwd: Optional[str] = None) -> CodeContext:
        """Start a kernel of its own for run_code: python (the default), javascript, typescript or bash."""
        return await AsyncInterpreter(self._client, self.id).create_context(language, cwd)

    async def list_code_contexts(self) -> builtins.list[CodeContext]:
        """Those there are: the languages' own first, then those that were created."""
        return await AsyncInterpreter(self._client, self.id).contexts()

    async def restart_code_context(self, context: Union[CodeContext, str]) -> None:
        """Give a context a new kernel. Its variables are gone, and what runs in it ends."""
        await AsyncInterpreter(self._client, self.id).restart(context)

    async def remove_code_context(self, context: Union[CodeContext, str]) -> None:
        """End a context."""
        await AsyncInterpreter(self._client, self.id).remove(context)

    async def serve(
        self,
        name: str,
        handler: AsyncHandler,
        *,
        concurrency: int = 32,
        port: Optional[int] = None,
        replace: bool = False,
    ) -> AsyncCallback:
        """Have code inside call handler at http://cove.internal/NAME; see Sandbox.serve.

        handler is a coroutine function, an async generator function (its chunks
        are sent as they come) or a plain function that does not block.
        """
        served = await AsyncCallback(self._client, self.id, name, handler, port, replace, concurrency)._open()
        self._served.append(served)
        return served

    async def tree(self) -> Tree:
        """Every snapshot and sandbox it hangs together with; print() draws it."""
        return await self._client.call(_state_calls.tree(self.id))

    async def kill(self) -> End:
        """End the sandbox; nothing of it is left on return. An ended one answers with its first end."""
        await self._stop_serving()
        return _end(self._seen(await self._client.call(_calls.kill(self.id))))

    async def _stop_serving(self) -> None:
        while self._served:
            await self._served.pop().close()

    async def set_timeout(self, timeout: Optional[Seconds]) -> SandboxInfo:
        """Let it live for so many seconds from now; None or 0: until it is killed."""
        return self._seen(await self._client.call(_calls.set_timeout(self.id, timeout)))

    async def keep(self) -> SandboxInfo:
        """Let it outlive the process that made it; see Sandbox.keep."""
        return self._seen(await self._client.call(_calls.set_lease(self.id, "")))

    async def set_network(self, network: NetworkLike) -> int:
        """Put another network policy in force and return its generation: nothing that it denies is open any more."""
        return await self._client.call(_calls.set_network(self.id, network))

    async def set_secrets(self, secrets: Sequence[str]) -> None:
        """Say which secrets its requests leave with from now on, by name; [] is none."""
        await self._client.call(_calls.set_secrets(self.id, secrets))

    async def network(self) -> NetworkStatus:
        """The network policy in force, and how much it allowed and denied."""
        return await self._client.call(_calls.get_network(self.id, 0))

    async def flows(self, last: int = 100) -> Sequence[Flow]:
        """What the sandbox tried to reach last, oldest first; at most 512."""
        return (await self._client.call(_calls.get_network(self.id, last))).flows

    async def diff(
        self, since: Union[AsyncSnapshot, str] = "create", *, hash: bool = False, limit: Optional[int] = None
    ) -> Diff:
        """What changed in its files; see Sandbox.diff."""
        return await self._client.call(_calls.diff(self.id, _calls.ref("since", since), hash, limit))

    async def stats(self) -> Stats:
        return await self._client.call(_calls.stats(self.id))

    async def info(self) -> SandboxInfo:
        return self._seen(await self._client.call(_calls.get_sandbox(self.id)))

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            await self.kill()
            return
        with contextlib.suppress(CoveError):  # the error under way tells more
            await self.kill()


def _start_stdin(stdin: Union[bool, str, bytes], pty: Optional[TermSize]) -> tuple[Optional[bytes], bool]:
    if isinstance(stdin, (str, bytes)):
        return (stdin.encode() if isinstance(stdin, str) else stdin), False
    return None, bool(stdin) or pty is not None
