"""Templates: built with their output as it comes, found, deleted."""

from __future__ import annotations

import base64
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Break, Fail, FakeCove, Got, Stream, sandbox_json, snapshot_json

WEB = {
    "name": "web",
    "version": "3",
    "spec": {"image": "python:3.12"},
    "start": "python3 -m http.server",
    "readyPort": 8000,
    "readyTimeout": "30s",
    "snapshot": "sn7",
    "createdAt": "2026-03-01T10:00:00Z",
    "buildTime": "4.500s",
    "size": "6000000000",
}


def output(data: bytes) -> dict[str, Any]:
    return {"step": "start", "output": base64.b64encode(data).decode()}


def test_build_sends_what_was_asked_and_tells_what_happens(api: Api) -> None:
    word = "grüße\n".encode()
    events = [{"step": "create"}, output(word[:3]), output(word[3:]), {"step": "ready"}, {"step": "freeze"}]
    api.server.on("Templates/Build", Stream([*events, {"step": "done", "template": WEB}]))
    text: list[str] = []
    steps: list[str] = []
    template = api.Template.build(
        "web",
        image="python:3.12",
        start="python3 -m http.server",
        ready_port=8000,
        ready_timeout=30,
        cpu=2,
        memory="1GiB",
        env={"A": "b"},
        labels={"c": "d"},
        on_output=text.append,
        on_step=steps.append,
        client=api.client,
    )
    assert api.server.requests[0].message == {
        "name": "web",
        "spec": {
            "image": "python:3.12",
            "resources": {"cpu": 2, "memory": str(1 << 30)},
            "env": {"A": "b"},
            "labels": {"c": "d"},
        },
        "start": "python3 -m http.server",
        "readyPort": 8000,
        "readyTimeout": "30s",
    }
    assert "".join(text) == "grüße\n"
    assert steps == ["create", "start", "ready", "freeze", "done"]
    assert (template.id, template.name, template.version, template.snapshot) == ("web@3", "web", 3, "sn7")
    assert (template.size, template.build_time, template.created_at.hour) == (6_000_000_000, 4.5, 10)
    assert (template.last_info.ready_port, template.last_info.ready_timeout) == (8000, 30)


def test_build_from_a_snapshot(api: Api) -> None:
    api.server.on("Templates/Build", Stream([{"step": "done", "template": WEB}]))
    api.Template.build("web", snapshot="sn1", ready_command="test -e /ready", client=api.client)
    assert api.server.requests[0].message == {
        "name": "web",
        "spec": {"snapshot": "sn1"},
        "readyCommand": "test -e /ready",
        "readyTimeout": "60s",
    }


def test_a_build_that_fails_or_breaks_is_not_made_again(api: Api) -> None:
    late = Fail("deadline_exceeded", "deadline_exceeded", "not ready within 1m0s")
    cases: list[tuple[Any, type[cove.CoveError]]] = [
        (Stream([{"step": "create"}, late]), cove.DeadlineExceeded),
        (Stream([{"step": "create"}, Break()]), cove.TransportError),
        (Stream([{"step": "create"}]), cove.TransportError),
    ]
    for built, (answer, kind) in enumerate(cases, start=1):
        api.server.on("Templates/Build", answer)
        with pytest.raises(kind):
            api.Template.build("web", client=api.client)
        assert api.server.count("Build") == built


def test_two_ways_to_be_ready_are_refused(api: Api) -> None:
    with pytest.raises(cove.InvalidArgument):
        api.Template.build("web", ready_command="true", ready_port=80, client=api.client)
    assert api.server.requests == []


def test_get_list_delete(api: Api) -> None:
    def versions(got: Got) -> dict[str, Any]:
        return {"versions": ["3"] if "@" in got.message["name"] else ["1", "2"]}

    api.server.on("Templates/Get", {"template": WEB})
    api.server.on("Templates/List", {"templates": [WEB, {**WEB, "version": "2"}]})
    api.server.on("Templates/Delete", versions)
    template = api.Template.get("web", client=api.client)
    assert [t.version for t in api.Template.list("web", client=api.client)] == [3, 2]
    api.Template.list(client=api.client)
    assert [got.message for got in api.server.sent("List")] == [{"name": "web"}, {}]
    assert template.delete() == [3]
    assert template.delete(all_versions=True) == [1, 2]
    assert [got.message["name"] for got in api.server.sent("Delete")] == ["web@3", "web"]


def test_tags(api: Api) -> None:
    def tag(got: Got) -> Any:
        if not got.message["tags"]:
            return Fail("invalid_argument", "invalid_argument", "0 tags", status=400)
        return {"template": {**WEB, "tags": ["stable", *got.message["tags"]]}}

    api.server.on("Templates/Get", {"template": {**WEB, "tags": ["stable"]}})
    api.server.on("Templates/Tag", tag)
    api.server.on("Templates/Untag", {})
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json(spec={"template": "web@3"})})
    template = api.Template.get("web:stable", client=api.client)
    assert template.tags == ("stable",)
    assert template.tag("v3", "tested") is None
    assert template.tags == ("stable", "v3", "tested")
    assert template.untag("stable", "of another version") is None
    assert template.tags == ("v3", "tested")
    with pytest.raises(cove.InvalidArgument):
        template.tag()
    assert template.tags == ("v3", "tested")
    api.Sandbox.create(template="web:v3", client=api.client)
    sent = [(got.path.split("/")[-1], got.message) for got in api.server.requests if not got.path.endswith("Create")]
    assert sent == [
        ("Get", {"name": "web:stable"}),
        ("Tag", {"name": "web@3", "tags": ["v3", "tested"]}),
        ("Untag", {"name": "web", "tags": ["stable", "of another version"]}),
        ("Tag", {"name": "web@3", "tags": []}),
    ]
    assert api.server.sent("Create")[0].message["spec"] == {"template": "web:v3"}


def test_async_listeners_are_awaited() -> None:
    import asyncio

    server = FakeCove()
    server.start()
    server.on("Templates/Build", Stream([output(b"up"), {"step": "done", "template": WEB}]))
    server.on("Sandboxes/Get", {"sandbox": sandbox_json()})
    server.on("Snapshots/Create", Stream([{"step": "done", "snapshot": snapshot_json()}]))
    heard: list[str] = []

    async def listen(text: str) -> None:
        await asyncio.sleep(0)
        heard.append(text)

    async def main() -> None:
        async with cove.AsyncClient(server.url, FakeCove.KEY) as client:
            await cove.AsyncTemplate.build("web", on_output=listen, on_step=listen, client=client)
            sb = await cove.AsyncSandbox.connect("sb1", client=client)
            await sb.snapshot(on_progress=lambda progress: listen("snapshot " + progress.step))

    try:
        asyncio.run(main())
    finally:
        server.stop()
    assert heard == ["start", "up", "done", "snapshot done"]
    assert server.breaches == []
