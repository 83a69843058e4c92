"""Snapshots, forks, restores, standby and templates of a real server."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

import cove

from .conftest import LABEL, Live

pytestmark = pytest.mark.live

SMALL = {"cpu": 0.5, "memory": "64MiB", "memory_limit": "256MiB", "disk": "256MiB"}

# Counts in memory alone; the file only shows how far it is.
COUNTER = """
import time
n = 0
while True:
    n += 1
    open("/tmp/count", "w").write(str(n))
    time.sleep(0.01)
"""


def start_counter(sb: Any) -> Any:
    sb.files.write("/tmp/counter.py", COUNTER)
    process = sb.start(["python3", "/tmp/counter.py"])
    count_above(sb, 0)
    return process


def count_above(sb: Any, n: int) -> int:
    """How far the counter is, once it is above n."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = sb.files.read("/tmp/count") if sb.files.exists("/tmp/count") else ""
        if text.isdigit() and int(text) > n:
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"the counter did not get above {n}")


def take(live: Live, sb: Any, **options: Any) -> Any:
    return sb.snapshot(labels={LABEL: live.run, **options.pop("labels", {})}, **options)


def test_a_memory_snapshot_goes_on_in_another_sandbox(live: Live) -> None:
    steps: list[cove.SnapshotProgress] = []
    with live.create(**SMALL) as sb:
        start_counter(sb)
        snapshot = take(live, sb, on_progress=steps.append)
        at = count_above(sb, 0)
        assert (snapshot.kind, snapshot.sandbox, snapshot.unchanged) == ("memory", sb.id, False)
        assert snapshot.size > 0
        assert snapshot.paused > 0
        assert snapshot.created_at is not None
        assert steps[-1].step == "done"
        count_above(sb, at)  # the parent goes on
        assert sb.info().parent == sb.parent == snapshot.id
    with live.create(snapshot=snapshot, **SMALL) as child:
        assert child.info().parent == snapshot.id
        count_above(child, at)  # at least as far as when it was frozen: it did not start again
        assert any("counter.py" in task.command for task in child.processes().tasks)
    assert snapshot.verify() > 0


def test_a_filesystem_snapshot_has_the_files_and_no_process(live: Live) -> None:
    with live.create(**SMALL) as sb:
        start_counter(sb)
        sb.files.write("/opt/kept", "here", user="root")
        snapshot = take(live, sb, memory=False)
    assert snapshot.kind == "filesystem"
    with live.create(snapshot=snapshot.id, **SMALL) as child:
        assert child.files.read("/opt/kept") == "here"
        assert not any("counter.py" in task.command for task in child.processes().tasks)


def test_a_snapshot_of_what_did_not_change_is_the_same(live: Live) -> None:
    with live.create(**SMALL) as sb:
        sb.files.write("/tmp/x", "1")
        first = take(live, sb, memory=False)
        second = take(live, sb, memory=False)
        assert (second.id, second.unchanged) == (first.id, True)
        sb.files.write("/tmp/x", "2")
        third = take(live, sb, memory=False)
        assert third.id != first.id
        assert not third.unchanged
        assert third.parent == first.id


def test_a_snapshot_that_stops(live: Live) -> None:
    with live.create(**SMALL) as sb:
        take(live, sb, stop=True)
        assert sb.info().end.cause == "killed_by_user"


def test_a_directory_moves_to_another_sandbox(live: Live, tmp_path: Path) -> None:
    with live.create(**SMALL) as sb:
        sb.files.write("/work/a/b.txt", "grüße", mode=0o640, user="root")
        snapshot = take(live, sb, path="/work")
    assert (snapshot.kind, snapshot.path) == ("directory", "/work")
    with live.create(**SMALL) as other:
        snapshot.mount(other)
        assert other.files.read("/work/a/b.txt") == "grüße"
        assert not other.exec("echo x > /work/a/b.txt", user="root").ok  # read-only
        snapshot.mount(other, "/own", unpack=True)
        other.exec("echo more >> /own/a/b.txt", user="root").check()
        assert other.files.read("/own/a/b.txt") == "grüßemore\n"
    size = snapshot.export(tmp_path / "work.tar")
    assert size == (tmp_path / "work.tar").stat().st_size
    file = io.BytesIO()
    assert snapshot.export(file) == size
    with tarfile.open(tmp_path / "work.tar") as tar:
        (name,) = [n for n in tar.getnames() if n.endswith("a/b.txt")]
        content = tar.extractfile(name)
        assert content is not None
        assert content.read().decode() == "grüße"


