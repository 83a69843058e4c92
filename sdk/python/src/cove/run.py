"""Runs: jobs of a trainer whose sandboxes end with them."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable, Optional, Union

from . import _calls, _lease, _run_calls, shipment
from ._connect import EnvelopeReader
from ._transfer import LocalPath
from ._values import Seconds, to_seconds
from .changes import Replayed
from .client import AsyncClient, Client, default_async_client, default_client
from .errors import CoveError, FailedPrecondition, NotFound, TransportError, Unavailable
from .rollout import Checkpoint, Cost, Group, GroupProgress, PlanInfo, RunInfo, Step
from .sandbox import AsyncSandbox, Sandbox

_SPEC = frozenset(
    {"image", "snapshot", "template", "cpu", "memory", "memory_limit", "disk", "pids", "timeout", "idle_timeout"}
    | {"on_idle", "on_timeout", "env", "labels", "volumes", "network", "secrets", "record", "replay", "deterministic"}
)


# How often a stream that breaks at once is opened again, a second apart.
_FOLLOW_TRIES = 30


def _spec(options: dict[str, Any], run: str, group: str, episode: str) -> dict[str, Any]:
    """A SandboxSpec of what Sandbox.create takes, in a run."""
    unknown = [name for name in options if name not in _SPEC]
    if unknown:
        raise TypeError(f"{unknown[0]!r} is not one of: {', '.join(sorted(_SPEC))}")
    given: dict[str, Any] = {name: options.get(name) for name in _SPEC}
    spec = _calls.sandbox_spec(**given)
    rollout = {"run": run, "group": group, "episode": episode}
    spec["rollout"] = {key: value for key, value in rollout.items() if value}
    return spec


def _copy_spec(options: dict[str, Any], run: str, group: str) -> dict[str, Any]:
    """The same for copies of a sandbox, which bring all but a few things along."""
    unknown = [name for name in options if name not in ("labels", "env", "timeout")]
    if unknown:
        raise TypeError(f"{unknown[0]!r} is the sandbox's own; labels, env and timeout can be said")
    spec = _spec(options, run, group, "")
    del spec["image"]
    return spec


class _Heart:
    """Says in the background that a run's client is there."""

    def __init__(self, send: _lease.Send, run: str, ttl: float) -> None:
        self.lost = False
        self._send, self._run, self._every = send, run, min(_lease.BEAT, ttl / 3)
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._beats, name="cove-run", daemon=True)
        self.thread.start()

    def _beats(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._send(_run_calls.heartbeat_run(self._run))
            except CoveError as err:
                if _run_calls.over(err):
                    self.lost = True
                    return
            except Exception:
                continue  # the next one may get through

    def stop(self) -> None:
        self._stop.set()


class _RunState:
    """What a run object knows without asking."""

    def __init__(
        self,
        name: str,
        *,
        ttl: Seconds = _lease.TTL,
        labels: Optional[Mapping[str, str]] = None,
        keep: bool = False,
        output: Optional[str] = None,
        resume: bool = False,
        steps: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._ttl = to_seconds("ttl", ttl)
        self._create = _run_calls.create_run(
            name, ttl=ttl, labels=labels, keep=keep, output=output, resume=resume, steps=steps
        )
        self._info: Optional[RunInfo] = None
        self._heart: Optional[_Heart] = None

    @property
    def last_info(self) -> RunInfo:
        if self._info is None:
            raise FailedPrecondition("the run has not begun", hint="with Run(...) as run, or run.begin()")
        return self._info

    @property
    def id(self) -> str:
        return self.last_info.id

    @property
    def lost(self) -> bool:
        """Whether the server has ended it, as far as this process has heard: its sandboxes are gone."""
        return self._heart is not None and self._heart.lost

    def _begun(self, info: RunInfo, send: Optional[_lease.Send]) -> None:
        self._info = info
        if send is not None and self._heart is None:
            self._heart = _Heart(send, info.id, info.ttl or self._ttl)

    def _still(self) -> None:
        if self._heart is not None:
            self._heart.stop()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self._info.id if self._info else 'not begun'}>"


class Run(_RunState):
    """A job of a trainer. Its sandboxes end with it: on the way out of the with block, or when this process is gone.

    >>> with Run("grpo-7") as run:
    ...     group = run.group(8, image="base")
    ...     for sb in group:
    ...         print(sb.exec("echo hello").stdout)

    ttl: seconds the server waits for a sign of life, which a thread gives.
    keep=True: the sandboxes outlive it. output: what steps keep of what was
    printed, "head_tail" (the default), "whole" or "none". resume=True: a run of
    that name goes on, or is joined if it is active. steps: what steps say besides,
    of "files" (what changed in the file system) and "egress" (where to, how much).
    """

    def __init__(self, name: str, *, client: Optional[Client] = None, **options: Any) -> None:
        super().__init__(name, **options)
        self._client = client or default_client()
        self.checkpoint = Checkpoints(self)

    @classmethod
    def attach(cls, name: str, *, client: Optional[Client] = None) -> Run:
        """A run that somebody else keeps alive, by name or id."""
        run = cls(name, client=client)
        run._begun(run._client.call(_run_calls.get_run(name)), None)
        return run

    @staticmethod
    def list(
        *, ended: bool = False, labels: Optional[Mapping[str, str]] = None, client: Optional[Client] = None
    ) -> builtins.list[RunInfo]:
        """The runs there are, newest first; with ended=True those that have ended too."""
        return (client or default_client()).call(_run_calls.list_runs(ended, labels))

    @staticmethod
    def delete(name: str, *, client: Optional[Client] = None) -> None:
        """Forget a run that has ended, with its steps and checkpoints."""
        (client or default_client()).call(_run_calls.delete_run(name))

    def begin(self) -> Run:
        """What the with statement does first."""
        self._begun(self._client.call(self._create), _lease._sender(self._client))
        return self

    def __enter__(self) -> Run:
        return self.begin() if self._info is None else self

    def __exit__(self, kind: Any, error: Any, *_: object) -> None:
        if self._heart is None:
            return  # it is somebody else's
        detail = "" if kind is None else kind.__name__
        try:
            self.end(detail)
        except CoveError:
            if kind is None:
                raise

    def end(self, detail: str = "") -> RunInfo:
        """End it with its sandboxes; detail says why, for people."""
        self._still()
        self._info = self._client.call(_run_calls.end_run(self.id, detail))
        return self._info

    def reap(self) -> builtins.list[str]:
        """End it with all its sandboxes, those that were kept too; their ids."""
        self._still()
        return self._client.call(_run_calls.reap_run(self.id))

    def info(self) -> RunInfo:
        self._info = self._client.call(_run_calls.get_run(self.id))
        return self._info

    def heartbeat(self) -> None:
        """Say that the client is there. A thread does so by itself."""
        self._client.call(_run_calls.heartbeat_run(self.id))

    def sandbox(
        self,
        image: Optional[str] = None,
        *,
        group: str = "",
        episode: str = "",
        keep: bool = False,
        idempotency_key: Optional[str] = None,
        create_timeout: Optional[float] = None,
        **options: Any,
    ) -> Sandbox:
        """Sandbox.create in this run. keep=True: it outlives the run."""
        spec = _spec({"image": image, **options}, self.id, group, episode)
        created = _lease.create(self._client, spec, idempotency_key, create_timeout, True)
        sb = Sandbox(self._client, created.info, created.node_time)
        if keep:
            sb.keep()
        return sb

    def group(
        self,
        n: int,
        image: Optional[str] = None,
        *,
        name: Optional[str] = None,
        sandbox: Optional[Union[Sandbox, str]] = None,
        at_least: Optional[int] = None,
        max_wait: Optional[Seconds] = None,
        key: Optional[str] = None,
        on_progress: Optional[Callable[[GroupProgress], Any]] = None,
        **options: Any,
    ) -> Group[Sandbox]:
        """n sandboxes alike, at once: of an image, a snapshot, a template, or copies of a running sandbox.

        All of them, or at least at_least; with fewer none is left and this
        raises. On a full server it waits its turn for the room of all, at most
        max_wait seconds (default: as long as the server lets creates wait). The
        same key gives the same sandboxes. Without a name the server gives one that
        no other group has. Other options as of Sandbox.create.
        """
        given = {"image": image, **options} if image is not None else options
        spec = _spec(given, self.id, name or "", "") if sandbox is None else _copy_spec(given, self.id, name or "")
        message = _run_calls.group(spec, n, sandbox=sandbox, at_least=at_least, key=key, max_wait=max_wait)

        def attempt() -> Any:
            grouping = _run_calls.Grouping(on_progress)
            self._client.follow("Runs/Group", message, grouping.receive)
            return grouping.result()

        made = self._client.retrying(attempt, repeatable=True)
        return Group(name or made.ready[0].group, [Sandbox(self._client, info) for info in made.ready], made.errors)

    def plan(self, items: Iterable[Mapping[str, Any]]) -> Plan:
        """Say what the run will start from next, so that the node has it ready.

        >>> plan = run.plan([{"image": "python:3.12", "count": 256}, {"snapshot": "warm", "count": 8}])
        >>> plan.wait()

        It takes the place of what was said before; [] says nothing any more. Images
        that are not there are pulled.
        """
        made = self._client.call(_run_calls.set_plan(self.id, _run_calls.plan_items(items)))
        return Plan(self, made)

    def steps(
        self,
        *,
        cursor: str = "",
        sandbox: Optional[Union[Sandbox, str]] = None,
        group: Optional[str] = None,
        episode: Optional[str] = None,
    ) -> Iterator[Step]:
        """What was run and has ended, in the order of the ends."""
        while True:
            page = self._client.call(_run_calls.list_steps(self.id, cursor, 1000, sandbox, group, episode, False))
            yield from page.steps
            cursor = page.next_cursor
            if not page.more:
                return

    def running(self) -> builtins.list[Step]:
        """What has begun and not ended."""
        info = self.last_info
        return self._client.call(_run_calls.list_steps(info.id, "", 1, None, None, None, True)).running

    def follow(self, cursor: str = "") -> Iterator[tuple[Step, str]]:
        """Each step as it ends, with the cursor after it, until the run is over. A lost connection is made again."""
        failures = 0
        while True:
            reply = None
            try:
                reply = self._client.stream("Runs/FollowSteps", {"run": self.id, "cursor": cursor}, None)
                envelopes = EnvelopeReader()
                for chunk in reply.chunks():
                    for event in envelopes.feed(chunk):
                        failures, cursor = 0, event.get("cursor", cursor)
                        if event.get("step"):
                            yield Step.parse(event["step"]), cursor
                return
            except (TransportError, Unavailable):
                failures += 1
                if failures > _FOLLOW_TRIES:
                    raise
            finally:
                if reply is not None:
                    reply.close()
            self._client._settings.clock.sleep(1.0)

    def records(self, *, cursor: str = "", follow: bool = False) -> Iterator[Mapping[str, Any]]:
        """Steps, ends of episodes and verdicts (docs/trajectories.md), each with the cursor after it.

        With follow until the run is over. A lost connection is made again.
        """
        return shipment.read(self._client, "runs", self.id, "export", cursor, follow)

    def export(self, directory: LocalPath, format: str = "jsonl") -> builtins.list[str]:
        """Write all records to a directory: jsonl, parquet, or atif with a file for each episode. The files."""
        return shipment.export(self._client, self.id, directory, format)

    def replay(
        self,
        sandbox: Optional[Union[Sandbox, str]] = None,
        *,
        episode: str = "",
        reset: int = 0,
        keep: bool = False,
        all: bool = False,
        on_step: Optional[Callable[[int, int], Any]] = None,
    ) -> Replayed:
        """Run the steps of an episode again, in a fresh sandbox of what it began with.

        The episode is that of a sandbox (the last with steps unless reset says which), or the
        one that has a name in this run. The result has the first observation that differs;
        all=True goes on and has one of each step. keep=True leaves the sandbox (result.kept).
        on_step(seq, steps) hears of each step that ended.
        """
        return replay_episode(
            sandbox, run=self.id, episode=episode, reset=reset, keep=keep, all=all, on_step=on_step, client=self._client
        )

    def cost(self, by: str = "run") -> builtins.list[Cost]:
        """What was used, summed by run, group, episode, sandbox or step."""
        return self._client.call(_run_calls.cost(by, self.id))


class Checkpoints:
    """Small versioned documents of a run: run.checkpoint.put(doc, if_version=…)."""

    def __init__(self, run: Run) -> None:
        self._of = run

    def put(self, doc: Any, *, if_version: Optional[int] = None) -> int:
        """The next version, which this returns: bytes or text as they are, all else as JSON.

        if_version: the latest that the caller has seen (0: none); Conflict if
        somebody has put another since.
        """
        return self._of._client.call(_run_calls.put_checkpoint(self._of.id, doc, if_version))

    def get(self, version: Optional[int] = None) -> Optional[Checkpoint]:
        """The latest, or a version of the last few; None if there is none."""
        try:
            return self._of._client.call(_run_calls.get_checkpoint(self._of.id, version))
        except NotFound as err:
            if err.field == "version":
                return None
            raise

    def list(self) -> builtins.list[Checkpoint]:
        """The versions that are kept, newest first, without their documents."""
        return self._of._client.call(_run_calls.list_checkpoints(self._of.id))


class Plan:
    """What a run will start from next. It ends with the run."""

    def __init__(self, run: Run, info: PlanInfo) -> None:
        self._of = run
        self.last_info = info

    def info(self) -> PlanInfo:
        """How far it is, or the one that took its place."""
        self.last_info = self._of._client.call(_run_calls.get_plan(self._of.id))
        return self.last_info

    def ready(self) -> bool:
        return self.info().ready

    def wait(
        self, timeout: Optional[Seconds] = None, *, on_progress: Optional[Callable[[PlanInfo], Any]] = None
    ) -> PlanInfo:
        """Until all is ready, or will not be (state "failed": see its items). DeadlineExceeded: not within timeout."""
        staging = _run_calls.Staging(timeout)
        while self.last_info.state == "staging":
            self.last_info = self._of._client.call(staging.next(self._of.id))
            if on_progress is not None:
                on_progress(self.last_info)
        return self.last_info

    def cancel(self) -> None:
        self.last_info = self._of._client.call(_run_calls.set_plan(self._of.id, []))


class AsyncPlan:
    """What a run will start from next; see Plan."""

    def __init__(self, run: AsyncRun, info: PlanInfo) -> None:
        self._of = run
        self.last_info = info

    async def info(self) -> PlanInfo:
        self.last_info = await self._of._client.call(_run_calls.get_plan(self._of.id))
        return self.last_info

    async def ready(self) -> bool:
        return (await self.info()).ready

    async def wait(
        self, timeout: Optional[Seconds] = None, *, on_progress: Optional[Callable[[PlanInfo], Any]] = None
    ) -> PlanInfo:
        """on_progress may return something to await."""
        staging = _run_calls.Staging(timeout)
        while self.last_info.state == "staging":
            self.last_info = await self._of._client.call(staging.next(self._of.id))
            told = on_progress(self.last_info) if on_progress is not None else None
            if inspect.isawaitable(told):
                await told
        return self.last_info

    async def cancel(self) -> None:
        self.last_info = await self._of._client.call(_run_calls.set_plan(self._of.id, []))


class AsyncRun(_RunState):
    """A job of a trainer, for asyncio; see Run."""

    def __init__(self, name: str, *, client: Optional[AsyncClient] = None, **options: Any) -> None:
        super().__init__(name, **options)
        self._client = client or default_async_client()
        self.checkpoint = AsyncCheckpoints(self)

    @classmethod
    async def attach(cls, name: str, *, client: Optional[AsyncClient] = None) -> AsyncRun:
        run = cls(name, client=client)
        run._begun(await run._client.call(_run_calls.get_run(name)), None)
        return run

    @staticmethod
    async def list(
        *, ended: bool = False, labels: Optional[Mapping[str, str]] = None, client: Optional[AsyncClient] = None
    ) -> builtins.list[RunInfo]:
        return await (client or default_async_client()).call(_run_calls.list_runs(ended, labels))

    @staticmethod
    async def delete(name: str, *, client: Optional[AsyncClient] = None) -> None:
        await (client or default_async_client()).call(_run_calls.delete_run(name))

    async def begin(self) -> AsyncRun:
        self._begun(await self._client.call(self._create), _lease._sender(self._client))
        return self

    async def __aenter__(self) -> AsyncRun:
        return await self.begin() if self._info is None else self

    async def __aexit__(self, kind: Any, error: Any, *_: object) -> None:
        if self._heart is None:
            return
        detail = "" if kind is None else kind.__name__
        ending = asyncio.ensure_future(self.end(detail))
        try:
            await asyncio.shield(ending)  # a task that is cancelled again must not leave the sandboxes
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await ending
            raise
        except CoveError:
            if kind is None:
                raise

    async def end(self, detail: str = "") -> RunInfo:
        self._still()
        self._info = await self._client.call(_run_calls.end_run(self.id, detail))
        return self._info

    async def reap(self) -> builtins.list[str]:
        self._still()
        return await self._client.call(_run_calls.reap_run(self.id))

    async def info(self) -> RunInfo:
        self._info = await self._client.call(_run_calls.get_run(self.id))
        return self._info

    async def heartbeat(self) -> None:
        await self._client.call(_run_calls.heartbeat_run(self.id))

    async def sandbox(
        self,
        image: Optional[str] = None,
        *,
        group: str = "",
        episode: str = "",
        keep: bool = False,
        idempotency_key: Optional[str] = None,
        create_timeout: Optional[float] = None,
        **options: Any,
    ) -> AsyncSandbox:
        spec = _spec({"image": image, **options}, self.id, group, episode)
        created = await _lease.async_create(self._client, spec, idempotency_key, create_timeout, True)
        sb = AsyncSandbox(self._client, created.info, created.node_time)
        if keep:
            await sb.keep()
        return sb

    async def group(
        self,
        n: int,
        image: Optional[str] = None,
        *,
        name: Optional[str] = None,
        sandbox: Optional[Union[AsyncSandbox, str]] = None,
        at_least: Optional[int] = None,
        max_wait: Optional[Seconds] = None,
        key: Optional[str] = None,
        on_progress: Optional[Callable[[GroupProgress], Any]] = None,
        **options: Any,
    ) -> Group[AsyncSandbox]:
        """n sandboxes alike, at once; see Run.group. on_progress may return something to await."""
        given = {"image": image, **options} if image is not None else options
        spec = _spec(given, self.id, name or "", "") if sandbox is None else _copy_spec(given, self.id, name or "")
        message = _run_calls.group(spec, n, sandbox=sandbox, at_least=at_least, key=key, max_wait=max_wait)

        async def attempt() -> Any:
            grouping = _run_calls.Grouping(on_progress)
            await self._client.follow("Runs/Group", message, grouping.receive)
            return grouping.result()

        made = await self._client.retrying(attempt, repeatable=True)
        sandboxes = [AsyncSandbox(self._client, info) for info in made.ready]
        return Group(name or made.ready[0].group, sandboxes, made.errors)

    async def plan(self, items: Iterable[Mapping[str, Any]]) -> AsyncPlan:
        """Say what the run will start from next; see Run.plan."""
        made = await self._client.call(_run_calls.set_plan(self.id, _run_calls.plan_items(items)))
        return AsyncPlan(self, made)

    async def steps(
        self,
        *,
        cursor: str = "",
        sandbox: Optional[Union[AsyncSandbox, str]] = None,
        group: Optional[str] = None,
        episode: Optional[str] = None,
    ) -> AsyncIterator[Step]:
        while True:
            page = await self._client.call(_run_calls.list_steps(self.id, cursor, 1000, sandbox, group, episode, False))
            for step in page.steps:
                yield step
            cursor = page.next_cursor
            if not page.more:
                return

    async def running(self) -> builtins.list[Step]:
        return (await self._client.call(_run_calls.list_steps(self.id, "", 1, None, None, None, True))).running

    async def follow(self, cursor: str = "") -> AsyncIterator[tuple[Step, str]]:
        failures = 0
        while True:
            reply = None
            try:
                reply = await self._client.stream("Runs/FollowSteps", {"run": self.id, "cursor": cursor}, None)
                envelopes = EnvelopeReader()
                async for chunk in reply.chunks():
                    for event in envelopes.feed(chunk):
                        failures, cursor = 0, event.get("cursor", cursor)
                        if event.get("step"):
                            yield Step.parse(event["step"]), cursor
                return
            except (TransportError, Unavailable):
                failures += 1
                if failures > _FOLLOW_TRIES:
                    raise
            finally:
                if reply is not None:
                    await reply.close()
            await self._client._settings.clock.async_sleep(1.0)

    async def records(self, *, cursor: str = "", follow: bool = False) -> AsyncIterator[Mapping[str, Any]]:
        """Steps, ends of episodes and verdicts (docs/trajectories.md), each with the cursor after it.

        With follow until the run is over. A lost connection is made again.
        """
        async for record in shipment.async_read(self._client, "runs", self.id, "export", cursor, follow):
            yield record

    async def export(self, directory: LocalPath, format: str = "jsonl") -> builtins.list[str]:
        """Write all records to a directory: jsonl, parquet, or atif with a file for each episode. The files."""
        return await shipment.async_export(self._client, self.id, directory, format)

    async def replay(
        self,
        sandbox: Optional[Union[AsyncSandbox, str]] = None,
        *,
        episode: str = "",
        reset: int = 0,
        keep: bool = False,
        all: bool = False,
        on_step: Optional[Callable[[int, int], Any]] = None,
    ) -> Replayed:
        """Run the steps of an episode again; see Run.replay. on_step may return something to await."""
        return await async_replay_episode(
            sandbox, run=self.id, episode=episode, reset=reset, keep=keep, all=all, on_step=on_step, client=self._client
        )

    async def cost(self, by: str = "run") -> builtins.list[Cost]:
        return await self._client.call(_run_calls.cost(by, self.id))


class AsyncCheckpoints:
    """Small versioned documents of a run; see Checkpoints."""

    def __init__(self, run: AsyncRun) -> None:
        self._of = run

    async def put(self, doc: Any, *, if_version: Optional[int] = None) -> int:
        return await self._of._client.call(_run_calls.put_checkpoint(self._of.id, doc, if_version))

    async def get(self, version: Optional[int] = None) -> Optional[Checkpoint]:
        try:
            return await self._of._client.call(_run_calls.get_checkpoint(self._of.id, version))
        except NotFound as err:
            if err.field == "version":
                return None
            raise

    async def list(self) -> builtins.list[Checkpoint]:
        return await self._of._client.call(_run_calls.list_checkpoints(self._of.id))


def replay_episode(
    sandbox: Optional[Union[Sandbox, str]] = None,
    *,
    run: str = "",
    episode: str = "",
    reset: int = 0,
    keep: bool = False,
    all: bool = False,
    on_step: Optional[Callable[[int, int], Any]] = None,
    client: Optional[Client] = None,
) -> Replayed:
    """Run an episode's steps again; see Run.replay. The run need not be said of a sandbox that is still known."""
    replaying = _run_calls.Replaying(on_step)
    message = _run_calls.replay(run, sandbox, episode, reset, keep, all)
    (client or default_client()).follow("Runs/Replay", message, replaying.receive)
    return replaying.result()


async def async_replay_episode(
    sandbox: Optional[Union[AsyncSandbox, str]] = None,
    *,
    run: str = "",
    episode: str = "",
    reset: int = 0,
    keep: bool = False,
    all: bool = False,
    on_step: Optional[Callable[[int, int], Any]] = None,
    client: Optional[AsyncClient] = None,
) -> Replayed:
    """Run an episode's steps again; see Run.replay."""
    replaying = _run_calls.Replaying(on_step)
    message = _run_calls.replay(run, sandbox, episode, reset, keep, all)
    await (client or default_async_client()).follow("Runs/Replay", message, replaying.receive)
    return replaying.result()
