"""Recordings: making, replaying, and moving them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Fail, Got, Plain, sandbox_json


def recording_json(**more: Any) -> dict[str, Any]:
    return {
        "id": "rec1",
        "name": "ep1",
        "sandbox": "sb1",
        "state": "finished",
        "createdAt": "2026-03-01T10:00:00Z",
        "finishedAt": "2026-03-01T10:01:00Z",
        "exchanges": "2",
        "bytes": "4096",
        **more,
    }


def test_what_is_asked_for_at_creation(api: Api) -> None:
    network = {"mode": "public", "record": {"id": "rec1", "name": "ep1"}}
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json(spec={"image": "base", "network": network})})
    sb = api.Sandbox.create(network="public", record="ep1", client=api.client)
    assert sb.last_info.network.record == cove.Record("ep1", "rec1")
    api.Sandbox.create(network="public", record=True, client=api.client)
    api.Sandbox.create(replay="ep1", client=api.client)
    rules = cove.Replay("ep1", repeat_last=True, ignore_query=("ts",), ignore_body=True, match_headers=("Accept",))
    api.Sandbox.create(replay=rules, client=api.client)
    api.server.on("Recordings/Get", {"recording": recording_json()})
    api.Sandbox.create(replay=api.Recording.get("ep1", client=api.client), client=api.client)
    assert [got.message["spec"]["network"] for got in api.server.sent("Create")] == [
        {"mode": "public", "record": {"name": "ep1"}},
        {"mode": "public", "record": {}},
        {"replay": {"recording": "ep1"}},
        {
            "replay": {
                "recording": "ep1",
                "repeatLast": True,
                "ignoreQuery": ["ts"],
                "ignoreBody": True,
                "matchHeaders": ["Accept"],
            }
        },
        {"replay": {"recording": "rec1"}},
    ]
    with pytest.raises(cove.InvalidArgument):
        api.Sandbox.create(replay=7, client=api.client)


def test_going_on_with_a_recording_under_another_policy(api: Api) -> None:
    sb = api.sandbox()
    api.server.on("Sandboxes/SetNetwork", {"generation": "2", "network": {"mode": "none"}})
    sb.set_network(cove.Network("public", record=cove.Record("ep1", "rec1")))
    sb.set_network(cove.Network(replay=cove.Replay("ep1")))
    assert [got.message["network"] for got in api.server.sent("SetNetwork")] == [
        {"mode": "public", "record": {"id": "rec1", "name": "ep1"}},
        {"replay": {"recording": "ep1"}},
    ]


def test_misses_are_listed(api: Api) -> None:
    miss = {
        "at": "2026-03-01T10:00:00Z",
        "method": "GET",
        "url": "https://a.test/",
        "reason": "replay_miss",
        "hint": "h",
    }
    replay = {"recording": "rec1", "answered": "3", "missed": "1", "unused": "2", "misses": [miss]}
    api.server.on("Sandboxes/GetNetwork", {"network": {"mode": "none"}, "generation": "1", "replay": replay})
    status = api.sandbox().network()
    assert status.recording is None
    assert (status.replay.answered, status.replay.missed, status.replay.unused) == (3, 1, 2)
    (seen,) = status.replay.misses
    assert (seen.method, seen.url, seen.reason, seen.hint) == ("GET", "https://a.test/", "replay_miss", "h")


def test_listing_and_removing(api: Api) -> None:
    api.server.on("Recordings/List", {"recordings": [recording_json(), recording_json(id="rec2", name="")]})
    first, second = api.Recording.list(client=api.client)
    assert (first.name, second.id, first.last_info.exchanges, first.last_info.bytes) == ("ep1", "rec2", 2, 4096)
    api.server.on("Recordings/Delete", {})
    first.delete()
    assert api.server.sent("Recordings/Delete")[0].message == {"name": "rec1"}
    api.server.on("Recordings/Delete", Fail("failed_precondition", "failed_precondition", "a sandbox replays it"))
    with pytest.raises(cove.FailedPrecondition):
        second.delete()


def test_every_page_of_requests(api: Api) -> None:
    def answer(got: Got) -> dict[str, Any]:
        after, most = int(got.message.get("after", 0)), got.message.get("exchanges", 0)
        numbers = range(after + 1, min(after + most, 1001) + 1)
        listed = [
            {"number": str(n), "method": "GET", "url": f"https://a.test/{n}", "status": 200, "took": "0.5s"}
            for n in numbers
        ]
        return {"recording": recording_json(), "exchanges": listed}

    api.server.on("Recordings/Get", answer)
    requests = api.Recording.get("ep1", client=api.client).requests()
    assert [r.number for r in requests] == list(range(1, 1002))
    assert (requests[0].status, requests[0].took, requests[0].url) == (200, 0.5, "https://a.test/1")


def test_archives(api: Api, tmp_path: Path) -> None:
    archives: dict[str, bytes] = {}

    def put(got: Got) -> Any:
        assert got.path == "/v1/recordings"
        if got.query.get("name") in archives:
            return Fail("already_exists", "already_exists", "there is one", status=409)
        archives[got.query.get("name", "")] = got.body
        return Plain(b'{"id": "rec9", "name": "copy", "state": "finished"}')

    def get(got: Got) -> Any:
        assert got.path == "/v1/recordings/rec1/archive"
        return Plain(b"har" if got.query.get("format") == "har" else b"archive" * 100_000)

    api.server.on("Recordings/Get", {"recording": recording_json()})
    api.server.on("GET archive", get)
    api.server.on("PUT recordings", put)
    recording = api.Recording.get("ep1", client=api.client)
    assert recording.export(tmp_path / "a.tape") == 700_000
    assert recording.export(tmp_path / "a.har", har=True) == 3
    copy = api.Recording.import_(tmp_path / "a.tape", "copy", client=api.client)
    assert (copy.id, copy.name, archives["copy"]) == ("rec9", "copy", b"archive" * 100_000)
    with pytest.raises(cove.AlreadyExists):
        api.Recording.import_(tmp_path / "a.tape", "copy", client=api.client)
