"""Shipments: records of runs on their way out of the platform. docs/trajectories.md says what a record is."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Optional, Union

from ._calls import Call, new_id, nothing
from ._connect import error_of_reply
from ._transfer import Appearing, LocalPath, async_save, in_thread, save
from ._values import Seconds, format_duration, parse_duration, parse_int, parse_time
from ._wire import Request
from .client import AsyncClient, Client, default_async_client, default_client
from .errors import InvalidArgument, TransportError, Unavailable
from .models import Json

_TRIES = 30
"""How often in a row a lost stream is opened again, a second apart."""


@dataclass(frozen=True)
class ShipmentInfo:
    """A shipment as the server knows it."""

    id: str
    name: str
    run: str
    """Id of its only run; "": all of the tenant's."""
    sink: Mapping[str, str]
    """Where it goes: kind, format, url, path, secret (its name), access_key, region."""
    state: str
    """active, paused, or failing: the last delivery was not taken and is tried again."""
    max_lag: int
    linger: float
    lag: int
    """Bytes of logs that wait."""
    records: int
    """Delivered."""
    created_at: Optional[datetime]
    delivered_at: Optional[datetime]
    failed_at: Optional[datetime]
    error: str
    """Of the last delivery; "": it was taken."""
    error_code: str
    positions: Mapping[str, str]
    """By run: the cursor up to where it was delivered. Only of info()."""

    @classmethod
    def parse(cls, j: Json) -> ShipmentInfo:
        sink = j.get("sink") or {}
        return cls(
            id=j.get("id", ""),
            name=j.get("name", ""),
            run=j.get("run", ""),
            sink={("access_key" if k == "accessKey" else k): v for k, v in sink.items()},
            state=j.get("state", ""),
            max_lag=parse_int(j.get("maxLag")),
            linger=parse_duration(j.get("linger")),
            lag=parse_int(j.get("lag")),
            records=parse_int(j.get("records")),
            created_at=parse_time(j.get("createdAt")),
            delivered_at=parse_time(j.get("deliveredAt")),
            failed_at=parse_time(j.get("failedAt")),
            error=j.get("errorMessage", ""),
            error_code=(j.get("error") or {}).get("code", ""),
            positions={p["run"]: p.get("cursor", "") for p in j.get("positions") or ()},
        )


def _one(j: Json) -> ShipmentInfo:
    return ShipmentInfo.parse(j["shipment"])


def _create(
    name: str,
    run: str,
    sink: Mapping[str, str],
    max_lag: Optional[int],
    linger: Optional[Seconds],
) -> Call[ShipmentInfo]:
    keys = {"access_key": "accessKey"}
    message: dict[str, Any] = {
        "name": name,
        "sink": {keys.get(k, k): v for k, v in sink.items()},
        "idempotencyKey": new_id() + new_id(),
    }
    if run:
        message["run"] = run
    if max_lag is not None:
        message["maxLag"] = str(max_lag)
    if linger is not None:
        message["linger"] = format_duration("linger", linger)
    return Call("Shipments/Create", message, _one, repeatable=True)


def _get(name: str) -> Call[ShipmentInfo]:
    return Call("Shipments/Get", {"shipment": name}, _one, repeatable=True)


def _list() -> Call[list[ShipmentInfo]]:
    def parse(j: Json) -> list[ShipmentInfo]:
        return [ShipmentInfo.parse(s) for s in j.get("shipments") or ()]

    return Call("Shipments/List", {}, parse, repeatable=True)


def _change(what: str, name: str, **more: str) -> Call[ShipmentInfo]:
    return Call(f"Shipments/{what}", {"shipment": name, **more}, _one, repeatable=True)


def _delete(name: str) -> Call[None]:
    return Call("Shipments/Delete", {"shipment": name}, nothing, repeatable=True, removes=True)


Record = Mapping[str, Any]
"""One record: see docs/trajectories.md. record["id"] is the same each time it is delivered."""


