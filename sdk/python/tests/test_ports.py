"""Reaching in: addresses of ports and readiness."""

from __future__ import annotations

import pytest

import cove

from .conftest import Api
from .fake_cove import Fail, Plain, sandbox_json


def _box(api: Api):  # type: ignore[no-untyped-def]
    api.server.on("Sandboxes/Create", {"sandbox": sandbox_json()})
    return api.Sandbox.create(client=api.client)


def test_url_joins_a_path_with_the_servers_own(api: Api) -> None:
    sb = _box(api)
    api.server.on("Ports/Url", {"url": f"/p/{sb.id}/80/", "token": "covep_x"})
    assert sb.url(80) == f"{api.client.url}/p/{sb.id}/80/?cove_token=covep_x"
    assert api.server.sent("Ports/Url")[-1].message == {"sandboxId": sb.id, "port": 80}
    sb.url(80, ttl=600)
    assert api.server.sent("Ports/Url")[-1].message["ttl"] == "600s"


def test_a_path_goes_before_the_token(api: Api) -> None:
    sb = _box(api)
    api.server.on("Ports/Url", {"url": f"/p/{sb.id}/80/", "token": "covep_x"})
    base = f"{api.client.url}/p/{sb.id}/80/"
    assert sb.url(80, "/status") == base + "status?cove_token=covep_x"
    assert sb.url(80, path="a?b=1#part") == base + "a?b=1&cove_token=covep_x#part"


def test_a_port_is_an_address_headers_and_fetch(api: Api) -> None:
    sb = _box(api)
    api.server.on("Ports/Url", {"url": f"/p/{sb.id}/80/", "token": "covep_x"})
    port = sb.port(80)
    assert (port.url, port.headers) == (f"{api.client.url}/p/{sb.id}/80/", {"X-Cove-Token": "covep_x"})
    assert "covep_x" not in repr(port)
    assert port.url + "/a" == port.url + "a" == port.at("a") == f"{api.client.url}/p/{sb.id}/80/a"
    api.server.on("GET status", Plain(b"hello", 302, {"location": "http://127.0.0.1:1/"}))
    answer = port.fetch("/status", params={"q": "1"}, headers={"x-cove-token": "other", "a": "b"})
    assert (answer.status_code, answer.content) == (302, b"hello")
    got = api.server.requests[-1]
    assert got.headers["x-cove-token"] == "covep_x"
    assert "authorization" not in {name.lower() for name in got.headers}
    api.server.on("Ports/Url", {"url": "https://80-x.cove.test/", "token": "covep_x", "public": True})
    assert sb.port(80).headers == {}


def test_url_of_a_domain_and_of_a_public_port(api: Api) -> None:
    sb = _box(api)
    api.server.on("Ports/Url", {"url": "https://80-x.cove.test/", "token": "covep_x", "public": True})
    assert sb.url(80) == "https://80-x.cove.test/"
    api.server.on("Ports/Set", {"sandbox": sandbox_json()})
    sb.set_public(80)
    assert api.server.sent("Ports/Set")[-1].message == {"sandboxId": sb.id, "port": 80, "public": True}


def test_wait(api: Api) -> None:
    sb = _box(api)
    api.server.on("Ports/WaitReady", {"waited": "1s"})
    sb.wait_port(80, timeout=5)
    assert api.server.sent("Ports/WaitReady")[-1].message == {"sandboxId": sb.id, "timeout": "5s", "port": 80}
    sb.wait_command("true")
    assert api.server.sent("Ports/WaitReady")[-1].message == {"sandboxId": sb.id, "timeout": "60s", "command": "true"}


@pytest.mark.parametrize("port", [0, 65536, True, "80"])
def test_what_is_no_port_is_refused_here(api: Api, port: object) -> None:
    sb = _box(api)
    with pytest.raises(cove.InvalidArgument) as caught:
        sb.wait_port(port)
    assert caught.value.field == "port"


def test_not_ready_in_time(api: Api) -> None:
    sb = _box(api)
    api.server.on("Ports/WaitReady", Fail("deadline_exceeded", "nothing listens"))
    with pytest.raises(cove.DeadlineExceeded):
        sb.wait_port(80)
