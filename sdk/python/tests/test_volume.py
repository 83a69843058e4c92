"""Volumes and their files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Break, Fail, Got, Plain


def volume_json(**more: Any) -> dict[str, Any]:
    return {
        "id": "v1",
        "name": "data",
        "size": str(1 << 30),
        "used": "4096",
        "labels": {"a": "b"},
        "createdAt": "2026-03-01T10:00:00Z",
        "holders": [{"sandbox": "sb1", "mode": "ro"}],
        **more,
    }


class FakeVolume:
    """One volume's content by path; `breaks` requests of each kind break first."""

    def __init__(self, server: Any, breaks: int = 0) -> None:
        self.content: dict[str, bytes] = {}
        self.modes: dict[str, str] = {}
        self.breaks = {"get": breaks, "put": breaks}
        server.on("GET files", self._get)
        server.on("PUT files", self._put)

    def _broken(self, kind: str) -> bool:
        self.breaks[kind] -= 1
        return self.breaks[kind] >= 0

    def _get(self, got: Got) -> Any:
        assert got.path == "/v1/volumes/v1/files"
        data = self.content.get(got.query["path"])
        if data is None:
            return Fail("not_found", "not_found", "no such file", status=404)
        return Plain([data[:10]], broken=True) if self._broken("get") else Plain(data)

    def _put(self, got: Got) -> Any:
        assert got.path == "/v1/volumes/v1/files"
        if self._broken("put"):
            return Break()
        self.content[got.query["path"]] = got.body
        self.modes[got.query["path"]] = got.query.get("mode", "")
        return Plain(status=204)


@pytest.fixture
def volume(api: Api) -> Any:
    api.server.on("Volumes/Get", {"volume": volume_json()})
    return api.Volume.get("data", client=api.client)


def test_create_and_get(api: Api) -> None:
    api.server.on("Volumes/Create", {"volume": volume_json()})
    volume = api.Volume.create("data", labels={"a": "b"}, client=api.client)
    assert api.server.requests[0].message == {"name": "data", "size": str(1 << 30), "labels": {"a": "b"}}
    assert (volume.id, volume.name, volume.size, volume.labels) == ("v1", "data", 1 << 30, {"a": "b"})
    assert volume.created_at.hour == 10
    api.server.on("Volumes/Get", {"volume": volume_json(used="8192")})
    info = volume.info()
    assert (info.used, info.holders) == (8192, (cove.VolumeHolder("sb1", "ro"),))
    assert volume.last_info is info
    assert api.server.sent("Get")[0].message == {"name": "v1"}


def test_a_create_that_broke_is_not_sent_again(api: Api) -> None:
    api.server.on("Volumes/Create", Break())
    with pytest.raises(cove.TransportError):
        api.Volume.create("data", "5GiB", client=api.client)
    assert api.server.count("Create") == 1


def test_list(api: Api) -> None:
    api.server.on("Volumes/List", {"volumes": [volume_json(), volume_json(id="v2", name="more")]})
    assert [v.name for v in api.Volume.list({"a": "b"}, client=api.client)] == ["data", "more"]
    assert api.Volume.list(client=api.client)[0].id == "v1"
    assert [got.message for got in api.server.sent("List")] == [{"labels": {"a": "b"}}, {}]