class _Lines:
    """Records out of the pieces of a stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found: list[dict[str, Any]] = []
        for line in lines:
            if not line.strip():
                continue  # the server is there
            record: dict[str, Any] = json.loads(line)
            if "schema" not in record and "code" in record:
                raise error_of_reply(500, line)
            found.append(record)
        return found

    def end(self) -> None:
        if self._rest:
            raise TransportError("the stream broke off within a record", sent=True)


def _records(client: Union[Client, AsyncClient], kind: str, id: str, what: str, cursor: str, follow: bool) -> Request:
    query = {**({"cursor": cursor} if cursor else {}), **({"follow": "true"} if follow else {})}
    return client._settings.content("GET", kind, id, what, query or None)


def read(client: Client, kind: str, id: str, what: str, cursor: str, follow: bool) -> Iterator[Record]:
    """Records of a stream. One that is lost is opened again after the last record."""
    failures = 0
    while True:
        reply = None
        try:
            reply = client.content(_records(client, kind, id, what, cursor, follow))
            lines = _Lines()
            for piece in reply.chunks():
                for record in lines.feed(piece):
                    failures, cursor = 0, record["cursor"]
                    yield record
            lines.end()
            return
        except (TransportError, Unavailable):
            failures += 1
            if failures > _TRIES:
                raise
        finally:
            if reply is not None:
                reply.close()
        client._settings.clock.sleep(1.0)


async def async_read(
    client: AsyncClient, kind: str, id: str, what: str, cursor: str, follow: bool
) -> AsyncIterator[Record]:
    failures = 0
    while True:
        reply = None
        try:
            reply = await client.content(_records(client, kind, id, what, cursor, follow))
            lines = _Lines()
            async for piece in reply.chunks():
                for record in lines.feed(piece):
                    failures, cursor = 0, record["cursor"]
                    yield record
            lines.end()
            return
        except (TransportError, Unavailable):
            failures += 1
            if failures > _TRIES:
                raise
        finally:
            if reply is not None:
                await reply.close()
        await client._settings.clock.async_sleep(1.0)


# A run as files


def _format(format: str) -> None:
    if format not in ("jsonl", "parquet", "atif"):
        raise InvalidArgument(f"format: {format!r} is not accepted; jsonl, parquet and atif are", field="format")


def _export_request(client: Union[Client, AsyncClient], run: str, format: str) -> Request:
    return client._settings.content("GET", "runs", run, "export", {"format": format})


def _trajectories(file: LocalPath, directory: LocalPath) -> builtins.list[str]:
    """A file for each line of one, which goes."""
    made = []
    with open(file, "rb") as lines:
        for line in lines:
            id = json.loads(line)["trajectory_id"]
            if not id or id != os.path.basename(id) or id.startswith("."):
                raise TransportError(f"the server sent a trajectory with the id {id!r}", sent=True)
            path = os.path.join(directory, id + ".json")
            with Appearing(path) as out:
                out.write(line)
                out.commit()
            made.append(path)
    os.unlink(file)
    return made


def _line(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def export(client: Client, run: str, directory: LocalPath, format: str) -> builtins.list[str]:
    _format(format)
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"records.{format}")
    if format == "jsonl":
        with Appearing(path) as out:
            for record in read(client, "runs", run, "export", "", False):
                out.write(_line(record))
            out.commit()
        return [path]
    save(client, _export_request(client, run, format), path)
    return _trajectories(path, directory) if format == "atif" else [path]


async def async_export(client: AsyncClient, run: str, directory: LocalPath, format: str) -> builtins.list[str]:
    _format(format)
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"records.{format}")
    if format == "jsonl":
        with Appearing(path) as out:
            async for record in async_read(client, "runs", run, "export", "", False):
                out.write(_line(record))
            out.commit()
        return [path]
    await async_save(client, _export_request(client, run, format), path)
    return await in_thread(_trajectories, path, directory) if format == "atif" else [path]


class ShipmentState:
    """What a shipment object knows without asking."""

    def __init__(self, info: ShipmentInfo) -> None:
        self.last_info = info
        """The shipment as this object last saw it; info() asks again."""

    @property
    def id(self) -> str:
        return self.last_info.id

    @property
    def name(self) -> str:
        return self.last_info.name

    def _seen(self, info: ShipmentInfo) -> ShipmentInfo:
        self.last_info = info
        return info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.name!r} {self.last_info.state}>"


class Shipment(ShipmentState):
    """Carries the records of a run, or of all runs, out of the platform, each at least once."""

    def __init__(self, client: Client, info: ShipmentInfo) -> None:
        """Use create(), get() or list()."""
        super().__init__(info)
        self._client = client

    @classmethod
    def create(
        cls,
        name: str,
        *,
        run: str = "",
        sink: Optional[Mapping[str, str]] = None,
        max_lag: Optional[int] = None,
        linger: Optional[Seconds] = None,
        client: Optional[Client] = None,
    ) -> Shipment:
        """A shipment of a run (id or name), or of all. Without a sink it is pulled: records() and ack().

        sink: {"kind": "http", "url": ..., "secret": ...}, {"kind": "directory", "path": ..., "format": "parquet"}, or
        {"kind": "s3", "url": ..., "path": "BUCKET/PREFIX", "access_key": ..., "secret": ...}.
        """
        client = client or default_client()
        return cls(client, client.call(_create(name, run, sink or {"kind": "pull"}, max_lag, linger)))

    @classmethod
    def get(cls, name: str, *, client: Optional[Client] = None) -> Shipment:
        """By name or id."""
        client = client or default_client()
        return cls(client, client.call(_get(name)))

    @classmethod
    def list(cls, *, client: Optional[Client] = None) -> builtins.list[Shipment]:
        """Every shipment, newest first."""
        client = client or default_client()
        return [cls(client, info) for info in client.call(_list())]

    def info(self) -> ShipmentInfo:
        """As it is now."""
        return self._seen(self._client.call(_get(self.id)))

    def pause(self) -> ShipmentInfo:
        """Stop deliveries. What waits waits on; beyond max_lag no step begins."""
        return self._seen(self._client.call(_change("Pause", self.id)))

    def resume(self) -> ShipmentInfo:
        return self._seen(self._client.call(_change("Resume", self.id)))

    def records(self, *, cursor: str = "", follow: bool = False) -> Iterator[Record]:
        """Of one that is pulled: what was not acknowledged. A lost connection is made again: records may come twice."""
        return read(self._client, "shipments", self.id, "records", cursor, follow)

    def ack(self, record: Union[Record, str]) -> ShipmentInfo:
        """All records of its run up to this one, or its cursor, have arrived: they are not told again."""
        cursor = record if isinstance(record, str) else record["cursor"]
        return self._seen(self._client.call(_change("Ack", self.id, cursor=cursor)))

    def delete(self) -> None:
        """What was not delivered holds nothing back any more."""
        self._client.call(_delete(self.id))


class AsyncShipment(ShipmentState):
    """Carries the records of a run, or of all runs, out of the platform, each at least once."""

    def __init__(self, client: AsyncClient, info: ShipmentInfo) -> None:
        """Use create(), get() or list()."""
        super().__init__(info)
        self._client = client

    @classmethod
    async def create(
        cls,
        name: str,
        *,
        run: str = "",
        sink: Optional[Mapping[str, str]] = None,
        max_lag: Optional[int] = None,
        linger: Optional[Seconds] = None,
        client: Optional[AsyncClient] = None,
    ) -> AsyncShipment:
        """As Shipment.create."""
        client = client or default_async_client()
        return cls(client, await client.call(_create(name, run, sink or {"kind": "pull"}, max_lag, linger)))

    @classmethod
    async def get(cls, name: str, *, client: Optional[AsyncClient] = None) -> AsyncShipment:
        """By name or id."""
        client = client or default_async_client()
        return cls(client, await client.call(_get(name)))

    @classmethod
    async def list(cls, *, client: Optional[AsyncClient] = None) -> builtins.list[AsyncShipment]:
        """Every shipment, newest first."""
        client = client or default_async_client()
        return [cls(client, info) for info in await client.call(_list())]

    async def info(self) -> ShipmentInfo:
        """As it is now."""
        return self._seen(await self._client.call(_get(self.id)))

    async def pause(self) -> ShipmentInfo:
        """Stop deliveries. What waits waits on; beyond max_lag no step begins."""
        return self._seen(await self._client.call(_change("Pause", self.id)))

    async def resume(self) -> ShipmentInfo:
        return self._seen(await self._client.call(_change("Resume", self.id)))

    async def records(self, *, cursor: str = "", follow: bool = False) -> AsyncIterator[Record]:
        """Of one that is pulled: what was not acknowledged. A lost connection is made again: records may come twice."""
        async for record in async_read(self._client, "shipments", self.id, "records", cursor, follow):
            yield record

    async def ack(self, record: Union[Record, str]) -> ShipmentInfo:
        """All records of its run up to this one, or its cursor, have arrived: they are not told again."""
        cursor = record if isinstance(record, str) else record["cursor"]
        return self._seen(await self._client.call(_change("Ack", self.id, cursor=cursor)))

    async def delete(self) -> None:
        """What was not delivered holds nothing back any more."""
        await self._client.call(_delete(self.id))
