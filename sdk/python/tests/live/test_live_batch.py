"""Batches against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from pathlib import Path
from typing import Any

import pytest

import cove
from cove import AsyncBatch, Batch

from .conftest import LABEL, gone_within

pytestmark = pytest.mark.live


@pytest.fixture
def small(run: str) -> dict[str, Any]:
    labels = {LABEL: run, "trial": uuid.uuid4().hex}
    return {"memory": "128MiB", "network": "none", "labels": labels, "parallel": 4}


def square(n: int) -> dict[str, int]:
    import math

    print("working on", n)
    if n == 3:
        raise ValueError("not this one")
    return {"square": math.floor(n * n)}


@pytest.mark.parametrize("reuse", [False, True])
def test_a_command(small: dict[str, Any], reuse: bool) -> None:
    results = list(Batch("echo {}; cat; test {} != 2", range(10), reuse=reuse, ordered=True, **small))
    assert [r.index for r in results] == list(range(10))
    assert [r.stdout for r in results] == [f"{n}\n{n}\n" for n in range(10)]
    assert [r.status for r in results] == ["ok", "ok", "failed"] + ["ok"] * 7
    assert len({r.sandbox_id for r in results}) <= 4 if reuse else 10


def test_a_function(small: dict[str, Any]) -> None:
    results = {r.input: r for r in Batch(square, range(5), **small)}
    assert results[4].value == {"square": 16}
    assert results[4].stdout == "working on 4\n"
    assert (results[3].status, results[3].exit_code, results[3].value) == ("failed", 1, None)
    assert "ValueError: not this one" in results[3].stderr
    with pytest.raises(cove.InvalidArgument, match="def"):
        Batch(lambda n: n, [1])


def test_it_goes_on_with_what_is_left(small: dict[str, Any], tmp_path: Path) -> None:
    journal = str(tmp_path / "out.jsonl")
    first = list(itertools.islice(Batch("cat", ["a b", {"x": 1}, "c", "d", "e", "f"], journal=journal, **small), 3))
    assert len(first) == 3
    assert gone_within(small["labels"], 10) == []  # of a create under way the server learns a moment later
    again = list(Batch("cat", ["a b", {"x": 1}, "c", "d", "e", "f"], journal=journal, ordered=True, **small))
    assert [r.stdout for r in again] == ["a b\n", '{"x": 1}\n', "c\n", "d\n", "e\n", "f\n"]
    kept = {r.index: r.sandbox_id for r in first}
    assert all(again[i].sandbox_id == id for i, id in kept.items())
    with pytest.raises(cove.FailedPrecondition, match="input 0"):
        list(Batch("cat", ["other"], journal=journal, **small))


def test_what_no_try_mends(small: dict[str, Any]) -> None:
    with pytest.raises(cove.ImageNotFound):
        list(Batch("true", range(100), image="nosuch", **small))
    with pytest.raises(cove.CommandNotFound):
        list(Batch(["nosuch"], range(100), **small))
    assert gone_within(small["labels"], 10) == []  # of a create under way the server learns a moment later


def test_async_cancellation_leaves_nothing(small: dict[str, Any]) -> None:
    async def some() -> int:
        seen = 0
        async with contextlib.aclosing(AsyncBatch("sleep 0.1", range(1000), **small).__aiter__()) as results:
            async for _ in results:
                seen += 1
                if seen == 5:
                    break
        return seen

    assert asyncio.run(some()) == 5
    assert gone_within(small["labels"], 10) == []  # of a create under way the server learns a moment later
