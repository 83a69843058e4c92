"""Pause, resume, auto-pause, fork, snapshots, network."""

import datetime
import time

import pytest
from e2b import Sandbox, SandboxException, SandboxNotFoundException, SandboxState, TimeoutException


def wait_for(what, seconds=60):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_pause_and_resume_with_memory(fresh):
    h = fresh.commands.run("i=0; while true; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done", background=True, timeout=0)
    h.disconnect()
    wait_for(lambda: fresh.files.exists("/tmp/count"))
    assert fresh.pause() is True
    assert fresh.pause() is False
    assert fresh.get_info().state == SandboxState.PAUSED
    assert not fresh.is_running()
    with pytest.raises(TimeoutException):
        fresh.commands.run("true")
    fresh.connect(timeout=120)
    assert fresh.get_info().state == SandboxState.RUNNING
    assert h.pid in [p.pid for p in fresh.commands.list()]
    before = int(fresh.files.read("/tmp/count") or 0)
    wait_for(lambda: int(fresh.files.read("/tmp/count") or 0) > before)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.pause("i0000000000000000000")


def test_auto_pause_and_auto_resume():
    s = Sandbox.create(timeout=4, lifecycle={"on_timeout": "pause", "auto_resume": False})
    try:
        s.files.write("/tmp/kept", "kept")
        assert s.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": False}
        wait_for(lambda: s.get_info().state == SandboxState.PAUSED)
        with pytest.raises(TimeoutException):  # no request wakes it
            s.files.read("/tmp/kept")
        assert s.get_info().state == SandboxState.PAUSED
        s.connect(timeout=60)
        assert s.files.read("/tmp/kept") == "kept"
        assert s.get_info().state == SandboxState.RUNNING
    finally:
        s.kill()
    s = Sandbox.create(timeout=4, lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        s.files.write("/tmp/kept", "kept")
        wait_for(lambda: s.get_info().state == SandboxState.PAUSED)
        assert s.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": True}
        assert s.commands.run("cat /tmp/kept").stdout == "kept"
        info = s.get_info()
        assert info.state == SandboxState.RUNNING
        left = (info.end_at - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
        assert left > 120, "woken by a request it has E2B's five minutes, not the four seconds it was made with"
    finally:
        assert s.kill()
    with pytest.raises(SandboxNotFoundException):
        s.get_info()


def test_snapshot_and_create_from_it(fresh):
    fresh.files.write("/home/user/state", "snap")
    snap = fresh.create_snapshot()
    child = Sandbox.create(snap.snapshot_id, timeout=60)
    try:
        assert child.files.read("/home/user/state") == "snap"
        assert snap.snapshot_id in [s.snapshot_id for s in fresh.list_snapshots().next_items()]
    finally:
        child.kill()
    assert Sandbox.delete_snapshot(snap.snapshot_id) is True
    assert Sandbox.delete_snapshot(snap.snapshot_id) is False
    with pytest.raises(SandboxException):
        Sandbox.create(snap.snapshot_id)


def test_fork(fresh):
    fresh.files.write("/tmp/x", "parent")
    children = fresh.fork(count=2, timeout=60)
    try:
        assert len(children) == 2 and len({c.sandbox_id for c in children}) == 2
        children[0].files.write("/tmp/x", "child")
        assert fresh.files.read("/tmp/x") == children[1].files.read("/tmp/x") == "parent"
    finally:
        for c in children:
            c.kill()


def test_network_options():
    s = Sandbox.create(timeout=60, allow_internet_access=False)
    try:
        assert s.get_info().allow_internet_access is False
    finally:
        s.kill()
    s = Sandbox.create(timeout=60, network={"allow_out": ["*.example.com", "1.1.1.1"], "deny_out": ["0.0.0.0/0"]})
    try:
        n = s.get_info().network
        assert sorted(n["allow_out"]) == ["*.example.com", "1.1.1.1/32"] and n["deny_out"] == ["0.0.0.0/0"]
        s.update_network({"deny_out": ["0.0.0.0/0"]})
        assert s.get_info().network["deny_out"] == ["0.0.0.0/0"]
        s.update_network({"deny_out": ["8.8.8.8/32"]})
        assert s.get_info().network["deny_out"] == ["8.8.8.8/32"]
    finally:
        s.kill()
    with pytest.raises(SandboxException, match="denyOut"):
        Sandbox.create(network={"allow_out": ["example.com"]})
    with pytest.raises(SandboxException, match="denyOut"):
        Sandbox.create(network={"deny_out": ["example.com"]})