def test_forks_go_their_own_ways(live: Live) -> None:
    with live.create(**SMALL) as sb:
        start_counter(sb)
        sb.files.write("/tmp/shared", "parent")
        children = sb.fork(3, labels={"role": "child"}, env={"SEED": "7"})
        try:
            assert len(children) == 3
            assert children.errors == []
            assert children.paused > 0
            for n, child in enumerate(children):
                child.files.write("/tmp/shared", f"child {n}")
            for n, child in enumerate(children):
                assert child.files.read("/tmp/shared") == f"child {n}"
                count_above(child, count_above(child, 0))
                assert child.exec("echo $SEED").stdout == "7\n"
                labels = child.info().labels
                assert (labels["role"], labels[LABEL]) == ("child", live.run)
            assert sb.files.read("/tmp/shared") == "parent"
            count_above(sb, count_above(sb, 0))
            tree = sb.tree()
            assert {c.id for c in children} <= {node.id for node in tree}
            assert sb.id in str(tree)
        finally:
            for child in children:
                child.kill()


def test_forks_of_a_snapshot(live: Live) -> None:
    with live.create(**SMALL) as sb:
        sb.files.write("/tmp/x", "here")
        snapshot = take(live, sb)
    children = snapshot.fork(2, min_ready=1)
    try:
        assert 1 <= len(children) <= 2
        assert [child.files.read("/tmp/x") for child in children] == ["here"] * len(children)
        assert {child.parent for child in children} == {snapshot.id}
    finally:
        for child in children:
            child.kill()


def test_restore_is_in_place(live: Live) -> None:
    with live.create(**SMALL) as sb:
        counter = start_counter(sb)
        sb.files.write("/tmp/x", "before")
        snapshot = take(live, sb, name=live.name("before"))
        sb.files.write("/tmp/x", "after")
        counter.kill()
        counter.wait()
        info = sb.restore(snapshot.name)
        assert info.id == sb.id
        assert info.episode == 2
        assert sb.files.read("/tmp/x") == "before"
        count_above(sb, count_above(sb, 0))  # what had been killed runs again


@pytest.mark.parametrize("cold", [False, True])
def test_any_call_wakes_a_paused_sandbox(live: Live, cold: bool) -> None:
    with live.create(**SMALL) as sb:
        start_counter(sb)
        state = "cold" if cold else "hot"
        assert sb.pause(cold=cold).standby == state
        assert sb.pause(cold=cold).standby == state  # again is no error
        assert sb.info().standby == state  # looking wakes nothing
        at = count_above(sb, 0)
        assert sb.info().standby == ""
        count_above(sb, at)
        sb.pause(cold=cold)
        assert sb.exec("echo awake").stdout == "awake\n"
        sb.pause(cold=cold)
        assert sb.resume().standby == ""
        count_above(sb, at)
        sb.pause(cold=cold)
    assert sb.last_info.end.cause == "killed_by_user"  # asleep or not


@pytest.mark.parametrize("cold", [False, True])
def test_who_waits_for_a_paused_sandbox_is_told(live: Live, cold: bool) -> None:
    with live.create(**SMALL) as sb:
        process = sb.start("touch /tmp/up; while ! [ -e /tmp/go ]; do sleep 0.05; done", timeout=60)
        with pytest.raises(cove.FailedPrecondition, match=process.exec_id) as busy:
            sb.pause(cold=cold, if_busy="refuse")
        assert busy.value.reason == "busy"
        sb.pause(cold=cold)
        began = time.monotonic()
        with pytest.raises(cove.DeadlineExceeded, match="was paused") as caught:
            process.wait(timeout=3)
        assert (caught.value.reason, process.standby) == ("asleep", "cold" if cold else "hot")
        assert time.monotonic() - began < 10
        sb.files.write("/tmp/go", "")  # wakes it
        assert process.wait(timeout=30).exit_code == 0


def test_a_stream_goes_on_through_a_pause(live: Live) -> None:
    with live.create(**SMALL) as sb:
        process = sb.start("for n in 1 2 3 4 5 6; do echo $n; sleep 0.2; done")
        sb.pause(cold=True)
        sb.resume()
        assert process.wait().stdout.split() == ["1", "2", "3", "4", "5", "6"]


def test_an_idle_sandbox_pauses(live: Live) -> None:
    with live.create(idle_timeout=1, on_idle="pause", **SMALL) as sb:
        sb.files.write("/tmp/x", "kept")
        deadline = time.monotonic() + 60
        while not sb.info().standby and time.monotonic() < deadline:
            time.sleep(0.1)
        assert sb.standby in ("hot", "cold")
        assert sb.files.read("/tmp/x") == "kept"


