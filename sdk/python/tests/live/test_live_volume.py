"""Volumes of a real server: content without a sandbox, content that outlives one, who may hold it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cove

from .conftest import LABEL, Live

pytestmark = pytest.mark.live

SMALL = {"cpu": 0.5, "memory": "64MiB", "memory_limit": "256MiB", "disk": "256MiB"}


@pytest.fixture
def volume(live: Live) -> Iterator[Any]:
    made = live.Volume.create(live.name("data"), "64MiB", labels={LABEL: live.run}, client=live.client)
    yield made
    made.delete()


def test_files_without_a_sandbox(live: Live, volume: Any, tmp_path: Path) -> None:
    data = os.urandom(3_000_001)
    volume.files.write("/dir/ü &=.txt", "grüße")
    volume.files.write("/big", iter([data[:1_000_000], data[1_000_000:]]))
    assert volume.files.read("/dir/ü &=.txt") == "grüße"
    assert volume.files.read_bytes("/big") == data
    assert volume.files.download("/big", tmp_path / "out") == len(data)
    assert (tmp_path / "out").read_bytes() == data
    volume.files.upload(tmp_path / "out", "/copy")
    assert {f.name for f in volume.files.list()} >= {"dir", "big", "copy"}
    assert "/dir/ü &=.txt" in [f.path for f in volume.files.list("/", depth=2)]
    volume.files.remove("/copy")
    volume.files.remove("/dir", recursive=True)
    with pytest.raises(cove.NotFound):
        volume.files.read("/copy")
    assert volume.info().used >= len(data)


def test_content_outlives_the_sandbox(live: Live, volume: Any) -> None:
    volume.files.write("/from-outside", "1")
    with live.create(volumes={"/data": volume}, **SMALL) as sb:
        assert sb.files.read("/data/from-outside") == "1"
        sb.exec("echo 2 > /data/from-inside; sync", user="root").check()
        assert [(h.sandbox, h.mode) for h in volume.info().holders] == [(sb.id, "rw")]
        with pytest.raises(cove.FailedPrecondition):
            volume.delete()
        with pytest.raises(cove.CoveError):
            live.create(volumes={"/data": volume}, **SMALL)  # rw is alone
    assert volume.info().holders == ()
    with live.create(volumes={"/data": (volume.name, "ro")}, **SMALL) as sb:
        assert sb.files.read("/data/from-inside") == "2\n"
        assert not sb.exec("echo 3 > /data/from-inside", user="root").ok
    assert volume.files.read("/from-inside") == "2\n"


def test_a_clone_goes_its_own_way(live: Live, volume: Any) -> None:
    volume.files.write("/x", "first")
    clone = volume.clone(live.name("clone"), labels={LABEL: live.run})
    try:
        volume.files.write("/x", "second")
        assert clone.files.read("/x") == "first"
        assert clone.last_info.cloned_from in (volume.id, volume.name)
    finally:
        clone.delete()


def test_a_volume_grows_and_has_an_end(live: Live, volume: Any) -> None:
    with pytest.raises(cove.CoveError):
        volume.files.write("/too-big", b"x" * (80 << 20))
    assert volume.resize("128MiB").size == 128 << 20
    volume.files.write("/fits", b"x" * (80 << 20))
    assert live.Volume.get(volume.name, client=live.client).size == 128 << 20


def test_names_are_taken_once(live: Live, volume: Any) -> None:
    with pytest.raises(cove.AlreadyExists):
        live.Volume.create(volume.name, labels={LABEL: live.run}, client=live.client)
    assert volume.id in [v.id for v in live.Volume.list({LABEL: live.run}, client=live.client)]
    with pytest.raises(cove.NotFound):
        live.Volume.get("nosuchvolume", client=live.client)


def test_a_volume_is_frozen_and_made_again(live: Live) -> None:
    volume = live.Volume.create(live.name("frozen"), "32MiB", client=live.client)
    volume.files.write("/dir/file", "as it was")
    snap = volume.snapshot(live.name("frozen-snap"))
    assert snap.kind == "directory"
    volume.files.write("/dir/file", "changed")
    again = live.Volume.create(live.name("thawed"), "32MiB", snapshot=snap, client=live.client)
    assert again.files.read("/dir/file") == "as it was"
    with live.create() as sb:
        snap.mount(sb, "/mnt/frozen")
        assert sb.exec(["cat", "/mnt/frozen/dir/file"]).stdout == "as it was"
    for v in (volume, again):
        v.delete()
    snap.delete()


def test_a_volume_over_memory(live: Live, volume: Any) -> None:
    """Memory that was saved without a volume has the one it is restored with, and the next memory has it too."""
    with live.create(**SMALL) as sb:
        snap = sb.snapshot(labels={LABEL: live.run})
        template = live.Template.build(live.name("plain"), start="exec sleep infinity", client=live.client, **SMALL)
    try:
        for origin in ({"snapshot": snap}, {"template": template}):
            with live.create(volumes={"/mnt/v": volume}, **origin) as sb:
                sb.exec("echo kept > /mnt/v/f").check()
                assert volume.files.read("/f") == "kept\n"
                second = sb.snapshot(labels={LABEL: live.run})
            other = live.Volume.create(live.name("other"), "64MiB", labels={LABEL: live.run}, client=live.client)
            with live.create(snapshot=second) as sb:  # with the volume that it was saved with
                assert sb.exec("cat /mnt/v/f").check().stdout == "kept\n"
            with live.create(snapshot=second, volumes={"/mnt/v": other}) as sb:
                sb.exec("test ! -e /mnt/v/f && echo its own > /mnt/v/g").check()
            assert other.files.read("/g") == "its own\n"
            assert "g" not in [f.name for f in volume.files.list()]
            with pytest.raises(cove.CoveError, match="saved with a volume at /mnt/v"):
                live.create(snapshot=second, volumes={"/elsewhere": other})
            other.delete()
            volume.files.remove("/f")
    finally:
        template.delete()
