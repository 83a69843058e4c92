from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import cove
from cove import errors
from cove._values import format_duration, parse_duration, parse_size, parse_time


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("512MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("2 GB", 2 * 10**9),
        ("1.1TiB", 1209462790553),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size("memory", text) == size  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "512M", "MiB", "-1MiB", -1, True, 1.5, "1.5", "1e3", None, "1 GiB extra"])
def test_what_is_no_size_names_the_field(text: object) -> None:
    with pytest.raises(cove.InvalidArgument) as caught:
        parse_size("disk", text)  # type: ignore[arg-type]
    assert caught.value.field == "disk"
    assert "MiB" in caught.value.hint


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0s"), (1.5, "1.5s"), (90, "90s"), (0.001, "0.001s"), (timedelta(minutes=2), "120s")]
)
def test_durations(value: float, text: str) -> None:
    assert format_duration("timeout", value) == text
    assert parse_duration(text) == timedelta(seconds=parse_duration(text)).total_seconds()


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "5", True])
def test_what_is_no_duration(value: object) -> None:
    with pytest.raises(cove.InvalidArgument):
        format_duration("timeout", value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-03-01T10:00:00Z", datetime(2026, 3, 1, 10, tzinfo=timezone.utc)),
        ("2026-03-01T10:00:00.5Z", datetime(2026, 3, 1, 10, 0, 0, 500000, tzinfo=timezone.utc)),
        ("2026-03-01T10:00:00.123456789Z", datetime(2026, 3, 1, 10, 0, 0, 123456, tzinfo=timezone.utc)),
        ("2026-03-01T12:00:00+02:00", datetime(2026, 3, 1, 10, tzinfo=timezone.utc)),
        (None, None),
    ],
)
def test_times(text: str, time: datetime) -> None:
    assert parse_time(text) == time


def test_every_code_of_the_catalogue_has_its_class_and_no_other() -> None:
    catalogue = json.loads((Path(__file__).parents[3] / "api" / "errors.json").read_text())
    assert {entry["code"] for entry in catalogue} == set(errors.BY_CODE)
    for code, cls in errors.BY_CODE.items():
        assert errors.make(code, "m").code == code
        assert getattr(cove, cls.__name__) is cls


def test_a_missing_program_has_a_class_of_its_own_that_old_code_still_catches() -> None:
    error = errors.make("not_found", "command not found: nope", reason="command_not_found")
    assert type(error) is cove.CommandNotFound
    assert isinstance(error, cove.NotFound)
    assert (error.code, error.reason) == ("not_found", "command_not_found")
    catalogue = json.loads((Path(__file__).parents[3] / "api" / "errors.json").read_text())
    assert set(errors.BY_REASON) <= {name for entry in catalogue for name in entry.get("reasons", {})}


def test_a_code_of_a_newer_server_stays_readable() -> None:
    error = errors.make("moon_phase", "wrong moon", hint="wait")
    assert type(error) is cove.CoveError
    assert (error.code, error.hint) == ("moon_phase", "wait")
    assert str(error) == "wrong moon (hint: wait)"
