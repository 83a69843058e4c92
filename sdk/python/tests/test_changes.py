"""What changed in files, and episodes that are run again."""

from __future__ import annotations

import base64
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Break, Fail, Stream, sandbox_json
from .test_run import begun


def test_diff(api: Api) -> None:
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json("abc")})
    api.server.on(
        "Sandboxes/Diff",
        {
            "since": "image",
            "changes": [
                {"path": "/a", "kind": "added", "now": {"type": "file", "size": "3", "mode": 0o644, "hash": "ff"}},
                {
                    "path": "/b",
                    "kind": "modified",
                    "what": ["content", "mode"],
                    "before": {"type": "file", "size": "1", "mode": 0o600},
                    "now": {"type": "file", "size": "2", "mode": 0o644},
                },
                {"path": "/c", "kind": "deleted", "before": {"type": "symlink", "target": "a"}},
            ],
            "added": "1",
            "modified": "1",
            "deleted": "1",
            "bytes": "5",
            "omitted": True,
            "took": "0.5s",
        },
    )
    sb = api.Sandbox.create(client=api.client)
    diff = sb.diff("image", hash=True, limit=3)
    assert api.server.sent("Sandboxes/Diff")[0].message == {"id": "abc", "since": "image", "hash": True, "limit": 3}
    assert diff.paths == ["/a", "/b", "/c"]
    assert (diff.added, diff.modified, diff.deleted, diff.bytes, diff.took) == (1, 1, 1, 5, 0.5)
    assert diff.omitted
    assert not diff.truncated
    added, modified, deleted = diff.changes
    assert added.before is None
    assert added.now is not None
    assert (added.now.size, added.now.mode, added.now.hash) == (3, 0o644, "ff")
    assert modified.what == ("content", "mode")
    assert deleted.now is None
    assert deleted.before is not None
    assert deleted.before.target == "a"
    sb.diff()
    assert api.server.sent("Sandboxes/Diff")[1].message == {"id": "abc", "since": "create"}


def done(**more: Any) -> dict[str, Any]:
    return {"state": "done", "result": {"run": "r1", "sandbox": "abc", "steps": "2", "replayed": "2", **more}}


def test_replay(api: Api) -> None:
    difference = {
        "step": "2",
        "id": "s2",
        "what": "stdout",
        "offset": "6",
        "expected": base64.b64encode(b"abcdef\xff").decode(),
        "actual": base64.b64encode(b"abcdefX").decode(),
        "command": "date",
    }
    digest = {**difference, "what": "stderr", "offset": "-1"}
    gap = {"afterStep": "1", "what": "file.write", "detail": "/tmp/x"}
    api.server.on(
        "Runs/Replay",
        Stream(
            [
                {"state": "creating", "steps": "2"},
                {"state": "running", "step": "1", "steps": "2", "same": "1"},
                {"state": "running", "step": "2", "steps": "2", "same": "1"},
                done(differences=[difference, digest], gaps=[gap], kept="def", notFixed=["random numbers"], took="1s"),
            ]
        ),
    )
    seen: list[tuple[int, int]] = []
    with begun(api) as run:
        got = run.replay("abc", reset=3, keep=True, all=True, on_step=lambda seq, steps: seen.append((seq, steps)))
    assert api.server.sent("Runs/Replay")[0].message == {
        "run": "r1",
        "sandbox": "abc",
        "reset": "3",
        "keep": True,
        "all": True,
    }
    assert seen == [(1, 2), (2, 2)]
    assert not got.same
    assert (got.kept, got.not_fixed, got.took) == ("def", ("random numbers",), 1.0)
    first = got.first
    assert first is not None
    assert (first.step, first.offset, first.expected, first.actual) == (2, 6, b"abcdef\xff", b"abcdefX")
    assert got.differences[1].offset is None
    assert got.gaps == [cove.ReplayGap(1, "file.write", "/tmp/x")]


@pytest.mark.parametrize("end", [Break(), None])
def test_a_replay_whose_server_goes_away(api: Api, end: Any) -> None:
    """A stream that breaks, or ends before its result, is no result; nothing is asked for twice."""
    events: list[Any] = [{"state": "creating", "steps": "2"}] + ([end] if end else [])
    api.server.on("Runs/Replay", Stream(events))
    with begun(api) as run, pytest.raises(cove.Unavailable):
        run.replay(episode="e1")
    assert api.server.sent("Runs/Replay")[0].message == {"run": "r1", "episode": "e1"}


def test_a_replay_that_is_refused(api: Api) -> None:
    api.server.on("Runs/Replay", Stream([Fail("failed_precondition", "failed_precondition", "step 2 still runs")]))
    with begun(api) as run, pytest.raises(cove.FailedPrecondition, match="still runs"):
        run.replay("abc")
