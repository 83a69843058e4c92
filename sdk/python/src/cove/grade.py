"""Grades: what the work in a sandbox is worth, decided where the work cannot reach."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Optional, Union

from ._calls import Call, Command, HasId, new_id, ref, strings
from ._tar import pack
from ._transfer import in_thread
from ._values import Seconds, Size, format_duration, parse_duration, parse_int, parse_size, parse_time, to_seconds
from ._wire import Request
from .client import AsyncClient, Client, default_async_client, default_client, read_all
from .errors import DeadlineExceeded, InvalidArgument
from .models import Json

Tests = Union[str, "os.PathLike[str]", HasId]
"""A directory of this machine, or a directory snapshot by object, name or id."""


@dataclass(frozen=True)
class TestResult:
    """One test."""

    __test__ = False  # pytest looks at the name

    id: str
    outcome: str
    """passed, failed, error, skipped or missing."""
    duration: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Finding:
    """Something in the sandbox's files that a reader of the verdict should know of; it changes no reward."""

    kind: str
    path: str
    detail: str = ""
    carried: bool = False
    """It is in the grader."""


@dataclass(frozen=True)
class Verdict:
    """What a grade came to; state "running" until then."""

    id: str
    sandbox: str
    state: str
    """running, graded, timeout, oom, grader_failed, infra or canceled."""
    reward: Optional[float]
    """None: there is none, which is not 0. A fault of the grader or of the machine is no judgement of the work."""
    rewards: Mapping[str, float]
    reason: str
    error_code: str = ""
    """Of grader_failed and infra."""
    error: str = ""
    tests: Sequence[TestResult] = field(default_factory=tuple, repr=False)
    findings: Sequence[Finding] = field(default_factory=tuple, repr=False)
    findings_dropped: int = 0
    digest: str = ""
    """Of the files that were graded."""
    image_id: str = ""
    carried: int = 0
    carried_bytes: int = 0
    cause: str = ""
    exit_code: int = 0
    log: str = field(default="", repr=False)
    log_dropped: int = 0
    setup: float = 0.0
    """Seconds until the command ran."""
    paused: float = 0.0
    created_at: Optional[datetime] = None
    finished_at: Optional[datetime] = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.state != "running"

    @property
    def passed(self) -> bool:
        """The whole reward: 1 or more."""
        return self.reward is not None and self.reward >= 1

    @classmethod
    def parse(cls, j: Json) -> Verdict:
        error = j.get("error") or {}
        reward = j.get("reward")
        return cls(
            id=j["id"],
            sandbox=j.get("sandbox", ""),
            state=j.get("state", ""),
            reward=None if reward is None else float(reward),
            rewards={k: float(v) for k, v in (j.get("rewards") or {}).items()},
            reason=j.get("reason", ""),
            error_code=error.get("code", ""),
            error=error.get("message", ""),
            tests=tuple(
                TestResult(t["id"], t["outcome"], parse_duration(t.get("duration")), t.get("message", ""))
                for t in j.get("tests") or ()
            ),
            findings=tuple(
                Finding(f["kind"], f["path"], f.get("detail", ""), bool(f.get("carried")))
                for f in j.get("findings") or ()
            ),
            findings_dropped=parse_int(j.get("findingsDropped")),
            digest=j.get("digest", ""),
            image_id=j.get("imageId", ""),
            carried=parse_int(j.get("carried")),
            carried_bytes=parse_int(j.get("carriedBytes")),
            cause=j.get("cause", ""),
            exit_code=parse_int(j.get("exitCode")),
            log=j.get("log", ""),
            log_dropped=parse_int(j.get("logDropped")),
            setup=parse_duration(j.get("setup")),
            paused=parse_duration(j.get("paused")),
            created_at=parse_time(j.get("createdAt")),
            finished_at=parse_time(j.get("finishedAt")),
            labels=dict(j.get("labels") or {}),
        )

    @staticmethod
    def get(id: str, *, client: Optional[Client] = None) -> Verdict:
        """A grade as it is now, also after its sandbox is gone."""
        return (client or default_client()).call(_get(id))

    @staticmethod
    async def aget(id: str, *, client: Optional[AsyncClient] = None) -> Verdict:
        """get for asyncio."""
        return await (client or default_async_client()).call(_get(id))

    @staticmethod
    def list(
        sandbox: Optional[Union[str, HasId]] = None,
        *,
        state: Optional[str] = None,
        page_size: int = 100,
        client: Optional[Client] = None,
    ) -> Iterator[Verdict]:
        """Newest first, without tests, findings and logs."""
        client, token = client or default_client(), ""
        while True:
            page, token = client.call(_list(sandbox, state, page_size, token))
            yield from page
            if not token:
                return

    @staticmethod
    async def alist(
        sandbox: Optional[Union[str, HasId]] = None,
        *,
        state: Optional[str] = None,
        page_size: int = 100,
        client: Optional[AsyncClient] = None,
    ) -> AsyncIterator[Verdict]:
        """list for asyncio."""
        client, token = client or default_async_client(), ""
        while True:
            page, token = await client.call(_list(sandbox, state, page_size, token))
            for verdict in page:
                yield verdict
            if not token:
                return

    def cancel(self, *, client: Optional[Client] = None) -> Verdict:
        """End it without a reward, if it is under way: state "canceled". One that has ended stays as it is."""
        return (client or default_client()).call(_cancel(self.id))

    async def acancel(self, *, client: Optional[AsyncClient] = None) -> Verdict:
        """cancel for asyncio."""
        return await (client or default_async_client()).call(_cancel(self.id))

    def wait(self, timeout: Optional[Seconds] = None, *, client: Optional[Client] = None) -> Verdict:
        """The verdict, when there is one. DeadlineExceeded: not within timeout; the grade goes on."""
        client, waiting = client or default_client(), Waiting(self, timeout)
        while not waiting.verdict.done:
            waiting.verdict = client.call(waiting.next())
        return waiting.verdict

    async def await_(self, timeout: Optional[Seconds] = None, *, client: Optional[AsyncClient] = None) -> Verdict:
        """wait for asyncio."""
        client, waiting = client or default_async_client(), Waiting(self, timeout)
        while not waiting.verdict.done:
            waiting.verdict = await client.call(waiting.next())
        return waiting.verdict


