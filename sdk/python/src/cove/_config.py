"""Where the server is and which key opens it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional

from .errors import InvalidArgument, Unauthenticated, Unavailable

DEFAULT_URL = "http://127.0.0.1:7777"
DEFAULT_DATA = "/var/lib/cove"


def _data() -> Path:
    return Path(os.environ.get("COVE_DATA") or DEFAULT_DATA)


def local_url() -> str:
    """Where the server of this machine listens: it writes that beside its key."""
    try:
        return (_data() / "url").read_text(encoding="utf-8").strip().rstrip("/") or DEFAULT_URL
    except (OSError, UnicodeDecodeError):
        return DEFAULT_URL


def resolve_url(url: Optional[str]) -> str:
    """The argument, else COVE_URL, else the local server."""
    url = (url or os.environ.get("COVE_URL") or local_url()).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(
            f"url: {url!r} has no scheme", field="url", hint="set COVE_URL to http://HOST:PORT or https://HOST"
        )
    return url


def resolve_ca(ca: Optional[str]) -> Optional[str]:
    """The argument, else COVE_CA: a file of authorities to trust instead of the system's."""
    ca = ca or os.environ.get("COVE_CA") or None
    if ca is not None and not os.path.isfile(ca):
        raise InvalidArgument(f"ca: no file {ca!r}", field="ca", hint="it is a copy of the server's DATA/tls/ca.crt")
    return ca


def _server_runs() -> bool:
    """Whether the pid the local server wrote down is a process of the data directory's owner."""
    try:
        pid = int((_data() / "pid").read_text())
        return os.stat(f"/proc/{pid}").st_uid == _data().stat().st_uid
    except (OSError, ValueError):
        return False


def resolve_key(key: Optional[str], url: str) -> str:
    """The argument, else COVE_KEY, else the key file of the server on this machine.

    That one is root's. It goes to the URL the server wrote down and nowhere else, and only while the server
    runs: whoever takes its port meanwhile would get it.
    """
    key = key or os.environ.get("COVE_KEY")
    if not key:
        path = _data() / "key"
        if url != local_url():
            raise Unauthenticated(
                f"no API key for {url}: COVE_KEY is not set, and {path} is for {local_url()} only", hint="set COVE_KEY"
            )
        if os.path.exists(path) and not _server_runs():
            raise Unavailable(f"the server of {_data()} does not run", hint='"make start" or "cove serve" starts it')
        try:
            key = path.read_text(encoding="ascii", errors="strict").strip()
        except (OSError, UnicodeDecodeError) as err:
            raise Unauthenticated(
                f"no API key: COVE_KEY is not set and {path} cannot be read ({getattr(err, 'strerror', err)})",
                hint='set COVE_KEY; on the server\'s machine: eval "$(cove env)"',
            ) from None
    if not key or not key.isascii() or not key.isprintable():
        # It becomes a header: a line break in it would become two.
        raise InvalidArgument("key: empty, or with characters no key has", field="key")
    return key
