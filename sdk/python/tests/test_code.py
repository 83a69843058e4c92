"""What comes of an execution, line by line, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

import cove
from cove import code
from cove.code import Cell

LINES: list[dict[str, Any]] = [
    {"type": "number_of_executions", "execution_count": 3},
    {"type": "stdout", "text": "ü\n", "timestamp": "2026-01-01T00:00:00Z"},
    {"type": "keepalive"},
    {"type": "something new", "x": 1},
    {"type": "stderr", "text": "e"},
    {"type": "result", "text": "shown", "png": "aGk=", "extra": {"a/b": 1}, "is_main_result": False},
    {"type": "result", "text": "1", "is_main_result": True},
    {"type": "error", "name": "E", "value": "v", "traceback": "t"},
    {"type": "end_of_execution"},
]


def cell(said: list[Any]) -> Cell:
    return Cell(said.append, said.append, said.append, said.append)


def feed(to: Cell, data: bytes, size: int) -> None:
    for i in range(0, len(data), size):
        for listener, value in to.feed(data[i : i + size]):
            listener(value)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_lines_become_an_execution(size: int) -> None:
    said: list[Any] = []
    c = cell(said)
    feed(c, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode(), size)
    e = c.end()
    assert (e.stdout, e.stderr, e.text, e.execution_count) == ("ü\n", "e", "1", 3)
    assert [r.formats() for r in e.results] == [["text", "png", "a/b"], ["text"]]
    assert e.results[0].png_bytes == b"hi"
    assert said == ["ü\n", "e", *e.results, e.error]
    with pytest.raises(cove.ExecutionError, match="E: v"):
        e.check()


def test_an_answer_that_broke_off_is_no_execution() -> None:
    c = cell([])
    feed(c, json.dumps(LINES[1]).encode() + b"\n", 100)
    with pytest.raises(cove.TransportError):
        c.end()


def test_a_failure_is_an_error_of_the_api() -> None:
    failure = {"type": "failure", "error": {"code": "deadline_exceeded", "message": "over"}}
    with pytest.raises(cove.DeadlineExceeded, match="over"):
        feed(cell([]), json.dumps(failure).encode() + b"\n", 100)


def test_a_line_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_MOST_LINE", 1000)
    with pytest.raises(cove.TooLarge):
        feed(cell([]), b"x" * 2000, 100)


def test_a_context_and_a_language_are_too_much() -> None:
    client = cove.Client(url="http://127.0.0.1:1", key="k")
    with pytest.raises(cove.InvalidArgument):
        code._run(client, "id", "1", "python", "c", None, None)
    with pytest.raises(cove.InvalidArgument):
        code._one("")
    client.close()
