"""How many sandboxes a machine holds, and how fast it gives them out.

Against a live server (COVE_URL, COVE_KEY, COVE_SERVER_PID; scripts/with-server.sh
starts one), through the public API:

  scripts/with-server.sh .venv/bin/python bench/density.py --live 300
  scripts/with-server.sh .venv/bin/python bench/density.py --burst 256 --rate 200

--live N: N idle sandboxes of the default size, all of which ran one process. What
each takes: of its kernel (proportional set size of a sample), of the server, and of
the machine as a whole (memory that is no longer available, divided by N).
With --meet DIR --of K, K of these, each against a server of its own, hold theirs at
the same time: a server that may not raise its limit of open files has room for some
1,500 sandboxes.
--burst N: N creates at once, each with one exec: when they were done, and errors.
--rate N: N times create, exec, kill by --clients at a time, with a kernel of their
own and within a trust group (reuse), in turns: how many a second, and the CPU time
of the machine for each.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any, Optional

from cove import AsyncClient, AsyncSandbox

from measure import REPO, available, kernel_memory, kernels, log, p

MIB = 2**20


def pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def server_memory() -> int:
    """Of the server and of the processes that it keeps beside it, but not of kernels."""
    pid = int(os.environ["COVE_SERVER_PID"])
    total = pss(pid)
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            cmd = Path(f"/proc/{child}/cmdline").read_bytes()
            if not cmd.startswith(b"runsc-sandbox\0"):
                total += pss(int(child))
    return total


def busy() -> float:
    """Seconds of CPU that the machine has used."""
    fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def cove_cpu(data: str) -> float:
    """Seconds of CPU of the server and of its kernels, dead ones included. With cgroup
    v1 a sentry's first 20 ms or so are missing: it joins its group after its start."""
    fields = Path(f"/proc/{os.environ['COVE_SERVER_PID']}/stat").read_text().rsplit(")", 1)[1].split()
    server = sum(int(f) for f in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    parent = "cove-" + hashlib.sha256(f"{data}/gvisor".encode()).hexdigest()[:8]
    v2 = Path("/sys/fs/cgroup") / parent / "cpu.stat"
    if v2.exists():
        return server + int(v2.read_text().split()[1]) / 1e6
    return server + int((Path("/sys/fs/cgroup/cpuacct") / parent / "cpuacct.usage").read_text()) / 1e9


async def gather(n: int, at_once: int, one: Any) -> list[Any]:
    gate = asyncio.Semaphore(at_once)

    async def turn(i: int) -> Any:
        async with gate:
            return await one(i)

    return await asyncio.gather(*(turn(i) for i in range(n)))


async def meet(place: Optional[Path], of: int, what: str) -> None:
    """Waits, at most ten minutes, until all of them are here."""
    if place is None:
        return
    (place / f"{what}-{os.getpid()}").touch()
    for _ in range(6000):
        if len(list(place.glob(what + "-*"))) >= of:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"not all {of} came to {place}: {what}")


async def live(n: int, at_once: int, data: str, place: Optional[Path], of: int) -> dict[str, Any]:
    async with AsyncClient() as client:
        before, server = available(), server_memory()
        t0 = time.perf_counter()

        async def create(_: int) -> AsyncSandbox:
            sb = await AsyncSandbox.create(labels={"bench": "density"}, client=client, create_timeout=1200)
            assert (await sb.exec(["true"])).exit_code == 0
            return sb

        sbs = await gather(n, at_once, create)
        t1 = time.perf_counter()
        log(f"  {n} live and used after {t1 - t0:.1f} s")
        await meet(place, of, "live")
        await asyncio.sleep(10)  # what is unused is given back after some seconds
        each = kernel_memory(random.sample(kernels(data), min(24, n)))
        machine, own = before - available(), server_memory() - server
        await meet(place, of, "measured")
        ok = sum(await gather(n, at_once, lambda i: answers(sbs[i])))
        await meet(place, of, "answered")
        t2 = time.perf_counter()
        await gather(n, at_once, lambda i: sbs[i].kill())
        return {
            "sandboxes": n,
            "servers": of,
            "create_s": t1 - t0,
            "answered": ok,
            "kill_s": time.perf_counter() - t2,
            "kernel_MiB_p50": statistics.median(each) / MIB,
            "server_MiB": (server + own) / MIB,
            "server_MiB_each": own / n / MIB,
            "machine_MiB_each": machine / (n * of) / MIB,
        }


