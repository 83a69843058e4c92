"""What the API tells: plain, immutable records."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

from ._values import parse_duration, parse_int, parse_time
from .errors import CommandError, FailedPrecondition
from .network import Network
from .types import EndCause, StreamName

if TYPE_CHECKING:
    from .client import AsyncClient, Client
    from .image import BuildEvent, Recipe

Json = Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """How a process or a sandbox ended.

    cause is one of: exited, signalled, deadline, oom, disk_full, killed_by_user,
    lease_expired, client_ended, ttl, idle, evicted, node_lost, init_killed,
    reset, egress_denied, infra. A newer server may know more.
    """

    cause: EndCause
    exit_code: int = 0
    signal: str = ""
    detail: str = ""
    at: Optional[datetime] = None

    def __str__(self) -> str:
        if self.cause == "exited":
            return f"exited with {self.exit_code}"
        if self.cause == "signalled":
            return f"signalled by {self.signal}"
        return f"{self.cause}: {self.detail}" if self.detail else self.cause

    @classmethod
    def parse(cls, j: Json) -> End:
        return cls(
            cause=j.get("cause", ""),
            exit_code=j.get("exitCode", 0),
            signal=j.get("signal", ""),
            detail=j.get("detail", ""),
            at=parse_time(j.get("at")),
        )


@dataclass(frozen=True)
class Resources:
    """What a sandbox may use. Sizes are bytes."""

    cpu: float
    memory: int
    memory_limit: int
    disk: int
    pids: int

    @classmethod
    def parse(cls, j: Json) -> Resources:
        return cls(
            cpu=float(j.get("cpu", 0)),
            memory=parse_int(j.get("memory")),
            memory_limit=parse_int(j.get("memoryLimit")),
            disk=parse_int(j.get("disk")),
            pids=parse_int(j.get("pids")),
        )


@dataclass(frozen=True)
class VolumeMount:
    """A volume in a sandbox."""

    volume: str
    """Name or id, as it was given."""
    path: str
    mode: str
    """rw (alone), ro or shared (read-write with others)."""

    @classmethod
    def parse(cls, j: Json) -> VolumeMount:
        return cls(volume=j.get("volume", ""), path=j.get("path", ""), mode=j.get("mode", "") or "rw")


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as the server knows it. `end` is set once it has ended."""

    id: str
    image: str
    image_id: str
    node: str
    state: str
    """creating, running, ending or ended."""
    episode: int
    """1 after creation, one more with each reset."""
    resources: Resources
    env: Mapping[str, str]
    labels: Mapping[str, str]
    timeout: float
    """Seconds; 0 means none."""
    idle_timeout: float
    created_at: Optional[datetime]
    expires_at: Optional[datetime]
    end: Optional[End]
    on_idle: str = ""
    """What idle_timeout does: kill or pause."""
    snapshot: str = ""
    """It was created from; so with template."""
    template: str = ""
    volumes: tuple[VolumeMount, ...] = ()
    parent: str = ""
    """The snapshot or sandbox it came from, or the snapshot last taken of it; empty: an image."""
    ancestors: tuple[str, ...] = ()
    """Parent first."""
    standby: str = ""
    """hot (frozen in memory), cold (on disk) or, awake, empty."""
    network: Network = field(default_factory=Network)
    network_generation: int = 0
    """1 after creation, one more with each set_network."""
    secrets: tuple[str, ...] = ()
    """Names of those its requests leave with."""
    lease: str = ""
    """The lease it ends with; empty: none. See Sandbox.keep."""
    run: str = ""
    """Id of the run it is of; empty: none. See Run."""
    group: str = ""
    episode_name: str = ""
    deterministic: bool = False
    not_fixed: tuple[str, ...] = ()
    """Of a deterministic one: what differs from one to another all the same, in words."""

    @classmethod
    def parse(cls, j: Json) -> SandboxInfo:
        spec: Json = j.get("spec") or {}
        end = j.get("end")
        return cls(
            id=j.get("id", ""),
            image=spec.get("image", ""),
            image_id=j.get("imageId", ""),
            node=j.get("node", ""),
            state=str(j.get("state", "")).replace("SANDBOX_STATE_", "").lower(),
            episode=parse_int(j.get("episode")),
            resources=Resources.parse(spec.get("resources") or {}),
            env=spec.get("env") or {},
            labels=spec.get("labels") or {},
            timeout=parse_duration(spec.get("timeout")),
            idle_timeout=parse_duration(spec.get("idleTimeout")),
            deterministic=spec.get("deterministic") is not None,
            not_fixed=tuple(j.get("notFixed") or ()),
            created_at=parse_time(j.get("createdAt")),
            expires_at=parse_time(j.get("expiresAt")),
            end=End.parse(end) if end else None,
            on_idle=spec.get("onIdle", ""),
            snapshot=spec.get("snapshot", ""),
            template=spec.get("template", ""),
            volumes=tuple(VolumeMount.parse(v) for v in spec.get("volumes") or ()),
            parent=j.get("parent", ""),
            lease=spec.get("lease", ""),
            run=(spec.get("rollout") or {}).get("run", ""),
            group=(spec.get("rollout") or {}).get("group", ""),
            episode_name=(spec.get("rollout") or {}).get("episode", ""),
            ancestors=tuple(j.get("ancestors") or ()),
            standby=j.get("standby", ""),
            network=Network._from(spec.get("network") or {}),
            network_generation=parse_int(j.get("networkGeneration")),
            secrets=tuple(spec.get("secrets") or ()),
        )