def test_snapshots_are_found_and_pruned(live: Live) -> None:
    name = live.name("best")
    with live.create(**SMALL) as sb:
        made = []
        for n in range(3):
            sb.files.write("/tmp/n", str(n))
            made.append(take(live, sb, memory=False, name=name if n == 0 else None, labels={"n": str(n)}))
        assert live.Snapshot.get(name, client=live.client).id == made[0].id
        found = [s.id for s in live.Snapshot.list(sandbox=sb, page_size=1, client=live.client)]
        assert found == [s.id for s in reversed(made)]  # newest first
        (one,) = live.Snapshot.list({LABEL: live.run, "n": "1"}, kind="filesystem", client=live.client)
        assert one.id == made[1].id
        rules = {"keep_last": 1, "keep_labels": {"n": "0"}, "sandbox": sb, "client": live.client}
        assert [p.id for p in live.Snapshot.prune(dry_run=True, **rules)] == [made[1].id]
        (pruned,) = live.Snapshot.prune(**rules)
        assert pruned.id == made[1].id
        assert pruned.reason
        with pytest.raises(cove.NotFound):
            live.Snapshot.get(made[1].id, client=live.client)
        assert live.Snapshot.get(made[2].id, client=live.client).delete() >= 0
        assert sb.files.read("/tmp/n") == "2"


def test_what_is_not_there(live: Live) -> None:
    with pytest.raises(cove.NotFound):
        live.create(snapshot="nosuchsnapshot")
    with pytest.raises(cove.NotFound):
        live.create(template="nosuchtemplate")
    with pytest.raises(cove.NotFound):
        live.Snapshot.get("nosuchsnapshot", client=live.client)
    with pytest.raises(cove.NotFound):
        live.create(volumes={"/data": "nosuchvolume"})
    with live.create(**SMALL) as sb:
        with pytest.raises(cove.NotFound):
            sb.restore("nosuchsnapshot")
        with pytest.raises(cove.CoveError):
            sb.fork(257)
        with pytest.raises(cove.CoveError):
            take(live, sb, path="/no/such/directory")


def test_a_template_starts_ready(live: Live) -> None:
    name = live.name("web")
    text: list[str] = []
    steps: list[str] = []
    template = live.Template.build(
        name,
        start="echo starting; cd /etc && exec python3 -m http.server --bind 127.0.0.1 8000",
        ready_port=8000,
        cpu=0.5,
        memory="128MiB",
        memory_limit="256MiB",
        on_output=text.append,
        on_step=steps.append,
        client=live.client,
    )
    assert template.id == f"{name}@1"
    assert template.build_time > 0
    assert "starting" in "".join(text)
    assert steps[0] == "create"
    assert steps[-1] == "done"
    fetch = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:8000/hostname').status)"
    for given in (template, name, f"{name}@1"):
        with live.create(template=given) as sb:
            assert sb.exec(["python3", "-c", fetch], timeout=60).stdout == "200\n"
    assert live.Template.get(name, client=live.client).version == 1
    assert [t.version for t in live.Template.list(name, client=live.client)] == [1]
    with pytest.raises(cove.CoveError):
        live.Template.build(name, start="false", ready_command="false", ready_timeout=1, client=live.client)
    assert live.Template.get(name, client=live.client).version == 1  # a failed build changes nothing
    assert template.delete() == [1]
    with pytest.raises(cove.NotFound):
        live.create(template=name)


def test_a_template_is_named_by_its_tags(live: Live) -> None:
    name = live.name("tagged")
    first, second = (live.Template.build(name, env={"N": n}, client=live.client, **SMALL) for n in "12")
    first.tag("stable", "old")
    assert first.tags == ("old", "stable")
    assert live.Template.get(f"{name}:stable", client=live.client).version == 1
    with live.create(template=f"{name}:stable") as sb:
        assert sb.exec("echo $N").stdout == "1\n"
    second.tag("stable")  # which takes it from the first
    assert [t.tags for t in live.Template.list(name, client=live.client)] == [("stable",), ("old",)]
    with live.create(template=f"{name}:stable") as sb:
        assert sb.exec("echo $N").stdout == "2\n"
    second.untag("old", "nowhere")  # whichever version has it
    assert second.tags == ("stable",)
    assert live.Template.get(first.id, client=live.client).tags == ()
    with pytest.raises(cove.NotFound):
        live.create(template=f"{name}:old")
    for wrong in ((), ("a b",)):
        with pytest.raises(cove.InvalidArgument) as refused:
            first.tag(*wrong)
        assert refused.value.field == "tags"
    assert second.delete() == [2]
    with pytest.raises(cove.NotFound):
        live.Template.get(f"{name}:stable", client=live.client)
