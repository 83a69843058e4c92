"""Sharing an installation: tenants and their quotas, API keys, and the audit log."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any, Optional

from ._calls import Call, nothing
from ._values import Seconds, format_duration, parse_int, parse_time
from .client import AsyncClient, Client, default_async_client, default_client
from .models import Json


@dataclass(frozen=True)
class Quota:
    """Bounds of a tenant; 0 is none. Bytes, cores."""

    sandboxes: int = 0
    cpu: float = 0
    memory: int = 0
    disk: int = 0
    snapshot_bytes: int = 0
    creates_per_second: float = 0
    weight: int = 0
    """Share of a full node; 0 = 1."""
    image_bytes: int = 0

    @classmethod
    def parse(cls, j: Optional[Json]) -> Quota:
        j = j or {}
        return cls(
            sandboxes=parse_int(j.get("sandboxes")),
            cpu=float(j.get("cpu") or 0),
            memory=parse_int(j.get("memory")),
            disk=parse_int(j.get("disk")),
            snapshot_bytes=parse_int(j.get("snapshotBytes")),
            creates_per_second=float(j.get("createsPerSecond") or 0),
            weight=parse_int(j.get("weight")),
            image_bytes=parse_int(j.get("imageBytes")),
        )

    def message(self) -> dict[str, Any]:
        names = {
            "snapshot_bytes": "snapshotBytes",
            "image_bytes": "imageBytes",
            "creates_per_second": "createsPerSecond",
        }
        given = {names.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in given.items() if v}


@dataclass(frozen=True)
class TenantInfo:
    id: str
    name: str
    quota: Quota
    used: Quota
    """With Tenant.get only."""
    labels: Mapping[str, str]
    created_at: Optional[datetime]

    @classmethod
    def parse(cls, j: Json) -> TenantInfo:
        return cls(
            id=j.get("id", ""),
            name=j.get("name", ""),
            quota=Quota.parse(j.get("quota")),
            used=Quota.parse(j.get("used")),
            labels=dict(j.get("labels") or {}),
            created_at=parse_time(j.get("createdAt")),
        )


@dataclass(frozen=True)
class KeyInfo:
    """An API key. secret is there once, when it was made or rotated."""

    id: str
    name: str
    tenant: str
    role: str
    scopes: tuple[str, ...]
    created_at: Optional[datetime]
    last_used_at: Optional[datetime]
    expires_at: Optional[datetime]
    old_secret_until: Optional[datetime]
    secret: str = ""

    @classmethod
    def parse(cls, j: Json, secret: str = "") -> KeyInfo:
        return cls(
            id=j.get("id", ""),
            name=j.get("name", ""),
            tenant=j.get("tenant", ""),
            role=j.get("role", ""),
            scopes=tuple(j.get("scopes") or ()),
            created_at=parse_time(j.get("createdAt")),
            last_used_at=parse_time(j.get("lastUsedAt")),
            expires_at=parse_time(j.get("expiresAt")),
            old_secret_until=parse_time(j.get("oldSecretUntil")),
            secret=secret,
        )

    def __repr__(self) -> str:  # without the secret: it would be in somebody's log
        return f"<KeyInfo {self.id} {self.name!r} {self.role} of {self.tenant}>"


@dataclass(frozen=True)
class AuditEntry:
    """Who did what to which thing when. hash covers the entry and prev."""

    seq: int
    at: Optional[datetime]
    tenant: str
    key: str
    key_name: str
    remote: str
    op: str
    things: tuple[str, ...]
    outcome: str
    prev: str
    hash: str

    @classmethod
    def parse(cls, j: Json) -> AuditEntry:
        return cls(
            seq=parse_int(j.get("seq")),
            at=parse_time(j.get("at")),
            tenant=j.get("tenant", ""),
            key=j.get("key", ""),
            key_name=j.get("keyName", ""),
            remote=j.get("remote", ""),
            op=j.get("op", ""),
            things=tuple(j.get("things") or ()),
            outcome=j.get("outcome", ""),
            prev=j.get("prev", ""),
            hash=j.get("hash", ""),
        )


def _tenant(j: Json) -> TenantInfo:
    return TenantInfo.parse(j["tenant"])


def _create_tenant(name: str, quota: Optional[Quota], labels: Optional[Mapping[str, str]]) -> Call[TenantInfo]:
    message: dict[str, Any] = {"name": name}
    if quota:
        message["quota"] = quota.message()
    if labels:
        message["labels"] = dict(labels)
    return Call("Tenants/Create", message, _tenant)


def _get_tenant(name: str) -> Call[TenantInfo]:
    return Call("Tenants/Get", {"name": name} if name else {}, _tenant, repeatable=True)


def _list_tenants() -> Call[builtins.list[TenantInfo]]:
    return Call("Tenants/List", {}, lambda j: [TenantInfo.parse(t) for t in j.get("tenants") or ()], repeatable=True)


def _set_quota(name: str, quota: Quota) -> Call[TenantInfo]:
    return Call("Tenants/SetQuota", {"name": name, "quota": quota.message()}, _tenant, repeatable=True)


def _delete_tenant(name: str) -> Call[None]:
    return Call("Tenants/Delete", {"name": name}, nothing, repeatable=True, removes=True)


def _with_secret(j: Json) -> KeyInfo:
    return KeyInfo.parse(j["key"], j.get("secret", ""))


def _create_key(
    name: str, role: Optional[str], tenant: Optional[str], scopes: Optional[Sequence[str]], expires: Optional[Seconds]
) -> Call[KeyInfo]:
    message: dict[str, Any] = {"name": name}
    if role:
        message["role"] = role
    if tenant:
        message["tenant"] = tenant
    if scopes:
        message["scopes"] = builtins.list(scopes)
    if expires is not None:
        message["expires"] = format_duration("expires", expires)
    return Call("Keys/Create", message, _with_secret)


def _list_keys() -> Call[builtins.list[KeyInfo]]:
    return Call("Keys/List", {}, lambda j: [KeyInfo.parse(k) for k in j.get("keys") or ()], repeatable=True)


def _rotate_key(id: str, grace: Optional[Seconds]) -> Call[KeyInfo]:
    message: dict[str, Any] = {"id": id}
    if grace is not None:
        message["grace"] = format_duration("grace", grace)
    return Call("Keys/Rotate", message, _with_secret)


def _revoke_key(id: str) -> Call[None]:
    return Call("Keys/Revoke", {"id": id}, nothing, repeatable=True, removes=True)


def _audit_message(since: Optional[datetime], after: int, all_tenants: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"all": True} if all_tenants else {}
    if after:
        message["after"] = after
    if since:
        message["since"] = since.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
    return message


class Tenant:
    """Teams that share an installation and see nothing of each other. docs/tenants.md."""

    @staticmethod
    def create(
        name: str,
        *,
        quota: Optional[Quota] = None,
        labels: Optional[Mapping[str, str]] = None,
        client: Optional[Client] = None,
    ) -> TenantInfo:
        return (client or default_client()).call(_create_tenant(name, quota, labels))

    @staticmethod
    def get(name: str = "", *, client: Optional[Client] = None) -> TenantInfo:
        """With what it uses now; without a name your own."""
        return (client or default_client()).call(_get_tenant(name))

    @staticmethod
    def list(*, client: Optional[Client] = None) -> builtins.list[TenantInfo]:
        return (client or default_client()).call(_list_tenants())

    @staticmethod
    def set_quota(name: str, quota: Quota, *, client: Optional[Client] = None) -> TenantInfo:
        """All of it: what the quota does not say has no bound any more."""
        return (client or default_client()).call(_set_quota(name, quota))

    @staticmethod
    def delete(name: str, *, client: Optional[Client] = None) -> None:
        """One without live sandboxes and state; its keys go with it."""
        (client or default_client()).call(_delete_tenant(name))


class Key:
    """API keys of a tenant: roles root, admin, developer and readonly."""

    @staticmethod
    def create(
        name: str,
        *,
        role: Optional[str] = None,
        tenant: Optional[str] = None,
        scopes: Optional[Sequence[str]] = None,
        expires: Optional[Seconds] = None,
        client: Optional[Client] = None,
    ) -> KeyInfo:
        """.secret of the answer is shown this once. Role and tenant are your own by default."""
        return (client or default_client()).call(_create_key(name, role, tenant, scopes, expires))

    @staticmethod
    def list(*, client: Optional[Client] = None) -> builtins.list[KeyInfo]:
        return (client or default_client()).call(_list_keys())

    @staticmethod
    def rotate(id: str, *, grace: Optional[Seconds] = None, client: Optional[Client] = None) -> KeyInfo:
        """A new secret; the old one stays good for grace seconds (an hour by default)."""
        return (client or default_client()).call(_rotate_key(id, grace))

    @staticmethod
    def revoke(id: str, *, client: Optional[Client] = None) -> None:
        """Worthless at once."""
        (client or default_client()).call(_revoke_key(id))


def audit(
    *,
    since: Optional[datetime] = None,
    after: int = 0,
    all_tenants: bool = False,
    client: Optional[Client] = None,
) -> builtins.list[AuditEntry]:
    """The audit log of your tenant, oldest first."""
    entries: builtins.list[AuditEntry] = []
    (client or default_client()).follow(
        "System/Audit", _audit_message(since, after, all_tenants), lambda j: entries.append(AuditEntry.parse(j))
    )
    return entries


class AsyncTenant:
    """Tenants for asyncio; see Tenant."""

    @staticmethod
    async def create(
        name: str,
        *,
        quota: Optional[Quota] = None,
        labels: Optional[Mapping[str, str]] = None,
        client: Optional[AsyncClient] = None,
    ) -> TenantInfo:
        return await (client or default_async_client()).call(_create_tenant(name, quota, labels))

    @staticmethod
    async def get(name: str = "", *, client: Optional[AsyncClient] = None) -> TenantInfo:
        return await (client or default_async_client()).call(_get_tenant(name))

    @staticmethod
    async def list(*, client: Optional[AsyncClient] = None) -> builtins.list[TenantInfo]:
        return await (client or default_async_client()).call(_list_tenants())

    @staticmethod
    async def set_quota(name: str, quota: Quota, *, client: Optional[AsyncClient] = None) -> TenantInfo:
        return await (client or default_async_client()).call(_set_quota(name, quota))

    @staticmethod
    async def delete(name: str, *, client: Optional[AsyncClient] = None) -> None:
        await (client or default_async_client()).call(_delete_tenant(name))


class AsyncKey:
    """API keys for asyncio; see Key."""

    @staticmethod
    async def create(
        name: str,
        *,
        role: Optional[str] = None,
        tenant: Optional[str] = None,
        scopes: Optional[Sequence[str]] = None,
        expires: Optional[Seconds] = None,
        client: Optional[AsyncClient] = None,
    ) -> KeyInfo:
        return await (client or default_async_client()).call(_create_key(name, role, tenant, scopes, expires))

    @staticmethod
    async def list(*, client: Optional[AsyncClient] = None) -> builtins.list[KeyInfo]:
        return await (client or default_async_client()).call(_list_keys())

    @staticmethod
    async def rotate(id: str, *, grace: Optional[Seconds] = None, client: Optional[AsyncClient] = None) -> KeyInfo:
        return await (client or default_async_client()).call(_rotate_key(id, grace))

    @staticmethod
    async def revoke(id: str, *, client: Optional[AsyncClient] = None) -> None:
        await (client or default_async_client()).call(_revoke_key(id))


async def async_audit(
    *,
    since: Optional[datetime] = None,
    after: int = 0,
    all_tenants: bool = False,
    client: Optional[AsyncClient] = None,
) -> builtins.list[AuditEntry]:
    """The audit log; see audit."""
    entries: builtins.list[AuditEntry] = []
    await (client or default_async_client()).follow(
        "System/Audit", _audit_message(since, after, all_tenants), lambda j: entries.append(AuditEntry.parse(j))
    )
    return entries
