"""Where the server is and which key opens it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional

from .errors import InvalidArgument, Unauthenticated

DEFAULT_URL = "http://127.0.0.1:7777"
DEFAULT_DATA = "/var/lib/cove"


def resolve_url(url: Optional[str]) -> str:
    """The argument, else COVE_URL, else the local server."""
    url = (url or os.environ.get("COVE_URL") or DEFAULT_URL).rstrip("/")
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


def resolve_key(key: Optional[str]) -> str:
    """The argument, else COVE_KEY, else the key file of the server on this machine."""
    key = key or os.environ.get("COVE_KEY")
    if not key:
        path = Path(os.environ.get("COVE_DATA") or DEFAULT_DATA) / "key"
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
