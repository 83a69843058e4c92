"""Grades of a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

import cove

from .conftest import Live

pytestmark = pytest.mark.live


def test_right_and_wrong_work_are_told_apart(live: Live, tmp_path: Path) -> None:
    (tmp_path / "test_add.py").write_text("from solution import add\ndef test_add(): assert add(2, 3) == 5\n")
    sb = live.create()
    rewards = []
    for work in ("def add(a, b): return a + b", "def add(a, b): return a - b", "import os; os._exit(0)"):
        sb.files.write("/work/solution.py", work)
        verdict = sb.grade(tmp_path, artifacts=["/work"], timeout=60)
        assert verdict.state == "graded", verdict
        rewards.append(verdict.reward)
    assert rewards == [1.0, 0.0, 0.0]
    sb.kill()
    assert cove.Verdict.get(verdict.id).reward == 0.0
