"""The benchmark behind every number Cove publishes.

Runs against a live server (COVE_URL, COVE_KEY; `make bench` starts one with an
empty data directory) through the public API only. Times are compared within one
run, interleaved, because the machine is shared and noisy: a number from another
run, or an absolute bound, says nothing here. Prints a table and keeps the raw
figures as JSON under bench/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cove import AsyncClient, AsyncSandbox, Client, Sandbox

from measure import (
    MS,
    REPO,
    Raw,
    available,
    kernel_memory,
    kernels,
    log,
    p,
    timed,
    wait_warm,
)
from grpo_bench import bench_grpo
from memory import bench_memory
from batches import bench_batch
from repls import bench_repl
from rollout import bench_group, bench_steps
from state import bench_cold, bench_files, bench_fork, bench_standby
from templates import bench_template

# --- comparison with plain runc and runsc -------------------------------------------------


class Bundle:
    """The base image's root file system as an OCI bundle for runc and runsc."""

    def __init__(self, erofs: str, command: list[str]) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="cove-bench-"))
        subprocess.run(
            ["fsck.erofs", f"--extract={self.dir}/rootfs", erofs],
            check=True,
            capture_output=True,
        )
        subprocess.run(["runc", "spec"], cwd=self.dir, check=True)
        spec = json.loads((self.dir / "config.json").read_text())
        spec["process"].update(args=command, terminal=False)
        (self.dir / "config.json").write_text(json.dumps(spec))
        self.n = 0

    def run(self, *runtime: str) -> float:
        self.n += 1
        cmd = [
            *runtime,
            "run",
            "--bundle",
            str(self.dir),
            f"cove-bench-{os.getpid()}-{self.n}",
        ]
        return timed(
            lambda: subprocess.run(
                cmd,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def close(self) -> None:
        netns = (
            self.dir / "runsc" / "null-netns"
        )  # runsc leaves a namespace mounted in its root
        if netns.exists():
            subprocess.run(["umount", str(netns)], check=True)
        shutil.rmtree(self.dir)


def one_life(raw: Raw, times: dict[str, list[float]]) -> None:
    wait_warm(raw)
    t0 = time.perf_counter()
    sb = Sandbox.create(network="none")  # as runc and runsc beside it
    t1 = time.perf_counter()
    r = sb.exec(["true"])
    t2 = time.perf_counter()
    assert r.exit_code == 0, r
    times["create"].append(t1 - t0)
    times["cove"].append(t2 - t0)
    # Episodes: the first reset of a sandbox, then one after another.
    for k in range(4):
        wait_warm(raw)
        times["first reset" if k == 0 else "reset"].append(timed(sb.reset))
        sb.exec(["true"])
    sb.kill()


def networked_life(raw: Raw, times: dict[str, list[float]]) -> None:
    wait_warm(raw)
    t0 = time.perf_counter()
    with Sandbox.create(network="public") as sb:
        t1 = time.perf_counter()
        sb.exec(["true"])
        times["cove, networked"].append(time.perf_counter() - t0)
        times["create, networked"].append(t1 - t0)


def bench_create(rounds: int, erofs: str) -> dict[str, Any]:
    raw, bundle = Raw(), Bundle(erofs, ["true"])
    runsc = [
        str(REPO / ".cache" / "tools" / "runsc-plain"),
        "--network=none",
        "--root",
        str(bundle.dir / "runsc"),
    ]
    runc = ["runc", "--root", str(bundle.dir / "runc")]
    times: dict[str, list[float]] = {
        "cove": [],
        "runc": [],
        "runsc": [],
        "create": [],
        "first reset": [],
        "reset": [],
        "cove, networked": [],
        "create, networked": [],
    }
    try:
        for i in range(rounds + 2):  # two rounds to warm every cache
            keep = times if i >= 2 else {k: [] for k in times}
            steps = [
                lambda keep=keep: one_life(raw, keep),
                lambda keep=keep: keep["runc"].append(bundle.run(*runc)),
                lambda keep=keep: keep["runsc"].append(bundle.run(*runsc)),
                lambda keep=keep: networked_life(raw, keep),
            ]
            for k in range(4):
                steps[(i + k) % 4]()
    finally:
        bundle.close()
    m = {k: statistics.median(v) for k, v in times.items()}
    return {
        "ms": {k: {"p50": p(v, 0.5), "p90": p(v, 0.9)} for k, v in times.items()},
        "checks": [
            ("create + first exec, vs runc run", m["cove"] / m["runc"], "<=", 0.7),
            ("runsc run, vs create + first exec", m["runsc"] / m["cove"], ">=", 4.0),
            ("reset, vs runc run", m["reset"] / m["runc"], "<=", 0.25),
            ("reset, ms", m["reset"] * MS, "<=", 6),
            ("first reset, ms", m["first reset"] * MS, "<=", 6),
            (
                "create with a network, vs without",
                m["create, networked"] / m["create"],
                "<=",
                1.5,
            ),
        ],
    }


def bench_exec(rounds: int) -> dict[str, Any]:
    """exec of `true` through the API against subprocess.run(["true"]) inside the same sandbox."""
    inner = (
        "import subprocess, sys, time\n"
        "for _ in sys.stdin:\n"
        "    t = time.perf_counter(); subprocess.run(['true']); print(time.perf_counter() - t, flush=True)\n"
    )
    api: list[float] = []
    inside: list[float] = []
    with Sandbox.create(cpu=2) as sb:
        proc = sb.start(["python3", "-c", inner], stdin=True)
        out = iter(proc)
        for i in range(rounds + 5):
            a = timed(lambda: sb.exec(["true"]))
            proc.write("go\n")
            b = float(next(out).data)
            if i >= 5:
                api.append(a)
                inside.append(b)
        proc.kill()
    return {
        "ms": {
            "api exec": {"p50": p(api, 0.5), "p90": p(api, 0.9)},
            "spawn inside": {"p50": p(inside, 0.5), "p90": p(inside, 0.9)},
        },
        "checks": [
            (
                "exec of true, vs spawn inside",
                statistics.median(api) / statistics.median(inside),
                "<=",
                1.5,
            )
        ],
    }


def bench_api_share(rounds: int) -> dict[str, Any]:
    raw, share, node = Raw(), [], []
    for i in range(rounds + 2):
        wait_warm(raw)
        t = time.perf_counter()
        got = raw.call("Sandboxes/Create", {"spec": {"image": "base"}})
        wall = time.perf_counter() - t
        took = float(got["nodeTime"].rstrip("s"))
        raw.call("Sandboxes/Kill", {"id": got["sandbox"]["id"]})
        if i >= 2:
            share.append(wall - took)
            node.append(took)
    return {
        "ms": {
            "node": {"p50": p(node, 0.5), "p90": p(node, 0.9)},
            "api on top": {"p50": p(share, 0.5), "p90": p(share, 0.9)},
        },
        "checks": [("API on top of the node's create, ms", p(share, 0.5), "<=", 3.0)],
    }


# --- memory and scale ---------------------------------------------------------------------


async def live(n: int, data: str) -> dict[str, Any]:
    async with AsyncClient() as client:
        gate = asyncio.Semaphore(32)

        async def create() -> AsyncSandbox:
            async with gate:
                return await AsyncSandbox.create(
                    cpu=0.1,
                    memory="32MiB",
                    labels={"bench": "live"},
                    client=client,
                    create_timeout=600,
                )

        before = available()
        t0 = time.perf_counter()
        sbs = await asyncio.gather(*(create() for _ in range(n)))
        t1 = time.perf_counter()
        log(f"  {n} live after {t1 - t0:.1f} s")
        # A sample: the kernel walks the page tables of each for up to a second.
        idle = kernel_memory(random.sample(kernels(data), 10))
        machine = (before - available()) / n

        async def answer(sb: AsyncSandbox) -> bool:
            async with gate:
                r = await sb.exec(["echo", sb.id])
                return r.stdout.strip() == sb.id

        ok = sum(await asyncio.gather(*(answer(sb) for sb in sbs)))
        t2 = time.perf_counter()
        log(f"  {ok} answered in {t2 - t1:.1f} s")
        await asyncio.gather(*(sb.kill() for sb in sbs))
        t3 = time.perf_counter()
        return {
            "create_s": t1 - t0,
            "answer_s": t2 - t1,
            "kill_s": t3 - t2,
            "answered": ok,
            "idle_bytes_p50": statistics.median(idle),
            "machine_bytes_each": machine,  # with the host's own structures, the grown pool and the server
        }


def bench_live(n: int, data: str) -> dict[str, Any]:
    got = asyncio.run(live(n, data))
    # What is left is the pool, which has grown with the demand: warm kernels, one
    # blank and the two that may be booting.
    for _ in range(100):
        extra = (
            len(kernels(data))
            - int(Raw().call("System/Info", {}).get("warmKernels", 0))
            - 3
        )
        if extra <= 0:
            break
        time.sleep(0.1)
    return {
        "figures": {**got, "kernels_left_beyond_pool": max(0, extra)},
        "checks": [
            (f"{n} live sandboxes, answering", float(got["answered"]), ">=", float(n)),
            ("kernels left beyond the pool", float(max(0, extra)), "<=", 0.0),
            ("idle sandbox, MiB", got["idle_bytes_p50"] / 2**20, "<=", 12.0),
        ],
    }


# --- bytes --------------------------------------------------------------------------------


def bench_bytes(rounds: int) -> dict[str, Any]:
    size = 256
    up: list[float] = []
    down: list[float] = []
    auth = ["-H", "Authorization: Bearer " + os.environ["COVE_KEY"]]
    with (
        tempfile.TemporaryDirectory(prefix="cove-bench-") as tmp,
        Sandbox.create(cpu=2, memory="1GiB", disk="4GiB") as sb,
    ):
        src, dst = Path(tmp) / "src", Path(tmp) / "dst"
        src.write_bytes(os.urandom(2**20) * size)
        want = hashlib.sha256(src.read_bytes()).hexdigest()
        url = f"{os.environ['COVE_URL']}/v1/sandboxes/{sb.id}/files?path=/tmp/blob"
        for i in range(rounds + 1):
            a = timed(
                lambda: subprocess.run(
                    ["curl", "-sSf", *auth, "-T", str(src), url],
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
            )
            b = timed(
                lambda: subprocess.run(
                    ["curl", "-sSf", *auth, "-o", str(dst), url], check=True
                )
            )
            if i:
                up.append(size / a)
                down.append(size / b)
        assert hashlib.sha256(dst.read_bytes()).hexdigest() == want, (
            "the file came back different"
        )
        inside = sb.exec(["sha256sum", "/tmp/blob"]).stdout.split()[0]
        assert inside == want, "the file inside is different"

        n = 100 * 2**20
        t = time.perf_counter()
        r = sb.exec(["sh", "-c", f"head -c {n} /dev/zero | tr '\\0' x"], timeout=300)
        took = time.perf_counter() - t
        exact = (
            r.exit_code == 0
            and len(r.stdout_bytes) == n
            and r.stdout_bytes.count(b"x") == n
        )
    return {
        "figures": {
            "upload_mib_s": statistics.median(up),
            "download_mib_s": statistics.median(down),
            "print_mib_s": 100 / took,
        },
        "checks": [
            ("256 MiB upload, MiB/s", statistics.median(up), ">=", 200.0),
            ("256 MiB download, MiB/s", statistics.median(down), ">=", 200.0),
            ("100 MiB printed, bytes lost", 0.0 if exact else 1.0, "<=", 0.0),
        ],
    }


def bench_gateway(websockets: int) -> dict[str, Any]:
    """A small compiled server in one sandbox, through the gateway; the load runs on the same cores."""
    with tempfile.TemporaryDirectory() as tmp:
        for name in ("portserver", "portload"):
            subprocess.run(
                ["go", "build", "-o", f"{tmp}/{name}", f"./bench/{name}"],
                cwd=REPO,
                env={**os.environ, "CGO_ENABLED": "0"},
                check=True,
            )
        with Sandbox.create(cpu=2, memory="1GiB") as sb:
            sb.files.write("/portserver", Path(f"{tmp}/portserver").read_bytes(), mode=0o755)
            sb.exec("nohup /portserver 8080 >/dev/null 2>&1 &")
            sb.wait_port(8080)
            url = sb.url(8080)

            def load(*flags: str) -> dict[str, Any]:
                out = subprocess.run([f"{tmp}/portload", *flags, url], check=True, capture_output=True, text=True)
                return dict(json.loads(out.stdout))

            load("-for", "2s")
            # One after the other in turns, so that a noisy machine hits both alike.
            plain, beside = [], []
            for _ in range(3):
                plain.append(load("-for", "3s"))
                beside.append(load("-for", "3s", "-slow", "1"))
            before = sb.stats().memory
            hold = subprocess.Popen(
                [f"{tmp}/portload", "-websockets", str(websockets), url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert hold.stdin and hold.stdout
            opened = hold.stdout.readline().strip()
            each = (sb.stats().memory - before) / max(1, websockets)
            rest, _ = hold.communicate("\n")
            held = json.loads(rest) if opened == "open" and hold.returncode == 0 else {"open": 0}
    rate = statistics.median(r["per_second"] for r in plain)
    with_slow = statistics.median(r["per_second"] for r in beside)
    return {
        "plain": plain,
        "beside_a_slow_client": beside,
        "websockets": held,
        "figures": {
            "requests/s": rate,
            "p99 ms": statistics.median(r["p99_ms"] for r in plain),
            "KiB per idle WebSocket in the sandbox": each / 1024,
        },
        "checks": [
            ("gateway: requests/s to one sandbox", rate, ">=", 500),
            ("gateway: share of them beside a slow client", with_slow / rate, ">=", 0.8),
            ("gateway: idle WebSockets held", held["open"], ">=", websockets),
        ],
    }


def bench_ports(rounds: int) -> dict[str, Any]:
    """Small questions to a server in a sandbox, as a database's clients ask: from inside and through port-forward, in turns."""
    with tempfile.TemporaryDirectory() as tmp:
        for name in ("portserver", "portload"):
            subprocess.run(
                ["go", "build", "-o", f"{tmp}/{name}", f"./bench/{name}"],
                cwd=REPO,
                env={**os.environ, "CGO_ENABLED": "0"},
                check=True,
            )
        with Sandbox.create(cpu=2, memory="1GiB") as sb:
            for name in ("portserver", "portload"):
                sb.files.write(f"/{name}", Path(f"{tmp}/{name}").read_bytes(), mode=0o755)
            sb.exec("nohup /portserver 8080 9090 >/dev/null 2>&1 &")
            sb.wait_port(9090)
            forward = subprocess.Popen(
                [f"{REPO}/bin/cove", "port-forward", sb.id, "0:9090"], stderr=subprocess.PIPE, text=True
            )
            assert forward.stderr
            try:
                addr = forward.stderr.readline().split()[0]
                inside: dict[int, list[dict[str, Any]]] = {1: [], 8: []}
                outside: dict[int, list[dict[str, Any]]] = {1: [], 8: []}
                cpu: dict[int, list[float]] = {1: [], 8: []}
                for _ in range(rounds):
                    for n in (1, 8):
                        flags = f"-clients {n} -for 2s"
                        inside[n].append(json.loads(sb.exec(f"/portload -lines 127.0.0.1:9090 {flags}").stdout))
                        before = sb.stats().cpu_time
                        out = subprocess.run(
                            [f"{tmp}/portload", "-lines", addr, *flags.split()],
                            check=True,
                            capture_output=True,
                            text=True,
                        )
                        outside[n].append(json.loads(out.stdout))
                        cpu[n].append((sb.stats().cpu_time - before) / outside[n][-1]["requests"])
            finally:
                forward.send_signal(signal.SIGINT)
                forward.wait()

    def share(n: int) -> float:
        return statistics.median(
            o["per_second"] / i["per_second"] for i, o in zip(inside[n], outside[n], strict=True)
        )

    return {
        "inside": inside,
        "outside": outside,
        "figures": {
            **{f"{n} clients: share of the rate inside": share(n) for n in (1, 8)},
            **{f"{n} clients: p50 ms": statistics.median(o["p50_ms"] for o in outside[n]) for n in (1, 8)},
            **{f"{n} clients: CPU of the sandbox, us a request": statistics.median(cpu[n]) * 1e6 for n in (1, 8)},
        },
        "checks": [("ports: share of the rate inside, 8 clients", share(8), ">=", 0.1)],
    }


def bench_boot(rounds: int) -> dict[str, Any]:
    """A first create and exec in a kernel as it boots, in one that has rehearsed and in one that served another sandbox, in turn: see BenchmarkFirst."""
    out = subprocess.run(
        ["go", "test", "./runtime/gvisor", "-run", "XXX", "-bench", "First", "-benchtime", f"{rounds}x"],
        cwd=REPO,
        env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": f"-trimpath -modfile={REPO}/.cache/gvisor.mod"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    words = next(line for line in out.splitlines() if line.startswith("BenchmarkFirst")).split()
    got = {unit: float(value) for value, unit in zip(words[2::2], words[3::2], strict=True)}
    return {
        "figures": got,
        "checks": [
            ("boot: CPU of a kernel that somebody waits for, vs rehearsed", got["fresh-cpu-ms"] / got["rehearsed-cpu-ms"], "<=", 0.7),
            ("boot: CPU of the kernel for a create + exec in one that is used again, ms", got["reused-cpu-ms"], "<=", 30.0),
        ],
    }


def bench_e2b(rounds: int) -> dict[str, Any]:
    """A create through E2B's dialect beside the native one: the same client, in turn, on one connection each."""
    url = urllib.parse.urlsplit(os.environ["COVE_URL"])
    key = os.environ["COVE_KEY"]
    raw = key.removeprefix("cove_")
    spelled = "e2b_" + base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)).hex()
    calls = {
        "native": ("/cove.v1.Sandboxes/Create", {"Authorization": f"Bearer {key}"}, {"spec": {"timeout": "60s"}}),
        "E2B": ("/v2/sandboxes", {"X-API-KEY": spelled}, {"templateID": "base", "timeout": 60}),
    }
    raw_client = Raw()
    links = {name: http.client.HTTPConnection(url.hostname or "", url.port or 80) for name in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 3):  # the first ones warm up
        for name in random.sample(list(calls), len(calls)):
            path, headers, body = calls[name]
            wait_warm(raw_client)
            t0 = time.perf_counter()
            links[name].request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
            answer = links[name].getresponse()
            got = json.loads(answer.read())
            took = time.perf_counter() - t0
            if answer.status >= 300:
                raise RuntimeError(f"{name}: {answer.status} {got}")
            if i >= 3:
                times[name].append(took)
            links[name].request("DELETE", f"/sandboxes/{got.get('sandboxID') or got['sandbox']['id']}", headers={"X-API-KEY": spelled})
            links[name].getresponse().read()
    more = statistics.median(times["E2B"]) - statistics.median(times["native"])
    return {
        "ms": {f"create, {name}": {"p50": p(ts, 0.5), "p90": p(ts, 0.9)} for name, ts in times.items()},
        "checks": [("e2b: create, ms more than the native one", more * 1e3, "<=", 3)],
    }


def bench_grade(rounds: int) -> dict[str, Any]:
    """A grade by `true` against a create and a first exec of `true`, in turns: what is left is the grading's own."""
    raw = Raw()
    times: dict[str, list[float]] = {"create": [], "first exec": [], "grade": [], "grade, until the command": []}
    with tempfile.TemporaryDirectory() as tests, Sandbox.create(network="none") as sb:
        Path(tests, "test_nothing.py").write_text("def test_nothing(): pass\n")
        sb.exec("mkdir -p /work/src && for i in $(seq 40); do echo $i > /work/src/$i.py; done")

        def grade(keep: dict[str, list[float]]) -> None:
            sb.exec("date > /work/src/now")  # or its files are those of the last time
            wait_warm(raw)
            t0 = time.perf_counter()
            v = sb.grade(tests, ["true"], ["/work"])
            keep["grade"].append(time.perf_counter() - t0)
            keep["grade, until the command"].append(v.setup)
            assert v.reward == 1, v

        def create(keep: dict[str, list[float]]) -> None:
            wait_warm(raw)
            t0 = time.perf_counter()
            with Sandbox.create(network="none") as one:
                t1 = time.perf_counter()
                one.exec(["true"], user="64002:64002")  # as the grader's command is
                keep["create"].append(t1 - t0)
                keep["first exec"].append(time.perf_counter() - t1)

        for i in range(rounds + 2):
            keep = times if i >= 2 else {k: [] for k in times}
            for step in (grade, create) if i % 2 else (create, grade):
                step(keep)
    m = {k: statistics.median(v) for k, v in times.items()}
    return {
        "ms": {k: {"p50": p(v, 0.5), "p90": p(v, 0.9)} for k, v in (times | grade_phases(sb.id)).items()},
        # On a machine that others load, the fastest tenth says more than the median.
        "figures": {"the same by the fastest tenth": (p(times["grade"], 0.1) - p(times["first exec"], 0.1)) / p(times["create"], 0.1)},
        "checks": [("grade without its command, vs create", (m["grade"] - m["first exec"]) / m["create"], "<=", 2.0)],
    }


def grade_phases(sandbox: str) -> dict[str, list[float]]:
    """When each part of the grades of a sandbox was over, since the request, as the server logged it."""
    log = Path(os.environ.get("COVE_DATA", "."), "serve.log")
    phases: dict[str, list[float]] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        if "msg=graded" in line and f"sandbox={sandbox}" in line:
            for name, ms in re.findall(r"ms\.(\w+)=([\d.]+)", line):
                phases.setdefault("grade: " + name, []).append(float(ms) / 1e3)
    return phases


def main() -> int:
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("--rounds", type=int, default=30)
    a.add_argument("--live", type=int, default=500, help="how many sandboxes at once")
    a.add_argument(
        "--only",
        default="",
        help="comma-separated: create,exec,api,bytes,live,standby,template,fork,memory,files,cold,gateway,ports,boot,steps,group,e2b,grade,batch,repl,grpo",
    )
    a.add_argument(
        "--cold", type=int, default=2000, help="how many sandboxes in cold standby"
    )
    a.add_argument(
        "--forks", type=int, default=100, help="how many children at once; 0 for none"
    )
    a.add_argument(
        "--check", action="store_true", help="exit 1 when a target is missed"
    )
    a.add_argument(
        "--data",
        default=os.environ.get("COVE_DATA", "/var/lib/cove"),
        help="the server's data directory",
    )
    args = a.parse_args()
    image = Client().images.get("base")
    erofs = next(Path(args.data).glob(f"**/{image.id.split(':')[1]}.erofs"))
    all_: dict[str, Callable[[], dict[str, Any]]] = {
        "create": lambda: bench_create(args.rounds, str(erofs)),
        "exec": lambda: bench_exec(args.rounds * 5),
        "api": lambda: bench_api_share(args.rounds),
        "bytes": lambda: bench_bytes(5),
        "live": lambda: bench_live(args.live, args.data),
        "standby": lambda: bench_standby(args.rounds),
        "template": lambda: bench_template(args.rounds),
        "fork": lambda: bench_fork(max(3, args.rounds // 5), args.data),
        "memory": lambda: bench_memory(
            max(3, args.rounds // 5), args.data, args.forks
        ),
        "files": lambda: bench_files(args.rounds),
        "cold": lambda: bench_cold(args.cold, args.data),
        "gateway": lambda: bench_gateway(2000),
        "grade": lambda: bench_grade(args.rounds),
        "ports": lambda: bench_ports(max(3, args.rounds // 5)),
        "boot": lambda: bench_boot(args.rounds),
        "steps": lambda: bench_steps(args.rounds),
        "batch": lambda: bench_batch(args.rounds),
        "repl": lambda: bench_repl(max(3, args.rounds // 5)),
        "group": lambda: bench_group(args.rounds),
        "e2b": lambda: bench_e2b(args.rounds * 3),
        "grpo": bench_grpo,
    }
    only = [s for s in args.only.split(",") if s] or list(all_)
    results: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": os.cpu_count(),
        "rounds": args.rounds,
    }
    missed = 0
    rows: list[tuple[str, str, str, str]] = []
    for name in only:
        log(f"{name} …")
        got = results[name] = all_[name]()
        log(f"  {json.dumps({k: v for k, v in got.items() if k != 'checks'})}")
        for label, ms in got.get("ms", {}).items():
            rows.append(
                (f"  {label}", f"{ms['p50']:.1f} ms", f"p90 {ms['p90']:.1f} ms", "")
            )
        for label, value in got.get("figures", {}).items():
            rows.append((f"  {label}", f"{value:,.1f}", "", ""))
        for label, value, op, target in got["checks"]:
            ok = {"<=": value <= target, ">=": value >= target, "<": value < target}[op]
            missed += not ok
            rows.append(
                (label, f"{value:.2f}", f"{op} {target:g}", "ok" if ok else "MISSED")
            )
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    for r in rows:
        print(
            "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w)
                for i, (c, w) in enumerate(zip(r, widths))
            )
        )
    out = REPO / "bench" / "results" / (time.strftime("%Y%m%d-%H%M%S") + ".json")
    out.write_text(json.dumps(results, indent=1))
    log(f"raw figures: {out}")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
