"""tinker-cookbook: a SandboxInterface, and its client of SandboxFusion against ours."""

import threading
from pathlib import Path

import pytest
from tinker_cookbook.sandbox import SandboxFusionClient, SandboxInterface, SandboxTerminatedError

from cove.adapters.sandboxfusion import Server
from cove.adapters.tinker import sandbox_factory


async def test_a_sandbox():
    sandbox = await sandbox_factory("base", memory="256MiB", network="none")(Path("."), 600)
    assert isinstance(sandbox, SandboxInterface)
    try:
        assert (await sandbox.write_file("/w/run.sh", "echo $((6 * 7)); exit 3", executable=True)).exit_code == 0
        ran = await sandbox.run_command("./run.sh", workdir="/w")
        assert (ran.stdout, ran.exit_code) == ("42\n", 3)
        assert len((await sandbox.run_command("yes | head -c 1000000")).stdout) == 128 << 10
        assert (await sandbox.run_command("sleep 60", timeout=1)).exit_code == 124
        assert (await sandbox.read_file("/w/run.sh", max_bytes=4)).stdout == "echo"
        assert (await sandbox.read_file("/nowhere")).exit_code == 1
        await sandbox.send_heartbeat()
    finally:
        await sandbox.cleanup()
    with pytest.raises(SandboxTerminatedError):
        await sandbox.run_command("true")
    with pytest.raises(SandboxTerminatedError):
        await sandbox.send_heartbeat()


@pytest.fixture
def fusion():
    with Server(("127.0.0.1", 0), concurrency=2, memory="256MiB") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/run_code"
        server.shutdown()


async def test_run_code(fusion):
    client = SandboxFusionClient(url=fusion)
    try:
        ok, answer = await client.run("print(open('data.txt').read())", {"data.txt": "ä"}, timeout=20)
        assert ok, answer
        assert answer["run_result"]["stdout"] == "ä\n"
        ok, answer = await client.run("import sys; sys.exit(3)", {}, timeout=20)
        assert not ok
        assert (answer["status"], answer["run_result"]["return_code"]) == ("Failed", 3)
        ok, answer = await client.run("import time; time.sleep(60)", {}, timeout=1)
        assert answer["run_result"]["status"] == "TimeLimitExceeded"
        ok, answer = await client.run("echo $((6 * 7))", {}, timeout=20, language="bash")
        assert answer["run_result"]["stdout"] == "42\n"
        ok, answer = await client.run("x", {}, timeout=20, language="cobol")
        assert not ok
        assert "422" in answer["error"]
        ok, answer = await client.run("open('/etc/hostname')", {"../../../etc/x": "y"}, timeout=20)
        assert ok, answer  # a path out of its directory is still inside the sandbox
    finally:
        await client.close()
