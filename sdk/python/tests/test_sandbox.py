"""Sandboxes: what is sent, what is understood, and when a call is sent again."""

from __future__ import annotations

import asyncio
import io
import pickle
from pathlib import Path
from typing import Any

import httpx
import pytest

import cove

from .conftest import Api
from .fake_cove import Break, Fail, FakeCove, Got, sandbox_json


def test_create_sends_what_was_asked_and_knows_what_came(api: Api) -> None:
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json(), "nodeTime": "0.0025s"})
    sb = api.Sandbox.create(
        "python:3.12",
        cpu=0.5,
        memory="256MiB",
        memory_limit="1GiB",
        disk=10**9,
        timeout=90,
        idle_timeout=1.5,
        env={"A": "ü"},
        labels={"run": "r1"},
        reuse="run-7",
        idempotency_key="k1",
        client=api.client,
    )
    assert api.server.requests[0].message == {
        "spec": {
            "image": "python:3.12",
            "resources": {"cpu": 0.5, "memory": str(256 << 20), "memoryLimit": str(1 << 30), "disk": "1000000000"},
            "env": {"A": "ü"},
            "labels": {"run": "r1"},
            "reuse": "run-7",
            "timeout": "90s",
            "idleTimeout": "1.5s",
        },
        "idempotencyKey": "k1",
    }
    assert sb.id == "sb1"
    assert sb.node_time == 0.0025
    assert sb.last_info.state == "running"
    assert sb.last_info.resources.memory == 512 << 20
    assert sb.last_info.timeout == 90
    assert sb.last_info.created_at.microsecond == 123456


def test_a_create_that_breaks_is_sent_again_with_the_same_key(api: Api) -> None:
    answers: list[Any] = [Break(), Fail("unavailable", "unavailable", status=503), {"sandbox": sandbox_json()}]
    api.server.on("Sandboxes/Create", lambda _: answers.pop(0))
    assert api.Sandbox.create(client=api.client).id == "sb1"
    keys = {got.message["idempotencyKey"] for got in api.server.sent("Create")}
    assert len(keys) == 1
    assert len(keys.pop()) >= 32
    assert api.server.count("Create") == 3


def test_two_creates_have_two_keys(api: Api) -> None:
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json()})
    api.Sandbox.create(client=api.client)
    api.Sandbox.create(client=api.client)
    first, second = (got.message["idempotencyKey"] for got in api.server.sent("Create"))
    assert first != second


def test_create_waits_for_a_full_server_as_long_as_it_is_told(api: Api) -> None:
    full = Fail("no_capacity", "resource_exhausted", "full", retry_after_ms=5000, status=429)
    answers: list[Any] = [full, full, {"sandbox": sandbox_json()}]
    api.server.on("Sandboxes/Create", lambda _: answers.pop(0))
    assert api.Sandbox.create(client=api.client).id == "sb1"
    assert len(api.time.slept) == 2
    assert all(5 <= seconds < 8 for seconds in api.time.slept)


def test_create_goes_on_waiting_when_the_server_gave_up(api: Api) -> None:
    late = Fail("deadline_exceeded", "deadline_exceeded", "gave up waiting", status=504)
    answers: list[Any] = [late, {"sandbox": sandbox_json()}]
    api.server.on("Sandboxes/Create", lambda _: answers.pop(0))
    assert api.Sandbox.create(client=api.client).id == "sb1"
    assert len({got.message["idempotencyKey"] for got in api.server.sent("Create")}) == 1


def test_create_gives_up_at_its_timeout(api: Api) -> None:
    full = Fail("no_capacity", "resource_exhausted", "full", hint="kill some", retry_after_ms=4000, status=429)
    api.server.on("Sandboxes/Create", full)
    with pytest.raises(cove.NoCapacity) as caught:
        api.Sandbox.create(client=api.client, create_timeout=10)
    assert caught.value.retry_after == 4.0
    assert caught.value.hint == "kill some"
    assert sum(api.time.slept) <= 10
    assert api.server.count("Create") == 3


def test_a_wrong_field_is_named_and_not_tried_again(api: Api) -> None:
    fail = Fail(
        "invalid_argument", message="cpu: -1", op="sandbox.create", field_name="resources.cpu", hint="0.1 to 64"
    )
    api.server.on("Sandboxes/Create", fail)
    with pytest.raises(cove.InvalidArgument) as caught:
        api.Sandbox.create(cpu=-1, client=api.client)
    error = caught.value
    assert (error.code, error.field, error.hint, error.op) == (
        "invalid_argument",
        "resources.cpu",
        "0.1 to 64",
        "sandbox.create",
    )
    assert str(error) == "cpu: -1 (hint: 0.1 to 64)"
    assert api.server.count("Create") == 1


