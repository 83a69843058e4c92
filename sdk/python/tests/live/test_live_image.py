"""Images built on a real server, step by step and of a Dockerfile."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cove
from cove import Image

from ..blocking import Blocking
from .conftest import Live

pytestmark = pytest.mark.live


@pytest.fixture
def name(live: Live) -> Iterator[str]:
    made = live.name("built")
    yield made
    with contextlib.suppress(cove.NotFound):
        live.client.images.remove(made)


def build(live: Live, what: Any, *args: Any, **options: Any) -> Image:
    image: Image
    if isinstance(live.client, Blocking):
        image = Blocking(what, live.client._loop).build_async(*args, client=live.client, **options)
    else:
        image = what.build(*args, client=live.client, **options)
    return image


def ran_again(events: list[cove.BuildEvent]) -> list[str]:
    """Steps with files that did not come from the cache."""
    cached = {event.step for event in events if event.kind == "cached"}
    steps = [event for event in events if event.kind == "step" and event.text.startswith(("RUN", "COPY"))]
    return [event.text for event in steps if event.step not in cached]


def test_step_by_step(live: Live, name: str, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "main.py").write_text("import os; print('hello', os.environ['WHO'])\n")
    recipe = (
        Image.from_("base")
        .run("mkdir -p /srv/data", f"echo {name} > /srv/data/made", user="root")
        .copy(tmp_path, "/srv/app/", owner="user")
        .copy(tmp_path / "pkg" / "main.py", "/srv/one.py", mode="755")
        .env(WHO="you")
        .workdir("/srv/app")
        .cmd("python3", "pkg/main.py")
    )
    events: list[cove.BuildEvent] = []
    image = build(live, recipe, name, on_event=events.append)
    assert image.names == (name,)
    assert (image.working_dir, image.cmd) == ("/srv/app", ("python3", "pkg/main.py"))
    assert len(ran_again(events)) == 3
    with live.create(image=name) as sb:
        out = sb.exec("python3 pkg/main.py; cat /srv/data/made; stat -c '%U %a' pkg/main.py /srv/one.py").stdout
    assert out.splitlines() == ["hello you", name, "user 644", "root 755"]
    events.clear()
    assert build(live, recipe, name, on_event=events.append).id == image.id
    assert ran_again(events) == []


def test_what_fails_is_typed_and_names_its_step(live: Live, name: str) -> None:
    with pytest.raises(cove.FailedPrecondition) as caught:
        build(live, Image.from_("base").env(A="1").run("echo it broke >&2; exit 3"), name)
    assert caught.value.field == "steps[1]"
    assert 'step 2 (.run("echo it broke >&2; exit 3"))' in str(caught.value)
    assert "it broke" in caught.value.hint
    with pytest.raises(cove.NotFound):
        live.client.images.get(name)


def test_a_dockerfile(live: Live, name: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        'FROM base\nARG N=0\nCOPY a /a\nRUN --mount=type=secret,id=s,env=S test "$S" = v && echo N is $N\n'
    )
    (tmp_path / "a").write_text("a")
    events: list[cove.BuildEvent] = []
    build(live, Image, name, tmp_path, args={"N": name}, secrets={"s": "v"}, on_event=events.append)
    assert f"N is {name}\n" in [event.text for event in events if event.kind == "output"]
    (tmp_path / "Dockerfile").write_text("FROM base\nRNU x\n")
    with pytest.raises(cove.InvalidArgument, match="did you mean 'RUN'") as caught:
        build(live, Image, name, tmp_path)
    assert caught.value.field == "dockerfile:2"


@pytest.mark.parametrize("live", ["sync"], indirect=True)
def test_packages(live: Live, name: str) -> None:
    for host, port in (("pypi.org", 443), ("deb.debian.org", 80)):
        try:
            socket.create_connection((host, port), timeout=10).close()
        except OSError as error:
            pytest.skip(f"{host} is not to be reached from here: {error}")
    build(live, Image.from_("base").apt("tree").pip("iniconfig").run("tree --version"), name)
    with live.create(image=name) as sb:
        assert sb.exec("python3 -c 'import iniconfig' && tree --version").exit_code == 0
        assert sb.exec("ls /var/lib/apt/lists").stdout == ""
