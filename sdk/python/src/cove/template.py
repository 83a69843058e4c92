"""Templates: named, versioned things to start from, with their start command up and ready."""

from __future__ import annotations

import builtins
import codecs
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Callable, Optional, Union

from . import _calls, _state_calls
from ._connect import decode_base64
from ._values import Seconds, Size
from .client import AsyncClient, Client, default_async_client, default_client, maybe
from .errors import TransportError
from .models import Json
from .snapshot import AsyncSnapshot, Snapshot
from .state import TemplateInfo


class TemplateState:
    """What a template object knows without asking."""

    def __init__(self, info: TemplateInfo) -> None:
        self.last_info = info

    @property
    def id(self) -> str:
        """name@version."""
        return f"{self.last_info.name}@{self.last_info.version}"

    @property
    def name(self) -> str:
        return self.last_info.name

    @property
    def version(self) -> int:
        return self.last_info.version

    @property
    def tags(self) -> tuple[str, ...]:
        """By which this version is named too, "name:tag"; as of the last answer."""
        return self.last_info.tags

    @property
    def snapshot(self) -> str:
        """Id of what it starts from."""
        return self.last_info.snapshot

    @property
    def size(self) -> int:
        """Bytes of state."""
        return self.last_info.size

    @property
    def build_time(self) -> float:
        """Seconds."""
        return self.last_info.build_time

    @property
    def created_at(self) -> Optional[datetime]:
        return self.last_info.created_at

    def _untagged(self, tags: tuple[str, ...]) -> None:
        self.last_info = replace(self.last_info, tags=tuple(tag for tag in self.tags if tag not in tags))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.size} bytes>"


class Template(TemplateState):
    """A version of a template. Sandbox.create(template=…) starts from it; by its name alone, from the newest.

    "name@version" and "name:tag" name one version.
    """

    def __init__(self, client: Client, info: TemplateInfo) -> None:
        """Use build(), get() or list()."""
        super().__init__(info)
        self._client = client

    @classmethod
    def build(
        cls,
        name: str,
        *,
        image: Optional[str] = None,
        snapshot: Optional[Union[Snapshot, str]] = None,
        start: Optional[str] = None,
        ready_command: Optional[str] = None,
        ready_port: Optional[int] = None,
        ready_timeout: Seconds = 60,
        cpu: Optional[float] = None,
        memory: Optional[Size] = None,
        memory_limit: Optional[Size] = None,
        disk: Optional[Size] = None,
        pids: Optional[int] = None,
        env: Optional[Mapping[str, str]] = None,
        labels: Optional[Mapping[str, str]] = None,
        on_output: Optional[Callable[[str], Any]] = None,
        on_step: Optional[Callable[[str], Any]] = None,
        client: Optional[Client] = None,
    ) -> Template:
        """Make the next version: run the start command, wait until it is ready, freeze it.

        Ready is when ready_command succeeds or something listens on ready_port.
        on_output gets what the start command prints; on_step create, start,
        ready, freeze, done. A failed build leaves nothing.
        """
        client = client or default_client()
        spec = _calls.sandbox_spec(
            image=image,
            snapshot=snapshot,
            cpu=cpu,
            memory=memory,
            memory_limit=memory_limit,
            disk=disk,
            pids=pids,
            env=env,
            labels=labels,
        )
        message = _state_calls.new_template(
            name,
            spec,
            start=start,
            ready_command=ready_command,
            ready_port=ready_port,
            ready_timeout=ready_timeout,
        )

        def attempt() -> TemplateInfo:
            build = _Build(name, on_output, on_step)
            client.follow("Templates/Build", message, lambda event: [call(arg) for call, arg in build.receive(event)])
            return build.result()

        return cls(client, client.retrying(attempt, repeatable=False))

    @classmethod
    def get(cls, name: str, *, client: Optional[Client] = None) -> Template:
        """By "name", the newest, "name@version" or "name:tag"."""
        client = client or default_client()
        return cls(client, client.call(_state_calls.get_template(name)))

    @classmethod
    def list(cls, name: Optional[str] = None, *, client: Optional[Client] = None) -> builtins.list[Template]:
        """The newest version of each, or every version of one."""
        client = client or default_client()
        return [cls(client, info) for info in client.call(_state_calls.list_templates(name))]

    def tag(self, *tags: str) -> None:
        """Have this version carry tags, and no other of its name."""
        self.last_info = self._client.call(_state_calls.tag_template(self.id, tags))

    def untag(self, *tags: str) -> None:
        """Take tags off whichever version of its name carries them."""
        self._client.call(_state_calls.untag_template(self.name, tags))
        self._untagged(tags)

    def delete(self, *, all_versions: bool = False) -> builtins.list[int]:
        """Remove this version, or all of its name; the versions that went."""
        return self._client.call(_state_calls.delete_template(self.name if all_versions else self.id))


