"""A server with a certificate of its own: COVE_CA and Client(ca=...)."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import cove
from cove import errors


class _Info(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"version":"tls"}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A TLS 1.3 server and the file of its authority."""
    cert, key = tmp_path / "ca.crt", tmp_path / "ca.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(cert, key)
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Info)
    web.socket = context.wrap_socket(web.socket, server_side=True)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{web.server_address[1]}", str(cert)
    web.shutdown()
    thread.join()
    web.server_close()


def test_the_authority_is_trusted(server: tuple[str, str]) -> None:
    url, ca = server
    with cove.Client(url, "cove_x", ca=ca) as client:
        assert client.info().version == "tls"


def test_from_the_environment(server: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    url, ca = server
    monkeypatch.setenv("COVE_CA", ca)
    with cove.Client(url, "cove_x") as client:
        assert client.info().version == "tls"


def test_without_it_the_server_is_a_stranger(server: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    url, _ = server
    monkeypatch.delenv("COVE_CA", raising=False)
    with cove.Client(url, "cove_x", retry_timeout=0.1) as client, pytest.raises(cove.TransportError):
        client.info()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(cove.InvalidArgument, match="no file"):
        cove.Client("https://127.0.0.1:1", "cove_x", ca=str(tmp_path / "nosuch"))


def test_quota_exceeded_is_an_error_of_its_own() -> None:
    assert errors.BY_CODE["quota_exceeded"] is cove.QuotaExceeded
