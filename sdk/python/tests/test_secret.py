"""Secrets: made or changed, listed, deleted, and named by sandboxes; no value comes back."""

from __future__ import annotations

from typing import Any

import pytest

import cove

from .blocking import Blocking
from .conftest import Api
from .fake_cove import Fail, Got, sandbox_json

SECRET = {
    "name": "openai",
    "hosts": ["api.openai.com"],
    "header": "Authorization",
    "format": "Bearer {}",
    "env": "OPENAI_API_KEY",
    "placeholder": "cove-secret-openai-x",
    "createdAt": "2026-03-01T10:00:00Z",
}


def secrets_of(api: Api) -> Any:
    return cove.Secret if api.Sandbox is cove.Sandbox else Blocking(cove.AsyncSecret, api.Sandbox._loop)


def test_set_makes_what_is_not_there(api: Api) -> None:
    there: list[str] = []

    def update(got: Got) -> Any:
        return {"secret": SECRET} if there else Fail("not_found", "not_found", "no secret", status=404)

    def create(got: Got) -> Any:
        there.append(got.message["name"])
        return {"secret": SECRET}

    api.server.on("Secrets/Update", update)
    api.server.on("Secrets/Create", create)
    api.server.on("Secrets/List", {"secrets": [SECRET]})
    api.server.on("Secrets/Delete", {})
    kind = secrets_of(api)
    with pytest.raises(cove.NotFound):
        kind.set("openai", hosts=["b.test"], client=api.client)
    made = kind.set(
        "openai",
        "sk-1",
        hosts=["api.openai.com"],
        header="Authorization",
        format="Bearer {}",
        env="OPENAI_API_KEY",
        client=api.client,
    )
    assert api.server.sent("Create")[0].message == {
        "name": "openai",
        "value": "sk-1",
        "hosts": ["api.openai.com"],
        "header": "Authorization",
        "format": "Bearer {}",
        "env": "OPENAI_API_KEY",
    }
    assert (made.placeholder, made.hosts, made.body) == ("cove-secret-openai-x", ("api.openai.com",), False)
    kind.set("openai", "sk-2", body=True, client=api.client)
    assert api.server.sent("Update")[-1].message == {"name": "openai", "value": "sk-2", "body": True}
    assert [s.name for s in kind.list(client=api.client)] == ["openai"]
    kind.delete("openai", client=api.client)
    with pytest.raises(cove.InvalidArgument) as refused:
        kind.set("openai", hosts="b.test", client=api.client)
    assert refused.value.field == "hosts"


def test_labels_stay_unless_they_are_said(api: Api) -> None:
    api.server.on("Secrets/Update", {"secret": {**SECRET, "labels": {"team": "rl"}, "version": "4"}})
    kind = secrets_of(api)
    for given, sent in (
        ({"labels": {"team": "rl"}}, {"labels": {"team": "rl"}}),
        ({}, {}),
        ({"labels": {}}, {"labels": {}, "clearLabels": True}),
    ):
        info = kind.set("openai", "sk-2", client=api.client, **given)
        assert api.server.sent("Update")[-1].message == {"name": "openai", "value": "sk-2", **sent}
        assert (info.labels, info.version) == ({"team": "rl"}, 4)
    with pytest.raises(cove.InvalidArgument) as refused:
        kind.set("openai", labels={"team": 3}, client=api.client)
    assert refused.value.field == "labels"
    api.server.on("Secrets/Update", Fail("not_found", "not_found", "no secret", status=404))
    api.server.on("Secrets/Create", {"secret": SECRET})
    for labels in ({"team": "rl"}, {}):
        info = kind.set("openai", "sk-3", hosts=["b.test"], labels=labels, client=api.client)
        assert api.server.sent("Create")[-1].message["labels"] == labels
        assert info.labels == {}


def test_a_sandbox_names_its_secrets(api: Api) -> None:
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json(spec={"image": "base", "secrets": ["openai"]})})
    api.server.on("Sandboxes/SetSecrets", {"secrets": []})
    sb = api.Sandbox.create(network="public", secrets=["openai"], client=api.client)
    assert api.server.sent("Create")[0].message["spec"]["secrets"] == ["openai"]
    assert sb.last_info.secrets == ("openai",)
    sb.set_secrets([])
    assert api.server.sent("SetSecrets")[0].message == {"id": "sb1", "secrets": []}
    with pytest.raises(cove.InvalidArgument):
        api.Sandbox.create(secrets="openai", client=api.client)
