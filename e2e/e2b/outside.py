"""A piece of the internet for tests: outside.py COMMAND...

Every name is this machine's address, where an HTTPS server tells what headers it was asked with. The command, which
starts a Cove server, finds in COVE_SERVE_ARGS the flags that make it ask these names and trust that server, and
OUTSIDE_IP, OUTSIDE_PORT and OUTSIDE_SEEN, a URL of this machine alone that says what the last request came with: the
values of secrets, too, which its answers are searched for.
"""

import http.server
import json
import os
import pathlib
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading

import trustme

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))
from wildcard_dns import answer  # noqa: E402

DOMAIN = "outside.test"
last: dict[str, str] = {}


class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global last
        last = {k.lower(): v for k, v in self.headers.items()}
        self.say(last)

    def say(self, what: dict[str, str]) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Seen(Echo):
    def do_GET(self) -> None:
        self.say(last)


def serve(server: http.server.ThreadingHTTPServer) -> int:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 9))  # sends nothing
        return s.getsockname()[0]


def names(address: str) -> int:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))

    def run() -> None:
        while True:
            query, client = server.recvfrom(4096)
            try:
                server.sendto(answer(query, DOMAIN, address), client)
            except (IndexError, struct.error):
                continue  # no query: nobody waits for an answer

    threading.Thread(target=run, daemon=True).start()
    return server.getsockname()[1]


def main() -> int:
    address = own_address()
    authority = trustme.CA()
    site = http.server.ThreadingHTTPServer((address, 0), Echo)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(f"*.{DOMAIN}").configure_cert(tls)
    site.socket = tls.wrap_socket(site.socket, server_side=True)
    with tempfile.TemporaryDirectory() as tmp:
        roots = pathlib.Path(tmp) / "roots.pem"
        authority.cert_pem.write_to_path(roots)
        env = dict(os.environ, OUTSIDE_IP=address, OUTSIDE_PORT=str(serve(site)))
        env["OUTSIDE_SEEN"] = f"http://127.0.0.1:{serve(http.server.ThreadingHTTPServer(('127.0.0.1', 0), Seen))}/"
        env["COVE_SERVE_ARGS"] = f"{env.get('COVE_SERVE_ARGS', '')} --dns 127.0.0.1:{names(address)} --egress-roots {roots}"
        return subprocess.run(sys.argv[1:], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
