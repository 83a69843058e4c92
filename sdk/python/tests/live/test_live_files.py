"""Files of a real server."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import cove

pytestmark = pytest.mark.live


def test_write_and_read(sb: Any) -> None:
    info = sb.files.write("/tmp/a/b/c.txt", "grüße\n", mode=0o640, user="root")
    assert (info.path, info.size, info.mode, info.uid, info.type) == ("/tmp/a/b/c.txt", 8, 0o640, 0, "file")
    assert sb.files.read("/tmp/a/b/c.txt") == "grüße\n"
    sb.files.write("/tmp/a/b/c.txt", b"more", append=True)
    assert sb.files.read_bytes("/tmp/a/b/c.txt", offset=8) == b"more"
    assert sb.files.read_bytes("/tmp/a/b/c.txt", offset=2, length=2) == "grüße".encode()[2:4]
    sb.files.write("/tmp/a/b/c.txt", "new", atomic=True)
    assert sb.files.read("/tmp/a/b/c.txt") == "new"
    sb.files.write("/tmp/empty", "")
    assert sb.files.read_bytes("/tmp/empty") == b""
    with pytest.raises(cove.NotFound):
        sb.files.write("/tmp/no/parents", "x", parents=False)


def test_files_without_a_size(sb: Any) -> None:
    assert "MemTotal" in sb.files.read("/proc/meminfo")


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 20 << 20])
def test_content_above_what_a_call_carries(sb: Any, size: int) -> None:
    data = os.urandom(size)
    assert sb.files.write("/tmp/large", data, mode=0o600).size == size
    assert sb.files.read_bytes("/tmp/large") == data
    assert sb.files.read_bytes("/tmp/large", offset=size - 5) == data[-5:]
    assert sb.files.read_bytes("/tmp/large", offset=3, length=size - 7) == data[3 : size - 4]


def test_upload_and_download_64_mib(sb: Any, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 64
    (tmp_path / "in").write_bytes(data)
    (tmp_path / "in").chmod(0o755)
    info = sb.files.upload(tmp_path / "in", "/tmp/up/file")
    assert (info.size, info.mode) == (len(data), 0o755)
    digest = hashlib.sha256(data).hexdigest()
    assert sb.exec("sha256sum /tmp/up/file", timeout=120).check().stdout.split()[0] == digest
    assert sb.files.download("/tmp/up/file", tmp_path / "out") == len(data)
    assert hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest() == digest
    with open(tmp_path / "in", "rb") as file:
        assert sb.files.write("/tmp/up/streamed", file).size == len(data)
    sb.files.remove("/tmp/up", recursive=True)


def test_directories_go_there_and_back(sb: Any, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "empty").mkdir(parents=True)
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "sub" / "data").write_bytes(os.urandom(3 << 20))
    (tree / "sub" / ("n" * 200)).write_text("long")
    (tree / "sub" / "ünïcode name").write_text("x")
    (tree / "sub" / "link").symlink_to("../run.sh")
    sb.files.upload_dir(tree, "/tmp/tree", user="user")
    assert sb.exec("/tmp/tree/sub/link").stdout == "ran\n"
    assert sb.files.stat("/tmp/tree/run.sh").owner == "user"
    assert sb.files.download_dir("/tmp/tree", tmp_path / "back") == []
    names = {p.relative_to(tree) for p in tree.rglob("*")}
    assert {p.relative_to(tmp_path / "back") for p in (tmp_path / "back").rglob("*")} == names
    assert (tmp_path / "back" / "sub" / "data").read_bytes() == (tree / "sub" / "data").read_bytes()
    assert os.access(tmp_path / "back" / "run.sh", os.X_OK)
    assert os.readlink(tmp_path / "back" / "sub" / "link") == "../run.sh"


def test_a_hostile_directory_stays_inside(sb: Any, tmp_path: Path) -> None:
    sb.exec(
        "rm -rf /tmp/evil; mkdir /tmp/evil && cd /tmp/evil && ln -s /etc abs && ln -s ../.. up && echo ok > good"
    ).check()
    with pytest.raises(cove.UnsafeArchive):
        sb.files.download_dir("/tmp/evil", tmp_path / "refused")
    assert sorted(sb.files.download_dir("/tmp/evil", tmp_path / "kept", on_unsafe="skip")) == ["abs", "up"]
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["good"]
    with pytest.raises(cove.TooLarge):
        sb.files.download_dir("/tmp/evil", tmp_path / "small", on_unsafe="skip", max_bytes=1)


def test_list_stat_and_exists(sb: Any) -> None:
    sb.exec(
        "rm -rf /tmp/ls; mkdir -p /tmp/ls/d/e && echo 12345 > /tmp/ls/f && ln -s f /tmp/ls/l && touch /tmp/ls/d/e/g"
    ).check()
    names = {f.name: f for f in sb.files.list("/tmp/ls")}
    assert sorted(names) == ["d", "f", "l"]
    assert (names["d"].is_dir, names["f"].size, names["l"].type, names["l"].target) == (True, 6, "symlink", "f")
    deep = {f.path for f in sb.files.list("/tmp/ls", depth=3)}
    assert "/tmp/ls/d/e/g" in deep
    cut = sb.files.list("/tmp/ls", depth=3, limit=2)
    assert (len(cut), cut.truncated) == (2, True)
    assert sb.files.stat("/tmp/ls/f").mod_time is not None
    assert sb.files.exists("/tmp/ls/l")
    assert not sb.files.exists("/tmp/ls/none")
    with pytest.raises(cove.NotFound):
        sb.files.list("/tmp/ls/none")


def test_mkdir_move_remove_chmod_chown(sb: Any) -> None:
    sb.exec("rm -rf /tmp/ops").check()
    assert sb.files.mkdir("/tmp/ops/a", mode=0o700, user="user").mode == 0o700
    sb.files.mkdir("/tmp/ops/a")  # there already, which is fine
    with pytest.raises(cove.AlreadyExists):
        sb.files.mkdir("/tmp/ops/a", parents=False)
    sb.files.write("/tmp/ops/a/f", "x")
    assert sb.files.move("/tmp/ops/a", "/tmp/ops/b").path == "/tmp/ops/b"
    sb.files.chmod("/tmp/ops/b", 0o755)
    sb.files.chmod("/tmp/ops/b/f", 0o600)
    sb.files.chown("/tmp/ops/b", "user:user", recursive=True)
    info = sb.files.stat("/tmp/ops/b/f")
    assert (info.mode, info.owner, info.group) == (0o600, "user", "user")
    with pytest.raises(cove.CoveError):
        sb.files.remove("/tmp/ops/b")  # not empty
    sb.files.remove("/tmp/ops/b", recursive=True)
    assert not sb.files.exists("/tmp/ops/b")
    with pytest.raises(cove.NotFound):
        sb.files.remove("/tmp/ops/b")


def test_a_relative_path_is_below_the_working_directory(sb: Any) -> None:
    sb.files.write("beside", "here")
    assert sb.exec("cat beside").stdout == "here"
    with pytest.raises(cove.NotFound):
        sb.files.read("etc/passwd")
    with pytest.raises(cove.InvalidArgument) as caught:
        sb.files.read("")
    assert caught.value.field == "path"


def test_a_watch_sees_what_changes(sb: Any) -> None:
    sb.exec("rm -rf /tmp/w; mkdir -p /tmp/w/deep").check()
    wanted = {("create", "/tmp/w/new"), ("remove", "/tmp/w/new"), ("create", "/tmp/w/deep/below")}
    seen: set[tuple[str, str]] = set()
    with sb.files.watch("/tmp/w", recursive=True, timeout=60) as watch:
        other = cove.Sandbox.connect(sb.id)
        change = threading.Thread(
            target=lambda: other.exec("echo x > /tmp/w/new; echo y > /tmp/w/deep/below; rm /tmp/w/new")
        )
        change.start()
        for event in watch:
            seen.add((event.op, event.path))
            if wanted <= seen:
                break
        change.join()
    assert wanted <= seen
    with pytest.raises(cove.NotFound):
        sb.files.watch("/tmp/nothing-here")


def test_a_quiet_watch_ends(sb: Any) -> None:
    sb.files.mkdir("/tmp/quiet")
    assert list(sb.files.watch("/tmp/quiet", timeout=1)) == []
