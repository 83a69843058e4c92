"""Every unary call of the API as a value: what to send and how to read the answer.

The sync and the async client both run these, so that a request is described
once. `repeatable` marks calls whose second run changes nothing more than the
first: only those are sent again after a connection broke with the outcome
unknown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Generic, Optional, Protocol, TypeVar, Union

from ._connect import decode_base64, encode_base64
from ._values import Seconds, Size, format_duration, parse_duration, parse_int, parse_size
from .changes import Deterministic, Diff
from .errors import InvalidArgument
from .models import End, FileInfo, FileList, Image, Json, ProcessList, RegistryLogin, SandboxInfo, ServerInfo, Stats
from .network import NetworkLike, NetworkStatus, to_network
from .replay import RecordLike, Replay, to_record

T = TypeVar("T")

Command = Union[str, Sequence[str]]
"""A line for the sandbox's shell, or an argument vector."""

# The most a Read or Write call carries. The API takes 16 MiB; above this the
# plain HTTP path is quicker, since it has no base64.
SMALL_FILE = 1 << 20


@dataclass
class Call(Generic[T]):
    method: str
    """Service and method, e.g. "Sandboxes/Create"."""
    message: dict[str, Any]
    parse: Callable[[Json], T]
    repeatable: bool = False
    wait_capacity: bool = False
    """Wait while the server is full."""
    slow: bool = False
    """It moves memory or whole trees of files and may take minutes."""
    removes: bool = False
    """Not found, when it is sent again, may mean that the first one did it: it is gone either way."""


def nothing(_: Json) -> None:
    return None


def new_id() -> str:
    """64 random bits in hex: for exec ids (unique in one sandbox) doubled for idempotency keys."""
    return os.urandom(8).hex()


# Sandboxes


@dataclass(frozen=True)
class Created:
    info: SandboxInfo
    node_time: float


def created(j: Json) -> Created:
    return Created(SandboxInfo.parse(j["sandbox"]), parse_duration(j.get("nodeTime")))


class HasId(Protocol):
    @property
    def id(self) -> str: ...


Ref = Union[str, HasId]
"""A name or id, or the object that has it."""


def ref(field: str, value: Ref) -> str:
    id = value if isinstance(value, str) else getattr(value, "id", None)
    if not isinstance(id, str) or not id:
        raise InvalidArgument(
            f"{field}: {value!r} is no name or id", field=field, hint=f"give a name, an id or the {field} itself"
        )
    return id


def sandbox_spec(
    *,
    image: Optional[str],
    snapshot: Optional[Ref] = None,
    template: Optional[Ref] = None,
    cpu: Optional[float],
    memory: Optional[Size],
    memory_limit: Optional[Size],
    disk: Optional[Size],
    pids: Optional[int],
    timeout: Optional[Seconds] = None,
    idle_timeout: Optional[Seconds] = None,
    on_idle: Optional[str] = None,
    on_timeout: Optional[str] = None,
    env: Optional[Mapping[str, str]],
    labels: Optional[Mapping[str, str]],
    volumes: Optional[Mapping[str, Union[Ref, tuple[Ref, str]]]] = None,
    network: Optional[NetworkLike] = None,
    secrets: Optional[Sequence[str]] = None,
    record: Optional[RecordLike] = None,
    replay: Optional[Union[Ref, Replay]] = None,
    reuse: Optional[str] = None,
    deterministic: Union[bool, Deterministic, None] = None,
) -> dict[str, Any]:
    """A SandboxSpec: what to start from (image "base" where nothing is said) and with what."""
    sources = [("image", image), ("snapshot", snapshot), ("template", template)]
    spec: dict[str, Any] = {field: ref(field, value) for field, value in sources if value is not None}
    if len(spec) > 1:
        raise InvalidArgument(
            f"{', '.join(spec)}: a sandbox starts from one of them", field=list(spec)[1], hint="leave the others out"
        )
    if not spec:
        spec["image"] = "base"
    resources: dict[str, Any] = {}
    if cpu is not None:
        resources["cpu"] = cpu
    if memory is not None:
        resources["memory"] = str(parse_size("memory", memory))
    if memory_limit is not None:
        resources["memoryLimit"] = str(parse_size("memory_limit", memory_limit))
    if disk is not None:
        resources["disk"] = str(parse_size("disk", disk))
    if pids is not None:
        resources["pids"] = str(pids)
    if resources:
        spec["resources"] = resources
    if reuse:
        spec["reuse"] = reuse
    if deterministic:
        spec["deterministic"] = (Deterministic() if deterministic is True else deterministic)._json()
    if env:
        spec["env"] = strings("env", env)
    if labels:
        spec["labels"] = strings("labels", labels)
    if timeout is not None:
        spec["timeout"] = format_duration("timeout", timeout)
    if idle_timeout is not None:
        spec["idleTimeout"] = format_duration("idle_timeout", idle_timeout)
    if on_idle is not None:
        spec["onIdle"] = on_idle
    if on_timeout is not None:
        spec["onTimeout"] = on_timeout
    if volumes:
        spec["volumes"] = [_mount(path, volume) for path, volume in volumes.items()]
    if network is not None:
        spec["network"] = to_network(network)._json()
    if secrets:
        spec["secrets"] = names("secrets", secrets)
    recorded = to_record(record)
    if recorded is not None:
        spec.setdefault("network", {})["record"] = recorded._json()
    if replay is not None:
        replay = replay if isinstance(replay, Replay) else Replay(ref("replay", replay))
        spec.setdefault("network", {})["replay"] = replay._json()
    return spec


