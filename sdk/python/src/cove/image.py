"""Builds of images: of a Dockerfile, or step by step.

Image.build("app", "./repo")
Image.from_("base").apt("git").pip("requests").copy("src", "/srv/app").cmd("python3", "/srv/app").build("app")
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import re
import shlex
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Optional, Union, cast

from . import _context, _tar
from ._values import Seconds, format_duration
from .client import AsyncClient, Client, _Upload, default_async_client, default_client, maybe, read_all
from .errors import CoveError, FailedPrecondition, InvalidArgument, TransportError
from .models import Image, Json
from .network import NetworkLike, to_network

if TYPE_CHECKING:
    PathLike = Union[str, os.PathLike[str]]


@dataclass(frozen=True)
class BuildEvent:
    """Something that happened in a build: step, cached, output, done (of a step), warning, progress."""

    kind: str
    text: str
    step: int = 0
    total: int = 0
    stderr: bool = False

    @classmethod
    def parse(cls, j: Json) -> BuildEvent:
        return cls(j.get("kind", ""), j.get("text", ""), j.get("step", 0), j.get("total", 0), j.get("stderr", False))


OnEvent = Callable[[BuildEvent], Any]


class _Files:
    """Files for a build as a tar in a temporary file, known by their content."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
            self.file.write(chunk)
        self.file.seek(0)
        self.key = "sha256-" + digest.hexdigest()


class _Follower:
    """The events of one build, without I/O."""

    def __init__(self, on_event: Optional[OnEvent]) -> None:
        self._on_event = on_event
        self._image: Optional[Image] = None

    def receive(self, event: Json) -> Any:
        build = event.get("build")
        if build:
            self._image = Image.parse(build.get("image") or {})
            return None
        return self._on_event(BuildEvent.parse(event)) if self._on_event else None

    def result(self) -> Image:
        if self._image is None:
            raise TransportError("the build ended without an image", sent=True)
        return self._image


def build(client: Client, message: Json, files: Sequence[_Files], on_event: Optional[OnEvent]) -> Image:
    for one in files:
        with one.file:
            if client.call(_has_files(one.key)):
                continue
            upload = _Upload(one.file, None)
            request = client._settings.plain("PUT", f"/v1/build-files/{one.key}", None, upload.chunks(), ())
            b"".join(client.content(request).chunks())
    follower = _Follower(on_event)
    client.follow("Images/Build", message, follower.receive)
    return follower.result()


async def build_async(
    client: AsyncClient, message: Json, files: Sequence[_Files], on_event: Optional[OnEvent]
) -> Image:
    for one in files:
        with one.file:
            if await client.call(_has_files(one.key)):
                continue
            upload = _Upload(one.file, None)
            request = client._settings.plain("PUT", f"/v1/build-files/{one.key}", None, upload.achunks(), ())
            await read_all(await client.content(request))
    follower = _Follower(on_event)

    async def receive(event: Json) -> None:
        await maybe(follower.receive(event))

    await client.follow("Images/Build", message, receive)
    return follower.result()


def _has_files(key: str) -> Any:
    from ._calls import Call

    return Call("Images/HasFiles", {"key": key}, lambda j: bool(j.get("has")), repeatable=True)


def of_dockerfile(
    name: str,
    context: Optional[PathLike],
    dockerfile: Optional[PathLike],
    options: Mapping[str, Any],
    *,
    whole: bool = False,
) -> tuple[Json, list[_Files]]:
    """The request for a Dockerfile and its context, of which what the Dockerfile names is sent. Reads files."""
    message = {"name": name, **_options(**options)}
    if context is None and dockerfile is None:
        raise InvalidArgument("a build wants a context or a Dockerfile", field="context")
    directory = "" if context is None else os.fspath(context)
    file_name = os.path.join(directory, "Dockerfile") if dockerfile is None else os.fspath(dockerfile)
    try:
        with open(file_name, encoding="utf-8") as file:
            message["dockerfile"] = file.read()
    except FileNotFoundError:
        raise InvalidArgument(f"there is no {file_name}", field="dockerfile") from None
    if context is None:
        return message, []
    ignore_file = file_name + ".dockerignore"  # as BuildKit has it, a Dockerfile may have one of its own
    if os.path.exists(ignore_file):
        relative = os.path.relpath(ignore_file, directory)
        if not relative.startswith(os.pardir):
            message["ignoreFile"] = relative.replace(os.sep, "/")
    else:
        ignore_file = os.path.join(directory, ".dockerignore")
    left_out, partial = _context.left_out(directory, None if whole else message["dockerfile"], ignore_file)
    files = _Files(_tar.pack(directory, left_out))
    message["context"] = files.key
    if partial:
        message["contextPartial"] = True
    return message, [files]


