"""A name server that knows one domain: every name of it and below is one address.

    wildcard_dns.py DOMAIN ADDRESS LISTEN COMMAND...

LISTEN is an address of the loopback; the next one is taken where it is not free. It runs the command in a mount
namespace of its own whose /etc/resolv.conf names this server, so that nothing of the
machine changes, and ends with it. For tests of domain mode, where there is no wildcard DNS. Needs root.
"""

import errno
import ipaddress
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading


def answer(query: bytes, domain: str, address: str) -> bytes:
    """The address for A of a name of ours, nothing for its other types, and no such name for the rest."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace").lower())
        at += 1 + query[at]
    question = query[12 : at + 5]
    kind = struct.unpack("!H", query[at + 1 : at + 3])[0]
    name = ".".join(labels)
    ours = name == domain or name.endswith("." + domain)
    records = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 60, 4) + socket.inet_aton(address) if ours and kind == 1 else b""
    flags = 0x8580 if ours else 0x8183  # authoritative; or NXDOMAIN
    return query[:2] + struct.pack("!HHHHH", flags, 1, 1 if records else 0, 0, 0) + question + records


def main() -> int:
    domain, address, listen, *command = sys.argv[1:]
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(100):  # two runs at a time have one each
        try:
            server.bind((listen, 53))
            break
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            listen = str(ipaddress.ip_address(listen) + 1)

    def serve() -> None:
        while True:
            query, client = server.recvfrom(4096)
            try:
                server.sendto(answer(query, domain, address), client)
            except (IndexError, struct.error):
                continue  # no query: nobody waits for an answer

    threading.Thread(target=serve, daemon=True).start()
    with tempfile.NamedTemporaryFile("w", suffix=".resolv") as conf:
        conf.write(f"nameserver {listen}\n")
        conf.flush()
        enter = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        return subprocess.run(["unshare", "-m", "sh", "-c", enter, conf.name, *command], env=os.environ).returncode


if __name__ == "__main__":
    sys.exit(main())