class AsyncTemplate(TemplateState):
    """A version of a template for asyncio; see Template."""

    def __init__(self, client: AsyncClient, info: TemplateInfo) -> None:
        """Use build(), get() or list()."""
        super().__init__(info)
        self._client = client

    @classmethod
    async def build(
        cls,
        name: str,
        *,
        image: Optional[str] = None,
        snapshot: Optional[Union[AsyncSnapshot, str]] = None,
        start: Optional[str] = None,
        ready_command: Optional[str] = None,
        ready_port: Optional[int] = None,
        ready_timeout: Seconds = 60,
        cpu: Optional[float] = None,
        memory: Optional[Size] = None,
        memory_limit: Optional[Size] = None,
        disk: Optional[Size] = None,
        pids: Optional[int] = None,
        env: Optional[Mapping[str, str]] = None,
        labels: Optional[Mapping[str, str]] = None,
        on_output: Optional[Callable[[str], Any]] = None,
        on_step: Optional[Callable[[str], Any]] = None,
        client: Optional[AsyncClient] = None,
    ) -> AsyncTemplate:
        """Make the next version; see Template.build. The callbacks may be coroutine functions."""
        client = client or default_async_client()
        spec = _calls.sandbox_spec(
            image=image,
            snapshot=snapshot,
            cpu=cpu,
            memory=memory,
            memory_limit=memory_limit,
            disk=disk,
            pids=pids,
            env=env,
            labels=labels,
        )
        message = _state_calls.new_template(
            name,
            spec,
            start=start,
            ready_command=ready_command,
            ready_port=ready_port,
            ready_timeout=ready_timeout,
        )

        async def attempt() -> TemplateInfo:
            build = _Build(name, on_output, on_step)

            async def receive(event: Json) -> None:
                for call, arg in build.receive(event):
                    await maybe(call(arg))

            await client.follow("Templates/Build", message, receive)
            return build.result()

        return cls(client, await client.retrying(attempt, repeatable=False))

    @classmethod
    async def get(cls, name: str, *, client: Optional[AsyncClient] = None) -> AsyncTemplate:
        """By "name", the newest, "name@version" or "name:tag"."""
        client = client or default_async_client()
        return cls(client, await client.call(_state_calls.get_template(name)))

    @classmethod
    async def list(
        cls, name: Optional[str] = None, *, client: Optional[AsyncClient] = None
    ) -> builtins.list[AsyncTemplate]:
        """The newest version of each, or every version of one."""
        client = client or default_async_client()
        return [cls(client, info) for info in await client.call(_state_calls.list_templates(name))]

    async def tag(self, *tags: str) -> None:
        """Have this version carry tags, and no other of its name."""
        self.last_info = await self._client.call(_state_calls.tag_template(self.id, tags))

    async def untag(self, *tags: str) -> None:
        """Take tags off whichever version of its name carries them."""
        await self._client.call(_state_calls.untag_template(self.name, tags))
        self._untagged(tags)

    async def delete(self, *, all_versions: bool = False) -> builtins.list[int]:
        """Remove this version, or all of its name; the versions that went."""
        return await self._client.call(_state_calls.delete_template(self.name if all_versions else self.id))


class _Build:
    """The events of one build, without I/O."""

    def __init__(
        self, name: str, on_output: Optional[Callable[[str], Any]], on_step: Optional[Callable[[str], Any]]
    ) -> None:
        self._name, self._on_output, self._on_step = name, on_output, on_step
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._step = ""
        self._template: Optional[TemplateInfo] = None

    def receive(self, event: Json) -> builtins.list[tuple[Callable[[str], Any], str]]:
        """Each callback to call, with its text, in order."""
        calls = []
        step = event.get("step", "")
        if step and step != self._step:
            self._step = step
            if self._on_step is not None:
                calls.append((self._on_step, step))
        if event.get("template"):
            self._template = TemplateInfo.parse(event["template"])
        text = self._decoder.decode(decode_base64(event.get("output", "")), final=self._template is not None)
        if text and self._on_output is not None:
            calls.append((self._on_output, text))
        return calls

    def result(self) -> TemplateInfo:
        if self._template is None:
            raise TransportError(
                "the stream ended without a template",
                sent=True,
                hint=f'it may be there all the same: look with Template.list("{self._name}")',
            )
        return self._template
