"""Values as the API writes them: sizes, durations, timestamps, 64-bit integers.

The wire is protobuf JSON: int64 travels as a string (a JSON number is read
too), a Duration as "1.5s", a Timestamp as RFC 3339 with up to nanoseconds.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Any, Optional, Union

from .errors import InvalidArgument

Size = Union[int, str]
"""Bytes, or a string such as "512MiB", "1.5GiB" or "2GB"."""

Seconds = Union[int, float, timedelta]
"""A length of time in seconds, or a timedelta."""

# "512M" is refused on purpose: it is 512 MiB to Docker and 512 MB to Kubernetes.
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(field: str, value: Size) -> int:
    """Bytes of a size; InvalidArgument naming the field if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise InvalidArgument(f"{field}: {value} is negative", field=field)
        return value
    if isinstance(value, str):
        m = _SIZE.fullmatch(value)
        if m and m.group(2).lower() in _UNITS:
            number, unit = m.group(1), _UNITS[m.group(2).lower()]
            return int(number) * unit if "." not in number else round(float(number) * unit)
    raise InvalidArgument(
        f"{field}: {value!r} is not a size",
        field=field,
        hint='give bytes as an int, or a string with a unit: "512MiB", "1.5GiB", "2GB"',
    )


def to_seconds(field: str, value: Seconds) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 3.1e11:
        raise InvalidArgument(
            f"{field}: {value!r} is not a length of time", field=field, hint="give seconds, zero or more"
        )
    return float(value)


def format_duration(field: str, value: Seconds) -> str:
    """A protobuf JSON Duration."""
    text = f"{to_seconds(field, value):.9f}".rstrip("0").rstrip(".")
    return text + "s"


def parse_duration(value: Optional[str]) -> float:
    """Seconds of a protobuf JSON Duration; 0.0 where it is unset."""
    return float(value[:-1]) if value else 0.0


def parse_time(value: Optional[str]) -> Optional[datetime]:
    """An aware datetime; digits below a microsecond are cut."""
    if not value:
        return None
    # datetime.fromisoformat knows neither "Z" nor nine digits before Python 3.11.
    offset = "+00:00"
    if value[-1] in "Zz":
        value = value[:-1]
    elif value[-6] in "+-":
        value, offset = value[:-6], value[-6:]
    whole, _, fraction = value.partition(".")
    stamp = datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}{offset}")
    return stamp.astimezone(timezone.utc)


def parse_int(value: Any) -> int:
    """An int64, which protobuf JSON writes as a string and leaves out when zero."""
    return int(value) if value else 0
