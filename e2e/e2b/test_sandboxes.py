"""The control plane: create, connect, get, list, kill, timeout, metadata, envs, metrics."""

import datetime
import json
import os
import time
import urllib.request
import uuid

import httpx
import pytest
from e2b import (
    AuthenticationException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)


def rest(method, path, body=None, key=None):
    """A request as an SDK of another version would send it."""
    r = urllib.request.Request(os.environ["E2B_API_URL"] + path, method=method, data=None if body is None else json.dumps(body).encode(),
                               headers={"X-API-KEY": key or os.environ["E2B_API_KEY"], "Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(r) as answer:
            data = answer.read()
            return answer.status, json.loads(data) if data else None
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


def test_create_get_kill():
    s = Sandbox.create(timeout=120, metadata={"run": "a b&c", "n": "1"}, envs={"GREETING": "hello"})
    try:
        assert s.is_running()
        info = s.get_info()
        assert info.sandbox_id == s.sandbox_id
        assert info.metadata == {"run": "a b&c", "n": "1"}
        assert info.template_id == "base"
        assert info.state == SandboxState.RUNNING
        assert info.cpu_count >= 1 and info.memory_mb >= 128
        left = info.end_at - datetime.datetime.now(datetime.timezone.utc)
        assert datetime.timedelta(seconds=60) < left <= datetime.timedelta(seconds=121)
        assert s.commands.run("echo $GREETING").stdout == "hello\n"
    finally:
        assert s.kill() is True
    assert s.kill() is False
    assert not s.is_running()
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info(s.sandbox_id)
    with pytest.raises(TimeoutException):
        s.commands.run("true")


def test_older_paths():
    status, made = rest("POST", "/sandboxes", {"templateID": "base", "secure": True, "timeout": 60, "autoPause": False})
    assert status == 201 and made["envdAccessToken"] and made["clientID"]
    sid = made["sandboxID"]
    try:
        assert rest("POST", f"/sandboxes/{sid}/connect", {"timeout": 60})[0] == 200
        assert rest("POST", f"/sandboxes/{sid}/refreshes", {"duration": 90})[0] == 204
        assert [s for s in rest("GET", "/sandboxes")[1] if s["sandboxID"] == sid]
        assert Sandbox.connect(sid).commands.run("echo 1").stdout == "1\n"
    finally:
        assert rest("DELETE", f"/sandboxes/{sid}")[0] == 204
    status, body = rest("DELETE", f"/sandboxes/{sid}")
    assert (status, body["code"]) == (404, 404)


def test_timeout_and_connect(fresh):
    def left():
        return (fresh.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)).total_seconds()

    fresh.set_timeout(20)
    assert left() <= 20
    again = Sandbox.connect(fresh.sandbox_id, timeout=400)
    assert 380 < left() <= 400
    Sandbox.connect(fresh.sandbox_id, timeout=30)
    assert left() > 300, "a connect never takes time away"
    assert again.commands.run("echo same").stdout == "same\n"


def test_the_timeout_ends_it():
    s = Sandbox.create(timeout=1)
    deadline = time.monotonic() + 30
    while s.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(SandboxNotFoundException):
        s.set_timeout(10)


def test_list_pages_and_filters():
    run = uuid.uuid4().hex
    made = [Sandbox.create(timeout=120, metadata={"run": run, "i": str(i), "odd": "x=1&y"}) for i in range(3)]
    try:
        want = [s.sandbox_id for s in reversed(made)]
        pages = Sandbox.list(query=SandboxQuery(metadata={"run": run, "odd": "x=1&y"}), limit=2)
        first = pages.next_items()
        assert [i.sandbox_id for i in first] == want[:2] and pages.has_next
        assert [i.sandbox_id for i in pages.next_items()] == want[2:] and not pages.has_next
        assert first[0].metadata["i"] == "2"
        oldest = Sandbox.list(query=SandboxQuery(metadata={"run": run}), order="asc").next_items()
        assert [i.sandbox_id for i in oldest] == want[::-1]
        assert Sandbox.list(query=SandboxQuery(metadata={"run": run}, state=[SandboxState.PAUSED])).next_items() == []
        assert Sandbox.list(query=SandboxQuery(metadata={"run": "other"})).next_items() == []
    finally:
        for s in made:
            s.kill()


def test_metrics(sbx):
    [m] = sbx.get_metrics()
    assert m.cpu_count >= 1 and m.cpu_used_pct >= 0
    assert 0 < m.mem_used < m.mem_total and m.disk_total > 0


def test_idempotency_key():
    key = uuid.uuid4().hex
    a = Sandbox.create(timeout=60, idempotency_key=key)
    b = Sandbox.create(timeout=60, idempotency_key=key)
    assert a.sandbox_id == b.sandbox_id
    assert a.kill()


def test_typed_errors():
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 64)
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_nonsense")
    with pytest.raises(SandboxException, match="template 'no-such-template' not found"):
        Sandbox.create("no-such-template")
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect("i0000000000000000000")
    with pytest.raises(NotFoundException):
        Sandbox.get_info("NOT-AN-ID")
    with pytest.raises(SandboxException, match="400.*metadata"):
        Sandbox.create(metadata={"e2b.template": "mine"})
    with pytest.raises(SandboxException, match="400.*labels"):
        Sandbox.create(metadata={"k": "v" * 10_000})
    with pytest.raises(SandboxException, match="400.*timeout"):
        Sandbox.create(timeout=-1)
    status, body = rest("POST", "/v2/sandboxes", {"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]})
    assert status == body["code"] == 404 and "'v'" in body["message"]
    assert rest("GET", "/volumes") == (200, [])
    assert rest("POST", "/v2/sandboxes", {"templateID": 5})[0] == 400
    assert rest("POST", "/v2/sandboxes", {"templateID": "base", "metadata": {"k": "x" * (2 << 20)}})[0] == 413


def test_a_token_opens_its_own_sandbox_only(sbx, fresh):
    stolen = fresh._envd_access_token if hasattr(fresh, "_envd_access_token") else fresh.connection_config.sandbox_headers["X-Access-Token"]
    r = urllib.request.Request(os.environ["E2B_SANDBOX_URL"] + "/files?path=/etc/passwd", headers={"E2b-Sandbox-Id": sbx.sandbox_id, "X-Access-Token": stolen})
    with pytest.raises(urllib.error.HTTPError) as e:
        urllib.request.urlopen(r)
    assert e.value.code == 401
    r = urllib.request.Request(os.environ["E2B_SANDBOX_URL"] + "/files?path=/etc/passwd", headers={"E2b-Sandbox-Id": sbx.sandbox_id})
    with pytest.raises(urllib.error.HTTPError) as e:
        urllib.request.urlopen(r)
    assert e.value.code == 401
    assert json.loads(e.value.read()) == {"code": 401, "message": "unauthorized access, please provide a valid access token or method signing if supported"}


def test_metrics_of_many(sbx):
    headers = {"X-API-KEY": os.environ["E2B_API_KEY"]}
    res = httpx.get(os.environ["E2B_API_URL"] + "/sandboxes/metrics", params={"sandbox_ids": f"{sbx.sandbox_id},nosuchsandbox000"}, headers=headers)
    assert list(res.json()["sandboxes"]) == [sbx.sandbox_id] and res.json()["sandboxes"][sbx.sandbox_id]["memTotal"] > 0