def test_wrong_arguments_are_refused_before_anything_is_sent(api: Api) -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"memory": "512M"}, "memory"),
        ({"timeout": -1}, "timeout"),
        ({"env": {"A": 1}}, "env"),
    ]
    for wrong, field in wrongs:
        with pytest.raises(cove.InvalidArgument) as caught:
            api.Sandbox.create(client=api.client, **wrong)
        assert caught.value.field == field
    assert api.server.requests == []


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (Fail("image_not_found", "not_found", hint="did you mean 'base'?", status=404), cove.ImageNotFound),
        (Fail("sandbox_ended", "failed_precondition"), cove.SandboxEnded),
        (Fail("disk_full", "resource_exhausted", status=429), cove.DiskFull),
        (Fail("", "resource_exhausted", status=429, detail=False), cove.TooLarge),
        (Fail("", "aborted", status=409, detail=False), cove.Conflict),
        (Fail("", "unimplemented", status=501, detail=False), cove.Unsupported),
        (Fail("", "unknown", status=500, detail=False), cove.Internal),
    ],
)
def test_errors_are_classes(api: Api, fail: Fail, kind: type[cove.CoveError]) -> None:
    api.server.on("Sandboxes/Stats", fail)
    with pytest.raises(cove.CoveError) as caught:
        api.sandbox().stats()
    assert type(caught.value) is kind
    assert caught.value.hint == fail.hint


def test_a_wrong_key(api: Api) -> None:
    api.server.KEY = "another"
    with pytest.raises(cove.Unauthenticated):
        api.sandbox()
    with pytest.raises(cove.Unauthenticated):
        api.Sandbox.create(client=api.client)


def test_list_goes_through_all_pages(api: Api) -> None:
    def answer(got: Got) -> dict[str, Any]:
        token = int(got.message.get("pageToken", "0"))
        page = [sandbox_json(f"sb{token}x{n}") for n in range(2)]
        return {"sandboxes": page, **({"nextPageToken": str(token + 1)} if token < 2 else {})}

    api.server.on("Sandboxes/List", answer)
    found = api.Sandbox.list({"run": "r1"}, states=["running", "ended"], page_size=2, client=api.client)
    assert [sb.id for sb in found] == ["sb0x0", "sb0x1", "sb1x0", "sb1x1", "sb2x0", "sb2x1"]
    assert api.server.requests[0].message == {
        "pageSize": 2,
        "labels": {"run": "r1"},
        "states": ["SANDBOX_STATE_RUNNING", "SANDBOX_STATE_ENDED"],
    }


def test_an_empty_list(api: Api) -> None:
    api.server.on("Sandboxes/List", {})
    assert list(api.Sandbox.list(client=api.client)) == []


def test_connect_to_what_has_ended_says_why(api: Api) -> None:
    ended = sandbox_json(state="SANDBOX_STATE_ENDED", end={"cause": "oom", "detail": "over 512MiB"})
    api.server.on("Sandboxes/Get", {"sandbox": ended})
    with pytest.raises(cove.SandboxEnded, match="oom: over 512MiB"):
        api.Sandbox.connect("sb1", client=api.client)
    assert api.Sandbox.get_info("sb1", client=api.client).end.cause == "oom"


def test_the_life_of_a_sandbox(api: Api) -> None:
    ended = sandbox_json(state="SANDBOX_STATE_ENDED", end={"cause": "killed_by_user", "at": "2026-03-01T10:00:00Z"})
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json()})
    api.server.on("Sandboxes/Reset", {"sandbox": sandbox_json(episode="2"), "nodeTime": "0.004s"})
    api.server.on("Sandboxes/SetTimeout", {"sandbox": sandbox_json(expiresAt="2026-03-01T11:00:00Z")})
    api.server.on("Sandboxes/Stats", {"cpuTime": "1.5s", "memory": "1024", "processes": 3})
    api.server.on("Sandboxes/Kill", {"sandbox": ended})
    with api.Sandbox.create(client=api.client) as sb:
        assert sb.reset().episode == 2
        assert sb.node_time == 0.004
        assert sb.set_timeout(None).expires_at.hour == 11
        assert sb.stats() == cove.Stats(1.5, 1024, 0, 0, 3)
    assert api.server.sent("SetTimeout")[0].message == {"id": "sb1", "timeout": "0s"}
    assert sb.last_info.end.cause == "killed_by_user"
    assert sb.kill().cause == "killed_by_user"


