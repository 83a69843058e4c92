"""Tenants, keys and the audit log on a live server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import pytest

import cove

pytestmark = pytest.mark.live


@pytest.fixture
def tenant() -> Iterator[cove.TenantInfo]:
    t = cove.Tenant.create("t" + secrets.token_hex(4), quota=cove.Quota(sandboxes=1, creates_per_second=100))
    try:
        yield t
    finally:
        cove.Tenant.delete(t.name)


def test_two_teams(tenant: cove.TenantInfo) -> None:
    assert tenant.name in [t.name for t in cove.Tenant.list()]
    key = cove.Key.create("dev", tenant=tenant.name, role="developer", expires=600)
    assert key.secret
    assert key.secret not in repr(key)
    assert key.expires_at
    with cove.Sandbox.create() as ours, cove.Client(key=key.secret) as theirs:
        with cove.Sandbox.create(client=theirs) as sb:
            assert [s.id for s in cove.Sandbox.list(client=theirs)] == [sb.id]
            with pytest.raises(cove.NotFound):
                cove.Sandbox.connect(ours.id, client=theirs)
            with pytest.raises(cove.QuotaExceeded):
                cove.Sandbox.create(client=theirs)
            assert cove.Tenant.get(client=theirs).used.sandboxes == 1
            cove.Tenant.set_quota(tenant.name, cove.Quota(sandboxes=2))
            cove.Sandbox.create(client=theirs).kill()
        with pytest.raises(cove.PermissionDenied):
            cove.Key.list(client=theirs)
        rotated = cove.Key.rotate(key.id, grace=0)
        with pytest.raises(cove.Unauthenticated):
            cove.Tenant.get(client=theirs)
    cove.Key.revoke(key.id)
    with cove.Client(key=rotated.secret) as gone, pytest.raises(cove.Unauthenticated):
        cove.Tenant.get(client=gone)
    log = [e for e in cove.audit(all_tenants=True) if e.key == key.id]
    assert {"sandbox.create", "key.list"} <= {e.op for e in log}
    assert {e.outcome for e in log} >= {"ok", "permission_denied", "quota_exceeded"}
    whole = cove.audit(all_tenants=True)
    assert all(b.prev == a.hash for a, b in zip(whole, whole[1:]))


async def _async_side(name: str) -> None:
    async with cove.AsyncClient() as client:
        assert name in [t.name for t in await cove.AsyncTenant.list(client=client)]
        key = await cove.AsyncKey.create("r", tenant=name, role="readonly", scopes=["sandboxes"], client=client)
        assert (await cove.AsyncTenant.get(name, client=client)).quota.sandboxes == 1
        assert key.id in [k.id for k in await cove.AsyncKey.list(client=client)]
        assert (await cove.AsyncKey.rotate(key.id, client=client)).old_secret_until
        await cove.AsyncKey.revoke(key.id, client=client)
        assert any(e.op == "key.revoke" for e in await cove.async_audit(all_tenants=True, client=client))


def test_asyncio(tenant: cove.TenantInfo) -> None:
    asyncio.run(_async_side(tenant.name))