@dataclass(frozen=True)
class Stats:
    """What a sandbox uses now, seen from the host: code inside cannot falsify it. Sizes are bytes."""

    cpu_time: float
    memory: int
    memory_peak: int
    disk_used: int
    processes: int
    oom_kills: int = 0  # processes that ended over the memory limit; a snapshot has the number of its sandbox
    egress_sent: int = 0  # by its present kernel
    egress_received: int = 0

    @classmethod
    def parse(cls, j: Json) -> Stats:
        return cls(
            cpu_time=parse_duration(j.get("cpuTime")),
            memory=parse_int(j.get("memory")),
            memory_peak=parse_int(j.get("memoryPeak")),
            disk_used=parse_int(j.get("diskUsed")),
            processes=parse_int(j.get("processes")),
            oom_kills=parse_int(j.get("oomKills")),
            egress_sent=parse_int(j.get("egressSent")),
            egress_received=parse_int(j.get("egressReceived")),
        )


@dataclass(frozen=True)
class Output:
    """A run of bytes of one stream of a process."""

    stream: StreamName
    """stdout, stderr or pty."""
    data: bytes
    offset: int
    """Of the first byte, counted over all streams together: attach(exec_id, offset) comes back to it."""
    text: str
    """data as UTF-8. A character cut by the end of data is in the next Output's text."""


@dataclass(frozen=True)
class Result:
    """A finished command. A non-zero exit raises nothing: look at `ok`, or call check()."""

    stdout_bytes: bytes
    stderr_bytes: bytes
    end: End
    exec_id: str
    duration: float = 0.0
    """Seconds the process ran, measured by the server."""
    lost: tuple[tuple[int, int], ...] = ()
    """Byte ranges (of the combined offsets) the server no longer held when they were asked for. Almost always empty."""
    replayed: bool = False
    """The exec_id had been started before: this is that run's output, nothing ran again."""
    egress_denied: int = 0
    """What the network policy denied the sandbox, whichever process tried, while this was followed."""
    replay_missed: int = 0
    """Requests that the replay of the sandbox had no answer for meanwhile; Sandbox.network().replay says which."""

    @cached_property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @cached_property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def exit_code(self) -> int:
        """The exit code; 128 + signal for a signal. An end that has none (deadline, oom, …) never reads as 0: -1."""
        return self.end.exit_code if self.end.exit_code or self.end.cause == "exited" else -1

    @property
    def ok(self) -> bool:
        return self.end.cause == "exited" and self.end.exit_code == 0

    def check(self) -> Result:
        """Itself if ok; CommandError with the last of stderr otherwise."""
        if self.ok:
            return self
        tail = self.stderr_bytes[-2000:].decode("utf-8", "replace").strip()
        raise CommandError(f"command {self.end}" + (f": {tail}" if tail else ""), self)

    def __repr__(self) -> str:
        def short(data: bytes) -> str:
            return repr(data[:60].decode("utf-8", "replace")) + (f"… {len(data)} bytes" if len(data) > 60 else "")

        return f"Result({self.end}, stdout={short(self.stdout_bytes)}, stderr={short(self.stderr_bytes)})"