def test_leaving_by_an_error_kills_and_keeps_the_error(api: Api) -> None:
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json()})
    api.server.on("Sandboxes/Kill", Fail("internal", "internal", status=500))
    with pytest.raises(ValueError, match="mine"), api.Sandbox.create(client=api.client):
        raise ValueError("mine")
    assert api.server.count("Kill") == 1


def test_kill_by_label(api: Api) -> None:
    api.server.on("Sandboxes/KillByLabel", {"ids": ["a", "b"]})
    assert api.Sandbox.kill_by_label({"run": "r1"}, client=api.client) == ["a", "b"]
    with pytest.raises(cove.InvalidArgument):
        api.Sandbox.kill_by_label({}, client=api.client)


def test_what_must_not_happen_twice_is_not_sent_twice(api: Api) -> None:
    sb = api.sandbox()
    api.server.on("Files/Move", Break())
    with pytest.raises(cove.TransportError):
        sb.files.move("/a", "/b")
    assert api.server.count("Move") == 1


def test_a_restarting_server_is_ridden_out(api: Api) -> None:
    sb = api.sandbox()
    api.server.on("Files/Move", {"info": {"path": "/b"}})
    api.server.stop()
    restarts = iter([api.server.start])
    api.time.on_sleep = lambda: next(restarts, lambda: None)()
    # Move runs once at most, and yet this is safe: the request never left.
    assert sb.files.move("/a", "/b").path == "/b"
    assert api.server.count("Move") == 1


def test_a_server_that_stays_away_is_given_up(api: Api) -> None:
    sb = api.sandbox()
    api.server.stop()
    with pytest.raises(cove.TransportError, match="cannot reach") as caught:
        sb.info()
    assert 15 < sum(api.time.slept) <= 30
    assert "COVE_URL" in caught.value.hint
    assert isinstance(caught.value, cove.Unavailable)


def test_a_server_that_was_never_there_is_given_up_soon(api: Api) -> None:
    api.server.stop()
    with pytest.raises(cove.TransportError):
        api.Sandbox.create(client=api.client)
    assert sum(api.time.slept) <= 2


def test_logins_to_registries(api: Api) -> None:
    login = {"registry": "ghcr.io", "username": "me", "updatedAt": "2026-03-01T10:00:00Z"}
    api.server.on("Images/Login", {"login": login})
    api.server.on("Images/Logins", {"logins": [login]})
    api.server.on("Images/Logout", {})
    assert api.client.images.login("ghcr.io", username="me", password="pw").registry == "ghcr.io"
    assert api.server.sent("Login")[0].message == {"registry": "ghcr.io", "username": "me", "password": "pw"}
    assert [i.username for i in api.client.images.logins()] == ["me"]
    api.client.images.logout("ghcr.io")
    assert api.server.sent("Logout")[0].message == {"registry": "ghcr.io"}


def test_images(api: Api) -> None:
    image = {"id": "sha256:1", "names": ["base"], "size": "1000", "platform": "linux/amd64"}
    api.server.on("Images/List", {"images": [image]})
    api.server.on("Images/Get", {"image": image})
    api.server.on("Images/Remove", {})
    assert [i.names for i in api.client.images.list()] == [("base",)]
    assert api.client.images.get("base").size == 1000
    api.client.images.remove("base")
    assert api.server.sent("Remove")[0].message == {"name": "base"}


def test_a_pull_reports_and_survives_a_break(api: Api) -> None:
    from .fake_cove import Stream

    download = {"step": "download", "done": "5", "total": "10"}
    done = {"step": "done", "image": {"id": "sha256:1", "names": ["py"]}}
    answers = [Stream([download, Break()]), Stream([download, done])]
    api.server.on("Images/Pull", lambda _: answers.pop(0))
    steps: list[cove.PullProgress] = []
    image = api.client.images.pull("python:3.12", name="py", on_progress=steps.append)
    assert image.names == ("py",)
    assert [s.step for s in steps] == ["download", "download", "done"]
    assert steps[0] == cove.PullProgress("download", 5, 10)


