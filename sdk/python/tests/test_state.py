"""Standby, forks, restores and the tree: what is sent, what is understood, what is sent again."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Break, Fail, Stream, sandbox_json, snapshot_json


def test_create_from_what_was_kept(api: Api) -> None:
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json(parent="sn1", ancestors=["sn1", "sn0"])})
    api.server.on("Snapshots/Get", {"snapshot": snapshot_json()})
    api.server.on("Templates/Get", {"template": {"name": "web", "version": "3"}})
    snapshot = api.Snapshot.get("sn1", client=api.client)
    template = api.Template.get("web", client=api.client)
    sources: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"snapshot": snapshot}, {"snapshot": "sn1"}),
        ({"snapshot": "ready"}, {"snapshot": "ready"}),
        ({"template": template}, {"template": "web@3"}),
        ({"template": "web"}, {"template": "web"}),
        ({}, {"image": "base"}),
    ]
    for given, sent in sources:
        sb = api.Sandbox.create(client=api.client, **given)
        assert api.server.sent("Create")[-1].message["spec"] == sent
    assert sb.parent == "sn1"
    assert sb.last_info.ancestors == ("sn1", "sn0")


def test_create_from_two_things_is_refused(api: Api) -> None:
    for given in ({"image": "base", "snapshot": "s"}, {"image": "base", "template": "t"}):
        with pytest.raises(cove.InvalidArgument, match="starts from one") as caught:
            api.Sandbox.create(client=api.client, **given)
        assert caught.value.field == list(given)[1]
    with pytest.raises(cove.InvalidArgument) as caught:
        api.Sandbox.create(client=api.client, snapshot=5)
    assert caught.value.field == "snapshot"
    assert api.server.requests == []


def test_create_with_volumes_and_what_idling_does(api: Api) -> None:
    spec = {
        "image": "base",
        "onIdle": "pause",
        "volumes": [{"volume": "data", "path": "/data"}, {"volume": "v1", "path": "/set", "mode": "ro"}],
    }
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json(spec=spec)})
    api.server.on("Volumes/Get", {"volume": {"id": "v1", "name": "set"}})
    volume = api.Volume.get("set", client=api.client)
    sb = api.Sandbox.create(
        idle_timeout=60,
        on_idle="pause",
        on_timeout="pause",
        volumes={"/data": "data", "/set": (volume, "ro"), "/all": volume},
        client=api.client,
    )
    sent = api.server.sent("Create")[0].message["spec"]
    assert (sent["onIdle"], sent["onTimeout"]) == ("pause", "pause")
    assert sent["volumes"] == [
        {"volume": "data", "path": "/data"},
        {"volume": "v1", "path": "/set", "mode": "ro"},
        {"volume": "v1", "path": "/all"},
    ]
    assert sb.last_info.on_idle == "pause"
    assert sb.last_info.volumes == (cove.VolumeMount("data", "/data", "rw"), cove.VolumeMount("v1", "/set", "ro"))


def test_pause_and_resume_are_sent_again(api: Api) -> None:
    sb = api.sandbox()
    pauses: list[Any] = [Break(), {"sandbox": sandbox_json(standby="cold")}]
    resumes: list[Any] = [Break(), {"sandbox": sandbox_json(), "nodeTime": "0.080s"}]
    api.server.on("Sandboxes/Pause", lambda _: pauses.pop(0))
    api.server.on("Sandboxes/Resume", lambda _: resumes.pop(0))
    assert sb.standby == ""
    assert sb.pause(cold=True).standby == "cold"
    assert sb.standby == "cold"
    assert "sb1 base cold" in repr(getattr(sb, "_target", sb))
    assert sb.resume().standby == ""
    assert (sb.standby, sb.node_time) == ("", 0.08)
    assert [got.message for got in api.server.sent("Pause")] == [{"id": "sb1", "cold": True}] * 2
    api.server.on("Sandboxes/Pause", {"sandbox": sandbox_json(standby="hot")})
    assert sb.pause().standby == "hot"
    assert api.server.sent("Pause")[-1].message == {"id": "sb1"}
    assert sb.pause(if_busy="refuse").standby == "hot"
    assert api.server.sent("Pause")[-1].message == {"id": "sb1", "ifBusy": "refuse"}


def test_restore_keeps_the_object(api: Api) -> None:
    sb = api.sandbox()
    api.server.on("Snapshots/Get", {"snapshot": snapshot_json()})
    api.server.on("Sandboxes/Restore", {"sandbox": sandbox_json(episode="2", parent="sn1"), "nodeTime": "0.1s"})
    info = sb.restore(api.Snapshot.get("sn1", client=api.client))
    assert (info.episode, sb.parent, sb.node_time) == (2, "sn1", 0.1)
    sb.restore("before")
    assert [got.message["snapshot"] for got in api.server.sent("Restore")] == ["sn1", "before"]


def test_a_fork_is_its_ready_children_and_the_errors_of_the_others(api: Api) -> None:
    sb = api.sandbox()
    failed = {
        "error": {"code": "no_capacity", "op": "sandbox.fork", "hint": "kill some", "retryAfterMs": "1500"},
        "message": "no memory left",
    }
    results = [{"sandbox": sandbox_json("c1", parent="sb1")}, failed, {"sandbox": sandbox_json("c3")}, {}]
    api.server.on("Sandboxes/Fork", {"results": results, "paused": "0.012s"})
    children = sb.fork(4, min_ready=2, labels={"a": "b"}, env={"SEED": "1"}, timeout=60)
    sent = api.server.sent("Fork")[0].message
    assert sent.pop("idempotencyKey")
    assert sent == {
        "id": "sb1",
        "count": 4,
        "minReady": 2,
        "labels": {"a": "b"},
        "env": {"SEED": "1"},
        "timeout": "60s",
        "lease": "",
    }
    assert isinstance(children, cove.Forks)
    assert [child.id for child in children] == ["c1", "c3"]
    assert children[0].parent == "sb1"
    assert children.paused == 0.012
    full, unknown = children.errors
    assert isinstance(full, cove.NoCapacity)
    assert (full.message, full.op, full.hint, full.retry_after) == ("no memory left", "sandbox.fork", "kill some", 1.5)
    assert isinstance(unknown, cove.Internal)
    api.server.on("Sandboxes/Stats", {"memory": "5"})
    assert children[1].stats().memory == 5


def test_a_fork_from_a_snapshot(api: Api) -> None:
    api.server.on("Snapshots/Get", {"snapshot": snapshot_json()})
    api.server.on("Sandboxes/Fork", {"results": [{"sandbox": sandbox_json("c1")}]})
    (child,) = api.Snapshot.get("sn1", client=api.client).fork(1)
    assert child.id == "c1"
    sent = api.server.sent("Fork")[0].message
    assert sent.pop("idempotencyKey")
    assert sent == {"snapshot": "sn1", "count": 1, "lease": ""}


def test_a_fork_below_min_ready_raises(api: Api) -> None:
    sb = api.sandbox()
    api.server.on("Sandboxes/Fork", Fail("no_capacity", "resource_exhausted", "1 of 4 ready", status=429))
    with pytest.raises(cove.NoCapacity, match="1 of 4"):
        sb.fork(4, min_ready=2)
    assert api.server.count("Fork") == 1


def test_a_fork_that_broke_is_asked_for_again_by_its_key(api: Api) -> None:
    sb = api.sandbox()
    answers: list[Any] = [Break(), Fail("unavailable", "unavailable", status=503), {"results": []}, {"results": []}]
    api.server.on("Sandboxes/Fork", lambda _: answers.pop(0))
    sb.fork(2)
    sb.fork(2)
    keys = [got.message["idempotencyKey"] for got in api.server.sent("Fork")]
    assert len(keys) == 4
    assert keys[0]
    assert keys[0] == keys[1] == keys[2] != keys[3]


@pytest.mark.parametrize(("n", "min_ready", "field"), [(0, None, "n"), (2, 0, "min_ready"), (2, 3, "min_ready")])
def test_a_fork_of_no_number(api: Api, n: int, min_ready: Any, field: str) -> None:
    sb = api.sandbox()
    with pytest.raises(cove.InvalidArgument) as caught:
        sb.fork(n, min_ready=min_ready)
    assert caught.value.field == field
    assert api.server.count("Fork") == 0


def test_the_tree(api: Api) -> None:
    nodes = [
        {"id": "sb1", "kind": "sandbox", "state": "running", "createdAt": "2026-03-01T10:00:00Z"},
        {"id": "sn1", "parent": "sb1", "kind": "memory", "name": "ready"},
        {"id": "sb2", "parent": "sn1", "kind": "sandbox", "state": "cold"},
        {"id": "sb3", "parent": "sn1", "kind": "sandbox", "state": "running"},
        {"id": "sn2", "parent": "sb2", "kind": "filesystem"},
        {"id": "sn3", "parent": "sb1", "kind": "directory"},
        {"id": "sn9", "parent": "deleted", "kind": "memory"},
    ]
    sb = api.sandbox()
    api.server.on("Sandboxes/Tree", {"nodes": nodes})
    tree = sb.tree()
    assert str(tree) == "\n".join(
        [
            "sb1 sandbox running",
            "├── sn1 memory (ready)",
            "│   ├── sb2 sandbox cold",
            "│   │   └── sn2 filesystem",
            "│   └── sb3 sandbox running",
            "└── sn3 directory",
            "sn9 memory",
        ]
    )
    assert len(tree) == 7
    assert [node.id for node in tree.roots] == ["sb1", "sn9"]
    assert [node.id for node in tree.children("sn1")] == ["sb2", "sb3"]
    assert tree.children(tree.nodes[-1]) == ()
    assert tree.children("") == ()
    assert next(iter(tree)).created_at.hour == 10
    api.server.on("Snapshots/Get", {"snapshot": snapshot_json()})
    assert len(api.Snapshot.get("sn1", client=api.client).tree()) == 7
    assert api.server.sent("Tree")[-1].message == {"id": "sn1"}


def test_a_tree_as_deep_as_a_long_run_and_one_that_makes_no_sense() -> None:
    from cove.state import Tree

    chain = [{"id": f"s{n}", "parent": f"s{n - 1}" if n else "", "kind": "memory"} for n in range(3000)]
    assert str(Tree.parse({"nodes": chain})).count("\n") == 2999
    circle = [{"id": "a", "parent": "b"}, {"id": "b", "parent": "a"}, {"id": "c", "parent": "c"}]
    assert str(Tree.parse({"nodes": circle})) == "a\n└── b\nc"
    assert str(Tree.parse({})) == ""


def test_a_snapshot_says_what_it_is(api: Api) -> None:
    sb = api.sandbox()
    made = snapshot_json(name="ready", expiresAt="2026-03-02T10:00:00Z")
    events: list[Any] = [
        {"step": "freeze"},
        {"step": "store", "done": "5", "total": "10"},
        {"step": "done", "snapshot": made, "unchanged": True, "paused": "0.009s"},
    ]
    api.server.on("Snapshots/Create", Stream(events))
    steps: list[cove.SnapshotProgress] = []
    snapshot = sb.snapshot(name="ready", labels={"step": "1"}, stop=True, ttl=86400, on_progress=steps.append)
    sent = api.server.sent("Create")[0].message
    assert sent.pop("idempotencyKey")
    assert sent == {
        "sandbox": "sb1",
        "kind": "memory",
        "name": "ready",
        "labels": {"step": "1"},
        "stop": True,
        "ttl": "86400s",
    }
    assert (snapshot.id, snapshot.name, snapshot.kind, snapshot.sandbox) == ("sn1", "ready", "memory", "sb1")
    assert (snapshot.size, snapshot.stored, snapshot.parent) == (6_000_000_000, 5_000_000, "sn0")
    assert (snapshot.unchanged, snapshot.paused) == (True, 0.009)
    assert snapshot.created_at.hour == 10
    assert snapshot.expires_at is not None
    assert snapshot.expires_at.day == 2
    assert steps[:2] == [cove.SnapshotProgress("freeze", 0, 0), cove.SnapshotProgress("store", 5, 10)]
    assert len(steps) == 3


def test_the_kinds_of_snapshots(api: Api) -> None:
    sb = api.sandbox()
    api.server.on("Snapshots/Create", lambda _: Stream([{"step": "done", "snapshot": snapshot_json()}]))
    sb.snapshot()
    sb.snapshot(memory=False)
    sb.snapshot(path="/work")
    sent = [got.message for got in api.server.sent("Create")]
    assert len({message.pop("idempotencyKey") for message in sent}) == 3
    assert sent == [
        {"sandbox": "sb1", "kind": "memory"},
        {"sandbox": "sb1", "kind": "filesystem"},
        {"sandbox": "sb1", "kind": "directory", "path": "/work"},
    ]


def test_a_snapshot_that_broke_is_asked_for_again_by_its_key(api: Api) -> None:
    sb = api.sandbox()
    answers: list[Any] = [
        Stream([{"step": "freeze"}, Break()]),
        Stream([{"step": "freeze"}, Fail("unavailable", "unavailable", "draining")]),
        Stream([{"step": "done", "snapshot": snapshot_json()}]),
    ]
    api.server.on("Snapshots/Create", lambda _: answers.pop(0))
    sb.snapshot()
    assert len({got.message["idempotencyKey"] for got in api.server.sent("Create")}) == 1
    assert api.server.count("Create") == 3


def test_a_snapshot_that_has_no_room_is_not_asked_for_again(api: Api) -> None:
    sb = api.sandbox()
    api.server.on("Snapshots/Create", Fail("disk_full", "resource_exhausted", "the store is full"))
    with pytest.raises(cove.DiskFull):
        sb.snapshot()
    assert api.server.count("Create") == 1


def test_a_snapshot_of_a_server_that_restarts_is_taken_once(api: Api) -> None:
    sb = api.sandbox()
    api.server.on("Snapshots/Create", Stream([{"step": "done", "snapshot": snapshot_json()}]))
    api.server.stop()
    restarts = iter([api.server.start])
    api.time.on_sleep = lambda: next(restarts, lambda: None)()
    assert sb.snapshot().id == "sn1"
    assert api.server.count("Create") == 1


def test_what_a_listener_raises_comes_out(api: Api) -> None:
    sb = api.sandbox()
    api.server.on("Snapshots/Create", Stream([{"step": "freeze"}, {"step": "done", "snapshot": snapshot_json()}]))

    def refuse(_: cove.SnapshotProgress) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        sb.snapshot(on_progress=refuse)
    assert api.sandbox().id == "sb1"  # the client goes on


def test_what_moves_memory_or_files_may_take_long(api: Api) -> None:
    client = getattr(api.client, "_target", api.client)
    send, waits = client._wire.send, {}

    def record(request: Any) -> Any:
        waits[request.target.rpartition("/")[2]] = request.read_timeout
        return send(request)

    client._wire.send = record
    sandbox = {"sandbox": sandbox_json()}
    for name in ("Pause", "Resume", "Restore", "Stats"):
        api.server.on("Sandboxes/" + name, {} if name == "Stats" else sandbox)
    api.server.on("Sandboxes/Fork", {"results": [sandbox]})
    api.server.on("Snapshots/Create", Stream([{"step": "done", "snapshot": snapshot_json()}]))
    sb = api.sandbox()
    sb.pause(cold=True)
    sb.resume()
    sb.restore("sn1")
    sb.fork(1)
    sb.stats()
    sb.snapshot()
    slow = dict.fromkeys(("Pause", "Resume", "Restore", "Fork"), 960)
    assert waits == {"Get": 120, "Stats": 120, "Create": None, **slow}


@pytest.mark.parametrize(
    ("sync", "other"),
    [
        (cove.Client, cove.AsyncClient),
        (cove.Sandbox, cove.AsyncSandbox),
        (cove.Files, cove.AsyncFiles),
        (cove.Process, cove.AsyncProcess),
        (cove.Snapshot, cove.AsyncSnapshot),
        (cove.Template, cove.AsyncTemplate),
        (cove.Volume, cove.AsyncVolume),
        (cove.VolumeFiles, cove.AsyncVolumeFiles),
    ],
)
def test_sync_and_async_have_the_same_methods(sync: type, other: type) -> None:
    def methods(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
        return {
            name: [(p.name, p.kind, p.default) for p in inspect.signature(value).parameters.values()]
            for name, value in inspect.getmembers(kind, callable)
            if not name.startswith("_")
        }

    assert methods(sync) == methods(other)
