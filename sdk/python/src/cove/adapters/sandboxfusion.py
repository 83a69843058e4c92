"""SandboxFusion: POST /run_code for verl, tinker and others that know its address only.

    python -m cove.adapters.sandboxfusion --listen 127.0.0.1:8080 --concurrency 64

Each request has a sandbox of its own, without a network, that is gone with the
answer. Code that fails is an answer; a fault of ours is `SandboxError`, which
trainers do not take for a reward.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import logging
import threading
from binascii import Error as BadBase64
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Optional

from .. import CoveError, NotFound, Result, Sandbox

log = logging.getLogger("cove.sandboxfusion")

_MAX_BODY = 64 << 20
_DIR = "/work"

# How a language is compiled and run, in _DIR. A language whose tools an image lacks is
# the image's: its compile or run fails as the shell says.
_LANGUAGES: dict[str, tuple[str, Optional[str], str]] = {
    "python": ("main.py", None, "python3 main.py"),
    "pytest": ("test_main.py", None, "python3 -m pytest -q test_main.py"),
    "bash": ("main.sh", None, "bash main.sh"),
    "nodejs": ("main.js", None, "node main.js"),
    "perl": ("main.pl", None, "perl main.pl"),
    "ruby": ("main.rb", None, "ruby main.rb"),
    "php": ("main.php", None, "php main.php"),
    "lua": ("main.lua", None, "lua main.lua"),
    "R": ("main.R", None, "Rscript main.R"),
    "cpp": ("main.cpp", "g++ -O2 -std=c++17 main.cpp -o main", "./main"),
    "go": ("main.go", "go build -o main main.go", "./main"),
    "rust": ("main.rs", "rustc -O main.rs -o main", "./main"),
    "java": ("Main.java", "javac Main.java", "java -cp . Main"),
    "csharp": ("main.cs", "mcs -out:main.exe main.cs", "mono main.exe"),
}


class BadRequest(ValueError):
    """The request, not the code in it, is wrong."""


def run_code(body: dict[str, Any], **create: Any) -> dict[str, Any]:
    """Answer one request. create: what each Sandbox.create gets."""
    language = body.get("language", "")
    if language not in _LANGUAGES:
        raise BadRequest(f"language: {language!r} is none of {', '.join(_LANGUAGES)}")
    if not isinstance(body.get("code"), str):
        raise BadRequest("code: must be text")
    name, compiling, running = _LANGUAGES[language]
    limits = dict(create)
    if (memory := float(body.get("memory_limit_MB") or -1)) > 0:
        limits["memory"] = int(memory * (1 << 20))
    answer = _answer("Failed")
    with Sandbox.create(**limits) as sb:
        for path, content in {name: None, **(body.get("files") or {})}.items():
            try:
                data = body["code"].encode() if content is None else base64.b64decode(content, validate=True)
            except (BadBase64, TypeError, ValueError):
                raise BadRequest(f"files: the content of {path!r} must be base64") from None
            sb.files.write(f"{_DIR}/{path}", data)
        stdin = body.get("stdin") or ""
        for field, command, timeout, given in (
            ("compile_result", compiling, body.get("compile_timeout"), ""),
            ("run_result", running, body.get("run_timeout"), stdin),
        ):
            if command is None:
                continue
            result = sb.exec(command, cwd=_DIR, stdin=given, timeout=float(timeout or 10))
            answer[field] = _part(result)
            if not result.ok:
                break
        else:
            answer["status"] = "Success"
        for path in body.get("fetch_files") or ():
            try:
                answer["files"][path] = base64.b64encode(sb.files.read_bytes(f"{_DIR}/{path}")).decode()
            except NotFound:
                continue  # as the original: a file that is not there is not in the answer
    return answer


def _answer(status: str, message: str = "") -> dict[str, Any]:
    no = {"compile_result": None, "run_result": None, "executor_pod_name": None}
    return {"status": status, "message": message, **no, "files": {}}


def _part(result: Result) -> dict[str, Any]:
    late = result.end.cause == "deadline"
    return {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": result.duration,
        "return_code": None if late else result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr if result.end.cause in ("exited", "deadline") else f"{result.stderr}\n{result.end}",
    }


class Server(ThreadingHTTPServer):
    """As many sandboxes at a time as concurrency; more requests wait."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], concurrency: int, **create: Any) -> None:
        super().__init__(address, _Handler)
        self.slots = threading.BoundedSemaphore(concurrency)
        self.create = {"network": "none", **create}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/v1/ping" else 404, "pong" if self.path == "/v1/ping" else "not here")

    def do_POST(self) -> None:
        if self.path != "/run_code":
            self._answer(404, {"detail": "only /run_code is served"})
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MAX_BODY:
            self.close_connection = True  # the body is still on it
            self._answer(413, {"detail": f"the body must have a length, of {_MAX_BODY} bytes at most"})
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
            if not isinstance(body, dict):
                raise BadRequest("the body must be a JSON object")
            with self.server.slots:
                answer = run_code(body, **self.server.create)
        except CoveError as e:
            log.warning("a request had no answer: %s", e)
            answer = _answer("SandboxError", str(e))
        except (ValueError, TypeError) as e:
            self._answer(422, {"detail": str(e)})
            return
        self._answer(200, answer)

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cove.adapters.sandboxfusion", description="POST /run_code")
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT")
    parser.add_argument("--concurrency", type=int, default=64, help="sandboxes at a time (default: 64)")
    parser.add_argument("--image", default=None, help="default: base")
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--network", default="none")
    args = parser.parse_args()
    host, _, port = args.listen.rpartition(":")
    create = {"image": args.image, "memory": args.memory, "network": args.network}
    with Server((host, int(port)), args.concurrency, **create) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"serving http://{args.listen}/run_code", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
