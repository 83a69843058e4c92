"""Snapshots: found, pruned, mounted, verified, exported, deleted."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Break, Fail, Got, Plain, snapshot_json


def taken(api: Api, **more: Any) -> Any:
    api.server.on("Snapshots/Get", {"snapshot": snapshot_json(**more)})
    return api.Snapshot.get("sn1", client=api.client)


def test_list_goes_through_all_pages(api: Api) -> None:
    def answer(got: Got) -> dict[str, Any]:
        token = int(got.message.get("pageToken", "0"))
        page = [snapshot_json(f"sn{token}x{n}") for n in range(2)]
        return {"snapshots": page, **({"nextPageToken": str(token + 1)} if token < 2 else {})}

    api.server.on("Snapshots/List", answer)
    sb = api.sandbox()
    found = api.Snapshot.list({"a": "b"}, sandbox=sb, kind="memory", page_size=2, client=api.client)
    assert [s.id for s in found] == ["sn0x0", "sn0x1", "sn1x0", "sn1x1", "sn2x0", "sn2x1"]
    first = {"pageSize": 2, "labels": {"a": "b"}, "sandbox": "sb1", "kind": "memory"}
    assert api.server.sent("List")[0].message == first
    assert api.server.sent("List")[2].message == {**first, "pageToken": "2"}
    api.server.on("Snapshots/List", {})
    assert list(api.Snapshot.list(sandbox="sb2", client=api.client)) == []


def test_a_delete_that_broke_is_sent_again_and_gone_is_done(api: Api) -> None:
    snapshot = taken(api)
    gone = Fail("not_found", "not_found", status=404)
    answers: list[Any] = [{"freed": "5000000"}, Break(), gone, gone]
    api.server.on("Snapshots/Delete", lambda _: answers.pop(0))
    assert snapshot.delete() == 5_000_000
    assert snapshot.delete() == 0  # broke, and then it was gone
    with pytest.raises(cove.NotFound):
        snapshot.delete()
    assert {got.message["id"] for got in api.server.sent("Delete")} == {"sn1"}


def test_a_delete_that_never_left_does_not_take_gone_for_done(api: Api) -> None:
    snapshot = taken(api)
    api.server.on("Snapshots/Delete", Fail("not_found", "not_found", status=404))
    api.server.stop()
    restarts = iter([api.server.start])
    api.time.on_sleep = lambda: next(restarts, lambda: None)()
    with pytest.raises(cove.NotFound):
        snapshot.delete()


def test_prune(api: Api) -> None:
    removed = [{"id": "sn1", "reason": "older than 24h0m0s", "stored": "7"}]
    api.server.on("Snapshots/Prune", {"removed": removed})
    pruned = api.Snapshot.prune(
        keep_last=3,
        keep_labels={"best": "yes"},
        max_bytes="10GiB",
        max_age=86400,
        sandbox="sb1",
        dry_run=True,
        client=api.client,
    )
    assert pruned == [cove.PrunedSnapshot("sn1", "older than 24h0m0s", 7)]
    assert api.server.requests[0].message == {
        "keepLast": 3,
        "keepLabels": {"best": "yes"},
        "maxBytes": str(10 << 30),
        "maxAge": "86400s",
        "sandbox": "sb1",
        "dryRun": True,
    }


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        ({}, "keep_last"),
        ({"sandbox": "sb1"}, "keep_last"),
        ({"keep_last": 0}, "keep_last"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_age": 0}, "max_age"),
    ],
)
def test_prune_without_a_rule_is_refused(api: Api, rules: dict[str, Any], field: str) -> None:
    with pytest.raises(cove.InvalidArgument) as caught:
        api.Snapshot.prune(client=api.client, **rules)
    assert caught.value.field == field
    assert api.server.requests == []


def test_only_a_prune_that_removes_nothing_is_sent_again(api: Api) -> None:
    answers: list[Any] = [Break(), {}]
    api.server.on("Snapshots/Prune", lambda _: answers.pop(0))
    assert api.Snapshot.prune(keep_last=1, dry_run=True, client=api.client) == []
    api.server.on("Snapshots/Prune", Break())
    with pytest.raises(cove.TransportError):
        api.Snapshot.prune(keep_last=1, client=api.client)
    assert api.server.count("Prune") == 3


def test_mount_and_verify(api: Api) -> None:
    snapshot = taken(api, kind="directory", path="/work")
    assert snapshot.path == "/work"
    api.server.on("Snapshots/Mount", {})
    snapshot.mount(api.sandbox())
    snapshot.mount("sb2", "/elsewhere", unpack=True)
    assert [got.message for got in api.server.sent("Mount")] == [
        {"snapshot": "sn1", "sandbox": "sb1"},
        {"snapshot": "sn1", "sandbox": "sb2", "path": "/elsewhere", "unpack": True},
    ]
    api.server.on("Snapshots/Verify", {"bytes": "123456789012"})
    assert snapshot.verify() == 123456789012
    api.server.on("Snapshots/Verify", Fail("corrupt", "data_loss", "chunk 7 of sn1", status=500))
    with pytest.raises(cove.Corrupt, match="chunk 7"):
        snapshot.verify()


def test_export_to_a_path_survives_a_break(api: Api, tmp_path: Path) -> None:
    snapshot = taken(api, kind="directory")
    data = os.urandom(3_000_001)
    answers = [Plain([data[:1000]], broken=True), Plain([data[:1_000_000], data[1_000_000:]])]
    api.server.on("GET tar", lambda _: answers.pop(0))
    target = tmp_path / "work.tar"
    assert snapshot.export(target) == len(data)
    assert target.read_bytes() == data
    assert os.listdir(tmp_path) == ["work.tar"]
    got = api.server.sent("tar")[0]
    assert (got.path, got.query) == ("/v1/snapshots/sn1/tar", {})


def test_export_to_an_open_file_is_not_begun_again(api: Api) -> None:
    snapshot = taken(api, kind="directory")
    file = io.BytesIO()
    api.server.on("GET tar", Plain([b"x" * 1000, b"y"]))
    assert snapshot.export(file) == 1001
    assert file.getvalue() == b"x" * 1000 + b"y"
    api.server.on("GET tar", Plain([b"x" * 1000], broken=True))
    with pytest.raises(cove.TransportError):
        snapshot.export(io.BytesIO())
    assert api.server.count("tar") == 2


def test_export_of_what_has_no_tar_leaves_no_file(api: Api, tmp_path: Path) -> None:
    snapshot = taken(api)
    api.server.on("GET tar", Fail("failed_precondition", "failed_precondition", "a memory snapshot has no tar"))
    with pytest.raises(cove.FailedPrecondition):
        snapshot.export(tmp_path / "x.tar")
    assert os.listdir(tmp_path) == []
