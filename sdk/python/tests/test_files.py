"""Files: small content in a call, large over plain HTTP, directories as tar, changes as a stream."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Break, Fail, FakeCove, Got, Plain, Stream, sandbox_json


class FakeFiles:
    """Content by path, over both ways."""

    def __init__(self, server: Any) -> None:
        self.content: dict[str, bytes] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.ways: list[str] = []
        server.on("Files/Read", self._read)
        server.on("Files/Write", self._write)
        server.on("Files/Stat", self._stat)
        server.on("GET files", self._get)
        server.on("PUT files", self._put)

    def _info(self, path: str) -> dict[str, Any]:
        return {"path": path, "name": path.rpartition("/")[2], "type": "file", "size": str(len(self.content[path]))}

    def _read(self, got: Got) -> Any:
        import base64

        self.ways.append("read")
        path, offset, length = got.message["path"], int(got.message["offset"]), int(got.message["length"])
        if path not in self.content:
            return Fail("not_found", "not_found", f"no file {path}", status=404)
        data = self.content[path][offset : offset + length]
        return {"data": base64.b64encode(data).decode(), "info": self._info(path)}

    def _write(self, got: Got) -> Any:
        import base64

        self.ways.append("write")
        path = got.message["path"]
        self.content[path] = base64.b64decode(got.message.get("data", ""))
        self.options[path] = {k: got.message[k] for k in got.message if k not in ("path", "data", "sandboxId")}
        return {"info": self._info(path)}

    def _stat(self, got: Got) -> Any:
        path = got.message["path"]
        return {"info": self._info(path)} if path in self.content else Fail("not_found", "not_found", status=404)

    def _get(self, got: Got) -> Any:
        self.ways.append("get")
        data = self.content[got.query["path"]]
        if "range" not in got.headers:
            return Plain(data)
        first, _, last = got.headers["range"].removeprefix("bytes=").partition("-")
        return Plain(data[int(first) : int(last) + 1 if last else None], status=206)

    def _put(self, got: Got) -> Any:
        self.ways.append("put")
        path = got.query["path"]
        self.content[path] = got.body
        self.options[path] = {k: v for k, v in got.query.items() if k != "path"}
        return Plain(status=204)


@pytest.fixture
def files(api: Api) -> FakeFiles:
    return FakeFiles(api.server)


def test_small_content_is_one_call(api: Api, files: FakeFiles) -> None:
    sb = api.sandbox()
    info = sb.files.write("/a/b.txt", "grüße", mode=0o600, user="user", atomic=True)
    assert (info.path, info.size) == ("/a/b.txt", 7)
    assert sb.files.read("/a/b.txt") == "grüße"
    assert sb.files.read_bytes("/a/b.txt", offset=2, length=3) == "grüße".encode()[2:5]
    assert files.options["/a/b.txt"] == {"mode": 0o600, "user": "user", "atomic": True, "parents": True}
    assert files.ways == ["write", "read", "read"]
    sb.files.write("/empty", b"")
    assert sb.files.read_bytes("/empty") == b""


def test_large_content_goes_over_plain_http(api: Api, files: FakeFiles) -> None:
    sb = api.sandbox()
    data = os.urandom(5_000_001)
    assert sb.files.write("/big", data, mode=0o640, append=True, parents=False).size == len(data)
    assert sb.files.read_bytes("/big") == data
    assert sb.files.read_bytes("/big", offset=7, length=3_000_000) == data[7:3_000_007]
    assert sb.files.read_bytes("/big", offset=7) == data[7:]
    assert files.options["/big"] == {"mode": "0640", "append": "true"}
    assert files.ways == ["put", "read", "get", "read", "get", "read", "get"]


@pytest.mark.parametrize("kind", ["file", "text file", "iterator"])
def test_content_that_is_read_while_it_is_sent(api: Api, files: FakeFiles, kind: str) -> None:
    data = b"line\n" * 500_000
    source: Any = {
        "file": io.BytesIO(data),
        "text file": io.StringIO(data.decode()),
        "iterator": iter([data[:1000], data[1000:]]),
    }[kind]
    api.sandbox().files.write("/x y&z=ü", source)
    assert files.content["/x y&z=ü"] == data


def test_what_is_no_content(api: Api, files: FakeFiles) -> None:
    with pytest.raises(cove.InvalidArgument) as caught:
        api.sandbox().files.write("/x", 5)
    assert caught.value.field == "data"


def test_a_missing_file(api: Api, files: FakeFiles) -> None:
    sb = api.sandbox()
    with pytest.raises(cove.NotFound, match="no file /nope"):
        sb.files.read("/nope")
    assert not sb.files.exists("/nope")
    files.content["/yes"] = b""
    assert sb.files.exists("/yes")


def test_upload_and_download(api: Api, files: FakeFiles, tmp_path: Path) -> None:
    sb = api.sandbox()
    data = os.urandom(3_500_000)
    (tmp_path / "in").write_bytes(data)
    (tmp_path / "in").chmod(0o751)
    assert sb.files.upload(tmp_path / "in", "/bin/x").size == len(data)
    assert files.options["/bin/x"] == {"mode": "0751", "parents": "true"}
    assert api.server.sent("/files")[0].headers["content-length"] == str(len(data))
    assert sb.files.download("/bin/x", tmp_path / "out") == len(data)
    assert (tmp_path / "out").read_bytes() == data
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_a_download_that_breaks_off_starts_again_and_never_shows_half(api: Api, tmp_path: Path) -> None:
    sb = api.sandbox()
    data = os.urandom(200_000)
    (tmp_path / "out").write_bytes(b"old")
    answers = [Plain(data[:100_000], broken=True), Plain(data)]

    def answer(_: Got) -> Any:
        assert (tmp_path / "out").read_bytes() == b"old"
        return answers.pop(0)

    api.server.on("GET files", answer)
    assert sb.files.download("/x", tmp_path / "out") == len(data)
    assert (tmp_path / "out").read_bytes() == data
    api.server.on("GET files", Fail("sandbox_ended", "failed_precondition"))
    with pytest.raises(cove.SandboxEnded):
        sb.files.download("/x", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == data


def test_directories_go_both_ways(api: Api, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "deep").mkdir(parents=True)
    (tree / "empty").mkdir()
    (tree / "sub" / "file").write_bytes(os.urandom(2_500_000))
    (tree / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (tree / "sub" / "run.sh").chmod(0o755)
    (tree / "sub" / ("n" * 200)).write_text("a name too long for the old format")
    (tree / "sub" / "deep" / "up").symlink_to("../file")
    (tree / "ünïcode").write_text("x")
    os.mkfifo(tree / "pipe")
    sent: list[bytes] = []

    def put(got: Got) -> Any:
        assert got.query == {"path": "/work", "user": "user"}
        sent.append(got.body)
        return Break() if len(sent) == 1 else Plain(status=204)

    api.server.on("PUT tar", put)
    sb = api.sandbox()
    sb.files.upload_dir(tree, "/work", user="user")
    assert sent[0] == sent[1]  # sent again after the break

    chunks = [sent[1][start : start + 65_537] for start in range(0, len(sent[1]), 65_537)]
    api.server.on("GET tar", lambda _: Plain(chunks))
    assert sb.files.download_dir("/work", tmp_path / "copy") == []
    copy = tmp_path / "copy"
    assert (copy / "sub" / "file").read_bytes() == (tree / "sub" / "file").read_bytes()
    assert os.access(copy / "sub" / "run.sh", os.X_OK)
    assert os.readlink(copy / "sub" / "deep" / "up") == "../file"
    assert (copy / "empty").is_dir()
    assert (copy / "sub" / ("n" * 200)).exists()
    assert (copy / "ünïcode").read_text() == "x"
    assert not (copy / "pipe").exists()


def test_a_hostile_directory_is_refused(api: Api, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
        good = tarfile.TarInfo("good")
        tar.addfile(good)
    api.server.on("GET tar", Plain(buffer.getvalue()))
    sb = api.sandbox()
    with pytest.raises(cove.UnsafeArchive, match="'/etc'"):
        sb.files.download_dir("/work", tmp_path / "a")
    assert sb.files.download_dir("/work", tmp_path / "b", on_unsafe="skip") == ["out"]
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["good"]


def test_the_other_calls(api: Api) -> None:
    entry = {
        "path": "/d/l",
        "name": "l",
        "type": "symlink",
        "mode": 511,
        "target": "x",
        "modTime": "2026-03-01T10:00:00Z",
    }
    for name, answer in {
        "List": {"files": [entry, {"path": "/d/e", "type": "dir"}], "truncated": True},
        "Mkdir": {"info": {"path": "/d", "type": "dir"}},
        "Move": {"info": {"path": "/e"}},
        "Remove": {},
        "Chmod": {},
        "Chown": {},
    }.items():
        api.server.on("Files/" + name, answer)
    sb = api.sandbox()
    listed = sb.files.list("/d", depth=3, limit=10)
    assert listed.truncated
    assert (listed[0].target, listed[0].mode, listed[0].is_file, listed[1].is_dir) == ("x", 0o777, False, True)
    assert sb.files.mkdir("/d", mode=0o700, user=1000).is_dir
    assert sb.files.move("/d", "/e").path == "/e"
    sb.files.remove("/e", recursive=True)
    sb.files.chmod("/e", 0o644, recursive=True)
    sb.files.chown("/e", "user:user")
    messages = {got.path.rpartition("/")[2]: got.message for got in api.server.requests}
    assert messages["List"] == {"sandboxId": "sb1", "path": "/d", "depth": 3, "limit": 10}
    assert messages["Mkdir"] == {"sandboxId": "sb1", "path": "/d", "parents": True, "mode": 0o700, "user": "1000"}
    assert messages["Move"] == {"sandboxId": "sb1", "from": "/d", "to": "/e"}
    assert messages["Remove"] == {"sandboxId": "sb1", "path": "/e", "recursive": True}
    assert messages["Chmod"] == {"sandboxId": "sb1", "path": "/e", "mode": 0o644, "recursive": True}
    assert messages["Chown"] == {"sandboxId": "sb1", "path": "/e", "user": "user:user", "recursive": False}


def test_a_watch_tells_changes_and_that_it_may_have_missed_some(api: Api) -> None:
    ready = {"op": "ready"}
    answers: list[Any] = [
        Stream([ready, {"path": "/d/a", "op": "create"}, Break()]),
        Stream([ready, {"path": "/d/b", "op": "remove"}, Fail("sandbox_ended", "failed_precondition")]),
    ]
    api.server.on("Files/Watch", lambda _: answers.pop(0))
    events = []
    with api.sandbox().files.watch("/d", recursive=True) as watch, pytest.raises(cove.SandboxEnded):  # noqa: PT012
        for event in watch:
            events.append((event.op, event.path))
    assert events == [("create", "/d/a"), ("overflow", "/d"), ("remove", "/d/b")]


def test_a_watch_of_nothing_is_refused_at_once(api: Api) -> None:
    api.server.on("Files/Watch", Fail("not_found", "not_found", "no /nope"))
    with pytest.raises(cove.NotFound, match="no /nope"):
        api.sandbox().files.watch("/nope")


def test_a_quiet_watch_ends_when_told_to(api: Api) -> None:
    release = threading.Event()

    def events() -> Any:
        yield {"op": "ready"}
        yield {"path": "/d/a", "op": "write"}
        release.wait(30)

    api.server.on("Files/Watch", lambda _: Stream(events()))
    try:
        watch = api.sandbox().files.watch("/d", timeout=1)
        assert [event.op for event in watch] == ["write"]
    finally:
        release.set()


def test_a_watch_that_ends_soon_waits_for_a_sandbox_that_wakes(api: Api) -> None:
    awake = threading.Event()

    def events() -> Any:
        assert awake.wait(30)
        yield {"op": "ready"}
        yield Fail("sandbox_ended", "failed_precondition")

    def resume(_: Got) -> Any:
        awake.set()
        return {"sandbox": sandbox_json()}

    api.server.on("Files/Watch", lambda _: Stream(events()))
    api.server.on("Sandboxes/Resume", resume)
    watch = api.sandbox().files.watch("/d", timeout=0.2)
    assert api.server.count("Resume") == 1
    watch.close()


def test_a_watch_can_be_closed_from_another_thread(server: FakeCove) -> None:
    release = threading.Event()

    def events() -> Any:
        yield {"op": "ready"}
        release.wait(30)

    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    server.on("Files/Watch", lambda _: Stream(events()))
    with cove.Client(server.url, FakeCove.KEY) as client:
        watch = cove.Sandbox.connect("sb1", client=client).files.watch("/d")
        reader = threading.Thread(target=lambda: list(watch))
        reader.start()
        watch.close()
        reader.join(20)
        release.set()
        assert not reader.is_alive()