def wants_whole(message: Json, error: FailedPrecondition) -> bool:
    """Whether a build failed for having only what its Dockerfile names: its base has an ONBUILD that copies."""
    return bool(message.get("contextPartial")) and error.field == "context"


def _options(
    args: Optional[Mapping[str, str]] = None,
    target: Optional[str] = None,
    secrets: Optional[Mapping[str, Union[str, bytes]]] = None,
    network: Optional[NetworkLike] = None,
    no_cache: bool = False,
    timeout: Optional[Seconds] = None,
    tags: Sequence[str] = (),
) -> dict[str, Any]:
    message: dict[str, Any] = {}
    if args:
        message["args"] = dict(args)
    if target:
        message["target"] = target
    if secrets:
        message["secretValues"] = {
            k: base64.b64encode(v.encode() if isinstance(v, str) else v).decode() for k, v in secrets.items()
        }
    if network is not None:
        message["network"] = to_network(network)._json()
    if no_cache:
        message["noCache"] = True
    if timeout is not None:
        message["timeout"] = format_duration("timeout", timeout)
    if tags:
        message["tags"] = list(tags)
    return message


@dataclass(frozen=True)
class Recipe:
    """An image to be built step by step. Each method returns a new one, so that recipes share their beginning."""

    base: str
    steps: tuple[Json, ...] = ()
    calls: tuple[str, ...] = ()  # that made the steps, for errors
    local: tuple[tuple[int, str], ...] = ()  # of copies: index of the step, and path on this machine

    def _with(self, call: str, op: str, *args: str, **more: Any) -> Recipe:
        step = {"op": op, "args": list(args), **{k: v for k, v in more.items() if v}}
        return replace(self, steps=(*self.steps, step), calls=(*self.calls, call))

    def run(self, *commands: str, user: str = "") -> Recipe:
        """Shell commands, one after the other, in one step."""
        _some("run", "command", commands)
        return self._with(_call("run", *commands), "RUN", " && ".join(commands), user=user)

    def apt(self, *packages: str) -> Recipe:
        """Debian packages, as root."""
        _some("apt", "package", packages)
        names = " ".join(map(shlex.quote, packages))
        script = (
            "apt-get update && "
            f"DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {names} && "
            "rm -rf /var/lib/apt/lists/*"
        )
        return self._with(_call("apt", *packages), "RUN", script, user="root")

    def pip(self, *packages: str) -> Recipe:
        """Python packages, as root, with the image's python3."""
        _some("pip", "package", packages)
        names = " ".join(map(shlex.quote, packages))
        script = f"PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir {names}"
        return self._with(_call("pip", *packages), "RUN", script, user="root")

    def copy(self, local: PathLike, dest: str, *, owner: str = "", mode: str = "") -> Recipe:
        """A file of this machine, or what is in a directory."""
        path = os.fspath(local)
        if not os.path.lexists(path):
            raise InvalidArgument(f"there is no {path}", field="local")
        source = "." if os.path.isdir(path) else os.path.basename(path)
        made = self._with(_call("copy", path, dest), "COPY", source, dest, user=owner, mode=mode)
        return replace(made, local=(*made.local, (len(made.steps) - 1, path)))

    def env(self, variables: Optional[Mapping[str, str]] = None, **more: str) -> Recipe:
        given = {**(variables or {}), **more}
        call = f".env({', '.join(f'{name}=…' for name in given)})"  # what they are may be nobody's business
        return self._with(call, "ENV", *[word for item in given.items() for word in item])

    def label(self, labels: Mapping[str, str]) -> Recipe:
        return self._with(_call("label", *labels), "LABEL", *[word for item in labels.items() for word in item])

    def workdir(self, path: str) -> Recipe:
        return self._with(_call("workdir", path), "WORKDIR", path)

    def user(self, name: str) -> Recipe:
        return self._with(_call("user", name), "USER", name)

    def expose(self, *ports: Union[int, str]) -> Recipe:
        return self._with(_call("expose", *map(str, ports)), "EXPOSE", *map(str, ports))

    def entrypoint(self, *argv: str) -> Recipe:
        return self._with(_call("entrypoint", *argv), "ENTRYPOINT", *argv)

    def cmd(self, *argv: str) -> Recipe:
        return self._with(_call("cmd", *argv), "CMD", *argv)

    def _message(self, name: str, options: Mapping[str, Any]) -> tuple[Json, list[_Files]]:
        steps = [dict(s) for s in self.steps]
        files = []
        for index, path in self.local:
            one = _Files(_tar.pack(path) if os.path.isdir(path) else _one_file(path))
            steps[index]["files"] = one.key
            files.append(one)
        return {"name": name, "from": self.base, "steps": steps, **_options(**options)}, files

    def build(
        self,
        name: str,
        *,
        args: Optional[Mapping[str, str]] = None,
        network: Optional[NetworkLike] = None,
        no_cache: bool = False,
        timeout: Optional[Seconds] = None,
        on_event: Optional[OnEvent] = None,
        client: Optional[Client] = None,
    ) -> Image:
        """Build it under a name. Steps that did not change come from the cache."""
        options = {"args": args, "network": network, "no_cache": no_cache, "timeout": timeout}
        message, files = self._message(name, options)
        try:
            return build(client or default_client(), message, files, on_event)
        except CoveError as error:
            self._place(error)
            raise

    async def build_async(
        self,
        name: str,
        *,
        args: Optional[Mapping[str, str]] = None,
        network: Optional[NetworkLike] = None,
        no_cache: bool = False,
        timeout: Optional[Seconds] = None,
        on_event: Optional[OnEvent] = None,
        client: Optional[AsyncClient] = None,
    ) -> Image:
        """build for asyncio; on_event may be a coroutine function."""
        options = {"args": args, "network": network, "no_cache": no_cache, "timeout": timeout}
        message, files = await asyncio.get_running_loop().run_in_executor(None, self._message, name, options)
        try:
            return await build_async(client or default_async_client(), message, files, on_event)
        except CoveError as error:
            self._place(error)
            raise

    def _place(self, error: CoveError) -> None:
        """Has an error name the call that made its step; its field stays what the server says."""
        of_step = re.fullmatch(r"steps\[(\d+)\]", error.field)
        if of_step and int(of_step[1]) < len(self.calls):
            index = int(of_step[1])
            place = f"step {index + 1} ({self.calls[index]})"
        elif error.field == "from":
            place = f"Image{_call('from_', self.base)}"
        else:
            return
        error.message = f"{place}: {error.message.replace(error.field + ': ', '', 1)}"
        error.args = (error.message,)


def _call(method: str, *args: str) -> str:
    """A call as it was written, or its beginning."""
    text = ", ".join(json.dumps(arg, ensure_ascii=False) for arg in args)
    return f".{method}({text if len(text) <= 60 else text[:59] + '…'})"


def _some(method: str, what: str, given: Sequence[str]) -> None:
    if not given or not all(given):
        raise InvalidArgument(f"{method} wants a {what}", field=method)


def _one_file(path: str) -> Iterator[bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = _tar._header(path, os.path.basename(path))
        if info is None:
            raise InvalidArgument(f"{path} is neither a file nor a directory", field="local")
        if info.isreg():
            with open(path, "rb") as file:
                tar.addfile(info, file)
        else:
            tar.addfile(info)
    yield buffer.getvalue()
