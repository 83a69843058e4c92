"""Domain mode: E2B_DOMAIN, wildcard names, and TLS of Cove's own authority (see run.sh)."""

import os
import time

import httpx
import pytest
from e2b_code_interpreter import Sandbox

DOMAIN = os.environ["E2B_DOMAIN"]


def until(what, seconds=60):
    deadline = time.monotonic() + seconds
    while not (got := what()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return got


def test_ports_have_hosts():
    with Sandbox.create("base", timeout=120, network={"allow_public_traffic": False}) as sbx:
        assert sbx.get_host(8000) == f"8000-{sbx.sandbox_id}.{DOMAIN}"
        sbx.files.write("index.html", "a page")
        sbx.commands.run("python3 -m http.server 8000", background=True)
        token = {"e2b-traffic-access-token": sbx.traffic_access_token}
        url = f"https://{sbx.get_host(8000)}/"
        until(lambda: httpx.get(url, headers=token).text == "a page")
        assert httpx.get(url).status_code == 403
        assert httpx.get(sbx.download_url("index.html")).text == "a page"
        with Sandbox.create("base", timeout=60) as other:
            stolen = sbx.download_url("index.html").replace(sbx.sandbox_id, other.sandbox_id)
            assert httpx.get(stolen).status_code == 401, "a signature is of one sandbox"


def test_the_code_interpreter_goes_by_the_operations():
    with Sandbox.create(timeout=120, envs={"OF_THE_SANDBOX": "yes"}) as sbx:
        assert sbx.run_code("import os; x = 6; os.environ['OF_THE_SANDBOX']").text == "yes"
        context = sbx.create_code_context(language="python")
        assert context in sbx.list_code_contexts()
        sbx.remove_code_context(context)
        with Sandbox.create(timeout=60) as other:
            r = httpx.post(f"https://49999-{sbx.sandbox_id}.{DOMAIN}/execute", json={"code": "x"}, headers={"X-Access-Token": other._envd_access_token})
            assert r.status_code == 401, r.text
        assert sbx.run_code("x").text == "6"


def test_the_code_interpreter_is_started_when_it_is_asked():
    with Sandbox.create(timeout=120) as sbx:
        sbx.run_code("x = 1")
        sbx.commands.run("pkill -9 -f '[s]erver.py'; pkill -9 -f '[i]pykernel' || true", user="root")

        def answers():
            try:
                return sbx.run_code("1 + 1", timeout=30).text == "2"
            except Exception:
                return False

        until(answers)
        with pytest.raises(Exception):
            sbx.run_code("1", language="cobol")
