"""The unary calls of kept state: standby, forks, snapshots, templates, volumes, recordings; see _calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ._calls import Call, Created, Ref, created, new_id, nothing, ref, sandbox, strings
from ._values import Seconds, Size, format_duration, parse_int, parse_size, to_seconds
from .errors import InvalidArgument
from .models import FileInfo, FileList, Json, SandboxInfo
from .replay import RecordedRequest, RecordingInfo
from .state import Forked, PrunedSnapshot, SnapshotInfo, TemplateInfo, Tree, VolumeInfo
from .types import IfBusy

# Standby, forks, the tree


def pause(id: str, cold: bool, if_busy: IfBusy) -> Call[SandboxInfo]:
    message: dict[str, Any] = {"id": id, **({"cold": True} if cold else {})}
    if if_busy != "freeze":
        message["ifBusy"] = if_busy
    return Call("Sandboxes/Pause", message, sandbox, repeatable=True, slow=True)


def resume(id: str) -> Call[Created]:
    return Call("Sandboxes/Resume", {"id": id}, created, repeatable=True, slow=True)


def restore(id: str, snapshot: Ref) -> Call[Created]:
    # As with reset, a second one leaves what one leaves.
    message = {"id": id, "snapshot": ref("snapshot", snapshot)}
    return Call("Sandboxes/Restore", message, created, repeatable=True, slow=True)


def fork(
    source: dict[str, str],
    count: int,
    *,
    min_ready: Optional[int],
    labels: Optional[Mapping[str, str]],
    env: Optional[Mapping[str, str]],
    timeout: Optional[Seconds],
    lease: Optional[str] = "",
) -> Call[Forked]:
    """source: the id of a sandbox or the name or id of a snapshot, by the field it goes to."""
    message: dict[str, Any] = {**source, "count": _at_least_one("n", count)}
    if min_ready is not None:
        if _at_least_one("min_ready", min_ready) > count:
            raise InvalidArgument(f"min_ready: {min_ready} of {count} cannot be", field="min_ready")
        message["minReady"] = min_ready
    if labels:
        message["labels"] = strings("labels", labels)
    if env:
        message["env"] = strings("env", env)
    if timeout is not None:
        message["timeout"] = format_duration("timeout", timeout)
    if lease is not None:
        message["lease"] = lease
    # With the key a second one gives the same children.
    message["idempotencyKey"] = new_id() + new_id()
    return Call("Sandboxes/Fork", message, Forked.parse, slow=True, repeatable=True)


def tree(id: str) -> Call[Tree]:
    return Call("Sandboxes/Tree", {"id": id}, Tree.parse, repeatable=True)


def _at_least_one(field: str, value: int) -> int:
    # 0 is "not said" to the server, which is not what the caller meant.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{field}: {value!r} is not a whole number from 1", field=field)
    return value


# Snapshots


def new_snapshot(
    sandbox_id: str,
    *,
    memory: bool,
    path: Optional[str],
    name: Optional[str],
    labels: Optional[Mapping[str, str]],
    stop: bool,
    ttl: Optional[Seconds],
) -> dict[str, Any]:
    """The message of Snapshots/Create, which is a stream."""
    kind = "directory" if path is not None else "memory" if memory else "filesystem"
    message: dict[str, Any] = {"sandbox": sandbox_id, "kind": kind, "idempotencyKey": new_id() + new_id()}
    if path is not None:
        message["path"] = path
    if name:
        message["name"] = name
    if labels:
        message["labels"] = strings("labels", labels)
    if stop:
        message["stop"] = True
    if ttl is not None:
        message["ttl"] = format_duration("ttl", ttl)
    return message


def get_snapshot(id: str) -> Call[SnapshotInfo]:
    def parse(j: Json) -> SnapshotInfo:
        return SnapshotInfo.parse(j["snapshot"])

    return Call("Snapshots/Get", {"id": id}, parse, repeatable=True)


@dataclass(frozen=True)
class SnapshotPage:
    snapshots: list[SnapshotInfo]
    next_token: str


def list_snapshots(
    labels: Optional[Mapping[str, str]],
    sandbox: Optional[Ref],
    kind: Optional[str],
    page_size: int,
    token: str,
) -> Call[SnapshotPage]:
    message: dict[str, Any] = {"pageSize": page_size}
    if labels:
        message["labels"] = strings("labels", labels)
    if sandbox is not None:
        message["sandbox"] = ref("sandbox", sandbox)
    if kind:
        message["kind"] = kind
    if token:
        message["pageToken"] = token

    def parse(j: Json) -> SnapshotPage:
        return SnapshotPage([SnapshotInfo.parse(s) for s in j.get("snapshots") or ()], j.get("nextPageToken", ""))

    return Call("Snapshots/List", message, parse, repeatable=True)


def delete_snapshot(id: str) -> Call[int]:
    def parse(j: Json) -> int:
        return parse_int(j.get("freed"))

    return Call("Snapshots/Delete", {"id": id}, parse, repeatable=True, slow=True, removes=True)


def prune_snapshots(
    *,
    keep_last: Optional[int],
    keep_labels: Optional[Mapping[str, str]],
    max_bytes: Optional[Size],
    max_age: Optional[Seconds],
    sandbox: Optional[Ref],
    dry_run: bool,
) -> Call[list[PrunedSnapshot]]:
    message: dict[str, Any] = {}
    if keep_last is not None:
        message["keepLast"] = _at_least_one("keep_last", keep_last)
    if keep_labels:
        message["keepLabels"] = strings("keep_labels", keep_labels)
    if max_bytes is not None:
        message["maxBytes"] = str(_at_least_one("max_bytes", parse_size("max_bytes", max_bytes)))
    if max_age is not None:
        if not to_seconds("max_age", max_age):
            raise InvalidArgument("max_age: zero would be no rule", field="max_age", hint="delete what is to go")
        message["maxAge"] = format_duration("max_age", max_age)
    if not message:
        raise InvalidArgument(
            "prune: no rule says what to keep",
            field="keep_last",
            hint="give keep_last, keep_labels, max_bytes or max_age",
        )
    if sandbox is not None:
        message["sandbox"] = ref("sandbox", sandbox)
    if dry_run:
        message["dryRun"] = True

    def parse(j: Json) -> list[PrunedSnapshot]:
        return [PrunedSnapshot.parse(p) for p in j.get("removed") or ()]

    # A second run would remove nothing more, but not say what the first removed.
    return Call("Snapshots/Prune", message, parse, repeatable=dry_run, slow=True)


def mount_snapshot(id: str, sandbox: Ref, path: Optional[str], unpack: bool) -> Call[None]:
    message: dict[str, Any] = {"snapshot": id, "sandbox": ref("sandbox", sandbox)}
    if path is not None:
        message["path"] = path
    if unpack:
        message["unpack"] = True
    return Call("Snapshots/Mount", message, nothing, slow=True)


def verify_snapshot(id: str) -> Call[int]:
    def parse(j: Json) -> int:
        return parse_int(j.get("bytes"))

    return Call("Snapshots/Verify", {"id": id}, parse, repeatable=True, slow=True)


# Templates


def new_template(
    name: str,
    spec: dict[str, Any],
    *,
    start: Optional[str],
    ready_command: Optional[str],
    ready_port: Optional[int],
    ready_timeout: Seconds,
) -> dict[str, Any]:
    """The message of Templates/Build, which is a stream."""
    message: dict[str, Any] = {
        "name": name,
        "spec": spec,
        "readyTimeout": format_duration("ready_timeout", ready_timeout),
    }
    if start is not None:
        message["start"] = start
    if ready_command is not None and ready_port is not None:
        raise InvalidArgument("ready_command, ready_port: one of them says when it is ready", field="ready_port")
    if ready_command is not None:
        message["readyCommand"] = ready_command
    if ready_port is not None:
        message["readyPort"] = ready_port
    return message


def _template(j: Json) -> TemplateInfo:
    return TemplateInfo.parse(j["template"])


def get_template(name: str) -> Call[TemplateInfo]:
    return Call("Templates/Get", {"name": name}, _template, repeatable=True)


def list_templates(name: Optional[str]) -> Call[list[TemplateInfo]]:
    def parse(j: Json) -> list[TemplateInfo]:
        return [TemplateInfo.parse(t) for t in j.get("templates") or ()]

    return Call("Templates/List", {"name": name} if name else {}, parse, repeatable=True)


def tag_template(name: str, tags: Sequence[str]) -> Call[TemplateInfo]:
    return Call("Templates/Tag", {"name": name, "tags": list(tags)}, _template, repeatable=True)


def untag_template(name: str, tags: Sequence[str]) -> Call[None]:
    return Call("Templates/Untag", {"name": name, "tags": list(tags)}, nothing, repeatable=True)


def delete_template(name: str) -> Call[list[int]]:
    def parse(j: Json) -> list[int]:
        return [parse_int(v) for v in j.get("versions") or ()]

    return Call("Templates/Delete", {"name": name}, parse, repeatable=True, slow=True, removes=True)


# Volumes. By id once there is an object: a name may have become another volume's.


def _volume(j: Json) -> VolumeInfo:
    return VolumeInfo.parse(j["volume"])


def create_volume(
    name: str, size: Size, labels: Optional[Mapping[str, str]], snapshot: Optional[str]
) -> Call[VolumeInfo]:
    message: dict[str, Any] = {"name": name, "size": str(parse_size("size", size))}
    if labels:
        message["labels"] = strings("labels", labels)
    if snapshot:
        message["snapshot"] = snapshot
    # Not repeatable: the second would find the name taken by the first.
    return Call("Volumes/Create", message, _volume)


def get_volume(name: str) -> Call[VolumeInfo]:
    return Call("Volumes/Get", {"name": name}, _volume, repeatable=True)


def list_volumes(labels: Optional[Mapping[str, str]]) -> Call[list[VolumeInfo]]:
    def parse(j: Json) -> list[VolumeInfo]:
        return [VolumeInfo.parse(v) for v in j.get("volumes") or ()]

    return Call("Volumes/List", {"labels": strings("labels", labels)} if labels else {}, parse, repeatable=True)


def delete_volume(id: str) -> Call[None]:
    return Call("Volumes/Delete", {"name": id}, nothing, repeatable=True, slow=True, removes=True)


def resize_volume(id: str, size: Size) -> Call[VolumeInfo]:
    message = {"name": id, "size": str(parse_size("size", size))}
    return Call("Volumes/Resize", message, _volume, repeatable=True, slow=True)


def clone_volume(id: str, new_name: str, labels: Optional[Mapping[str, str]]) -> Call[VolumeInfo]:
    message: dict[str, Any] = {"name": id, "newName": new_name}
    if labels:
        message["labels"] = strings("labels", labels)
    return Call("Volumes/Clone", message, _volume, slow=True)


def snapshot_volume(id: str, name: Optional[str], labels: Optional[Mapping[str, str]]) -> Call[SnapshotInfo]:
    message: dict[str, Any] = {"name": id}
    if name:
        message["snapshotName"] = name
    if labels:
        message["labels"] = strings("labels", labels)
    return Call("Volumes/Snapshot", message, lambda j: SnapshotInfo.parse(j["snapshot"]), slow=True)


def list_volume_files(id: str, path: str, depth: int) -> Call[FileList]:
    def parse(j: Json) -> FileList:
        files = FileList(FileInfo.parse(f) for f in j.get("files") or ())
        files.truncated = bool(j.get("truncated"))
        return files

    return Call("Volumes/ListFiles", {"name": id, "path": path, "depth": depth}, parse, repeatable=True)


def remove_volume_file(id: str, path: str, recursive: bool) -> Call[None]:
    return Call("Volumes/RemoveFile", {"name": id, "path": path, "recursive": recursive}, nothing)


# Recordings.


def _recording(j: Json) -> RecordingInfo:
    return RecordingInfo.parse(j["recording"])


def get_recording(name: str) -> Call[RecordingInfo]:
    return Call("Recordings/Get", {"name": name}, _recording, repeatable=True)


def recorded_requests(id: str, after: int, most: int) -> Call[list[RecordedRequest]]:
    def parse(j: Json) -> list[RecordedRequest]:
        return [RecordedRequest._from(e) for e in j.get("exchanges") or ()]

    message = {"name": id, "exchanges": most, "after": str(after)}
    return Call("Recordings/Get", message, parse, repeatable=True, slow=True)


def list_recordings() -> Call[list[RecordingInfo]]:
    def parse(j: Json) -> list[RecordingInfo]:
        return [RecordingInfo.parse(r) for r in j.get("recordings") or ()]

    return Call("Recordings/List", {}, parse, repeatable=True)


def delete_recording(id: str) -> Call[None]:
    return Call("Recordings/Delete", {"name": id}, nothing, repeatable=True, removes=True)