def test_a_registry_out_of_reach_is_told_at_once(api: Api) -> None:
    # The server has tried on its own.
    api.server.on("Images/Pull", Fail("unavailable", "unavailable", "registry cannot be used now"))
    with pytest.raises(cove.Unavailable, match="registry"):
        api.client.images.pull("127.0.0.1:1/x")
    assert api.server.count("Pull") == 1


def test_a_pull_that_fails(api: Api) -> None:
    api.server.on("Images/Pull", Fail("image_not_found", "not_found", hint="did you mean 'base'?"))
    with pytest.raises(cove.ImageNotFound, match="did you mean"):
        api.client.images.pull("bse")


def test_info(api: Api) -> None:
    api.server.on("System/Info", {"version": "1", "runtime": "gvisor", "total": {"memory": "5"}, "warmKernels": 3})
    info = api.client.info()
    assert (info.version, info.total.memory, info.warm_kernels, info.used.cpu) == ("1", 5, 3, 0.0)


def test_async_with_needs_no_await(server: FakeCove) -> None:
    server.on("Sandboxes/Create", {"sandbox": sandbox_json()})
    server.on("Sandboxes/Kill", {"sandbox": sandbox_json(end={"cause": "killed_by_user"})})

    async def use() -> None:
        async with cove.AsyncClient(server.url, FakeCove.KEY) as client:
            async with cove.AsyncSandbox.create(client=client) as sb:
                assert sb.id == "sb1"
            assert server.count("Kill") == 1
            async with await cove.AsyncSandbox.create(client=client):
                pass
            made = await asyncio.gather(*(cove.AsyncSandbox.create(client=client) for _ in range(3)))
            made.append(await asyncio.create_task(cove.AsyncSandbox.create(client=client)))
            made.append(await asyncio.wait_for(cove.AsyncSandbox.create(client=client), 20))
            assert [sb.id for sb in made] == ["sb1"] * 5

    asyncio.run(use())


def test_sandboxes_and_clients_pickle(server: FakeCove) -> None:
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    with cove.Client(server.url, FakeCove.KEY, create_timeout=7) as client:
        one, two = cove.Sandbox.connect("sb1", client=client), cove.Sandbox.connect("sb1", client=client)
        sent = pickle.dumps([one, two])
    came, other = pickle.loads(sent)
    assert (came.id, came.info().state) == ("sb1", "running")
    assert came._client is other._client
    assert came._client._settings.create_timeout == 7
    assert came.files is not None
    came._client.close()

    async def use() -> None:
        async with cove.AsyncClient(server.url, FakeCove.KEY) as client:
            sb = pickle.loads(pickle.dumps(await cove.AsyncSandbox.connect("sb1", client=client)))
            assert (await sb.info()).id == "sb1"
            await sb._client.close()

    asyncio.run(use())
    with pytest.raises(TypeError, match="make one over there"):
        pickle.dumps(cove.Client(server.url, FakeCove.KEY, http_client=httpx.Client()))


def test_import_of_an_image_tells_how_far_it_is_and_goes_on_after_a_break(api: Api, tmp_path: Path) -> None:
    tar = tmp_path / "image.tar"
    tar.write_bytes(b"x" * (3 << 20))
    answers: list[Any] = [Break(), {"id": "sha256:a", "names": ["mine"], "size": "9"}]
    api.server.on("PUT images", lambda _: answers.pop(0))
    steps: list[cove.PullProgress] = []
    assert api.client.images.import_(tar, "mine", on_progress=steps.append).names == ("mine",)
    assert [(got.query, len(got.body)) for got in api.server.sent("images")] == [({"name": "mine"}, 3 << 20)] * 2
    assert (steps[-1].done, steps[-1].total) == (3 << 20, 3 << 20)
    answers[:] = [{"id": "sha256:a"}]
    assert api.client.images.import_(io.BytesIO(b"tar"), "mine").id == "sha256:a"
    assert api.server.sent("images")[-1].body == b"tar"


def test_a_create_keeps_its_place_in_line(api: Api) -> None:
    """Who hangs up stands at the end of the line again."""
    client = getattr(api.client, "_target", api.client)
    send, waits = client._wire.send, []

    def record(request: Any) -> Any:
        waits.append(request.read_timeout)
        return send(request)

    client._wire.send = record
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json()})
    api.Sandbox.create(client=api.client, create_timeout=600)
    api.Sandbox.create(client=api.client, create_timeout=float("inf"))
    assert 590 < waits[-2] <= 600
    assert waits[-1] == 960
