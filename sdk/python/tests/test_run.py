"""Runs: begun, kept alive, ended; groups, steps, checkpoints, costs."""

from __future__ import annotations

import base64
import threading
from typing import Any

import pytest

import cove

from .blocking import Blocking
from .conftest import Api
from .fake_cove import Break, Fail, Got, Stream, sandbox_json


def run_json(**more: Any) -> dict[str, Any]:
    return {"id": "r1", "name": "grpo-7", "ttl": "300s", "state": "active", "sandboxes": 2, "steps": "5", **more}


def begun(api: Api, **options: Any) -> Any:
    api.server.on("Runs/Create", {"run": run_json()})
    api.server.on("Runs/Heartbeat", {"run": run_json()})
    api.server.on("Runs/End", {"run": run_json(state="ended")})
    return api.Run("grpo-7", client=api.client, **options)


def test_a_run_ends_on_the_way_out(api: Api) -> None:
    with begun(api, ttl=60, labels={"a": "b"}, output="none", resume=True) as run:
        assert run.id == "r1"
        assert not run.lost
        message = api.server.sent("Runs/Create")[0].message
        assert message.pop("idempotencyKey")
        assert message == {"name": "grpo-7", "ttl": "60s", "labels": {"a": "b"}, "output": "none", "resume": True}
    assert api.server.sent("Runs/End")[0].message == {"run": "r1"}
    with pytest.raises(ZeroDivisionError), begun(api):
        raise ZeroDivisionError
    assert api.server.sent("Runs/End")[1].message == {"run": "r1", "detail": "ZeroDivisionError"}


def test_it_is_kept_alive_until_it_is_gone(api: Api) -> None:
    beaten, gone = threading.Event(), threading.Event()

    def beat(got: Got) -> Any:
        if beaten.is_set():
            gone.set()
            return Fail("failed_precondition", "failed_precondition", "it has ended")
        beaten.set()
        return {"run": run_json()}

    if api.client._bulk.given is not None and isinstance(api.client, Blocking):
        pytest.skip("an httpx client of asyncio beats in its own loop, which stands still between two calls here")
    run = begun(api, ttl=1)
    api.server.on("Runs/Create", {"run": run_json(ttl="0.03s")})
    api.server.on("Runs/Heartbeat", beat)
    run.begin()
    assert gone.wait(20)
    run._heart.thread.join(20)
    assert run.lost


def test_one_that_is_attached_to_is_not_ended(api: Api) -> None:
    api.server.on("Runs/Get", {"run": run_json()})
    with api.Run.attach("grpo-7", client=api.client) as run:
        assert run.info().sandboxes == 2
    assert api.server.count("Runs/End") == 0
    assert api.server.count("Runs/Heartbeat") == 0


def test_its_sandboxes_have_its_lease(api: Api) -> None:
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json(spec={"rollout": {"run": "r1", "group": "g"}})})
    api.server.on("Sandboxes/Fork", {"results": [{"sandbox": sandbox_json("sb2")}]})
    api.server.on("Sandboxes/SetLease", {"sandbox": sandbox_json()})
    with begun(api) as run:
        sb = run.sandbox(group="g", episode="e", memory="64MiB")
        spec = api.server.sent("Sandboxes/Create")[0].message["spec"]
        assert spec["rollout"] == {"run": "r1", "group": "g", "episode": "e"}
        assert "lease" not in spec
        assert sb.last_info.run == "r1"
        assert sb.last_info.group == "g"
        sb.fork(1)
        assert "lease" not in api.server.sent("Sandboxes/Fork")[0].message, "the children's is the source's"
        sb.fork(1, keep=True)
        assert api.server.sent("Sandboxes/Fork")[1].message["lease"] == ""
        run.sandbox(keep=True)
        assert api.server.sent("Sandboxes/SetLease")[0].message == {"id": "sb1", "lease": ""}
        with pytest.raises(TypeError, match="memroy"):
            run.sandbox(memroy=1)


def test_a_group(api: Api) -> None:
    seen: list[cove.GroupProgress] = []
    breaks = iter([True])

    def events(got: Got) -> Any:
        yield {"state": "queued", "position": 3, "count": 3, "retryAfter": "0.25s"}
        if next(breaks, False):
            yield Break()
        yield {"state": "creating", "ready": 1, "count": 3}
        of = {"rollout": {"run": "r1", "group": "group-7x"}}
        results = [{"sandbox": sandbox_json("a", spec=of)}, {"sandbox": sandbox_json("b", spec=of)}]
        yield {"state": "done", "results": [*results, {"error": {"code": "disk_full"}, "message": "no space"}]}

    api.server.on("Runs/Group", lambda got: Stream(events(got)))
    with begun(api) as run:
        group = run.group(3, image="py", at_least=2, memory="64MiB", max_wait=60, on_progress=seen.append)
        assert [sb.id for sb in group] == ["a", "b"]
        assert group.name == "group-7x", "as the server called it"
        assert isinstance(group.errors[0], cove.DiskFull)
        assert seen[0].state == "queued"
        assert seen[0].position == 3
        assert seen[-1].ready == 1
        first, second = (got.message for got in api.server.sent("Runs/Group"))
        assert first == second, "asked again with the same key"
        assert first["spec"]["rollout"] == {"run": "r1"}, "a count of this process would be another's too"
        assert first["atLeast"] == 2
        run.group(1, sandbox="sb9", name="g", env={"A": "b"})
        copy = api.server.sent("Runs/Group")[-1].message
        assert copy["sandbox"] == "sb9"
        assert copy["spec"] == {"env": {"A": "b"}, "rollout": {"run": "r1", "group": "g"}}
        run.group(2, image="py", key="k")
        run.group(2, image="py", key="k")
        once, again = (got.message for got in api.server.sent("Runs/Group")[-2:])
        assert once == again, "the same key asks for the same"
        with pytest.raises(TypeError, match="memory"):
            run.group(1, sandbox="sb9", memory=1)
        for wrong in ({"n": 0}, {"n": 2, "at_least": 3}):
            with pytest.raises(cove.InvalidArgument):
                run.group(**wrong)