def names(field: str, values: Sequence[str]) -> list[str]:
    if isinstance(values, str):
        raise InvalidArgument(f"{field}: a list of names, not one string", field=field, hint=f"[{values!r}]")
    return list(values)


def _mount(path: str, volume: Union[Ref, tuple[Ref, str]]) -> dict[str, str]:
    if not isinstance(volume, tuple):
        return {"volume": ref("volume", volume), "path": path}
    source, mode = volume
    return {"volume": ref("volume", source), "path": path, "mode": mode}


def create_sandbox(spec: dict[str, Any], idempotency_key: Optional[str]) -> Call[Created]:
    message = {"spec": spec, "idempotencyKey": idempotency_key or new_id() + new_id()}
    return Call("Sandboxes/Create", message, created, repeatable=True, wait_capacity=True)


def strings(field: str, values: Mapping[str, str]) -> dict[str, str]:
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgument(f"{field}: {key!r}: {value!r} is not a pair of strings", field=field)
    return dict(values)


def sandbox(j: Json) -> SandboxInfo:
    return SandboxInfo.parse(j["sandbox"])


def get_sandbox(id: str) -> Call[SandboxInfo]:
    return Call("Sandboxes/Get", {"id": id}, sandbox, repeatable=True)


@dataclass(frozen=True)
class Page:
    sandboxes: list[SandboxInfo]
    next_token: str


def list_sandboxes(
    labels: Optional[Mapping[str, str]], states: Optional[Sequence[str]], page_size: int, token: str
) -> Call[Page]:
    message: dict[str, Any] = {"pageSize": page_size}
    if labels:
        message["labels"] = strings("labels", labels)
    if states:
        message["states"] = ["SANDBOX_STATE_" + s.upper() for s in states]
    if token:
        message["pageToken"] = token

    def parse(j: Json) -> Page:
        return Page([SandboxInfo.parse(s) for s in j.get("sandboxes") or ()], j.get("nextPageToken", ""))

    return Call("Sandboxes/List", message, parse, repeatable=True)


def set_timeout(id: str, timeout: Optional[Seconds]) -> Call[SandboxInfo]:
    message = {"id": id, "timeout": format_duration("timeout", timeout or 0)}
    return Call("Sandboxes/SetTimeout", message, sandbox, repeatable=True)


def set_network(id: str, network: NetworkLike) -> Call[int]:
    message = {"id": id, "network": to_network(network)._json()}
    return Call("Sandboxes/SetNetwork", message, lambda j: parse_int(j.get("generation")), repeatable=True)


def set_secrets(id: str, secrets: Sequence[str]) -> Call[None]:
    return Call("Sandboxes/SetSecrets", {"id": id, "secrets": names("secrets", secrets)}, nothing, repeatable=True)


def get_network(id: str, flows: int) -> Call[NetworkStatus]:
    return Call("Sandboxes/GetNetwork", {"id": id, "flows": flows}, NetworkStatus._from, repeatable=True)


def reset(id: str) -> Call[Created]:
    # A second reset leaves what one leaves, a pristine container; only the
    # episode number is one higher.
    return Call("Sandboxes/Reset", {"id": id}, created, repeatable=True)


def kill(id: str) -> Call[SandboxInfo]:
    return Call("Sandboxes/Kill", {"id": id}, sandbox, repeatable=True)


def kill_by_key(key: str) -> Call[None]:
    return Call("Sandboxes/Kill", {"idempotencyKey": key}, nothing, repeatable=True)


def set_lease(id: str, lease: str) -> Call[SandboxInfo]:
    return Call("Sandboxes/SetLease", {"id": id, "lease": lease}, sandbox, repeatable=True)


def create_lease(ttl: float, name: str) -> Call[str]:
    message = {"ttl": format_duration("ttl", ttl), "name": name}
    # One too many is nobody's and ends by itself.
    return Call("Leases/Create", message, lambda j: str(j["lease"]["id"]), repeatable=True)


def heartbeat(id: str) -> Call[None]:
    return Call("Leases/Heartbeat", {"id": id}, nothing, repeatable=True)