@dataclass(frozen=True)
class ProcessInfo:
    """A process started through the API. `end` is None while it runs."""

    exec_id: str
    pid: int
    args: tuple[str, ...]
    user: str
    cwd: str
    pty: bool
    started_at: Optional[datetime]
    end: Optional[End]

    @classmethod
    def parse(cls, j: Json) -> ProcessInfo:
        end = (j.get("end") or {}).get("end")
        return cls(
            exec_id=j.get("execId", ""),
            pid=j.get("pid", 0),
            args=tuple(j.get("args") or ()),
            user=j.get("user", ""),
            cwd=j.get("cwd", ""),
            pty=j.get("pty", False),
            started_at=parse_time(j.get("startedAt")),
            end=End.parse(end) if end else None,
        )


@dataclass(frozen=True)
class Task:
    """One process inside, started through the API or not, as `ps` would show it."""

    pid: int
    ppid: int
    uid: int
    state: str
    command: str
    exec_id: str

    @classmethod
    def parse(cls, j: Json) -> Task:
        return cls(
            pid=j.get("pid", 0),
            ppid=j.get("ppid", 0),
            uid=j.get("uid", 0),
            state=j.get("state", ""),
            command=j.get("command", ""),
            exec_id=j.get("execId", ""),
        )


@dataclass(frozen=True)
class ProcessList:
    """What runs, or ran, in a sandbox. Iterating gives the processes started through the API."""

    processes: tuple[ProcessInfo, ...]
    tasks: tuple[Task, ...]

    def __iter__(self) -> Any:
        return iter(self.processes)

    def __len__(self) -> int:
        return len(self.processes)

    @classmethod
    def parse(cls, j: Json) -> ProcessList:
        return cls(
            tuple(ProcessInfo.parse(p) for p in j.get("processes") or ()),
            tuple(Task.parse(t) for t in j.get("tasks") or ()),
        )


@dataclass(frozen=True)
class FileInfo:
    """One path inside a sandbox. Symlinks are described, not followed."""

    path: str
    name: str
    type: str
    """file, dir, symlink or other."""
    size: int
    mode: int
    """Permission bits with setuid, setgid and sticky: 0o7777."""
    uid: int
    gid: int
    owner: str
    group: str
    mod_time: Optional[datetime]
    target: str
    """Of a symlink."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Extended attributes "user.*" of a file or directory, without that prefix; in a list if asked for."""

    @property
    def is_dir(self) -> bool:
        return self.type == "dir"

    @property
    def is_file(self) -> bool:
        return self.type == "file"

    @classmethod
    def parse(cls, j: Json) -> FileInfo:
        return cls(
            path=j.get("path", ""),
            name=j.get("name", ""),
            type=j.get("type", ""),
            size=parse_int(j.get("size")),
            mode=j.get("mode", 0),
            uid=j.get("uid", 0),
            gid=j.get("gid", 0),
            owner=j.get("owner", ""),
            group=j.get("group", ""),
            mod_time=parse_time(j.get("modTime")),
            target=j.get("target", ""),
            attributes=j.get("attributes", {}),
        )


class FileList(list[FileInfo]):
    """The entries of a directory. `truncated` says that there were more than the limit."""

    truncated: bool = False


@dataclass(frozen=True)
class FileEvent:
    """A change seen by a watch: create, write, remove, rename, chmod; overflow where changes may have been missed."""

    path: str
    op: str


@dataclass(frozen=True)
class RegistryLogin:
    """That the tenant has credentials for a registry, without the password."""

    registry: str
    username: str
    updated_at: Optional[datetime]

    @classmethod
    def parse(cls, j: Json) -> RegistryLogin:
        return cls(
            registry=j.get("registry", ""), username=j.get("username", ""), updated_at=parse_time(j.get("updatedAt"))
        )


