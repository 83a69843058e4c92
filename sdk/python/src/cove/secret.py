"""Secrets: values that requests of sandboxes leave with and no sandbox holds."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Optional

from ._calls import Call, nothing, strings
from ._values import parse_int, parse_time
from .client import AsyncClient, Client, default_async_client, default_client
from .errors import InvalidArgument, NotFound
from .models import Json


@dataclass(frozen=True)
class SecretInfo:
    """A secret without its value, which nothing returns; docs/network.md says what the rest means."""

    name: str
    hosts: tuple[str, ...]
    header: str
    format: str
    url: bool
    body: bool
    allow_http: bool
    env: str
    """Variable that holds the placeholder inside."""
    placeholder: str
    created_at: Optional[datetime]
    updated_at: Optional[datetime]
    labels: Mapping[str, str] = field(default_factory=dict)
    version: int = 0
    """Of the value: 1 at first, one more each time one is set. 0 of a server that does not say."""

    @classmethod
    def parse(cls, j: Json) -> SecretInfo:
        return cls(
            name=j.get("name", ""),
            hosts=tuple(j.get("hosts") or ()),
            header=j.get("header", ""),
            format=j.get("format", ""),
            url=bool(j.get("url")),
            body=bool(j.get("body")),
            allow_http=bool(j.get("allowHttp")),
            env=j.get("env", ""),
            placeholder=j.get("placeholder", ""),
            created_at=parse_time(j.get("createdAt")),
            updated_at=parse_time(j.get("updatedAt")),
            labels=j.get("labels") or {},
            version=parse_int(j.get("version")),
        )


def _secret(j: Json) -> SecretInfo:
    return SecretInfo.parse(j["secret"])


def _message(
    name: str,
    value: Optional[str],
    hosts: Optional[Sequence[str]],
    header: Optional[str],
    format: Optional[str],
    env: Optional[str],
    url: Optional[bool],
    body: Optional[bool],
    allow_http: Optional[bool],
    labels: Optional[Mapping[str, str]],
) -> dict[str, Any]:
    if isinstance(hosts, str):
        raise InvalidArgument("hosts: a list of hosts, not one string", field="hosts", hint=f"[{hosts!r}]")
    given = {
        "value": value,
        "hosts": None if hosts is None else builtins.list(hosts),
        "header": header,
        "format": format,
        "env": env,
        "url": url,
        "body": body,
        "allowHttp": allow_http,
        "labels": None if labels is None else strings("labels", labels),
    }
    return {"name": name, **{k: v for k, v in given.items() if v is not None}}


def _update(message: dict[str, Any]) -> Call[SecretInfo]:
    if message.get("labels") == {}:  # which on the wire is the same as not said
        message = {**message, "clearLabels": True}
    return Call("Secrets/Update", message, _secret, repeatable=True)


def _create(message: dict[str, Any]) -> Call[SecretInfo]:
    return Call("Secrets/Create", message, _secret)


def _list() -> Call[builtins.list[SecretInfo]]:
    return Call("Secrets/List", {}, lambda j: [SecretInfo.parse(s) for s in j.get("secrets") or ()], repeatable=True)


def _delete(name: str) -> Call[None]:
    return Call("Secrets/Delete", {"name": name}, nothing, repeatable=True, removes=True)


class Secret:
    """Secrets of your tenant. Sandbox.create(secrets=["openai"], network="public") uses them."""

    @staticmethod
    def set(
        name: str,
        value: Optional[str] = None,
        *,
        hosts: Optional[Sequence[str]] = None,
        header: Optional[str] = None,
        format: Optional[str] = None,
        env: Optional[str] = None,
        url: Optional[bool] = None,
        body: Optional[bool] = None,
        allow_http: Optional[bool] = None,
        labels: Optional[Mapping[str, str]] = None,
        client: Optional[Client] = None,
    ) -> SecretInfo:
        """Make a secret, or change what is given of one; running sandboxes use it at once.

        Requests to hosts leave with the value: in header, made of format in which
        {} is the value, or without a header wherever the placeholder stands in a
        header; with url and body there too. env is the variable that holds the
        placeholder inside. labels take the place of those before; {} clears them.
        """
        client = client or default_client()
        message = _message(name, value, hosts, header, format, env, url, body, allow_http, labels)
        try:
            return client.call(_update(message))
        except NotFound:
            if value is None:
                raise
        return client.call(_create(message))

    @staticmethod
    def list(*, client: Optional[Client] = None) -> builtins.list[SecretInfo]:
        """All of them, by name."""
        return (client or default_client()).call(_list())

    @staticmethod
    def delete(name: str, *, client: Optional[Client] = None) -> None:
        """Forget it; sandboxes that have it lose it at once."""
        (client or default_client()).call(_delete(name))


class AsyncSecret:
    """Secrets for asyncio; see Secret."""

    @staticmethod
    async def set(
        name: str,
        value: Optional[str] = None,
        *,
        hosts: Optional[Sequence[str]] = None,
        header: Optional[str] = None,
        format: Optional[str] = None,
        env: Optional[str] = None,
        url: Optional[bool] = None,
        body: Optional[bool] = None,
        allow_http: Optional[bool] = None,
        labels: Optional[Mapping[str, str]] = None,
        client: Optional[AsyncClient] = None,
    ) -> SecretInfo:
        """Make a secret, or change what is given of one; see Secret.set."""
        client = client or default_async_client()
        message = _message(name, value, hosts, header, format, env, url, body, allow_http, labels)
        try:
            return await client.call(_update(message))
        except NotFound:
            if value is None:
                raise
        return await client.call(_create(message))

    @staticmethod
    async def list(*, client: Optional[AsyncClient] = None) -> builtins.list[SecretInfo]:
        """All of them, by name."""
        return await (client or default_async_client()).call(_list())

    @staticmethod
    async def delete(name: str, *, client: Optional[AsyncClient] = None) -> None:
        """Forget it; sandboxes that have it lose it at once."""
        await (client or default_async_client()).call(_delete(name))
