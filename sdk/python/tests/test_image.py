"""Builds of images: of a Dockerfile and its context, or step by step."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest

import cove
from cove import Image

from .blocking import Blocking
from .conftest import Api
from .fake_cove import Break, Fail, Got, Plain, Stream

DONE = {"build": {"id": "b1", "state": "done", "image": {"id": "sha256:ab", "names": ["app"], "env": ["A=1"]}}}
STEPS = [
    {"kind": "step", "step": 1, "total": 2, "text": "FROM base"},
    {"kind": "step", "step": 2, "total": 2, "text": "RUN x"},
    {"kind": "output", "step": 2, "total": 2, "text": "hi\n", "stderr": True},
]


class Builds:
    """A fake server that keeps what was uploaded, under both ways into the SDK."""

    def __init__(self, api: Api) -> None:
        self.server, self.client = api.server, api.client
        self.uploads: dict[str, bytes] = {}
        self.server.on("Images/HasFiles", lambda got: {"has": got.message["key"] in self.uploads})
        self.server.on("Images/Build", lambda _: Stream([*STEPS, DONE]))

    def put(self, key: str, got: Got) -> Plain:
        self.uploads[key] = got.body
        return Plain(b"{}")

    def __call__(self, recipe_or_name: Any, *args: Any, **options: Any) -> Image:
        recipe = isinstance(recipe_or_name, cove.Recipe)
        owner = recipe_or_name if recipe else Image
        given = args if recipe else (recipe_or_name, *args)
        image: Image
        if isinstance(self.client, Blocking):
            image = Blocking(owner, self.client._loop).build_async(*given, client=self.client, **options)
        else:
            image = owner.build(*given, client=self.client, **options)
        return image

    def message(self) -> dict[str, Any]:
        return self.server.sent("Images/Build")[-1].message

    def files(self, key: str) -> dict[str, Optional[str]]:
        return content(self.uploads[key])


def content(data: bytes) -> dict[str, Optional[str]]:
    """The files of a tar with their text, directories with None, links as "-> target"."""
    found: dict[str, Optional[str]] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            file = tar.extractfile(info) if info.isreg() else None
            found[info.name] = file.read().decode() if file else f"-> {info.linkname}" if info.issym() else None
    return found


@pytest.fixture
def builds(api: Api, monkeypatch: pytest.MonkeyPatch) -> Builds:
    made = Builds(api)
    # The name of the route is the key of the files.
    handle = api.server.handle

    def with_uploads(got: Got) -> Any:
        directory, _, key = got.path.rpartition("/")
        if got.method == "PUT" and directory == "/v1/build-files":
            api.server.on(f"PUT {key}", lambda got: made.put(key, got))
        return handle(got)

    monkeypatch.setattr(api.server, "handle", with_uploads)
    return made


def directory(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


def test_a_recipe_is_its_steps_in_order(builds: Builds, tmp_path: Path) -> None:
    source = directory(tmp_path / "src", {"main.py": "1", "pkg/a.py": "2"})
    (tmp_path / "one").write_text("3")
    recipe = (
        Image.from_("base")
        .apt("git", "lib x")
        .pip("requests>=2")
        .run("make", "make install", user="root")
        .copy(source, "/srv/app/", owner="app", mode="755")
        .copy(tmp_path / "one", "/etc/one")
        .env({"A": "1"}, B="2")
        .label({"l": "v"})
        .workdir("/srv")
        .user("app")
        .expose(80, "53/udp")
        .entrypoint("e", "1")
        .cmd("c")
    )
    events: list[cove.BuildEvent] = []
    image = builds(recipe, "app", args={"N": "1"}, timeout=60, no_cache=True, on_event=events.append)
    assert (image.id, image.names, image.env) == ("sha256:ab", ("app",), ("A=1",))
    sent = builds.message()
    assert (sent["name"], sent["from"], sent["args"], sent["timeout"], sent["noCache"]) == (
        "app",
        "base",
        {"N": "1"},
        "60s",
        True,
    )
    steps = sent["steps"]
    ops = " ".join(step["op"] for step in steps)
    assert ops == "RUN RUN RUN COPY COPY ENV LABEL WORKDIR USER EXPOSE ENTRYPOINT CMD"
    apt, pip, run, tree, one, env, *rest = steps
    assert "apt-get update && " in apt["args"][0]
    assert "install -y --no-install-recommends git 'lib x'" in apt["args"][0]
    assert "pip install --no-cache-dir 'requests>=2'" in pip["args"][0]
    assert {apt["user"], pip["user"]} == {"root"}
    assert run == {"op": "RUN", "args": ["make && make install"], "user": "root"}
    assert (tree["args"], tree["user"], tree["mode"]) == ([".", "/srv/app/"], "app", "755")
    assert builds.files(tree["files"]) == {"main.py": "1", "pkg": None, "pkg/a.py": "2"}
    assert one["args"] == ["one", "/etc/one"]
    assert builds.files(one["files"]) == {"one": "3"}
    assert env["args"] == ["A", "1", "B", "2"]
    assert [step["args"] for step in rest] == [["l", "v"], ["/srv"], ["app"], ["80", "53/udp"], ["e", "1"], ["c"]]
    assert [(event.kind, event.step, event.total, event.text, event.stderr) for event in events] == [
        ("step", 1, 2, "FROM base", False),
        ("step", 2, 2, "RUN x", False),
        ("output", 2, 2, "hi\n", True),
    ]


def test_recipes_share_their_beginning(builds: Builds) -> None:
    common = Image.from_("base").run("one")
    builds(common.run("two"), "a")
    assert [step["args"] for step in builds.message()["steps"]] == [["one"], ["two"]]
    builds(common, "b")
    assert [step["args"] for step in builds.message()["steps"]] == [["one"]]


def test_what_no_server_could_do_is_refused_at_once(tmp_path: Path) -> None:
    recipe = Image.from_("base")
    mistakes: list[tuple[Callable[[], Any], str]] = [
        (lambda: recipe.apt(), "apt"),
        (lambda: recipe.pip(""), "pip"),
        (lambda: recipe.run(), "run"),
        (lambda: recipe.copy(tmp_path / "none", "/x"), "local"),
        (lambda: Image.build("app"), "context"),
        (lambda: Image.build("app", tmp_path), "dockerfile"),
    ]
    for wrong, field in mistakes:
        with pytest.raises(cove.InvalidArgument) as caught:
            wrong()
        assert caught.value.field == field


def test_files_are_uploaded_once(builds: Builds, tmp_path: Path) -> None:
    directory(tmp_path, {"Dockerfile": "FROM base\nCOPY a /\n", "a": "1"})
    builds("app", tmp_path)
    builds("app", tmp_path)
    assert len([got for got in builds.server.requests if got.method == "PUT"]) == 1
    (tmp_path / "a").write_text("2")
    builds("app", tmp_path)
    assert len([got for got in builds.server.requests if got.method == "PUT"]) == 2


def test_a_dockerfile_with_its_options(builds: Builds, tmp_path: Path) -> None:
    directory(tmp_path, {"docker/My.file": "FROM base\nCOPY a b/* /x/\n", "docker/My.file.dockerignore": "b/skip\n"})
    directory(tmp_path, {"a": "1", "b/c": "2", "b/skip": "3", "large": "4", ".dockerignore": "a\n"})
    builds(
        "app",
        tmp_path,
        dockerfile=tmp_path / "docker/My.file",
        target="t",
        secrets={"s": "v"},
        tags=["app:2"],
        network="none",
    )
    sent = builds.message()
    assert sent["dockerfile"] == "FROM base\nCOPY a b/* /x/\n"
    assert (sent["target"], sent["secretValues"], sent["tags"]) == ("t", {"s": "dg=="}, ["app:2"])
    assert sent["ignoreFile"] == "docker/My.file.dockerignore"
    assert sent["contextPartial"] is True
    assert set(builds.files(sent["context"])) == {
        ".dockerignore",
        "a",
        "b",
        "b/c",
        "docker",
        "docker/My.file.dockerignore",
    }


@pytest.mark.parametrize(
    ("dockerfile", "want"),
    [
        ("FROM base\nCOPY a /\n", "a"),
        ("FROM base\nCOPY --chown=1 a \\\n  # of a comment\n\n  d/e /x/\n", "a d/e"),
        ('from base\ncopy ["a", "d/f", "/x/"]\n', "a d/f"),
        ("FROM base AS s\nCOPY --from=s a /\nADD https://h/a /\nADD d/? /\n", "d/e d/f"),
        ("FROM base\nCOPY ../a /\n", "a"),
        ("FROM base\nCOPY <<E /x\nCOPY d/e /y\nE\n", "d/e"),
        ("FROM base\nRUN --mount=type=cache,target=/c x\nRUN --mount=from=s,target=/m x\nCOPY a /\n", "a"),
        ("FROM base\nONBUILD COPY a /\n", "a"),
        ("FROM base\nRUN --mount=type=bind,source=a,target=/m x\n", None),
        ("FROM base\nRUN --mount=target=/m x\n", None),
        ("FROM base\nCOPY . /\n", None),
        ("FROM base\nCOPY $X /\n", None),
        ('FROM base\nCOPY "a" /\n', None),
        ("# escape=`\nFROM base\nCOPY a /\n", None),
        ("FROM base\nCOPY link /\n", None),
        ("FROM base\nCOPY lin* /\n", None),
    ],
)
def test_only_what_the_dockerfile_names_is_sent(tmp_path: Path, dockerfile: str, want: Optional[str]) -> None:
    directory(tmp_path, {"Dockerfile": dockerfile, "a": "", "d/e": "", "d/f": "", "large": ""})
    os.symlink("large", tmp_path / "link")
    message, (files,) = cove.image.of_dockerfile("app", tmp_path, None, {})
    with files.file:
        names = {name for name, text in content(files.file.read()).items() if text is not None}
    everything = {"Dockerfile", "a", "d/e", "d/f", "large", "link"}
    assert names == (everything if want is None else set(want.split()))
    assert message.get("contextPartial", False) is (want is not None)


def test_an_onbuild_of_the_base_gets_the_whole_context(builds: Builds, tmp_path: Path) -> None:
    directory(tmp_path, {"Dockerfile": "FROM parent\n", "a": "1"})

    def build(got: Got) -> Any:
        if got.message.get("contextPartial"):
            return Fail("failed_precondition", "failed_precondition", "only some was given", field_name="context")
        return Stream([DONE])

    builds.server.on("Images/Build", build)
    assert builds("app", tmp_path).id == "sha256:ab"
    assert set(builds.files(builds.message()["context"])) == {"Dockerfile", "a"}


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (
            Fail("failed_precondition", "failed_precondition", "exit 1", field_name="dockerfile:2"),
            cove.FailedPrecondition,
        ),
        (
            Fail("invalid_argument", "invalid_argument", "no instruction", field_name="dockerfile:1"),
            cove.InvalidArgument,
        ),
        (Fail("image_not_found", "not_found", "no image", field_name="dockerfile:1"), cove.ImageNotFound),
        (Fail("quota_exceeded", "resource_exhausted", "too many builds"), cove.QuotaExceeded),
    ],
)
def test_errors_are_typed_and_name_the_line(
    builds: Builds, tmp_path: Path, fail: Fail, error: type[cove.CoveError]
) -> None:
    builds.server.on("Images/Build", lambda _: Stream([STEPS[0], fail]))
    directory(tmp_path, {"Dockerfile": "FROM base\nRUN x\n"})
    with pytest.raises(error) as caught:
        builds("app", tmp_path)
    assert caught.value.field == fail.field_name


def test_errors_name_the_step_as_it_was_written(builds: Builds) -> None:
    recipe = Image.from_("bse").env(TOKEN="hunter2").pip("requests", "x" * 80).run("make")
    for field, want in (
        ("steps[0]", "step 1 (.env(TOKEN=…)): it broke"),
        ("steps[1]", 'step 2 (.pip("requests", "' + "x" * 46 + "…)): it broke"),
        ("steps[2]", 'step 3 (.run("make")): it broke'),
        ("from", 'Image.from_("bse"): it broke'),
        ("steps[3]", "steps[3]: it broke"),
        ("name", "name: it broke"),
    ):
        fail = Fail("failed_precondition", "failed_precondition", f"{field}: it broke", field_name=field)
        builds.server.on("Images/Build", lambda _, fail=fail: Stream([STEPS[0], fail]))
        with pytest.raises(cove.FailedPrecondition) as caught:
            builds(recipe, "app")
        assert (str(caught.value), caught.value.message, caught.value.field) == (want, want, field)


def test_a_server_that_goes_away_is_an_error(builds: Builds) -> None:
    for items in ([STEPS[0], Break()], [STEPS[0]]):
        builds.server.on("Images/Build", lambda _, items=items: Stream(items))
        with pytest.raises(cove.TransportError):
            builds(Image.from_("base").run("x"), "app")


def test_an_error_of_the_callers_own_ends_the_build(builds: Builds) -> None:
    def raising(_: cove.BuildEvent) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        builds(Image.from_("base").run("x"), "app", on_event=raising)
