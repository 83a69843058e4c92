"""The unary calls that reach in: addresses of ports and readiness; see _calls."""

from __future__ import annotations

from typing import Any, Optional

from ._calls import Call, nothing
from ._values import Seconds, format_duration
from .errors import InvalidArgument
from .models import Json


def _port(port: int) -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise InvalidArgument(f"port: {port!r} is no TCP port; 1 to 65535 are accepted", field="port")
    return port


def url(id: str, port: int, ttl: Optional[Seconds]) -> Call[Json]:
    message: dict[str, Any] = {"sandboxId": id, "port": _port(port)}
    if ttl is not None:
        message["ttl"] = format_duration("ttl", ttl)
    return Call("Ports/Url", message, dict, repeatable=True)


def set_public(id: str, port: int, public: bool) -> Call[Json]:
    message = {"sandboxId": id, "port": _port(port), "public": bool(public)}
    return Call("Ports/Set", message, dict, repeatable=True)


def wait_ready(id: str, *, port: Optional[int], command: Optional[str], timeout: Seconds) -> Call[None]:
    message: dict[str, Any] = {"sandboxId": id, "timeout": format_duration("timeout", timeout)}
    if port is not None:
        message["port"] = _port(port)
    if command is not None:
        message["command"] = command
    return Call("Ports/WaitReady", message, nothing, repeatable=True, slow=True)


def address(base: str, answer: Json) -> str:
    """The address of a port, without its token. The server knows only the path where it has no domain."""
    where = str(answer.get("url", ""))
    if where.startswith("/"):
        where = base.rstrip("/") + where
    return where if where.endswith("/") else where + "/"


def whole(base: str, answer: Json, path: str = "") -> str:
    """The address of a path at a port, with the token."""
    where = address(base, answer) + path.lstrip("/")
    token = answer.get("token")
    if not token or answer.get("public"):
        return where
    where, mark, fragment = where.partition("#")
    return f"{where}{'&' if '?' in where else '?'}cove_token={token}{mark}{fragment}"
