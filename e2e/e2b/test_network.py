"""Headers of rules, secrets in them, and ports that speak TLS. outside.py is what is outside."""

import json
import os
import uuid

import httpx
import pytest
from e2b import InvalidArgumentException, Sandbox, SandboxException, Secret

from conftest import native, visit

IP, PORT = os.environ["OUTSIDE_IP"], os.environ["OUTSIDE_PORT"]
API, OTHER = "api.outside.test", "other.outside.test"


PASSED = "-k"  # TLS that no rule is about is the server's own, whose authority nothing inside knows


def network(rules):
    return {"allow_out": [IP, API, OTHER], "deny_out": ["0.0.0.0/0"], "rules": rules}


def headers(**values):
    return [{"transform": {"headers": values}}]


def ask(sbx, host, *args):
    return json.loads(sbx.commands.run(f"curl -sS --max-time 20 {' '.join(args)} https://{host}:{PORT}/", timeout=60).stdout)


def seen():
    return httpx.get(os.environ["OUTSIDE_SEEN"]).json()


def test_headers_of_a_rule():
    with Sandbox.create(timeout=300, network=network({API: headers(**{"X-Team": "rl", "User-Agent": "cove"})})) as sbx:
        got = ask(sbx, API, "-H 'X-Team: mine'")
        assert (got["x-team"], got["user-agent"]) == ("rl", "cove")
        assert "x-team" not in ask(sbx, OTHER, PASSED)
        assert sbx.get_info().network["rules"] == {API: headers(**{"X-Team": "rl", "User-Agent": "cove"})}
        sbx.update_network(network({OTHER: headers(**{"X-Team": "later"})}))
        assert "x-team" not in ask(sbx, API, PASSED)
        assert ask(sbx, OTHER)["x-team"] == "later"
    with pytest.raises(SandboxException, match="400.*Host"):
        Sandbox.create(network=network({API: headers(Host="evil.test")}))
    with pytest.raises(SandboxException, match="400.*value of a header"):
        Sandbox.create(network=network({API: headers(**{"X-A": "a\r\nX-B: b"})}))


def test_secrets_in_headers():
    name, value = "key-" + uuid.uuid4().hex[:8], "sk-live-" + uuid.uuid4().hex
    made = Secret.create(name, value, metadata={"env": "test"})
    assert (made.name, made.version, made.metadata) == (name, 1, {"env": "test"})
    rule = {API: headers(Authorization=f"Bearer {Secret.fill(name)}")}
    try:
        with Sandbox.create(timeout=300, network=network(rule)) as sbx:
            echoed = ask(sbx, API)["authorization"]
            assert seen()["authorization"] == f"Bearer {value}"
            assert value not in echoed and echoed.startswith("Bearer cove-secret-")
            assert value not in sbx.commands.run("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'").stdout
            ask(sbx, OTHER, PASSED, f"-H 'Authorization: {echoed}'")
            assert seen()["authorization"] == echoed, "the value goes where a rule says, and nowhere else"
            assert sbx.get_info().network["rules"] == rule
            rotated = "sk-next-" + uuid.uuid4().hex
            assert Secret.update(name, rotated).version == 2
            ask(sbx, API)
            assert seen()["authorization"] == f"Bearer {rotated}"
            sbx.update_network(network({}))
            ask(sbx, API, PASSED)
            assert "authorization" not in seen()
            sbx.update_network(network({OTHER: headers(**{"X-Key": Secret.fill(name)})}))
            ask(sbx, OTHER)
            assert seen()["x-key"] == rotated
            assert Secret.destroy(name)
            ask(sbx, OTHER)
            assert rotated not in seen()["x-key"]
        with pytest.raises(SandboxException, match=f"404.*{name}"):
            Sandbox.create(network=network(rule))
    finally:
        Secret.destroy(name)
    with pytest.raises(SandboxException, match="workload identity"):
        Sandbox.create(network=network({API: headers(Authorization="Bearer ${e2b.identity.tokens.aws}")}))


def test_a_secret_that_is_bound_goes_to_its_hosts_only():
    name = "bound-" + uuid.uuid4().hex[:8]
    native("Secrets", "Create", {"name": name, "value": "bound-value-1", "hosts": [API]})
    try:
        with Sandbox.create(timeout=300, network=network({API: headers(**{"X-Key": Secret.fill(name)})})) as sbx:
            ask(sbx, API)
            assert seen()["x-key"] == "bound-value-1"
        with pytest.raises(SandboxException, match="400.*is bound to api.outside.test"):
            Sandbox.create(network=network({OTHER: headers(**{"X-Key": Secret.fill(name)})}))
    finally:
        Secret.destroy(name)


def test_secrets_are_listed_and_never_told():
    names = sorted(f"list-{uuid.uuid4().hex[:6]}" for _ in range(3))
    for n in names:
        Secret.create(n.upper() if n == names[0] else n, "value-of-" + n)
    try:
        with pytest.raises(Exception, match="already"):
            Secret.create(names[0], "value-again")
        pages, all_ = Secret.list(limit=2), []
        while pages.has_next:
            all_ += pages.next_items()
        assert [s.name for s in all_ if s.name in names] == names
        assert Secret.exists(names[0]) and Secret.get_info(names[1]).secret_id == Secret.get_info(names[1]).name
        assert "value-of" not in repr(all_)
    finally:
        for n in names:
            assert Secret.destroy(n)
    assert not Secret.destroy(names[0]) and not Secret.exists(names[0]) and not Secret.exists("NO such name!")
    with pytest.raises(Exception, match="at least 8"):
        Secret.create("short", "v1")


def test_refused_with_a_reason():
    for options, why in (({"network": {"egress_proxy": {"address": "proxy.example.com:1080"}}}, "proxy"), ({"iam": {"tokens": {"aws": Secret.iam_token(audience="sts", token_type="JWT-SVID")}}}, "identity")):
        with pytest.raises((SandboxException, InvalidArgumentException), match=why):
            Sandbox.create(**options)


def test_https_ports():
    """A port whose server speaks TLS itself, with whatever certificate."""
    with Sandbox.create(timeout=300, network={"https_ports": [8443]}) as sbx:
        sbx.commands.run("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=x -keyout k.pem -out c.pem 2>/dev/null")
        sbx.files.write("s.py", "import http.server as h, ssl\ns = h.HTTPServer(('', 8443), h.SimpleHTTPRequestHandler)\nc = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\nc.load_cert_chain('c.pem', 'k.pem')\ns.socket = c.wrap_socket(s.socket, server_side=True)\ns.serve_forever()\n")
        sbx.files.write("f.txt", "over TLS")
        sbx.commands.run("python3 s.py", background=True)
        native("Ports", "WaitReady", {"sandboxId": sbx.sandbox_id, "port": 8443})
        assert visit(sbx, 8443, "/f.txt").text == "over TLS"
        assert sbx.get_info().network["https_ports"] == [8443]
