"""Records of a run as others read them: ATIF by harbor's own models, Parquet by pyarrow."""

import json
import os
import time
from pathlib import Path

import pytest

import cove


@pytest.fixture
def run():
    name = f"trajectories-{os.getpid()}-{time.time_ns()}"
    with cove.Run(name) as run:
        sb = run.sandbox(image="base", memory="64MiB", network="none")
        sb.exec("echo hello; echo oops >&2; exit 3")
        sb.exec(["printf", "\\377\\000"])
        sb.reset()
        sb.exec("true")
        sb.kill()
        yield run
    cove.Run.delete(name)


def test_atif_is_what_harbor_reads(run, tmp_path):
    from harbor.models.trajectories.trajectory import Trajectory

    files = run.export(tmp_path, "atif")
    assert len(files) == 2
    first, second = (Trajectory.model_validate_json(Path(f).read_text()) for f in sorted(files))
    assert first.schema_version == "ATIF-v1.7"
    assert first.session_id == second.session_id == run.id
    assert [s.step_id for s in first.steps] == [1, 2]
    assert first.steps[0].tool_calls[0].arguments["command"].startswith("echo hello")
    assert first.steps[0].observation.results[0].content == "hello\noops\n"
    assert first.steps[0].observation.results[0].extra["exit_code"] == 3
    assert (first.extra["end"]["cause"], second.extra["end"]["cause"]) == ("reset", "killed_by_user")
    with pytest.raises(ValueError):  # it does refuse what it does not know
        Trajectory.model_validate({**json.loads(Path(files[0]).read_text()), "reward": 1})


def test_parquet_is_what_arrow_reads(run, tmp_path):
    import pyarrow.parquet as pq

    (file,) = run.export(tmp_path, "parquet")
    rows = pq.read_table(file).to_pylist()
    assert [r["kind"] for r in rows] == ["step", "step", "episode", "step", "episode"]
    assert rows[0]["exit_code"] == 3
    assert rows[0]["stdout_head"] == b"hello\n"
    assert rows[1]["stdout_head"] == b"\xff\x00"
    assert rows[1]["args"] == ["printf", "\\377\\000"]
    assert rows[2]["exit_code"] is None
    assert rows[0]["started_at"] < rows[0]["ended_at"]
    lines = [json.loads(text) for text in Path(run.export(tmp_path, "jsonl")[0]).read_text().splitlines()]
    assert [r["id"] for r in lines] == [r["id"] for r in rows]


def test_a_consumer_that_dies_goes_on(run):
    shipment = cove.Shipment.create(f"feed-{run.id}", run=run.id)
    seen = []
    for record in shipment.records():
        seen.append(record["id"])
        if len(seen) == 3:
            shipment.ack(record)
            break
    again = [r["id"] for r in cove.Shipment.get(shipment.name).records()]
    assert len(again) == 2 and not set(seen) & set(again)
    with pytest.raises(cove.FailedPrecondition):
        run.end()
        cove.Run.delete(run.id)
    shipment.delete()
