"""Sandboxes of a real server: life, labels, limits, errors, many at once."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from typing import Any

import pytest

import cove

from .conftest import LABEL, Live

pytestmark = pytest.mark.live


def test_create_says_what_was_made(live: Live) -> None:
    with live.create(
        cpu=0.5,
        memory="128MiB",
        memory_limit="256MiB",
        disk="100MiB",
        timeout=600,
        idle_timeout=300,
        env={"EPISODE": "ünö"},
        labels={"kind": "made"},
    ) as sb:
        info = sb.info()
        assert info.id == sb.id
        assert info.state == "running"
        assert info.image == "base"
        assert info.image_id.startswith("sha256:")
        assert (info.resources.cpu, info.resources.memory, info.resources.memory_limit) == (0.5, 128 << 20, 256 << 20)
        assert info.resources.disk == 100 << 20
        assert info.labels["kind"] == "made"
        assert (info.timeout, info.idle_timeout, info.episode) == (600, 300, 1)
        assert 590 < (info.expires_at - info.created_at).total_seconds() < 610
        assert sb.node_time > 0
        assert sb.exec("echo $EPISODE").stdout == "ünö\n"


def test_the_context_manager_kills_and_the_end_stays_readable(live: Live) -> None:
    with live.create() as sb:
        pass
    info = live.Sandbox.get_info(sb.id, client=live.client)
    assert info.state == "ended"
    assert info.end.cause == "killed_by_user"
    assert sb.kill().cause == "killed_by_user"  # again: the first end
    with pytest.raises(cove.SandboxEnded):
        sb.exec("true")
    with pytest.raises(cove.SandboxEnded):
        sb.files.read("/etc/passwd")
    with pytest.raises(cove.SandboxEnded):
        live.Sandbox.connect(sb.id, client=live.client)


def test_connect_is_the_same_sandbox(live: Live, sb: Any) -> None:
    sb.files.write("/tmp/mark", "here")
    again = live.Sandbox.connect(sb.id, client=live.client)
    assert again.files.read("/tmp/mark") == "here"


def test_an_idempotency_key_makes_one(live: Live) -> None:
    key = uuid.uuid4().hex
    with live.create(idempotency_key=key, cpu=0.5) as sb:
        assert live.create(idempotency_key=key, cpu=0.5).id == sb.id
        with pytest.raises(cove.AlreadyExists):
            live.create(idempotency_key=key, cpu=0.25)


def test_reset_leaves_nothing(live: Live) -> None:
    with live.create() as sb:
        sb.files.write("/tmp/old", "x")
        sb.exec("echo y > /dev/shm/old; mkdir -p /opt/old", user="root").check()
        sb.start("sleep 1000", exec_id="old")
        info = sb.reset()
        assert info.episode == 2
        assert sb.node_time > 0
        for path in ("/tmp/old", "/dev/shm/old", "/opt/old"):
            assert not sb.files.exists(path)
        assert not any("sleep" in task.command for task in sb.processes().tasks)
        assert sb.exec("echo fresh").stdout == "fresh\n"


def test_a_process_of_before_a_reset_ends_with_that_cause(live: Live) -> None:
    with live.create() as sb:
        process = sb.start("sleep 1000")
        sb.reset()
        assert process.wait().end.cause == "reset"


def test_a_timeout_ends_a_sandbox(live: Live) -> None:
    sb = live.create()
    assert sb.set_timeout(3600).expires_at is not None
    assert sb.set_timeout(None).expires_at is None
    sb.set_timeout(1)
    deadline = time.monotonic() + 60
    while sb.info().state != "ended" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sb.last_info.end.cause == "ttl"


def test_stats_come_from_the_host(live: Live, sb: Any) -> None:
    sb.exec("head -c 20000000 /dev/urandom > /var/tmp/stats; sync")
    stats = sb.stats()
    assert stats.cpu_time > 0
    assert stats.memory > 1 << 20
    assert stats.disk_used > 10 << 20
    assert stats.processes >= 0


def test_labels_list_and_kill(live: Live) -> None:
    batch = uuid.uuid4().hex
    made = {live.create(cpu=0.1, memory="64MiB", labels={"batch": batch, "n": str(n)}).id for n in range(5)}
    found = [s.id for s in live.Sandbox.list({"batch": batch}, page_size=2, client=live.client)]
    assert len(found) == 5
    assert set(found) == made
    (one,) = live.Sandbox.list({"batch": batch, "n": "3"}, client=live.client)
    assert one.last_info.labels["n"] == "3"
    assert set(live.Sandbox.kill_by_label({"batch": batch}, client=live.client)) == made
    assert list(live.Sandbox.list({"batch": batch}, client=live.client)) == []
    ended = list(live.Sandbox.list({"batch": batch}, states=["ended"], client=live.client))
    assert {s.last_info.end.cause for s in ended} == {"killed_by_user"}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"cpu": -1}, "cpu"),
        ({"memory": 5}, "memory"),
        ({"memory": "256MiB", "memory_limit": "128MiB"}, "memory_limit"),
        ({"labels": {"sp ace": "x"}}, "labels"),
        ({"env": {"1A": "x"}}, "env"),
        ({"timeout": 0.5}, "timeout"),
        ({"image": "-x"}, "image"),
    ],
)
def test_a_wrong_field_is_named(live: Live, wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(cove.InvalidArgument) as caught:
        live.create(**wrong)
    assert field in caught.value.field
    assert caught.value.code == "invalid_argument"


def test_an_unknown_image_suggests_the_right_one(live: Live) -> None:
    with pytest.raises(cove.ImageNotFound) as caught:
        live.create(image="bse")
    assert "base" in str(caught.value)


def test_an_unknown_sandbox(live: Live) -> None:
    with pytest.raises(cove.NotFound):
        live.Sandbox.connect("nosuchsandbox", client=live.client)


def test_a_wrong_key(run: str) -> None:
    with cove.Client(key="wrong") as client:
        with pytest.raises(cove.Unauthenticated):
            client.info()
        with pytest.raises(cove.Unauthenticated):
            cove.Sandbox.create(client=client)


def test_more_than_the_machine_has(live: Live) -> None:
    with pytest.raises(cove.TooLarge) as e:
        live.create(memory="8TiB", create_timeout=0)
    assert e.value.field == "spec.resources.memory"
    assert e.value.hint


def test_images_and_info(live: Live) -> None:
    info = live.client.info()
    assert info.version
    assert info.total.memory > 0
    image = live.client.images.get("base")
    assert image.id.startswith("sha256:")
    assert "base" in image.names
    assert image.id in {i.id for i in live.client.images.list()}
    with pytest.raises(cove.ImageNotFound):
        live.client.images.get("no-such-image")
    with pytest.raises(cove.ImageNotFound):
        live.client.images.remove("no-such-image")
    with pytest.raises(cove.CoveError):
        live.client.images.pull("127.0.0.1:1/no/registry:here")


def test_an_oom_is_told(live: Live) -> None:
    with live.create(memory="64MiB", memory_limit="64MiB") as sb:
        result = sb.exec(["python3", "-c", "x = bytearray(1 << 30); print(len(x))"], timeout=60)
        assert not result.ok
        assert "1073741824" not in result.stdout
        assert result.end.cause in ("oom", "exited", "signalled")


def test_many_at_once(run: str) -> None:
    count = int(os.environ.get("COVE_TEST_MANY", "256"))
    batch = uuid.uuid4().hex

    async def main() -> set[str]:
        async with cove.AsyncClient(create_timeout=300) as client:

            async def episode(n: int) -> str:
                sb = await cove.AsyncSandbox.create(
                    cpu=0.05,
                    memory="32MiB",
                    memory_limit="128MiB",
                    disk="16MiB",
                    labels={LABEL: run, "batch": batch},
                    client=client,
                )
                result = await sb.exec(["echo", str(n)], timeout=120)
                assert result.check().stdout == f"{n}\n"
                return sb.id

            made = set(await asyncio.gather(*(episode(n) for n in range(count))))
            live = {s.id async for s in cove.AsyncSandbox.list({"batch": batch}, client=client)}
            assert live == made
            assert set(await cove.AsyncSandbox.kill_by_label({"batch": batch}, client=client)) == made
            return made

    assert len(asyncio.run(main())) == count
