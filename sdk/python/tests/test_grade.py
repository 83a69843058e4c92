"""Grades: tests are sent once, a verdict is waited for, and no reward is not 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Break, Got, Plain

GRADE: dict[str, Any] = {"id": "g1", "sandbox": "sb1", "state": "running"}
DONE: dict[str, Any] = {
    **GRADE,
    "state": "graded",
    "reward": 0,
    "rewards": {"passed": 1, "total": 2, "pass_rate": 0.5},
    "reason": "1 of 2 tests passed",
    "tests": [{"id": "t.py::a", "outcome": "passed", "duration": "0.5s"}, {"id": "t.py::b", "outcome": "missing"}],
    "findings": [{"kind": "python_path", "path": "/work/x.pth", "carried": True}],
    "digest": "sha256:1",
    "log": "x",
    "setup": "0.050s",
    "createdAt": "2026-03-01T10:00:00Z",
}


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n")
    return tmp_path


def put_tests(api: Api) -> None:
    api.server.on("PUT tests", Plain(b'{"snapshot": "sn7", "size": 10}'))


def test_tests_are_sent_once_and_the_verdict_is_waited_for(api: Api, tests: Path) -> None:
    put_tests(api)
    answers: list[Any] = [{"grade": GRADE}, Break(), {"grade": DONE}]
    api.server.on("Grades/Create", {"grade": GRADE})
    api.server.on("Grades/Wait", lambda _: answers.pop(0))
    sb = api.sandbox()
    v = sb.grade(tests, "pytest", ["/work"], timeout=60, expected=["t.py::a"], memory="1GiB", stop=True)
    assert (v.state, v.reward, v.passed, v.done) == ("graded", 0.0, False, True)
    assert v.tests[1] == cove.TestResult("t.py::b", "missing")
    assert v.tests[0].duration == 0.5
    assert v.findings == (cove.Finding("python_path", "/work/x.pth", "", True),)
    message = dict(api.server.sent("Create")[-1].message)
    assert len(message.pop("idempotencyKey")) == 32
    assert message == {
        "sandbox": "sb1",
        "tests": "sn7",
        "command": "pytest",
        "artifacts": ["/work"],
        "timeout": "60s",
        "expected": ["t.py::a"],
        "resources": {"memory": str(1 << 30)},
        "stop": True,
    }
    api.server.on("Grades/Create", {"grade": DONE})
    sb.grade(str(tests), ["true"], ["/work"])
    assert api.server.sent("Create")[-1].message["args"] == ["true"]
    assert len([r for r in api.server.requests if "grades/tests" in r.path]) == 1


def test_no_reward_is_none(api: Api) -> None:
    error = {"code": "unavailable", "message": "the server ended", "hint": "again"}
    api.server.on("Grades/Create", {"grade": {**GRADE, "state": "infra", "error": error}})
    v = api.sandbox().grade("sn7", ["true"], ["/work"])
    assert v.reward is None
    assert not v.passed
    assert (v.error_code, v.error) == ("unavailable", "the server ended")
    assert api.server.sent("Create")[-1].message["tests"] == "sn7"


def test_a_grade_that_is_left_running(api: Api) -> None:
    api.server.on("Grades/Create", {"grade": GRADE})
    v = api.sandbox().grade("sn7", ["true"], ["/work"], wait=False)
    assert not v.done


def test_a_path_alone_is_no_list(api: Api) -> None:
    with pytest.raises(cove.InvalidArgument, match="list of paths"):
        api.sandbox().grade("sn7", ["true"], "/work")


def test_verdicts_are_found(server: Any, time: Any) -> None:
    def page(got: Got) -> dict[str, Any]:
        return {"grades": [DONE], **({} if got.message.get("pageToken") else {"nextPageToken": "n"})}

    server.on("Grades/List", page)
    server.on("Grades/Get", {"grade": DONE})
    server.on("Grades/Wait", {"grade": GRADE})
    client = cove.Client(server.url, server.KEY, keep=True)
    assert [v.id for v in cove.Verdict.list("sb1", state="graded", client=client)] == ["g1", "g1"]
    assert cove.Verdict.get("g1", client=client).log == "x"
    running = cove.Verdict.parse(GRADE)
    with pytest.raises(cove.DeadlineExceeded, match="still running"):
        running.wait(timeout=0.05, client=client)
