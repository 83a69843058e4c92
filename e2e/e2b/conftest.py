"""The published E2B SDK against a real Cove server (scripts/with-server.sh starts one)."""

import base64
import os

import httpx
import pytest

URL = os.environ["COVE_URL"]


def e2b_key(secret):
    """A key of Cove's in E2B's spelling."""
    raw = secret.removeprefix("cove_")
    return "e2b_" + base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)).hex()


def native(service, method, message):
    """A call of Cove's own API."""
    res = httpx.post(f"{URL}/cove.v1.{service}/{method}", json=message, headers={"Authorization": "Bearer " + os.environ["COVE_KEY"]})
    res.raise_for_status()
    return res.json()


def visit(sbx, port, path="/", **headers):
    """A request to a port in plain mode."""
    return httpx.get(URL + path, headers={"E2b-Sandbox-Id": sbx.sandbox_id, "E2b-Sandbox-Port": str(port), **headers})


os.environ["E2B_API_URL"] = os.environ["E2B_SANDBOX_URL"] = os.environ["E2B_VOLUME_API_URL"] = URL
os.environ["E2B_API_KEY"] = e2b_key(os.environ["COVE_KEY"])
for name in ("E2B_DOMAIN", "E2B_DEBUG", "E2B_ACCESS_TOKEN"):
    os.environ.pop(name, None)

from e2b import Sandbox  # noqa: E402  reads the environment


@pytest.fixture(scope="module")
def sbx():
    """One sandbox for the tests of a file that leave it as it was."""
    s = Sandbox.create(timeout=300, metadata={"fixture": "shared"})
    yield s
    s.kill()


@pytest.fixture
def fresh():
    """A sandbox of the test's own."""
    s = Sandbox.create(timeout=300)
    yield s
    s.kill()
