"""Network policies: what is sent, what is read back, and what is refused before it is sent."""

from __future__ import annotations

import pytest

import cove

from .conftest import Api
from .fake_cove import sandbox_json

POLICY = {
    "mode": "rules",
    "rules": [
        {"action": "allow", "domain": "pypi.org"},
        {
            "action": "allow",
            "domain": "*.example.com",
            "protocol": "tcp",
            "ports": [{"from": 80, "to": 80}, {"from": 8000, "to": 8010}],
        },
        {"action": "deny", "cidr": "203.0.113.0/24"},
        {"action": "deny", "ports": [{"from": 25, "to": 25}]},
    ],
}
RULES = ["allow pypi.org", "allow *.example.com tcp 80,8000-8010", "deny 203.0.113.0/24", "deny * 25"]


def test_a_policy_at_creation_and_later(api: Api) -> None:
    flow = {
        "start": "2026-03-01T10:00:00Z",
        "name": "pypi.org",
        "address": "203.0.113.5",
        "port": 443,
        "protocol": "tcp",
        "sent": "7",
        "allowed": True,
        "reason": "rule",
    }
    api.server.on(
        "Sandboxes/Create", {"sandbox": sandbox_json(spec={"image": "base", "network": POLICY}, networkGeneration="1")}
    )
    api.server.on("Sandboxes/SetNetwork", {"generation": "2", "network": {"mode": "public"}})
    api.server.on(
        "Sandboxes/GetNetwork",
        {"network": {"mode": "public"}, "generation": "2", "allowed": "1", "denied": "3", "flows": [flow]},
    )
    sb = api.Sandbox.create(network=RULES, client=api.client)
    assert api.server.sent("Create")[0].message["spec"]["network"] == POLICY
    assert sb.last_info.network.rules == tuple(cove.Rule.parse(r) for r in RULES)
    assert sb.set_network(cove.Network("public", bytes_per_second=1024)) == 2
    assert api.server.sent("SetNetwork")[0].message == {
        "id": "sb1",
        "network": {"mode": "public", "limits": {"bytesPerSecond": "1024"}},
    }
    assert sb.network().denied == 3
    (seen,) = sb.flows()
    assert (seen.name, seen.port, seen.sent, seen.rule, seen.allowed, seen.end) == ("pypi.org", 443, 7, 0, True, None)


@pytest.mark.parametrize("rule", ["allow", "allow a.org tcp x", "allow a.org tcp 80 more", "deny * 80-"])
def test_what_is_no_rule(api: Api, rule: str) -> None:
    with pytest.raises(cove.InvalidArgument):
        api.Sandbox.create(network=[rule], client=api.client)