def end_lease(id: str) -> Call[None]:
    return Call("Leases/End", {"id": id}, nothing, repeatable=True)


def kill_by_label(labels: Mapping[str, str]) -> Call[list[str]]:
    if not labels:
        raise InvalidArgument("labels: at least one is needed", field="labels")

    def parse(j: Json) -> list[str]:
        return list(j.get("ids") or ())

    return Call("Sandboxes/KillByLabel", {"labels": strings("labels", labels)}, parse, repeatable=True)


def diff(id: str, since: str, hash: bool, limit: Optional[int]) -> Call[Diff]:
    message: dict[str, Any] = {"id": id, "since": since}
    if hash:
        message["hash"] = True
    if limit is not None:
        message["limit"] = limit
    return Call("Sandboxes/Diff", message, Diff.parse, repeatable=True, slow=True)


def stats(id: str) -> Call[Stats]:
    return Call("Sandboxes/Stats", {"id": id}, Stats.parse, repeatable=True)


# Processes


def process_spec(
    cmd: Command,
    *,
    exec_id: Optional[str],
    cwd: Optional[str],
    env: Optional[Mapping[str, str]],
    user: Optional[Union[str, int]],
    timeout: Optional[Seconds],
    input: Optional[bytes],
    open_stdin: bool,
    pty: Optional[tuple[int, int]],
) -> dict[str, Any]:
    """A ProcessSpec. It always has an exec_id, so that a broken stream can be picked up again."""
    spec: dict[str, Any] = {"execId": exec_id or new_id()}
    if isinstance(cmd, str):
        spec["command"] = cmd
    else:
        args = list(cmd)
        if not args or not all(isinstance(a, str) for a in args):
            raise InvalidArgument(
                "cmd: neither a string nor a list of strings with at least one",
                field="cmd",
                hint='give a line for the shell ("ls -l") or an argument vector (["ls", "-l"])',
            )
        spec["args"] = args
    if cwd:
        spec["cwd"] = cwd
    if env:
        spec["env"] = strings("env", env)
    if user is not None:
        spec["user"] = str(user)
    if timeout is not None:
        spec["timeout"] = format_duration("timeout", timeout)
    if input:
        spec["input"] = encode_base64(input)
    if open_stdin:
        spec["stdin"] = True
    if pty is not None:
        spec["pty"] = {"rows": pty[0], "cols": pty[1]}
    return spec


def list_processes(sandbox_id: str) -> Call[ProcessList]:
    return Call("Processes/List", {"sandboxId": sandbox_id}, ProcessList.parse, repeatable=True)


def send_input(sandbox_id: str, exec_id: str, data: bytes) -> Call[None]:
    # Not repeatable: bytes that arrived would arrive twice.
    message = {"sandboxId": sandbox_id, "execId": exec_id, "data": encode_base64(data)}
    return Call("Processes/SendInput", message, nothing)


def close_input(sandbox_id: str, exec_id: str) -> Call[None]:
    return Call("Processes/CloseInput", {"sandboxId": sandbox_id, "execId": exec_id}, nothing, repeatable=True)


def signal(sandbox_id: str, exec_id: str, name: Union[str, int], process_only: bool) -> Call[None]:
    message: dict[str, Any] = {"sandboxId": sandbox_id, "execId": exec_id, "signal": str(name)}
    if process_only:
        message["processOnly"] = True
    # A second SIGKILL is nothing; a second SIGUSR1 is another one.
    return Call("Processes/Signal", message, nothing, repeatable=str(name) in ("SIGKILL", "KILL", "9"))


def resize(sandbox_id: str, exec_id: str, rows: int, cols: int) -> Call[None]:
    message = {"sandboxId": sandbox_id, "execId": exec_id, "size": {"rows": rows, "cols": cols}}
    return Call("Processes/Resize", message, nothing, repeatable=True)


def wait_process(sandbox_id: str, exec_id: str, max_wait: float) -> Call[Optional[End]]:
    message = {"sandboxId": sandbox_id, "execId": exec_id, "maxWait": format_duration("max_wait", max_wait)}

    def parse(j: Json) -> Optional[End]:
        end = (j.get("end") or {}).get("end")
        return End.parse(end) if end else None

    return Call("Processes/Wait", message, parse, repeatable=True)


# Files


def _info(j: Json) -> FileInfo:
    return FileInfo.parse(j.get("info") or j)


def read_file(sandbox_id: str, path: str, offset: int, length: int) -> Call[tuple[bytes, FileInfo]]:
    message: dict[str, Any] = {"sandboxId": sandbox_id, "path": path, "offset": str(offset), "length": str(length)}

    def parse(j: Json) -> tuple[bytes, FileInfo]:
        return decode_base64(j.get("data", "")), FileInfo.parse(j.get("info") or {})

    return Call("Files/Read", message, parse, repeatable=True)