def test_resize_clone_delete(api: Api, volume: Any) -> None:
    resizes: list[Any] = [Break(), {"volume": volume_json(size=str(2 << 30))}]
    api.server.on("Volumes/Resize", lambda _: resizes.pop(0))
    assert volume.resize("2GiB").size == volume.size == 2 << 30
    assert api.server.sent("Resize")[-1].message == {"name": "v1", "size": str(2 << 30)}
    clone = {"id": "v2", "name": "copy", "from": "v1"}
    api.server.on("Volumes/Clone", lambda got: {"volume": {**clone, "labels": got.message["labels"]}})
    copy = volume.clone("copy", labels={"x": "y"})
    assert (copy.id, copy.last_info.cloned_from, copy.labels) == ("v2", "v1", {"x": "y"})
    assert api.server.sent("Clone")[0].message == {"name": "v1", "newName": "copy", "labels": {"x": "y"}}
    api.server.on("Volumes/Clone", Break())
    with pytest.raises(cove.TransportError):
        volume.clone("copy")
    assert api.server.count("Clone") == 2
    api.server.on("Volumes/Delete", Fail("failed_precondition", "failed_precondition", "mounted in sb1"))
    with pytest.raises(cove.FailedPrecondition, match="sb1"):
        volume.delete()
    deletes: list[Any] = [Break(), Fail("not_found", "not_found", status=404)]
    api.server.on("Volumes/Delete", lambda _: deletes.pop(0))
    volume.delete()
    assert {got.message["name"] for got in api.server.sent("Delete")} == {"v1"}


def test_files_are_written_and_read(api: Api, volume: Any) -> None:
    fake = FakeVolume(api.server)
    big = os.urandom(5_000_001)
    volume.files.write("/a/ü &=.txt", "grüße", mode=0o600)
    volume.files.write("/big", big)
    volume.files.write("/stream", iter([b"one ", b"two"]))
    volume.files.write("/file", io.BytesIO(b"x" * 3_000_000))
    volume.files.write("/empty", b"")
    assert fake.content["/stream"] == b"one two"
    assert fake.content["/file"] == b"x" * 3_000_000
    assert fake.modes == {"/a/ü &=.txt": "0600", "/big": "", "/stream": "", "/file": "", "/empty": ""}
    assert volume.files.read("/a/ü &=.txt") == "grüße"
    assert volume.files.read_bytes("/big") == big
    assert volume.files.read_bytes("/empty") == b""
    with pytest.raises(cove.NotFound):
        volume.files.read("/none")


def test_files_are_copied_in_and_out_through_breaks(api: Api, volume: Any, tmp_path: Path) -> None:
    fake = FakeVolume(api.server, breaks=2)
    data = os.urandom(3_000_001)
    (tmp_path / "in").write_bytes(data)
    (tmp_path / "in").chmod(0o640)
    volume.files.upload(tmp_path / "in", "/x")
    assert fake.content["/x"] == data
    assert fake.modes["/x"] == "0640"
    assert api.server.sent("files")[-1].headers["content-length"] == str(len(data))
    assert volume.files.download("/x", tmp_path / "out") == len(data)
    assert (tmp_path / "out").read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_a_stream_that_broke_is_not_sent_again(api: Api, volume: Any) -> None:
    FakeVolume(api.server, breaks=1)
    with pytest.raises(cove.TransportError):
        volume.files.write("/x", iter([b"one", b"two"]))
    assert api.server.count("files") == 1
    volume.files.write("/x", b"whole")


def test_list_and_remove_files(api: Api, volume: Any) -> None:
    entries = [{"path": "/a", "name": "a", "type": "dir"}, {"path": "/b", "name": "b", "type": "file", "size": "5"}]
    api.server.on("Volumes/ListFiles", {"files": entries, "truncated": True})
    api.server.on("Volumes/RemoveFile", {})
    files = volume.files.list()
    assert [f.path for f in files] == ["/a", "/b"]
    assert files.truncated
    volume.files.list("/a", depth=3)
    assert [got.message for got in api.server.sent("ListFiles")] == [
        {"name": "v1", "path": "/", "depth": 1},
        {"name": "v1", "path": "/a", "depth": 3},
    ]
    volume.files.remove("/a", recursive=True)
    assert api.server.sent("RemoveFile")[0].message == {"name": "v1", "path": "/a", "recursive": True}
    api.server.on("Volumes/RemoveFile", Break())
    with pytest.raises(cove.TransportError):
        volume.files.remove("/a")
    assert api.server.count("RemoveFile") == 2