class Waiting:
    """How long to wait for a verdict, without I/O."""

    def __init__(self, verdict: Verdict, timeout: Optional[Seconds]) -> None:
        self.verdict = verdict
        self._until = None if timeout is None else time.monotonic() + to_seconds("timeout", timeout)

    def next(self) -> Call[Verdict]:
        wait = 20.0
        if self._until is not None:
            wait = min(wait, self._until - time.monotonic())
            if wait <= 0:
                raise DeadlineExceeded(
                    f"grade {self.verdict.id} is still running", hint="it goes on; Verdict.get(id) has it later"
                )
        message = {"id": self.verdict.id, "maxWait": format_duration("timeout", max(wait, 0.001))}
        return Call("Grades/Wait", message, _verdict, repeatable=True, slow=True)


def _verdict(j: Json) -> Verdict:
    return Verdict.parse(j["grade"])


def _cancel(id: str) -> Call[Verdict]:
    return Call("Grades/Cancel", {"id": id}, _verdict, repeatable=True, slow=True)


def _get(id: str) -> Call[Verdict]:
    return Call("Grades/Get", {"id": id}, _verdict, repeatable=True)


def _list(
    sandbox: Optional[Union[str, HasId]], state: Optional[str], page_size: int, token: str
) -> Call[tuple[list[Verdict], str]]:
    message: dict[str, Any] = {"pageSize": page_size, "pageToken": token}
    if sandbox is not None:
        message["sandbox"] = ref("sandbox", sandbox)
    if state is not None:
        message["state"] = state

    def parse(j: Json) -> tuple[list[Verdict], str]:
        return [Verdict.parse(g) for g in j.get("grades") or ()], j.get("nextPageToken", "")

    return Call("Grades/List", message, parse, repeatable=True)


