"""Many clients do everything to their sandboxes at random while the server is killed under them.

    with-server.sh soak_ops.py [--seconds N] [--clients N] [--kill N] [--origin child|reused]

Each client sets values and reads them back across resets, pauses, snapshots, restores and forks. A value that
is not the one expected, a process that stands still, a sandbox that is lost without a cause that explains it, an
operation that does not work again within a minute: these are violations, and the exit code says whether there were
any. Errors that a client sees and gets over are listed by operation and type. The server is killed with SIGKILL and
started again over the same data.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import pathlib
import random
import signal
import subprocess
import time
from collections.abc import Awaitable
from typing import Any, Callable, Optional

import cove
from cove import AsyncSandbox

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALL = {"image": "base", "memory": "48MiB", "memory_limit": "192MiB", "cpu": 1, "disk": "64MiB", "network": "none"}
COUNTER = "(i=0; while :; do i=$((i+1)); echo $i > /tmp/c; sleep 0.2; done) >/dev/null 2>&1 & true"
PATIENCE = 60.0
"""Seconds after which an operation that still fails is one that never works."""

PASSING = (cove.Unavailable, cove.NoCapacity, cove.DeadlineExceeded, cove.Conflict)
"""What a client may see while the server is away or full, and get over by asking again."""


class Server:
    """The server of with-server.sh, killed and started again at the same address."""

    def __init__(self, data: str, url: str) -> None:
        self.data, self.listen = data, url.split("//", 1)[1].rstrip("/")
        self.kills = 0
        self.away: list[float] = []
        self.process: Optional[subprocess.Popen[bytes]] = None

    def kill(self) -> None:
        os.kill(int(pathlib.Path(self.data, "pid").read_text()), signal.SIGKILL)
        self.kills += 1
        if self.process is not None:
            self.process.wait()

    def start(self) -> None:
        command = [str(ROOT / "bin/cove"), "serve", "--data", self.data, "--listen", self.listen]
        with open(pathlib.Path(self.data, "serve.log"), "ab") as log:
            self.process = subprocess.Popen(
                command + os.environ.get("COVE_SERVE_ARGS", "").split(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def restart(self) -> None:
        start = time.monotonic()
        self.kill()
        while True:
            self.start()
            assert self.process is not None
            while self.process.poll() is None:
                check = subprocess.run([str(ROOT / "bin/cove"), "health"], capture_output=True)
                if check.returncode == 0:
                    self.away.append(time.monotonic() - start)
                    return
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.2)  # the lock of the one before is let go in a moment


async def originate(origin: str) -> dict[str, Any]:
    """What the clients create: fresh sandboxes, children of one checkpoint, or those that share a trust group's kernels."""
    if origin == "reused":
        return {**SMALL, "reuse": "soak"}
    if origin == "child":
        parent = await AsyncSandbox.create(**SMALL)
        snapshot = await parent.snapshot(memory=True)
        await parent.kill()
        return {"snapshot": snapshot.id}
    return SMALL


