"""Ports of a sandbox as they are reached from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import httpx

from ._port_calls import address
from .client import AsyncClient, Client
from .models import Json

TOKEN_HEADER = "X-Cove-Token"


class _Address(str):
    """Of a port; ends in "/", and with a path after it has one slash between, not two."""

    def __add__(self, path: str) -> str:
        return str(self) + path.removeprefix("/")


class _PortState:
    def __init__(self, base: str, number: int, answer: Json) -> None:
        self.number = number
        self.url: str = _Address(address(base, answer))
        """Where the port is, without its token; url + "/path" and url + "path" are the same."""
        self.public = bool(answer.get("public"))
        """Anyone who knows the address reaches it: headers is empty."""
        self.token = "" if self.public else str(answer.get("token") or "")
        self.headers: dict[str, str] = {TOKEN_HEADER: self.token} if self.token else {}
        """What a request needs besides; the gateway takes it off before it goes in."""

    def at(self, path: str = "/") -> str:
        """The address of a path."""
        return str(self.url) + path.lstrip("/")

    def _request(self, path: str, headers: Optional[Mapping[str, str]]) -> tuple[str, dict[str, str]]:
        return self.at(path), {**(headers or {}), **self.headers}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number} {self.url}>"  # not the token


class Port(_PortState):
    """A port of a sandbox, from Sandbox.port(): any HTTP client reaches it by url and headers.

    >>> page = sb.port(8080).fetch("/status").json()
    """

    def __init__(self, client: Client, number: int, answer: Json) -> None:
        super().__init__(client.url, number, answer)
        self._client = client

    def fetch(
        self,
        path: str = "/",
        *,
        method: str = "GET",
        params: Optional[Mapping[str, Any]] = None,
        headers: Optional[Mapping[str, str]] = None,
        content: Any = None,
        json: Any = None,
        timeout: Optional[float] = 30.0,
    ) -> httpx.Response:
        """One request to the port. Redirects are not followed: code inside would name where the token goes."""
        where, all_headers = self._request(path, headers)
        return self._client.http().request(
            method, where, params=params, headers=all_headers, content=content, json=json, timeout=timeout
        )


class AsyncPort(_PortState):
    """A port of a sandbox, from AsyncSandbox.port(); see Port."""

    def __init__(self, client: AsyncClient, number: int, answer: Json) -> None:
        super().__init__(client.url, number, answer)
        self._client = client

    async def fetch(
        self,
        path: str = "/",
        *,
        method: str = "GET",
        params: Optional[Mapping[str, Any]] = None,
        headers: Optional[Mapping[str, str]] = None,
        content: Any = None,
        json: Any = None,
        timeout: Optional[float] = 30.0,
    ) -> httpx.Response:
        """One request to the port; see Port.fetch."""
        where, all_headers = self._request(path, headers)
        return await self._client.http().request(
            method, where, params=params, headers=all_headers, content=content, json=json, timeout=timeout
        )
