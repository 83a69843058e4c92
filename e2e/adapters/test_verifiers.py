"""verifiers: a Runtime, borrowed by a run."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.base import Runtime

from cove.adapters.verifiers import CoveConfig, provision

SMALL = {"memory": "256MiB"}


async def test_a_runtime():
    async with provision(CoveConfig(image="base", create=SMALL), env={"A": "task"}) as box:
        assert isinstance(box, Runtime)
        ran = await box.run(["sh", "-c", "pwd; echo $A $B; echo e >&2; exit 4"], {"B": "own"})
        assert (ran.exit_code, ran.stdout, ran.stderr) == (4, "/app\ntask own\n", "e\n")
        assert (await box.with_env({"A": "view"}).run(["sh", "-c", "echo $A"], {})).stdout == "view\n"
        ran = await box.with_user("nobody", "/tmp").run(["sh", "-c", "whoami; echo $HOME"], {})
        assert ran.stdout == "nobody\n/tmp\n"
        await box.write("d/x.bin", bytes(range(256)))
        assert await box.read("d/x.bin") == bytes(range(256))
        with pytest.raises(SandboxError):
            await box.read("d/x.bin", max_bytes=10)
        with pytest.raises(SandboxError):
            await box.read("nowhere")
        await box.run_background(["sh", "-c", "echo up; sleep 60"], {}, "log")
        for _ in range(100):
            if (await box.run(["cat", "log"], {})).stdout == "up\n":
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("the log of a background process stays empty")
        assert await box.alive()
    assert not await box.alive()


async def test_a_live_process():
    async with provision(CoveConfig(image="base", create=SMALL)) as box:
        process = await box.open_process(["sh", "-c", "read x; echo got $x; echo e >&2; exit 5"], {})
        assert await process.poll() is None
        await process.write(b"it\n")
        assert b"".join([c async for c in process.stdout]) == b"got it\n"
        assert b"".join([c async for c in process.stderr]) == b"e\n"
        assert await process.wait() == 5
        assert await process.poll() == 5
        sleeping = await box.open_process(["sleep", "60"], {})
        await sleeping.terminate()
        assert await sleeping.wait() == 128 + 15


class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"path=" + self.path.encode() + b" asked=" + asked)

    def log_message(self, *_):
        pass


@pytest.fixture
def model():
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


async def test_the_trainer_is_reached_without_a_network(model):
    post = "import sys, urllib.request as u; print(u.urlopen(u.Request(sys.argv[1], data=b'hi')).read().decode())"
    async with provision(CoveConfig(image="base", allow=[], create=SMALL)) as box:
        await box.prepare_setup()
        inside = box.host_url(f"http://127.0.0.1:{model}/v1/chat?x=1")
        await box.prepare_execution([inside])
        ran = await box.run(["python3", "-c", post, inside], {})
        assert ran.stdout == "path=/v1/chat?x=1 asked=hi\n", ran
        # A port of the trainer's machine that nobody gave out is not there.
        other = inside.replace(f"/{model}/", "/22/")
        assert (await box.run(["python3", "-c", post, other], {})).exit_code == 1
        out = await box.run(["python3", "-c", "import socket; socket.create_connection(('1.1.1.1', 80), 3)"], {})
        assert out.exit_code == 1