def create(
    sandbox: str,
    tests: Optional[str],
    command: Optional[Command],
    artifacts: Sequence[str],
    *,
    timeout: Optional[Seconds],
    results: Optional[str],
    separate: bool,
    expected: Optional[Sequence[str]],
    image: Optional[str],
    snapshot: Optional[Union[str, HasId]],
    tests_path: Optional[str],
    env: Optional[Mapping[str, str]],
    cwd: Optional[str],
    cpu: Optional[float],
    memory: Optional[Size],
    disk: Optional[Size],
    stop: bool,
    labels: Optional[Mapping[str, str]],
    idempotency_key: Optional[str],
) -> Call[Verdict]:
    if isinstance(artifacts, str):
        raise InvalidArgument("artifacts: a list of paths", field="artifacts", hint=f"write [{artifacts!r}]")
    # By a key it is one grade, however often the connection breaks.
    message: dict[str, Any] = {"sandbox": sandbox, "artifacts": list(artifacts)}
    message["idempotencyKey"] = idempotency_key or new_id() + new_id()
    if isinstance(command, str):
        message["command"] = command
    elif command is not None:
        message["args"] = list(command)
    named = {"tests": tests, "results": results, "image": image, "testsPath": tests_path, "cwd": cwd}
    message.update({k: v for k, v in named.items() if v is not None})
    if snapshot is not None:
        message["snapshot"] = ref("snapshot", snapshot)
    if timeout is not None:
        message["timeout"] = format_duration("timeout", timeout)
    if expected:
        message["expected"] = list(expected)
    if env:
        message["env"] = strings("env", env)
    if labels:
        message["labels"] = strings("labels", labels)
    message.update({k: True for k, v in {"separate": separate, "stop": stop}.items() if v})
    resources: dict[str, Any] = {}
    if cpu is not None:
        resources["cpu"] = cpu
    if memory is not None:
        resources["memory"] = str(parse_size("memory", memory))
    if disk is not None:
        resources["disk"] = str(parse_size("disk", disk))
    if resources:
        message["resources"] = resources
    return Call("Grades/Create", message, _verdict, repeatable=True, slow=True)


class Sent:
    """Tests as a tar, without I/O but the reading of it. A client sends the same once, also to many at a time."""

    def __init__(self, client: Union[Client, AsyncClient], tests: Union[str, os.PathLike[str]]) -> None:
        self.tar = b"".join(pack(os.fspath(tests)))
        self.digest = hashlib.sha256(self.tar).hexdigest()
        self.known: dict[str, str] = client.__dict__.setdefault("_grade_tests", {})
        self.sending: dict[str, Any] = client.__dict__.setdefault("_grade_sending", {})
        self.request: Request = client._settings.plain("PUT", "/v1/grades/tests", {"digest": self.digest}, self.tar, ())

    def took(self, answer: bytes) -> str:
        self.known[self.digest] = json.loads(answer)["snapshot"]
        return self.known[self.digest]


def send_tests(client: Client, tests: Tests) -> str:
    """The directory snapshot of tests, made of a directory where that is what they are."""
    if not is_directory(tests):
        return ref("tests", tests)  # type: ignore[arg-type]
    sent = Sent(client, tests)  # type: ignore[arg-type]
    if sent.digest in sent.known:
        return sent.known[sent.digest]
    with sent.sending.setdefault(sent.digest, threading.Lock()):
        if sent.digest in sent.known:
            return sent.known[sent.digest]
        return client.retrying(lambda: sent.took(b"".join(client.content(sent.request).chunks())), repeatable=True)


async def async_send_tests(client: AsyncClient, tests: Tests) -> str:
    """send_tests for asyncio."""
    if not is_directory(tests):
        return ref("tests", tests)  # type: ignore[arg-type]
    sent = await in_thread(Sent, client, tests)
    if sent.digest in sent.known:
        return sent.known[sent.digest]

    async def attempt() -> str:
        return sent.took(await read_all(await client.content(sent.request)))

    async with sent.sending.setdefault(sent.digest, asyncio.Lock()):
        if sent.digest in sent.known:
            return sent.known[sent.digest]
        return await client.retrying(attempt, repeatable=True)


def is_directory(tests: Tests) -> bool:
    """Whether tests are here, to be sent. A name that is both is the directory where it has a slash."""
    if isinstance(tests, os.PathLike):
        return True
    return isinstance(tests, str) and (os.sep in tests or os.path.isdir(tests))