@dataclass(frozen=True)
class WriteOptions:
    """How content is written; the same for the Write call and for PUT."""

    mode: Optional[int] = None
    user: Optional[Union[str, int]] = None
    atomic: bool = False
    append: bool = False
    parents: bool = True

    def query(self) -> dict[str, str]:
        query: dict[str, str] = {}
        if self.mode is not None:
            query["mode"] = f"{self.mode:04o}"
        if self.user is not None:
            query["user"] = str(self.user)
        for flag in ("atomic", "append", "parents"):
            if getattr(self, flag):
                query[flag] = "true"
        return query


def write_file(sandbox_id: str, path: str, data: bytes, options: WriteOptions) -> Call[FileInfo]:
    message: dict[str, Any] = {"sandboxId": sandbox_id, "path": path, "data": encode_base64(data)}
    if options.mode is not None:
        message["mode"] = options.mode
    if options.user is not None:
        message["user"] = str(options.user)
    for flag in ("atomic", "append", "parents"):
        if getattr(options, flag):
            message[flag] = True
    return Call("Files/Write", message, _info, repeatable=not options.append)


def stat(sandbox_id: str, path: str) -> Call[FileInfo]:
    return Call("Files/Stat", {"sandboxId": sandbox_id, "path": path}, _info, repeatable=True)


def list_files(sandbox_id: str, path: str, depth: int, limit: int) -> Call[FileList]:
    def parse(j: Json) -> FileList:
        files = FileList(FileInfo.parse(f) for f in j.get("files") or ())
        files.truncated = bool(j.get("truncated"))
        return files

    message = {"sandboxId": sandbox_id, "path": path, "depth": depth, "limit": limit}
    return Call("Files/List", message, parse, repeatable=True)


def mkdir(
    sandbox_id: str, path: str, parents: bool, mode: Optional[int], user: Optional[Union[str, int]]
) -> Call[FileInfo]:
    message: dict[str, Any] = {"sandboxId": sandbox_id, "path": path, "parents": parents}
    if mode is not None:
        message["mode"] = mode
    if user is not None:
        message["user"] = str(user)
    return Call("Files/Mkdir", message, _info, repeatable=parents)


def move(sandbox_id: str, source: str, target: str) -> Call[FileInfo]:
    return Call("Files/Move", {"sandboxId": sandbox_id, "from": source, "to": target}, _info)


def remove(sandbox_id: str, path: str, recursive: bool) -> Call[None]:
    return Call("Files/Remove", {"sandboxId": sandbox_id, "path": path, "recursive": recursive}, nothing)


def chmod(sandbox_id: str, path: str, mode: int, recursive: bool) -> Call[None]:
    message = {"sandboxId": sandbox_id, "path": path, "mode": mode, "recursive": recursive}
    return Call("Files/Chmod", message, nothing, repeatable=True)


def set_attributes(sandbox_id: str, path: str, attributes: Mapping[str, str]) -> Call[FileInfo]:
    message = {"sandboxId": sandbox_id, "path": path, "attributes": dict(attributes)}
    return Call("Files/SetAttributes", message, _info, repeatable=True)


def chown(sandbox_id: str, path: str, user: Union[str, int], recursive: bool) -> Call[None]:
    message = {"sandboxId": sandbox_id, "path": path, "user": str(user), "recursive": recursive}
    return Call("Files/Chown", message, nothing, repeatable=True)


# Images and the installation


def list_images() -> Call[list[Image]]:
    def parse(j: Json) -> list[Image]:
        return [Image.parse(i) for i in j.get("images") or ()]

    return Call("Images/List", {}, parse, repeatable=True)


def get_image(name: str) -> Call[Image]:
    def parse(j: Json) -> Image:
        return Image.parse(j["image"])

    return Call("Images/Get", {"name": name}, parse, repeatable=True)


def remove_image(name: str) -> Call[None]:
    return Call("Images/Remove", {"name": name}, nothing)


def login_registry(registry: str, username: str, password: str) -> Call[RegistryLogin]:
    def parse(j: Json) -> RegistryLogin:
        return RegistryLogin.parse(j["login"])

    message = {"registry": registry, "username": username, "password": password}
    return Call("Images/Login", message, parse, repeatable=True)


def list_logins() -> Call[list[RegistryLogin]]:
    def parse(j: Json) -> list[RegistryLogin]:
        return [RegistryLogin.parse(i) for i in j.get("logins") or ()]

    return Call("Images/Logins", {}, parse, repeatable=True)


def logout_registry(registry: str) -> Call[None]:
    return Call("Images/Logout", {"registry": registry}, nothing)


def server_info() -> Call[ServerInfo]:
    return Call("System/Info", {}, ServerInfo.parse, repeatable=True)
