"""A server that speaks Cove's protocol over real sockets and does what a test tells it to."""

from __future__ import annotations

import base64
import json
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Optional, Union
from urllib.parse import parse_qs, urlsplit

from . import contract


@dataclass
class Got:
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    message: dict[str, Any]
    peer: tuple[str, int]


@dataclass
class Fail(Exception):
    """An error answer, with the detail a real server adds."""

    code: str
    connect: str = "invalid_argument"
    message: str = "it did not work"
    op: str = ""
    field_name: str = ""
    hint: str = ""
    retry_after_ms: int = 0
    status: int = 400
    detail: bool = True

    def body(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"code": self.connect, "message": self.message}
        if self.detail:
            value = error_detail(self.code, self.op, self.field_name, self.hint, self.retry_after_ms)
            encoded = base64.b64encode(value).decode().rstrip("=")  # Connect leaves the padding out
            answer["details"] = [
                {"type": "other.v1.Detail", "value": "CgNmb28"},
                {"type": "cove.v1.ErrorDetail", "value": encoded},
            ]
        return answer


def error_detail(code: str, op: str, field_name: str, hint: str, retry_after_ms: int) -> bytes:
    out = b""
    for number, text in enumerate((code, op, field_name, hint), start=1):
        data = text.encode()
        if data:
            out += bytes([number << 3 | 2]) + varint(len(data)) + data
    if retry_after_ms:
        out += bytes([5 << 3]) + varint(retry_after_ms)
    return out + bytes([15 << 3 | 2, 2]) + b"??" + bytes([14 << 3 | 5]) + b"\0\0\0\0"  # fields of a later version


def varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


class Break:
    """The connection breaks here."""


@dataclass
class Raw:
    """Bytes put on a stream as they are."""

    data: bytes


@dataclass
class Stream:
    """A server stream: events, then a clean end unless a Break or Fail comes first."""

    items: Iterable[Union[dict[str, Any], Break, Fail, Raw]]


@dataclass
class Plain:
    """A plain HTTP answer. Without a length it is chunked; broken says that it breaks off."""

    body: Union[bytes, Iterable[bytes]] = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    broken: bool = False


Handler = Callable[[Got], Any]


def envelope(message: dict[str, Any], flags: int = 0) -> bytes:
    body = json.dumps(message).encode()
    return bytes([flags]) + len(body).to_bytes(4, "big") + body


