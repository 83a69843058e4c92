"""Files: read, write, list, info, move, remove, watch, signed URLs."""

import io
import json
import time
import urllib.error
import urllib.request

import pytest
from e2b import FileType, InvalidArgumentException, NotFoundException, SandboxException
from e2b.sandbox.filesystem.watch_handle import FilesystemEventType


@pytest.fixture
def here(sbx, request):
    d = f"/tmp/{request.node.name}"
    sbx.files.make_dir(d)
    yield d
    sbx.files.remove(d)


def test_write_and_read(sbx, here):
    w = sbx.files.write(f"{here}/a/b/c.txt", "ünï")
    assert (w.path, w.name) == (f"{here}/a/b/c.txt", "c.txt")
    assert sbx.files.read(f"{here}/a/b/c.txt") == "ünï"
    sbx.files.write(f"{here}/a/b/c.txt", b"\x00\xff")
    assert bytes(sbx.files.read(f"{here}/a/b/c.txt", format="bytes")) == b"\x00\xff"
    sbx.files.write(f"{here}/empty", "")
    assert sbx.files.read(f"{here}/empty") == ""
    big = bytes(range(256)) * 16_000
    sbx.files.write(f"{here}/big", io.BytesIO(big))
    assert b"".join(sbx.files.read(f"{here}/big", format="stream")) == big
    sbx.files.write(f"{here}/zipped", "z" * 100_000, gzip=True)
    assert sbx.files.read(f"{here}/zipped", gzip=True) == "z" * 100_000
    many = sbx.files.write_files([{"path": f"{here}/m{i}/x", "data": str(i)} for i in range(5)])
    assert [m.path for m in many] == [f"{here}/m{i}/x" for i in range(5)]
    assert sbx.files.read(f"{here}/m3/x") == "3"
    with pytest.raises(NotFoundException, match="does not exist"):
        sbx.files.read(f"{here}/none")
    with pytest.raises(InvalidArgumentException):
        sbx.files.write(here, "x")
    with pytest.raises(SandboxException):
        sbx.files.read(here)
    assert sbx.files.write(f"{here}/meta", "x", metadata={"k": "v"}).metadata == {"k": "v"}


def test_owners_and_homes(sbx):
    sbx.files.write("relative.txt", "mine")
    assert sbx.files.get_info("/home/user/relative.txt").owner == "user"
    assert sbx.files.read("~/relative.txt") == "mine"
    sbx.files.write("relative.txt", "root's", user="root")
    assert sbx.files.get_info("/root/relative.txt").owner == "root"
    # As E2B's agent, the user need not own where it writes; then it owns what it wrote.
    sbx.files.write("/app/src/main.py", "print(1)")
    assert sbx.commands.run("stat -c %U /app /app/src /app/src/main.py; touch /app/more; python3 /app/src/main.py").stdout == "user\nuser\nuser\n1\n"
    sbx.files.remove("/app")
    sbx.files.remove("relative.txt")


def test_info_and_list(sbx, here):
    sbx.files.write(f"{here}/f", "12345")
    sbx.files.make_dir(f"{here}/d/e")
    sbx.commands.run(f"chmod 640 {here}/f; ln -s f {here}/link; ln -s nowhere {here}/dangling")
    i = sbx.files.get_info(f"{here}/f")
    assert (i.name, i.type, i.path, i.size, i.mode, i.permissions, i.owner, i.group) == ("f", FileType.FILE, f"{here}/f", 5, 0o640, "-rw-r-----", "user", "user")
    assert abs(i.modified_time.timestamp() - time.time()) < 120
    link = sbx.files.get_info(f"{here}/link")
    assert link.type == FileType.SYMLINK and link.symlink_target == f"{here}/f"
    assert [e.name for e in sbx.files.list(here)] == ["d", "dangling", "f", "link"]
    assert f"{here}/d/e" in [e.path for e in sbx.files.list(here, depth=2)]
    assert sbx.files.exists(f"{here}/f") and not sbx.files.exists(f"{here}/none")
    with pytest.raises(NotFoundException):
        sbx.files.list(f"{here}/none")
    with pytest.raises(InvalidArgumentException):
        sbx.files.list(f"{here}/f")
    with pytest.raises(NotFoundException):
        sbx.files.get_info(f"{here}/none")


def test_directories_move_remove(sbx, here):
    assert sbx.files.make_dir(f"{here}/x/y") is True
    assert sbx.files.make_dir(f"{here}/x/y") is False
    sbx.files.write(f"{here}/x/f", "1")
    with pytest.raises(InvalidArgumentException):
        sbx.files.make_dir(f"{here}/x/f")
    moved = sbx.files.rename(f"{here}/x/f", f"{here}/new/g")
    assert moved.path == f"{here}/new/g" and not sbx.files.exists(f"{here}/x/f")
    with pytest.raises(NotFoundException):
        sbx.files.rename(f"{here}/none", f"{here}/other")
    sbx.files.remove(f"{here}/x")
    assert not sbx.files.exists(f"{here}/x")
    sbx.files.remove(f"{here}/never-was")


def events_of(w, want):
    seen, deadline = [], time.monotonic() + 20
    while not want(seen):
        assert time.monotonic() < deadline, seen
        seen += w.get_new_events()
        time.sleep(0.05)
    return seen


def test_watch(sbx, here):
    w = sbx.files.watch_dir(here, include_entry=True)
    sbx.files.write(f"{here}/w", "1")
    seen = events_of(w, lambda evs: any(e.type == FilesystemEventType.WRITE for e in evs))
    assert any(e.name == "w" and e.type == FilesystemEventType.CREATE for e in seen)
    sbx.files.remove(f"{here}/w")
    events_of(w, lambda evs: any(e.name == "w" and e.type == FilesystemEventType.REMOVE for e in evs))
    w.stop()
    with pytest.raises(SandboxException):
        w.get_new_events()
    sbx.files.make_dir(f"{here}/deep")
    w = sbx.files.watch_dir(here, recursive=True)
    sbx.files.write(f"{here}/deep/x", "1")
    events_of(w, lambda evs: any(e.name == "deep/x" for e in evs))
    w.stop()
    with pytest.raises(NotFoundException):
        sbx.files.watch_dir(f"{here}/none")


def get(url, data=None, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers)) as r:
        return r.read()


def test_signed_urls(sbx, here):
    sbx.files.write(f"{here}/s", "signed")
    assert get(sbx.download_url(f"{here}/s")) == b"signed"
    assert get(sbx.download_url(f"{here}/s", use_signature_expiration=60)) == b"signed"
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="u"\r\n\r\nuploaded\r\n--b--\r\n'
    got = json.loads(get(sbx.upload_url(f"{here}/u"), form, **{"Content-Type": "multipart/form-data; boundary=b"}))
    assert got == [{"path": f"{here}/u", "name": "u", "type": "file"}]
    assert sbx.files.read(f"{here}/u") == "uploaded"
    for url, why in (
        (sbx.download_url(f"{here}/s").replace("path=", "path=%2Fetc"), "invalid signature"),
        (sbx.download_url(f"{here}/s", use_signature_expiration=-10), "signature is already expired"),
    ):
        with pytest.raises(urllib.error.HTTPError) as e:
            get(url)
        assert e.value.code == 401 and json.loads(e.value.read()) == {"code": 401, "message": why}
    with pytest.raises(urllib.error.HTTPError):  # a URL to read does not write
        get(sbx.download_url(f"{here}/s"), form, **{"Content-Type": "multipart/form-data; boundary=b"})
