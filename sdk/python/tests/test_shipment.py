"""Shipments, and a run as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cove

from .conftest import Api
from .fake_cove import Fail, Got, Plain
from .test_run import begun


def shipment_json(**more: Any) -> dict[str, Any]:
    return {
        "id": "sh1",
        "name": "feed",
        "run": "r1",
        "sink": {"kind": "s3", "format": "parquet", "path": "bucket/x", "accessKey": "id", "secret": "key"},
        "state": "failing",
        "maxLag": "1073741824",
        "linger": "60s",
        "createdAt": "2026-03-01T10:00:00Z",
        "lag": "512",
        "records": "7",
        "error": {"code": "no_capacity"},
        "errorMessage": "host answered 503",
        "positions": [{"run": "r1", "cursor": "r1.99", "records": "7"}],
        **more,
    }


def line(n: int, **more: Any) -> bytes:
    record = {"schema": 1, "kind": "step", "id": f"step:r1-{n}", "run": "r1", "cursor": f"r1.{n}", **more}
    return json.dumps(record).encode() + b"\n"


def test_what_is_asked_for(api: Api) -> None:
    api.server.on("Shipments/Create", {"shipment": shipment_json()})
    api.Shipment.create("feed", client=api.client)
    sink = {"kind": "s3", "url": "https://s3.example", "path": "bucket/x", "access_key": "id", "secret": "key"}
    sh = api.Shipment.create("feed", run="grpo-7", sink=sink, max_lag=1 << 20, linger=2.5, client=api.client)
    first, second = (got.message for got in api.server.sent("Create"))
    assert first.pop("idempotencyKey") != second.pop("idempotencyKey")
    assert first == {"name": "feed", "sink": {"kind": "pull"}}
    assert second == {
        "name": "feed",
        "run": "grpo-7",
        "sink": {"kind": "s3", "url": "https://s3.example", "path": "bucket/x", "accessKey": "id", "secret": "key"},
        "maxLag": "1048576",
        "linger": "2.5s",
    }
    info = sh.last_info
    assert (info.state, info.lag, info.records, info.linger) == ("failing", 512, 7, 60.0)
    assert (info.error, info.error_code) == ("host answered 503", "no_capacity")
    assert info.sink["access_key"] == "id"
    assert info.positions == {"r1": "r1.99"}


def test_its_life(api: Api) -> None:
    api.server.on("Shipments/List", {"shipments": [shipment_json()]})
    api.server.on("Shipments/Get", {"shipment": shipment_json(state="active")})
    for method in ("Pause", "Resume", "Ack"):
        api.server.on(f"Shipments/{method}", {"shipment": shipment_json(state=method)})
    api.server.on("Shipments/Delete", {})
    sh = api.Shipment.get("feed", client=api.client)
    assert [s.last_info.id for s in api.Shipment.list(client=api.client)] == ["sh1"]
    assert sh.info().state == "active"
    assert (sh.pause().state, sh.resume().state) == ("Pause", "Resume")
    sh.ack("r1.5")
    sh.ack({"cursor": "r1.6"})
    assert [got.message["cursor"] for got in api.server.sent("Ack")] == ["r1.5", "r1.6"]
    sh.delete()


def test_records_go_on_after_a_break(api: Api) -> None:
    asked: list[dict[str, str]] = []

    def answer(got: Got) -> Plain:
        asked.append(got.query)
        if len(asked) == 1:
            return Plain([line(1), b"\n", line(2), line(3)[:10]], broken=True)
        return Plain([line(3), line(4, text="ü")])

    api.server.on("Shipments/Get", {"shipment": shipment_json()})
    api.server.on("GET records", answer)
    sh = api.Shipment.get("feed", client=api.client)
    assert [r["id"] for r in sh.records(follow=True)] == [f"step:r1-{n}" for n in (1, 2, 3, 4)]
    assert asked == [{"follow": "true"}, {"cursor": "r1.2", "follow": "true"}]


def test_an_error_at_the_end_of_a_stream_is_raised(api: Api) -> None:
    failed = json.dumps(Fail("corrupt", "data_loss", "damaged").body()).encode() + b"\n"
    api.server.on("GET export", lambda got: Plain([line(1), failed]))
    with begun(api) as run, pytest.raises(cove.CoveError) as raised:
        list(run.records())
    assert raised.value.code == "corrupt"


def test_a_run_as_files(api: Api, tmp_path: Path) -> None:
    def answer(got: Got) -> Plain:
        return {
            "": Plain([line(1), line(2)]),
            "parquet": Plain(b"PAR1 and so on"),
            "atif": Plain([b'{"trajectory_id":"sb1.1"}\n', b'{"trajectory_id":"sb1.2"}\n']),
        }[got.query.get("format", "")]

    api.server.on("GET export", answer)
    with begun(api) as run:
        assert run.export(tmp_path / "a") == [str(tmp_path / "a" / "records.jsonl")]
        lines = (tmp_path / "a" / "records.jsonl").read_text().splitlines()
        assert [json.loads(text)["id"] for text in lines] == ["step:r1-1", "step:r1-2"]
        (file,) = run.export(tmp_path, "parquet")
        assert Path(file).read_bytes() == b"PAR1 and so on"
        files = run.export(tmp_path / "t", "atif")
        assert files == [str(tmp_path / "t" / f"sb1.{n}.json") for n in (1, 2)]
        assert sorted(p.name for p in (tmp_path / "t").iterdir()) == ["sb1.1.json", "sb1.2.json"]
        with pytest.raises(cove.InvalidArgument):
            run.export(tmp_path, "csv")
        api.server.on("GET export", lambda got: Plain(b'{"trajectory_id":"../evil"}\n'))
        with pytest.raises(cove.CoveError):
            run.export(tmp_path / "e", "atif")
        assert not (tmp_path / "evil.json").exists()
