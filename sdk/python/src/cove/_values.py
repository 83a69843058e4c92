"""Values as the API writes them: sizes, durations, timestamps, 64-bit integers.

The wire is protobuf JSON: int64 travels as a string (a JSON number is read
too), a Duration as "1.5s", a Timestamp as RFC 3339 with up to nanoseconds.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from typing import Any, Optional, Union

from .errors import InvalidArgument

Size = Union[int, str]
"""Bytes, or a string such as "512MiB", "1.5GiB" or "2GB"."""

Seconds = Union[int, float, timedelta]
"""A length of time in seconds, or a timedelta."""

# The same units as the server's. "512M" is refused on purpose: it is 512 MiB to
# Docker and 512 MB to Kubernetes.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(field: str, value: Size) -> int:
    """Bytes of a size; InvalidArgument naming the field if it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= 0:
            return value
    elif isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match and unit and (unit > 1 or "." not in match.group(1)):
            # A fraction, because 1.1 in a float times 2^40 is off by bytes.
            return int(Fraction(match.group(1)) * unit)
    raise InvalidArgument(
        f"{field}: {value!r} is not a size",
        field=field,
        hint='give bytes as an int, powers of 1024 ("512MiB", "1.5GiB") or of 1000 ("512MB", "1GB")',
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