def step_json(n: int) -> dict[str, Any]:
    return {
        "id": f"r1-{n}",
        "seq": str(n),
        "run": "r1",
        "execId": "x",
        "end": {"cause": "exited", "exitCode": 3},
        "cpuTime": "0.5s",
        "stdout": {"head": base64.b64encode(b"he").decode(), "dropped": "7", "tail": base64.b64encode(b"lo").decode()},
    }


def test_steps(api: Api) -> None:
    def page(got: Got) -> Any:
        if got.message.get("running"):
            return {"running": [{"seq": "9"}], "nextCursor": "r1.0"}
        if not got.message.get("cursor"):
            return {"steps": [step_json(1)], "nextCursor": "r1.5", "more": True}
        return {"steps": [step_json(2)], "nextCursor": "r1.9"}

    api.server.on("Runs/ListSteps", page)
    with begun(api) as run:
        steps = list(run.steps(group="g"))
        assert [s.seq for s in steps] == [1, 2]
        assert steps[0].end.exit_code == 3
        assert steps[0].cpu_time == 0.5
        assert str(steps[0].stdout) == "he\n[7 bytes]\nlo"
        assert run.running()[0].seq == 9


def test_following_goes_on_after_a_break(api: Api) -> None:
    def events(got: Got) -> Any:
        if not got.message.get("cursor"):
            yield {"step": step_json(1), "cursor": "r1.5"}
            yield Break()
        assert got.message["cursor"] == "r1.5"
        yield {"cursor": "r1.5"}
        yield {"step": step_json(2), "cursor": "r1.9"}

    api.server.on("Runs/FollowSteps", lambda got: Stream(events(got)))
    with begun(api) as run:
        assert [(s.seq, cursor) for s, cursor in run.follow()] == [(1, "r1.5"), (2, "r1.9")]


def test_checkpoints(api: Api) -> None:
    stored: list[bytes] = []

    def put(got: Got) -> Any:
        if got.message.get("ifVersion") not in (None, str(len(stored))):
            return Fail("conflict", "aborted", "another version", field_name="if_version", status=409)
        stored.append(base64.b64decode(got.message["doc"]))
        return {"checkpoint": {"version": str(len(stored))}}

    api.server.on("Runs/PutCheckpoint", put)
    api.server.on(
        "Runs/GetCheckpoint",
        lambda got: (
            {"checkpoint": {"version": str(len(stored)), "doc": base64.b64encode(stored[-1]).decode()}}
            if stored
            else Fail("not_found", "not_found", "none", field_name="version", status=404)
        ),
    )
    api.server.on("Runs/ListCheckpoints", {"checkpoints": [{"version": "1", "size": "3"}]})
    with begun(api) as run:
        assert run.checkpoint.get() is None
        assert run.checkpoint.put({"step": 7}, if_version=0) == 1
        with pytest.raises(cove.Conflict):
            run.checkpoint.put(b"raw", if_version=0)
        assert run.checkpoint.put(b"raw", if_version=1) == 2
        assert stored == [b'{"step":7}', b"raw"]
        assert run.checkpoint.get().data == b"raw"
        assert run.checkpoint.list()[0].size == 3
        with pytest.raises(cove.InvalidArgument):
            run.checkpoint.put(object())


def test_costs_and_lists(api: Api) -> None:
    api.server.on("Runs/Cost", {"costs": [{"group": "g", "steps": "3", "cpuSeconds": 1.5}], "total": {}})
    api.server.on("Runs/List", {"runs": [run_json(end={"cause": "lease_expired"})]})
    api.server.on("Runs/Reap", {"ids": ["a"]})
    api.server.on("Runs/Delete", {})
    with begun(api) as run:
        cost = run.cost("group")[0]
        assert (cost.group, cost.steps, cost.cpu_seconds) == ("g", 3, 1.5)
        assert api.Run.list(ended=True, client=api.client)[0].end.cause == "lease_expired"
        assert run.reap() == ["a"]
        api.Run.delete("grpo-7", client=api.client)