@dataclass(frozen=True)
class Image:
    """A root file system, addressed by content."""

    id: str
    names: tuple[str, ...]
    size: int
    source: str
    platform: str
    created_at: Optional[datetime]
    env: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    exposed_ports: tuple[str, ...] = ()

    @staticmethod
    def from_(base: str) -> Recipe:
        """An image to be built step by step on another: `Image.from_("base").pip("requests").build("app")`."""
        from .image import Recipe

        return Recipe(base)

    @staticmethod
    def build(
        name: str,
        context: Optional[Union[str, os.PathLike[str]]] = None,
        *,
        dockerfile: Optional[Union[str, os.PathLike[str]]] = None,
        on_event: Optional[Callable[[BuildEvent], Any]] = None,
        client: Optional[Client] = None,
        **options: Any,
    ) -> Image:
        """Build the Dockerfile of a directory. Options: args, target, secrets, network, no_cache, timeout, tags."""
        from . import image
        from .client import default_client

        message, files = image.of_dockerfile(name, context, dockerfile, options)
        client = client or default_client()
        try:
            return image.build(client, message, files, on_event)
        except FailedPrecondition as error:
            if not image.wants_whole(message, error):
                raise
        message, files = image.of_dockerfile(name, context, dockerfile, options, whole=True)
        return image.build(client, message, files, on_event)

    @staticmethod
    async def build_async(
        name: str,
        context: Optional[Union[str, os.PathLike[str]]] = None,
        *,
        dockerfile: Optional[Union[str, os.PathLike[str]]] = None,
        on_event: Optional[Callable[[BuildEvent], Any]] = None,
        client: Optional[AsyncClient] = None,
        **options: Any,
    ) -> Image:
        """build for asyncio; on_event may be a coroutine function."""
        from . import image
        from .client import default_async_client

        client = client or default_async_client()
        read = asyncio.get_running_loop().run_in_executor
        message, files = await read(None, image.of_dockerfile, name, context, dockerfile, options)
        try:
            return await image.build_async(client, message, files, on_event)
        except FailedPrecondition as error:
            if not image.wants_whole(message, error):
                raise
        of_all = partial(image.of_dockerfile, name, context, dockerfile, options, whole=True)
        message, files = await read(None, of_all)
        return await image.build_async(client, message, files, on_event)

    @classmethod
    def parse(cls, j: Json) -> Image:
        return cls(
            id=j.get("id", ""),
            names=tuple(j.get("names") or ()),
            size=parse_int(j.get("size")),
            source=j.get("source", ""),
            platform=j.get("platform", ""),
            created_at=parse_time(j.get("createdAt")),
            env=tuple(j.get("env") or ()),
            working_dir=j.get("workingDir", ""),
            user=j.get("user", ""),
            entrypoint=tuple(j.get("entrypoint") or ()),
            cmd=tuple(j.get("cmd") or ()),
            labels=j.get("labels") or {},
            exposed_ports=tuple(j.get("exposedPorts") or ()),
        )


@dataclass(frozen=True)
class PullProgress:
    """A step of an image pull: resolve, download, flatten, erofs, done. Bytes; total 0 means unknown."""

    step: str
    done: int
    total: int


@dataclass(frozen=True)
class Capacity:
    sandboxes: int = 0
    cpu: float = 0.0
    memory: int = 0
    disk: int = 0

    @classmethod
    def parse(cls, j: Json) -> Capacity:
        return cls(
            sandboxes=parse_int(j.get("sandboxes")),
            cpu=float(j.get("cpu", 0)),
            memory=parse_int(j.get("memory")),
            disk=parse_int(j.get("disk")),
        )


@dataclass(frozen=True)
class ServerInfo:
    """The installation behind a client."""

    version: str
    runtime: str
    total: Capacity = field(default_factory=Capacity)
    used: Capacity = field(default_factory=Capacity)
    warm_kernels: int = 0
    warm_target: int = 0
    held_kernels: int = 0  # restored ahead from checkpoints in use
    held_target: int = 0
    lost_calls: int = 0  # lost between node and guest and sent again: a fault if not 0

    @classmethod
    def parse(cls, j: Json) -> ServerInfo:
        return cls(
            version=j.get("version", ""),
            runtime=j.get("runtime", ""),
            total=Capacity.parse(j.get("total") or {}),
            used=Capacity.parse(j.get("used") or {}),
            warm_kernels=j.get("warmKernels", 0),
            warm_target=j.get("warmTarget", 0),
            held_kernels=j.get("heldKernels", 0),
            held_target=j.get("heldTarget", 0),
            lost_calls=int(j.get("lostCalls", 0)),
        )
