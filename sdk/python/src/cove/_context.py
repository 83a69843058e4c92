"""The context of a build: which files of a directory are sent.

Less than there is, never less than the server needs: it reads .dockerignore and the Dockerfile itself, with BuildKit's
parser, and has the last word. What is not plain here is sent.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator
from typing import Callable, Optional

LeftOut = Callable[[str], bool]

_CONTINUED = re.compile(r"\\[ \t]*\r?\n(?:[ \t]*(?:#[^\n]*)?\r?\n)*")
_INSTRUCTION = re.compile(r"\s*(?:onbuild\s+)?(copy|add|run)\s+(.*)", re.I)
_MOUNT = re.compile(r"--mount=(\S*)")
_NO_FILES = re.compile(r"(^|,)type=(cache|secret|tmpfs|ssh)(,|$)")


def left_out(context: str, dockerfile: Optional[str], ignore_file: str) -> tuple[Optional[LeftOut], bool]:
    """What is not sent of a context, and whether that is more than the ignore file says. Without the Dockerfile it
    is not."""
    ignored = _ignored(ignore_file)
    needs = None if dockerfile is None else _needs(dockerfile)
    if needs is None or _linked(context, needs):
        return ignored, False
    keep = [*needs, ".dockerignore", os.path.relpath(ignore_file, context).replace(os.sep, "/")]
    sources = [[re.compile(_pattern(part)) for part in source.split("/")] for source in keep]

    def out(name: str) -> bool:
        parts = name.split("/")
        if not any(all(p.fullmatch(part) for p, part in zip(source, parts)) for source in sources):
            return True
        return ignored is not None and ignored(name)

    return out, True


def _needs(dockerfile: str) -> Optional[list[str]]:
    """Paths and patterns that a Dockerfile copies or mounts of its context; None = all of it, or not known here.

    A line of a here-document may look like an instruction: then more is sent.
    """
    if re.search(r"^\s*#\s*escape\s*=", dockerfile, re.I | re.M):
        return None
    found: list[str] = []
    for line in _CONTINUED.sub(" ", dockerfile).splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        op, rest = match[1].lower(), match[2].strip()
        if op == "run":
            if any(not _NO_FILES.search(mount) and ",from=" not in "," + mount for mount in _MOUNT.findall(rest)):
                return None
            continue
        sources = _sources(rest)
        if sources is None:
            return None
        found += sources
    needs = [posixpath.normpath("/" + source).lstrip("/") for source in found]
    return None if "" in needs else needs


def _sources(rest: str) -> Optional[list[str]]:
    words = rest.split()
    while words and words[0].startswith("--"):
        flag = words.pop(0)
        if flag.startswith("--from="):
            return []
        rest = rest[len(flag) :].lstrip()
    if rest.startswith("["):
        try:
            words = [str(word) for word in json.loads(rest)]
        except ValueError:
            return None
    elif any(c in rest for c in "\"'\\"):
        return None
    if any(c in word for word in words for c in "$[\\"):
        return None
    return [word for word in words[:-1] if not word.startswith(("<<", "http://", "https://"))]


def _linked(context: str, needs: list[str]) -> bool:
    """Whether a source leads through a link, and so to anything."""
    for source in needs:
        level = [context]
        for part in source.split("/"):
            wild = re.compile(_pattern(part)) if "*" in part or "?" in part else None
            level = [os.path.join(at, name) for at in level for name in (_names(at, wild) if wild else [part])]
            if any(map(os.path.islink, level)):
                return True
    return False


def _names(directory: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if pattern.fullmatch(name)]
    except OSError:  # no directory: nothing is copied of it
        return []


def _ignored(ignore_file: str) -> Optional[LeftOut]:
    try:
        with open(ignore_file, encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    except FileNotFoundError:
        return None
    if any(line.startswith("!") for line in lines):
        return None  # something below may be let in again
    patterns = [re.compile(_pattern(line.strip("/"))) for line in lines]
    return lambda name: not name.endswith(".dockerignore") and any(p.fullmatch(name) for p in patterns)


def _pattern(text: str) -> str:
    return "".join(_regex(text))


def _regex(text: str) -> Iterator[str]:
    i = 0
    while i < len(text):
        if text.startswith("**/", i):
            yield "(.*/)?"
            i += 3
        elif text.startswith("**", i):
            yield ".*"
            i += 2
        elif text[i] in "*?":
            yield "[^/]*" if text[i] == "*" else "[^/]"
            i += 1
        else:
            yield re.escape(text[i])
            i += 1
