"""pgbench against a PostgreSQL in a sandbox: from inside, and from here through `cove port-forward`, in turns.

    scripts/with-server.sh .venv/bin/python bench/pgbench.py [--rounds 3] [--seconds 5]

PostgreSQL is this machine's own, copied into the sandbox with the libraries it needs (apt-get install postgresql).
It also has a psql session open over a snapshot, a fork, a hot and a cold pause, and fails if that breaks.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from cove import Sandbox

COVE = Path(__file__).resolve().parent.parent / "bin" / "cove"
PROGRAMS = ("postgres", "initdb", "pg_ctl", "psql", "pgbench")


def installation() -> Path:
    """Where the newest PostgreSQL of this machine is."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: int(p.parts[-3]))
    if not found or not shutil.which("pgbench"):
        sys.exit("pgbench.py: apt-get install postgresql postgresql-contrib")
    return found[-1].parent.parent


def bundle(pg: Path) -> bytes:
    """A tar of PostgreSQL and every library it is linked with."""
    share = Path("/usr/share/postgresql") / pg.name
    files = {str(share), str(pg)}
    for binary in [*(pg / "bin" / name for name in PROGRAMS), *(pg / "lib").glob("*.so")]:
        listing = subprocess.run(["ldd", binary], capture_output=True, text=True).stdout
        files.update(os.path.realpath(lib) for lib in re.findall(r"=> (/\S+)", listing))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in sorted(files):
            tar.add(name, filter=lambda member: None if "/bitcode" in member.name else member)
        for name in sorted(files):  # under the name that the loader looks for
            for link in Path(name).parent.glob(Path(name).name.split(".so")[0] + ".so.*") if ".so" in name else ():
                if link.is_symlink() and os.path.realpath(link) == name:
                    tar.add(link)
    return out.getvalue()


def serve(sb: Sandbox, pg: Path) -> str:
    """PostgreSQL in the sandbox, with pgbench's tables; the command that runs its programs there."""
    sb.files.write("/tmp/pg.tar", bundle(pg))
    root = "tar -xf /tmp/pg.tar -C / --skip-old-files && rm /tmp/pg.tar && ldconfig; useradd -m pg; install -d -o pg /pg"
    sb.exec(root, user="root", timeout=120).check()
    run = f"LC_ALL=C PATH={pg}/bin:$PATH PGHOST=127.0.0.1 PGUSER=pg PGDATABASE=postgres "
    sb.exec(run + "initdb -D /pg -A trust >/dev/null", user="pg", timeout=300).check()
    sb.exec(run + "pg_ctl -D /pg -w -l /pg/log -o '-c unix_socket_directories= -c fsync=off' start", user="pg", timeout=120).check()
    sb.exec(run + "pgbench -i -q -s 2", user="pg", timeout=300).check()
    return run


def tps(text: str) -> float:
    found = re.search(r"tps = ([\d.]+)", text)
    assert found, text
    return float(found.group(1))


class Session:
    """A psql that stays connected."""

    def __init__(self, env: dict[str, str]) -> None:
        self._psql = subprocess.Popen(
            ["psql", "-Atq"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def ask(self, query: str) -> str:
        assert self._psql.stdin and self._psql.stdout
        self._psql.stdin.write(query + "\n")
        self._psql.stdin.flush()
        return self._psql.stdout.readline().strip()

    def close(self) -> int:
        self._psql.communicate("\\q\n")
        return self._psql.returncode


def lives_on(sb: Sandbox, env: dict[str, str]) -> None:
    """One session, with state of its own, over all that stops the sandbox for a while."""
    session = Session(env)
    pid = session.ask("select pg_backend_pid();")
    session.ask("create temp table mine as select 0 as n; select 'made';")
    kept = sb.snapshot()
    steps = {
        "snapshot": lambda: kept,
        "fork": lambda: [child.kill() for child in sb.fork(1)],
        "hot": sb.pause,
        "cold": lambda: sb.pause(cold=True),
    }
    for n, (name, step) in enumerate(steps.items(), 1):
        step()
        got = session.ask("update mine set n = n + 1 returning n || ' ' || pg_backend_pid();")
        assert got == f"{n} {pid}", f"after {name}: {got!r}"
        print(f"psql after {name}: the same session, {got}", file=sys.stderr)
    kept.delete()
    assert session.close() == 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=int, default=5)
    args = options.parse_args()
    pg = installation()
    shares: dict[str, list[float]] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    with Sandbox.create(cpu=2, memory="1GiB", disk="4GiB") as sb:
        run = serve(sb, pg)
        forward = subprocess.Popen([COVE, "port-forward", sb.id, "0:5432"], stderr=subprocess.PIPE, text=True)
        try:
            assert forward.stderr
            host, port = forward.stderr.readline().split()[0].rsplit(":", 1)
            env = {**os.environ, "PGHOST": host, "PGPORT": port, "PGUSER": "pg", "PGDATABASE": "postgres"}
            lives_on(sb, env)
            for _ in range(args.rounds):
                for name, flags in (("select, 1 client", "-S -c 1"), ("select, 8 clients", "-S -c 8 -j 2"), ("tpcb, 8 clients", "-c 8 -j 2")):
                    flags = f"-n -T {args.seconds} {flags}"
                    inside = tps(sb.exec(f"{run} pgbench {flags}", user="pg").check().stdout)
                    out = subprocess.run(["pgbench", *flags.split()], env=env, capture_output=True, text=True, check=True)
                    outside = tps(out.stdout)
                    rates.setdefault(name, []).append((inside, outside))
                    shares.setdefault(name, []).append(outside / inside)
                    print(f"{name}: inside {inside:.0f}, through the forward {outside:.0f}: {outside / inside:.2f}", file=sys.stderr)
        finally:
            forward.terminate()
            forward.wait()
    result: dict[str, Any] = {name: {"share": round(statistics.median(s), 3), "tps": rates[name]} for name, s in shares.items()}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