class Soak:
    def __init__(self, seconds: float, seed: int) -> None:
        self.until = time.monotonic() + seconds
        self.seed = seed
        self.spec: dict[str, Any] = SMALL
        self.operations: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.lost: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []
        self.latency: dict[str, list[float]] = collections.defaultdict(list)

    def over(self) -> bool:
        return time.monotonic() > self.until

    def violated(self, what: str) -> None:
        self.violations.append(what)
        print("VIOLATION", what, flush=True)

    async def do(self, name: str, f: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Until it works; what cannot pass by itself is raised."""
        began = time.monotonic()
        while True:
            start = time.monotonic()
            try:
                result = await f(*args, **kwargs)
            except PASSING as e:
                self.errors[f"{name}: {type(e).__name__}: {str(e)[:150]}"] += 1
                if time.monotonic() - began > PATIENCE:
                    self.violated(f"{name} still fails after {PATIENCE:.0f} s: {e!r}"[:400])
                    raise
                await asyncio.sleep(e.retry_after or 0.2 + random.random() * 0.3)
            else:
                self.latency[name].append(time.monotonic() - start)
                self.operations[name] += 1
                return result

    async def read(self, sandbox: AsyncSandbox, path: str) -> str:
        result = await self.do("exec", sandbox.exec, ["cat", path])
        return str(result.stdout).strip()

    async def client(self, number: int) -> None:
        rnd = random.Random(f"{self.seed}-{number}")
        episode = 0
        while not self.over():
            sandbox: Optional[AsyncSandbox] = None
            episode += 1
            try:
                key = f"soak-{self.seed}-{os.getpid()}-{number}-{episode}"
                sandbox = await self.do("create", AsyncSandbox.create, idempotency_key=key, **self.spec)
                await self.episode(sandbox, rnd, f"client {number}")
                await self.do("kill", sandbox.kill)
            except cove.CoveError as e:
                await self.lose(sandbox, e, f"client {number}")

    async def lose(self, sandbox: Optional[AsyncSandbox], e: cove.CoveError, who: str) -> None:
        """An error that asking again does not help with. Only the machine's own limits explain one."""
        cause = ""
        if sandbox is not None:
            try:
                cause = str((await self.do("get", sandbox.info)).end)
            except cove.CoveError as gone:
                cause = f"{type(gone).__name__}"
            try:
                await sandbox.kill()
            except cove.CoveError:
                pass
        self.lost[f"{type(e).__name__}: {str(e)[:150]}"] += 1
        if "oom" not in cause:
            self.violated(f"{who} lost {sandbox.id if sandbox else 'no sandbox'}: {e!r} op={e.op} end={cause}"[:500])

    async def episode(self, sandbox: AsyncSandbox, rnd: random.Random, who: str) -> None:
        value = "-"
        await self.do("exec", sandbox.exec, f"echo - > /tmp/s; {COUNTER}")
        taken: Optional[tuple[Any, str]] = None
        for _ in range(rnd.randint(5, 25)):
            if self.over():
                break
            steps = ["set", "get", "reset", "hot", "cold", "snapshot", "restore", "fork", "count"]
            step = rnd.choices(steps, [8, 6, 2, 2, 2, 2, 2, 1, 2])[0]
            if step == "set":
                value = str(rnd.getrandbits(40))
                await self.do("exec", sandbox.exec, f"echo {value} > /tmp/s")
            elif step == "get":
                got = await self.read(sandbox, "/tmp/s")
                if got != value:
                    self.violated(f"{who} {sandbox.id}: read {got!r}, wrote {value!r}")
            elif step == "reset":
                await self.do("reset", sandbox.reset)  # a reset that is asked for again is still a reset
                value = "-"
                r = await self.do("exec", sandbox.exec, f"test ! -e /tmp/c && echo - > /tmp/s; {COUNTER}")
                if r.exit_code != 0:
                    self.violated(f"{who} {sandbox.id}: an exec after a reset ended with {r.exit_code} {r.cause}")
            elif step == "hot":
                await self.do("pause", sandbox.pause)
            elif step == "cold":
                await self.do("cold pause", sandbox.pause, cold=True)
            elif step == "snapshot":
                if taken is not None:
                    await self.do("delete", taken[0].delete)
                taken = (await self.do("snapshot", sandbox.snapshot, memory=True), value)
            elif step == "restore" and taken is not None:
                await self.do("restore", sandbox.restore, taken[0])
                value = taken[1]
            elif step == "fork":
                for child in await self.do("fork", sandbox.fork, 3):
                    got = await self.read(child, "/tmp/s")
                    if got != value:
                        self.violated(f"{who} child {child.id} of {sandbox.id}: read {got!r}, wrote {value!r}")
                    await self.do("kill", child.kill)
            elif step == "count":
                before = await self.read(sandbox, "/tmp/c")
                await asyncio.sleep(0.6)
                # Between two increments on a busy machine: given time, it counts.
                for _ in range(20):
                    after = await self.read(sandbox, "/tmp/c")
                    if not before or (after and int(after) > int(before)):
                        break
                    await asyncio.sleep(0.5)
                else:
                    self.violated(f"{who} {sandbox.id}: its process stands still at {before}")
        if taken is not None:
            await self.do("delete", taken[0].delete)

    def report(self, server: Server) -> None:
        print(f"operations {sum(self.operations.values())}, server killed {server.kills} times", end="")
        print(", away " + " ".join(f"{a:.1f}" for a in server.away) + " s" if server.away else "")
        for name, times in sorted(self.latency.items()):
            times.sort()
            p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
            print(f"  {name:<12} {len(times):>6}   p50 {p50 * 1e3:6.0f}   p99 {p99 * 1e3:6.0f}   max {times[-1] * 1e3:6.0f} ms")
        print(f"errors that passed: {sum(self.errors.values())}")
        for text, n in self.errors.most_common(30):
            print(f"  {n:>6}  {text}")
        print(f"sandboxes lost: {sum(self.lost.values())}")
        for text, n in self.lost.most_common(10):
            print(f"  {n:>6}  {text}")
        print(f"violations: {len(self.violations)}")
        for v in self.violations[:20]:
            print("  " + v)


async def run(options: argparse.Namespace) -> int:
    server = Server(os.environ["COVE_DATA"], os.environ["COVE_URL"])
    soak = Soak(options.seconds, options.seed)
    print(f"soak: {options.clients} clients for {options.seconds:.0f} s, a kill every {options.kill:.0f} s, seed {options.seed}", flush=True)

    soak.spec = await originate(options.origin)

    async def killer() -> None:
        while options.kill > 0:
            await asyncio.sleep(options.kill)
            if soak.until - time.monotonic() < 5:
                return
            await server.restart()

    await asyncio.gather(killer(), *(soak.client(i) for i in range(options.clients)))
    left = [sandbox.id async for sandbox in AsyncSandbox.list()]
    if left:
        soak.violated(f"{len(left)} sandboxes are left that no client knows: {' '.join(left[:10])}")
    soak.report(server)
    return 1 if soak.violations else 0


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, default=300)
    p.add_argument("--clients", type=int, default=8)
    p.add_argument("--kill", type=float, default=25, help="seconds between kills of the server; 0 = never")
    p.add_argument("--origin", choices=["fresh", "child", "reused"], default="fresh", help="what the sandboxes are made of")
    p.add_argument("--seed", type=int, default=int(time.time()))
    return asyncio.run(run(p.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