class FakeCove:
    """Serves from start() to stop(); a second start() is a restart on the same port."""

    KEY = "cove_test_key"

    def __init__(self) -> None:
        self.requests: list[Got] = []
        self._handlers: dict[str, Handler] = {}
        self.on("Leases/Create", {"lease": {"id": "l1", "ttl": "300s"}})
        self.on("Leases/Heartbeat", {"lease": {"id": "l1", "ttl": "300s"}})
        self.on("Leases/End", {})
        self._server: Optional[_Server] = None
        self._thread: Optional[threading.Thread] = None
        self._port = 0
        self.breaches: list[str] = []
        """Messages that are not as the protos have them; a test with one fails."""

    def on(self, name: str, handler: Any) -> None:
        """name is "Sandboxes/Create", or "PUT files" for plain HTTP. handler is an answer or makes one of a Got."""
        self._handlers[name] = handler if callable(handler) else lambda _: handler

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def count(self, name: str) -> int:
        return len(self.sent(name))

    def sent(self, name: str) -> list[Got]:
        return [got for got in self.requests if got.path.endswith(name)]

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.fake = self
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        """As a crash does: the port is free and every connection is cut."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.cut()
        self._server.server_close()
        self._server = None

    def handle(self, got: Got) -> Any:
        at_port = got.path.startswith("/p/")
        if not at_port and got.headers.get("authorization") != "Bearer " + self.KEY:
            return Fail("unauthenticated", "unauthenticated", "no or a wrong key", status=401)
        if got.path.startswith("/cove.v1."):
            name = got.path.removeprefix("/cove.v1.")
        else:
            name = f"{got.method} {got.path.rpartition('/')[2]}"
        self.requests.append(got)
        if at_port or "/" not in name:
            return self._handlers[name](got)
        self.check(contract.check_request, name, got.message)
        answer = self._handlers[name](got)
        if isinstance(answer, dict):
            self.check(contract.check_answer, name, answer)
        elif isinstance(answer, Stream):
            answer.items = self._checked(name, answer.items)
        return answer

    def check(self, check: Callable[[str, Any], None], name: str, message: Any) -> None:
        try:
            check(name, message)
        except AssertionError as err:
            self.breaches.append(str(err))

    def _checked(self, name: str, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if isinstance(item, dict):
                self.check(contract.check_answer, name, item)
            yield item


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = True
    request_queue_size = 1024
    fake: FakeCove

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        with self._lock:
            for sock in self._open:
                reset(sock)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # cut connections are part of the tests


def reset(sock: socket.socket) -> None:
    """Close with RST, so that the peer sees a broken connection and not an end."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _Server

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self._body()
        parts = urlsplit(self.path)
        streaming = self.headers.get("content-type") == "application/connect+json"
        message: dict[str, Any] = {}
        if parts.path.startswith("/cove.v1."):
            assert self.headers["connect-protocol-version"] == "1"
            message = json.loads(body[5:] if streaming else body)
        headers = {name.lower(): value for name, value in self.headers.items()}
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        got = Got(self.command, parts.path, query, headers, body, message, self.client_address)
        answer = self.server.fake.handle(got)
        if isinstance(answer, Fail) and not streaming:
            self._whole(answer.status, json.dumps(answer.body()).encode(), {"content-type": "application/json"})
        elif isinstance(answer, Fail) and answer.status == 401:
            self._whole(401, json.dumps(answer.body()).encode(), {"content-type": "application/json"})
        elif isinstance(answer, Fail):
            self._stream([answer])
        elif isinstance(answer, Break):
            self._break()
        elif isinstance(answer, Stream):
            self._stream(answer.items)
        elif isinstance(answer, Plain):
            self._plain(answer)
        else:
            self._whole(200, json.dumps(answer).encode(), {"content-type": "application/json"})

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("transfer-encoding", ""):
            out = b""
            while True:
                size = int(self.rfile.readline(), 16)
                out += self.rfile.read(size)
                self.rfile.readline()
                if not size:
                    return out
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _plain(self, answer: Plain) -> None:
        if isinstance(answer.body, bytes) and not answer.broken:
            self._whole(answer.status, answer.body, answer.headers)
            return
        self._begin_chunks(answer.status, answer.headers)
        for data in [answer.body] if isinstance(answer.body, bytes) else answer.body:
            self._chunk(data)
        if answer.broken:
            self._break()
        else:
            self._chunk(b"")

    def _stream(self, items: Iterable[Union[dict[str, Any], Break, Fail, Raw]]) -> None:
        self._begin_chunks(200, {"content-type": "application/connect+json"})
        for item in items:
            if isinstance(item, Break):
                self._break()
                return
            if isinstance(item, Fail):
                self._chunk(envelope({"error": item.body()}, flags=2))
                break
            self._chunk(item.data if isinstance(item, Raw) else envelope(item))
        else:
            self._chunk(envelope({}, flags=2))
        self._chunk(b"")

    def _begin_chunks(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if data else b"0\r\n\r\n")
        self.wfile.flush()

    def _break(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        reset(self.connection)


class FakeProcesses:
    """Processes that run at most once per exec_id and can be read from any offset.

    Each stream breaks after as many bytes of output as the next of `breaks`
    says; when there are none left, it runs to the end.
    """

    def __init__(self, output: list[tuple[str, bytes]], breaks: Iterable[int] = (), piece: int = 1000) -> None:
        self.output = output
        self.breaks: Iterator[int] = iter(breaks)
        self.piece = piece
        self.runs: dict[str, dict[str, Any]] = {}
        self.input: dict[str, bytes] = {}
        self.closed: set[str] = set()
        self.signals: list[tuple[str, str]] = []
        self.end: dict[str, Any] = {"cause": "exited"}
        self.changed = threading.Event()
        """Its stdin was closed, or it got a signal."""
        self.ends_when_changed = False

    def install(self, server: FakeCove) -> FakeProcesses:
        server.on("Processes/Start", self._start)
        server.on("Processes/Attach", lambda got: self._follow(got.message["execId"], got, True))
        server.on("Processes/SendInput", self._send_input)
        server.on("Processes/CloseInput", self._close_input)
        server.on("Processes/Signal", self._signal)
        server.on("Processes/Resize", {})
        return self

    def _start(self, got: Got) -> Any:
        spec = got.message["process"]
        replayed = spec["execId"] in self.runs
        self.runs.setdefault(spec["execId"], spec)
        return self._follow(spec["execId"], got, replayed)

    def _follow(self, exec_id: str, got: Got, replayed: bool) -> Any:
        if exec_id not in self.runs:
            return Fail("not_found", "not_found", f"no process {exec_id}")
        return Stream(self._events(exec_id, int(got.message.get("offset", 0)), replayed))

    def _events(self, exec_id: str, offset: int, replayed: bool) -> Iterator[Union[dict[str, Any], Break]]:
        left: Optional[int] = next(self.breaks, None)
        if left == 0:
            yield Break()
            return
        yield {"started": {"execId": exec_id, "pid": 7, **({"replayed": True} if replayed else {})}}
        yield {"keepAlive": {}}
        position = 0
        for stream, data in self.output:
            for start in range(0, len(data), self.piece):
                piece = data[start : start + self.piece]
                stop = position + len(piece)
                if stop > offset:
                    skip = max(0, offset - position)
                    if left is not None and left < len(piece) - skip:
                        piece = piece[: skip + left]
                    message = {"stream": f"OUTPUT_STREAM_{stream}", "data": base64.b64encode(piece[skip:]).decode()}
                    if position + skip:
                        message["offset"] = str(position + skip)
                    yield {"output": message}
                    if left is not None:
                        left -= len(piece) - skip
                        if left <= 0:
                            yield Break()
                            return
                position = stop
        if self.ends_when_changed:
            assert self.changed.wait(60)
        total = sum(len(data) for _, data in self.output)
        yield {"end": {"end": self.end, "outputBytes": str(total), "duration": "0.250s"}}

    def _send_input(self, got: Got) -> Any:
        exec_id = got.message["execId"]
        if exec_id in self.closed:
            return Fail("failed_precondition", "failed_precondition", "stdin is closed")
        data = base64.b64decode(got.message["data"])
        self.input[exec_id] = self.input.get(exec_id, b"") + data
        return {}

    def _close_input(self, got: Got) -> Any:
        self.closed.add(got.message["execId"])
        self.changed.set()
        return {}

    def _signal(self, got: Got) -> Any:
        self.signals.append((got.message["execId"], got.message["signal"]))
        self.changed.set()
        return {}


def sandbox_json(id: str = "sb1", **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "spec": {
            "image": "base",
            "resources": {"cpu": 1, "memory": "536870912", "memoryLimit": "536870912", "disk": "10737418240"},
            "labels": {"run": "r1"},
            "timeout": "90s",
        },
        "imageId": "sha256:abc",
        "node": "n1",
        "state": "SANDBOX_STATE_RUNNING",
        "episode": "1",
        "createdAt": "2026-03-01T10:00:00.123456789Z",
        **more,
    }


def snapshot_json(id: str = "sn1", **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "kind": "memory",
        "sandbox": "sb1",
        "parent": "sn0",
        "ancestors": ["sn0"],
        "spec": {"image": "base"},
        "imageId": "sha256:abc",
        "node": "n1",
        "createdAt": "2026-03-01T10:00:00Z",
        "size": "6000000000",
        "stored": "5000000",
        **more,
    }
