"""Unpacking what an attacker packed: nothing is written outside, and nothing leads outside."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Callable, Union

import pytest

import cove
from cove._tar import Unpacker, pack

Entry = Union[tarfile.TarInfo, tuple[tarfile.TarInfo, bytes]]


def file(name: str, content: bytes = b"evil", mode: int = 0o644) -> Entry:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    return info, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def special(name: str, kind: bytes) -> Entry:
    info = tarfile.TarInfo(name)
    info.type = kind
    return info


def directory(name: str, mode: int = 0o755) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    return info


def archive(*entries: Entry, format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for entry in entries:
            if isinstance(entry, tuple):
                tar.addfile(entry[0], io.BytesIO(entry[1]))
            else:
                tar.addfile(entry)
    return buffer.getvalue()


class Place:
    """A directory to unpack into, with something beside it that must not change."""

    def __init__(self, base: Path) -> None:
        self.base, self.root = base, base / "root"
        (base / "victim").mkdir()
        (base / "victim" / "file").write_text("precious")
        self.root.mkdir()
        self.before = self.outside()

    def outside(self) -> list[tuple[str, str, int]]:
        found = []
        for path in sorted(self.base.rglob("*")):
            if self.root not in path.parents and path != self.root:
                content = path.read_text() if path.is_file() else ""
                found.append((str(path), content, path.lstat().st_mode))
        return found

    def unpack(self, data: bytes, *, on_unsafe: str = "error", max_bytes: int = 1 << 20, step: int = 333) -> list[str]:
        try:
            with Unpacker(str(self.root), max_bytes=max_bytes, on_unsafe=on_unsafe) as unpacker:
                for start in range(0, len(data), step):
                    unpacker.feed(data[start : start + step])
                unpacker.finish()
                return unpacker.skipped
        finally:
            assert self.outside() == self.before
            for path in self.root.rglob("*"):
                assert self.root.resolve() in path.resolve().parents or path.resolve() == self.root.resolve()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


ESCAPES: dict[str, Callable[[], bytes]] = {
    "a name above": lambda: archive(file("../victim/file")),
    "a name above, later": lambda: archive(file("a/../../victim/file")),
    "an absolute name": lambda: archive(file("/tmp/cove-escape")),
    "an absolute link": lambda: archive(link("l", "/etc")),
    "a link above": lambda: archive(link("l", "../victim")),
    "a link above from below": lambda: archive(directory("a"), link("a/l", "../../victim")),
    "a link that goes down to come up": lambda: archive(directory("a"), link("l", "a/../../victim")),
    "a link through a link": lambda: archive(
        directory("a"), directory("a/b"), link("in", "a/b"), link("out", "in/../../victim")
    ),
    "a link and a file through it": lambda: archive(link("d", "../victim"), file("d/file")),
    "a safe link and a file through it": lambda: archive(directory("a"), link("d", "a"), file("d/file")),
    "a link and a file over it": lambda: archive(link("f", "../victim/file"), file("f")),
    "a hard link above": lambda: archive(link("h", "../victim/file", tarfile.LNKTYPE)),
    "an absolute hard link": lambda: archive(link("h", "/etc/passwd", tarfile.LNKTYPE)),
    "a hard link through a link": lambda: archive(
        link("d", "../victim"), link("h", "d/file", tarfile.LNKTYPE), file("h")
    ),
    "a hard link to nothing": lambda: archive(link("h", "missing", tarfile.LNKTYPE)),
    "a hard link to a directory": lambda: archive(directory("a"), link("h", "a", tarfile.LNKTYPE)),
    "an empty link": lambda: archive(link("l", "")),
    "a device": lambda: archive(special("dev", tarfile.CHRTYPE)),
    "a disk": lambda: archive(special("dev", tarfile.BLKTYPE)),
    "a pipe": lambda: archive(special("pipe", tarfile.FIFOTYPE)),
    "a file in place of the root": lambda: archive(file(".")),
    "a file below a file": lambda: archive(file("a"), file("a/b")),
    "a name far too deep": lambda: archive(file("/".join(["d"] * 400))),
    "a long absolute link": lambda: archive(link("l", "/" + "x" * 300)),
    "a long link above (GNU)": lambda: archive(link("l", "../" * 100 + "victim"), format=tarfile.GNU_FORMAT),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_is_refused(place: Place, name: str) -> None:
    with pytest.raises(cove.UnsafeArchive):
        place.unpack(ESCAPES[name]())


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_is_left_out_when_asked(place: Place, name: str) -> None:
    data = ESCAPES[name]()
    good = archive(file("good", b"fine"))
    try:
        skipped = place.unpack(
            data[: len(data.rstrip(b"\0")) + -len(data.rstrip(b"\0")) % 512] + good, on_unsafe="skip"
        )
    except cove.Corrupt:
        return  # refused as a whole is safe too
    assert skipped
    assert (place.root / "good").read_bytes() == b"fine"


def test_a_link_made_by_someone_else_is_not_followed(place: Place) -> None:
    (place.root / "d").symlink_to(place.base / "victim")
    (place.root / "f").symlink_to(place.base / "victim" / "file")
    with Unpacker(str(place.root), max_bytes=1 << 20) as unpacker, pytest.raises(cove.UnsafeArchive, match="'d'"):
        unpacker.feed(archive(file("f", b"new"), file("d/file")))
    assert (place.root / "f").read_bytes() == b"new"
    assert place.outside() == place.before


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_honest_content_arrives(place: Place, format: int) -> None:
    long = "long/" * 30 + "name" * 20
    data = archive(
        directory("."),
        directory("a", 0o700),
        file("./a/x", b"x" * 1300, 0o4777),
        link("a/up", "../a/x"),
        link("dangling", "a/nothing"),
        link("a/hard", "a/x", tarfile.LNKTYPE),
        file(long, b"deep"),
        link("far", long),
        file("empty", b""),
        file("bytes\udcff", b"not utf-8"),
        format=format,
    )
    for step in (1, 512, 100_000):
        assert place.unpack(data, step=step) == []
        assert (place.root / "a" / "x").read_bytes() == b"x" * 1300
        assert os.stat(place.root / "a" / "x").st_ino == os.stat(place.root / "a" / "hard").st_ino
        assert (place.root / "a" / "up").read_bytes() == b"x" * 1300
        assert (place.root / "far").read_bytes() == b"deep"
        assert (place.root / "empty").read_bytes() == b""
        assert os.readlink(place.root / "dangling") == "a/nothing"
        assert (place.root / "bytes\udcff").exists()
        # No setuid, nothing writable by others.
        assert stat.S_IMODE(os.stat(place.root / "a" / "x").st_mode) & 0o7022 == 0
        assert stat.S_IMODE(os.stat(place.root / "a").st_mode) == 0o700


def test_the_last_of_two_entries_counts(place: Place) -> None:
    place.unpack(archive(file("a", b"1"), link("a", "b"), file("b", b"2"), file("a", b"3")))
    assert (place.root / "a").read_bytes() == b"3"
    assert not (place.root / "a").is_symlink()
    place.unpack(archive(file("a", b"4"), link("a", "b")))
    assert os.readlink(place.root / "a") == "b"


def test_too_much_is_refused_before_it_is_written(place: Place) -> None:
    with pytest.raises(cove.TooLarge):
        place.unpack(archive(file("a", b"x" * 6000), file("b", b"x" * 6000)), max_bytes=10_000)
    assert not (place.root / "b").exists()


def huge_header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, b"L", b"K"])
def test_an_extended_header_cannot_fill_memory(place: Place, kind: bytes) -> None:
    with pytest.raises(cove.UnsafeArchive):
        place.unpack(huge_header(kind, 1 << 33))


def test_a_sparse_file_cannot_grow_out_of_nothing(place: Place) -> None:
    with pytest.raises((cove.UnsafeArchive, cove.TooLarge)):
        place.unpack(huge_header(tarfile.GNUTYPE_SPARSE, 1 << 40))
    info = tarfile.TarInfo("s")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": str(1 << 40)}
    with pytest.raises(cove.UnsafeArchive):
        place.unpack(archive(info))


@pytest.mark.parametrize("cut", [1, 511, 512, 700, 1024, 1536, 2000])
def test_an_archive_cut_short_is_not_taken_for_whole(place: Place, cut: int) -> None:
    data = archive(file("a", b"x" * 600))[: 512 + 1024 + 1024]
    with pytest.raises(cove.Corrupt):
        place.unpack(data[:cut])


def test_what_is_no_archive(place: Place) -> None:
    with pytest.raises(cove.Corrupt):
        place.unpack(b"not a tar at all" * 64)
    damaged = bytearray(archive(file("a"), file("b")))
    damaged[1024 + 5] ^= 0xFF  # in the second header
    with pytest.raises(cove.Corrupt):
        place.unpack(bytes(damaged))


@pytest.mark.parametrize("record", [b"99 path=a\n", b"x path=a\n", b"3 \n", b"0 a=b\n", b"9 path=ab"])
def test_a_broken_extended_header(place: Place, record: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    with pytest.raises(cove.Corrupt):
        place.unpack(info.tobuf() + record.ljust(512, b"\0") + archive(file("a")))


def test_a_file_that_shrinks_while_it_is_packed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 4_000_000)
    stream = pack(str(tmp_path))
    next(stream)
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(cove.Corrupt, match="shorter"):
        list(stream)


def test_a_missing_directory_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(cove.InvalidArgument):
        list(pack(str(tmp_path / "missing")))
