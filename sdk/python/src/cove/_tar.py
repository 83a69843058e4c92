"""Directories as tar streams, packed and unpacked without trusting the other side.

What comes out of a sandbox was written by an attacker. tarfile's data filter is
not used: it resolves paths by name, and has been bypassed by long and racing
links (CVE-2025-4517, CVE-2024-12718), so that its safety depends on the
caller's Python. Here every directory is opened relative to its parent without
following links, and links are made only after everything else, so there is
never a link in the way while something is written.

Unpacking is fed from outside, so that the sync and the async client share it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import Callable, Optional

from .errors import Corrupt, InvalidArgument, TooLarge, UnsafeArchive, Unsupported

BLOCK = 512
CHUNK = 1 << 20

# A path and its attributes; the longest legal path is 4 KiB.
_MAX_EXTENDED = 64 << 10
_MAX_ENTRIES = 1_000_000
_MAX_DEPTH = 256

_GNU_LONG_NAME, _GNU_LONG_LINK = b"L", b"K"

_WITHOUT_CONTENT = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.DIRTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
)


# Packing


def pack(directory: str, left_out: Optional[Callable[[str], bool]] = None) -> Iterator[bytes]:
    """The tar of a local directory's content, in chunks of about 1 MiB, less names that are left out with all below.

    Links are packed as links. Sockets, pipes and devices are left out. Owners
    are not carried: the receiving side decides whose the files are.
    """
    if not os.path.isdir(directory):
        raise InvalidArgument(f"{directory} is not a directory", field="local")
    buffer = bytearray()
    for path, name in _walk(directory, left_out):
        info = _header(path, name)
        if info is None:
            continue
        buffer += info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if info.isreg():
            for data in _content(path, info.size):
                buffer += data
                if len(buffer) >= CHUNK:
                    yield bytes(buffer)
                    buffer.clear()
            buffer += bytes(-info.size % BLOCK)
    buffer += bytes(2 * BLOCK)
    yield bytes(buffer)


def _walk(directory: str, left_out: Optional[Callable[[str], bool]]) -> Iterator[tuple[str, str]]:
    """(path, name in the archive), parents before children, in a stable order. Links are not followed."""
    pending = [(directory, "")]
    while pending:
        path, name = pending.pop()
        if name and left_out is not None and left_out(name):
            continue
        if name:
            yield path, name
        if not name or (os.path.isdir(path) and not os.path.islink(path)):
            with os.scandir(path) as entries:
                children = sorted(entry.name for entry in entries)
            for child in reversed(children):
                pending.append((os.path.join(path, child), f"{name}/{child}" if name else child))


def _header(path: str, name: str) -> Optional[tarfile.TarInfo]:
    status = os.lstat(path)
    info = tarfile.TarInfo(name)
    info.mode = stat.S_IMODE(status.st_mode) & 0o755  # that others may write is not for elsewhere
    info.mtime = int(status.st_mtime)
    if stat.S_ISREG(status.st_mode):
        info.size = status.st_size
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = os.readlink(path)
    else:
        return None
    return info


def _content(path: str, size: int) -> Iterator[bytes]:
    """Exactly size bytes: the header has promised them."""
    with open(path, "rb") as file:
        while size:
            data = file.read(min(CHUNK, size))
            if not data:
                raise Corrupt(f"{path} became shorter while it was read")
            size -= len(data)
            yield data


# Unpacking


class Unpacker:
    """Writes a tar stream below a directory, and nowhere else.

    on_unsafe "error" refuses the whole archive at the first entry that is not
    safe to keep; "skip" leaves such entries out and lists them in `skipped`.
    Not safe are: names that leave the directory, links that would lead out of
    it, devices, pipes and sparse files.
    """

    def __init__(self, directory: str, *, max_bytes: int, on_unsafe: str = "error") -> None:
        if on_unsafe not in ("error", "skip"):
            raise InvalidArgument(f"on_unsafe: {on_unsafe!r} is neither error nor skip", field="on_unsafe")
        if os.open not in os.supports_dir_fd or not hasattr(os, "O_NOFOLLOW"):
            raise Unsupported("directories cannot be downloaded safely on this operating system")
        os.makedirs(directory, exist_ok=True)
        self.skipped: list[str] = []
        self._strict = on_unsafe == "error"
        self._max_bytes = self._room = max_bytes
        self._entries = 0
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._buffer = bytearray()
        self._zero_blocks = 0
        self._next: dict[str, str] = {}  # name and link of the entry to come, from an extended header
        self._extended: Optional[tuple[bytes, bytearray]] = None  # (type, content so far)
        self._file = -1  # descriptor being written; -1 drops the content
        self._entry: Optional[tarfile.TarInfo] = None
        self._left = 0  # content of the entry still to come
        self._padding = 0
        self._links: dict[tuple[str, ...], str] = {}
        self._directories: list[tuple[tuple[str, ...], float]] = []

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            if self._left:
                view = view[self._consume(view) :]
            elif self._padding:
                skip = min(self._padding, len(view))
                self._padding -= skip
                view = view[skip:]
            else:
                take = min(BLOCK - len(self._buffer), len(view))
                self._buffer += view[:take]
                view = view[take:]
                if len(self._buffer) == BLOCK:
                    block = bytes(self._buffer)
                    self._buffer.clear()
                    self._header(block)

    def finish(self) -> None:
        """The stream is over: make the links. Corrupt if it was over too early."""
        if self._left or self._buffer or self._zero_blocks < 2:
            raise Corrupt("the archive is cut short")
        for parts, target in self._links.items():
            self._make_link(parts, target)
        for parts, mtime in reversed(self._directories):
            with contextlib.suppress(OSError, OverflowError), self._parent(parts) as parent:
                os.utime(parts[-1], (mtime, mtime), dir_fd=parent, follow_symlinks=False)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def __enter__(self) -> Unpacker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _header(self, block: bytes) -> None:
        if not any(block):
            self._zero_blocks += 1
            return
        if self._zero_blocks:
            raise Corrupt("the archive goes on after its end")
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.TarError as err:
            raise Corrupt(f"a header of the archive is broken: {err}") from None
        if info.size < 0:
            raise Corrupt("a header of the archive has a negative size")
        if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, _GNU_LONG_NAME, _GNU_LONG_LINK):
            if info.size > _MAX_EXTENDED:
                raise UnsafeArchive(f"an extended header of {info.size} bytes")
            self._extended = (info.type, bytearray())
        else:
            self._begin(info)
        self._padding = -info.size % BLOCK
        self._left = info.size
        if not self._left:
            self._end_content()

    def _begin(self, info: tarfile.TarInfo) -> None:
        self._entries += 1
        if self._entries > _MAX_ENTRIES:
            raise TooLarge(f"the directory has more than {_MAX_ENTRIES} entries")
        info.name = self._next.pop("path", info.name)
        info.linkname = self._next.pop("linkpath", info.linkname)
        size = self._next.pop("size", None)
        if size is not None:
            if not size.isdigit():
                raise Corrupt("an extended header has a broken size")
            info.size = int(size)
        sparse = any(key.startswith("GNU.sparse") for key in self._next)
        self._next.clear()
        if info.type in _WITHOUT_CONTENT:
            info.size = 0  # whatever the header says
        self._room -= info.size
        if self._room < 0:
            raise TooLarge(
                f"the directory holds more than {self._max_bytes} bytes", hint="raise max_bytes if that is expected"
            )
        try:
            if sparse:
                raise UnsafeArchive(f"{info.name!r} is a sparse file")
            self._make(info)
        except UnsafeArchive:
            if self._strict:
                raise
            self.skipped.append(info.name)

    def _make(self, info: tarfile.TarInfo) -> None:
        parts = _parts(info.name)
        if info.isdir():
            if parts:
                self._links.pop(parts, None)
                with self._directory(parts) as directory:
                    os.fchmod(directory, (info.mode & 0o755) | 0o700)
                self._directories.append((parts, info.mtime))
            return
        if not parts:
            raise UnsafeArchive(f"{info.name!r} names the directory itself")
        if info.issym():
            _check_link(parts, info.linkname)
            self._links[parts] = info.linkname
        elif info.islnk():
            self._make_hardlink(parts, _parts(info.linkname))
        elif info.isreg() and info.type != tarfile.GNUTYPE_SPARSE:
            self._links.pop(parts, None)
            with self._parent(parts) as parent:
                self._clear(parent, parts)
                # Nothing may run with more rights for having come from a
                # sandbox, nor be writable by others.
                mode = (info.mode & 0o755) | 0o600
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                self._file = os.open(parts[-1], flags, mode, dir_fd=parent)
            self._entry = info
        else:
            raise UnsafeArchive(f"{info.name!r} is a device, a pipe or of an unknown kind")

    def _consume(self, view: memoryview) -> int:
        """Take content of the current entry; how much."""
        take = min(self._left, len(view))
        if self._extended is not None:
            self._extended[1].extend(view[:take])
        elif self._file >= 0:
            rest = view[:take]
            while len(rest):
                rest = rest[os.write(self._file, rest) :]
        self._left -= take
        if not self._left:
            self._end_content()
        return take

    def _end_content(self) -> None:
        if self._extended is not None:
            kind, content = self._extended
            self._extended = None
            if kind == _GNU_LONG_NAME:
                self._next["path"] = _text(content)
            elif kind == _GNU_LONG_LINK:
                self._next["linkpath"] = _text(content)
            elif kind == tarfile.XHDTYPE:
                self._next.update(_pax(bytes(content)))
        elif self._file >= 0:
            assert self._entry is not None
            with contextlib.suppress(OSError, OverflowError):
                os.utime(self._file, (self._entry.mtime, self._entry.mtime))
            os.close(self._file)
            self._file = -1

    def _make_hardlink(self, parts: tuple[str, ...], source: tuple[str, ...]) -> None:
        if not source or source == parts:
            raise UnsafeArchive(f"{'/'.join(parts)!r} is a link to nothing")
        with self._parent(source) as source_parent:
            try:
                if not stat.S_ISREG(os.stat(source[-1], dir_fd=source_parent, follow_symlinks=False).st_mode):
                    raise UnsafeArchive(f"{'/'.join(parts)!r} links to what is not a file")
            except FileNotFoundError:
                raise UnsafeArchive(f"{'/'.join(parts)!r} links to what is not in the archive") from None
            self._links.pop(parts, None)
            with self._parent(parts) as parent:
                self._clear(parent, parts)
                os.link(source[-1], parts[-1], src_dir_fd=source_parent, dst_dir_fd=parent, follow_symlinks=False)

    def _make_link(self, parts: tuple[str, ...], target: str) -> None:
        with self._parent(parts) as parent:
            self._clear(parent, parts)
            os.symlink(target, parts[-1], dir_fd=parent)

    def _clear(self, parent: int, parts: tuple[str, ...]) -> None:
        """Remove what is in the way, so that nothing is ever written through it."""
        try:
            os.unlink(parts[-1], dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError as err:
            raise UnsafeArchive(f"{'/'.join(parts)!r} cannot be replaced: {err.strerror}") from None

    def _parent(self, parts: tuple[str, ...]) -> contextlib.AbstractContextManager[int]:
        return self._directory(parts[:-1])

    @contextlib.contextmanager
    def _directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        """The descriptor of a directory, made where missing. No link is followed on the way."""
        current = os.dup(self._root)
        try:
            for part in parts:
                try:
                    child = self._open_directory(current, part)
                except FileNotFoundError:
                    os.mkdir(part, 0o755, dir_fd=current)
                    child = self._open_directory(current, part)
                except OSError:
                    raise UnsafeArchive(f"{part!r} in {'/'.join(parts)!r} is not a directory") from None
                os.close(current)
                current = child
            yield current
        finally:
            os.close(current)

    @staticmethod
    def _open_directory(parent: int, name: str) -> int:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def _parts(name: str) -> tuple[str, ...]:
    if name.startswith("/") or "\0" in name:
        raise UnsafeArchive(f"{name!r} is not a relative path")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise UnsafeArchive(f"{name!r} leaves the directory")
    if len(parts) > _MAX_DEPTH:
        raise UnsafeArchive(f"{name[:80]!r}… is nested deeper than {_MAX_DEPTH}")
    return parts


def _check_link(parts: tuple[str, ...], target: str) -> None:
    """Refuse a link that could lead out.

    ".." may only stand in front, and not more often than the link is deep: from
    there a path goes only down, through directories or other links of this
    archive, each of which stays inside by the same rule.
    """
    name = "/".join(parts)
    if not target or target.startswith("/") or "\0" in target:
        raise UnsafeArchive(
            f"{name!r} links to {target!r}, which is not a relative path",
            hint='on_unsafe="skip" leaves such links out',
        )
    steps = [step for step in target.split("/") if step not in ("", ".")]
    up = 0
    while up < len(steps) and steps[up] == "..":
        up += 1
    if up > len(parts) - 1 or ".." in steps[up:]:
        raise UnsafeArchive(
            f"{name!r} links to {target!r}, which may leave the directory",
            hint='on_unsafe="skip" leaves such links out',
        )


def _text(content: bytearray) -> str:
    return bytes(content).split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes) -> dict[str, str]:
    """Records of "LENGTH KEY=VALUE\\n", LENGTH counting the whole record."""
    records: dict[str, str] = {}
    while content:
        digits, space, _ = content.partition(b" ")
        if not space or not digits.isdigit() or len(digits) > 6:
            raise Corrupt("an extended header is broken")
        length = int(digits)
        record = content[len(digits) + 1 : length]
        if length <= len(digits) + 1 or not record.endswith(b"\n") or length > len(content):
            raise Corrupt("an extended header is broken")
        key, equals, value = record[:-1].partition(b"=")
        if not equals:
            raise Corrupt("an extended header is broken")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        content = content[length:]
    return records