async def answers(sb: AsyncSandbox) -> bool:
    return (await sb.exec(["echo", sb.id])).stdout.strip() == sb.id


async def burst(n: int) -> dict[str, Any]:
    async with AsyncClient() as client:
        t0 = time.perf_counter()
        done: list[float] = []
        failed: list[str] = []

        async def one(_: int) -> Optional[AsyncSandbox]:
            try:
                sb = await AsyncSandbox.create(client=client, create_timeout=600)
                await sb.exec(["true"])
            except Exception as e:  # each is what this is about
                failed.append(str(e))
                return None
            done.append(time.perf_counter() - t0)
            return sb

        sbs = await gather(n, n, one)
        await gather(n, 32, lambda i: sbs[i].kill() if sbs[i] else asyncio.sleep(0))
        return {
            "burst": n,
            "failed": len(failed),
            "first_error": failed[0] if failed else "",
            "p50_ms": p(done, 0.5) if done else 0,
            "all_s": max(done, default=0.0),
        }


async def rate(n: int, clients: int, rounds: int) -> dict[str, Any]:
    async with AsyncClient() as client:
        out: dict[str, list[dict[str, float]]] = {"own": [], "reuse": []}

        async def life(reuse: Optional[str]) -> None:
            sb = await AsyncSandbox.create(network="none", reuse=reuse, client=client, create_timeout=600)
            assert (await sb.exec(["true"])).exit_code == 0
            await sb.kill()

        for kind in out:  # the first of each boots what the later ones find
            await gather(2 * clients, clients, lambda _, k=kind: life("bench" if k == "reuse" else None))
        for _ in range(rounds):
            for kind, got in out.items():
                await asyncio.sleep(1)
                data = os.environ["COVE_DATA"]
                t0, c0, o0 = time.perf_counter(), busy(), cove_cpu(data)
                await gather(n, clients, lambda _, k=kind: life("bench" if k == "reuse" else None))
                wall, cpu, own = time.perf_counter() - t0, busy() - c0, cove_cpu(data) - o0
                got.append({"per_s": n / wall, "cpu_ms": own / n * 1e3, "machine_cpu_ms": cpu / n * 1e3})
                log(f"  {kind}: {n / wall:.1f}/s, {own / n * 1e3:.1f} ms of CPU each, {cpu / n * 1e3:.1f} of the machine with the clients")
    return {
        "lives": n,
        "clients": clients,
        **{f"{k}_per_s": statistics.median(r["per_s"] for r in v) for k, v in out.items()},
        **{f"{k}_cpu_ms": statistics.median(r["cpu_ms"] for r in v) for k, v in out.items()},
        "rounds": out,
    }


def main() -> int:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--live", type=int, default=0)
    a.add_argument("--meet", type=Path, help="a directory; see above")
    a.add_argument("--of", type=int, default=1)
    a.add_argument("--burst", type=int, default=0)
    a.add_argument("--rate", type=int, default=0)
    a.add_argument("--rounds", type=int, default=3, help="of --rate")
    a.add_argument("--clients", type=int, default=0, help="of --rate; default twice the cores")
    a.add_argument("--at-once", type=int, default=0, help="of --live; default four times the cores")
    args = a.parse_args()
    cores = os.cpu_count() or 1
    got: dict[str, Any] = {"cores": cores, "load": os.getloadavg()[0]}
    if args.live:
        got["live"] = asyncio.run(live(args.live, args.at_once or 4 * cores, os.environ["COVE_DATA"], args.meet, args.of))
    if args.burst:
        got["burst"] = asyncio.run(burst(args.burst))
    if args.rate:
        got["rate"] = asyncio.run(rate(args.rate, args.clients or 2 * cores, args.rounds))
    print(json.dumps(got, indent=1))
    out = REPO / "bench" / "results" / f"density-{time.strftime('%Y%m%d-%H%M%S')}.json"
    out.write_text(json.dumps(got, indent=1))
    log(f"kept: {out}")
    return 1 if got.get("burst", {}).get("failed") or got.get("live", {}).get("answered") != (args.live or None) and args.live else 0


if __name__ == "__main__":
    raise SystemExit(main())
