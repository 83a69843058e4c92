"""What the parts of the benchmark measure with."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
MS = 1e3


def log(*args: object) -> None:
    print(*args, file=sys.stderr, flush=True)


def p(values: list[float], q: float) -> float:
    """The q-th percentile in milliseconds."""
    s = sorted(values)
    return s[min(len(s) - 1, int(q * len(s)))] * MS


def timed(f: Callable[[], Any]) -> float:
    t = time.perf_counter()
    f()
    return time.perf_counter() - t


class Raw:
    """A bare keep-alive HTTP connection, to leave the SDK out of a measurement."""

    def __init__(self) -> None:
        self.url = urllib.parse.urlparse(os.environ["COVE_URL"])
        self.conn = http.client.HTTPConnection(self.url.hostname or "", self.url.port)

    def call(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        self.conn.request(
            "POST",
            "/cove.v1." + method,
            json.dumps(body),
            {
                "Content-Type": "application/json",
                "Authorization": "Bearer " + os.environ["COVE_KEY"],
            },
        )
        r = self.conn.getresponse()
        data = r.read()
        if r.status != 200:
            raise RuntimeError(f"{method}: {r.status} {data!r}")
        return json.loads(data)  # type: ignore[no-any-return]


def wait_warm(raw: Raw) -> None:
    """Waits until the pools are full again: filling them is not part of a create."""
    for _ in range(2000):
        info = raw.call("System/Info", {})
        if int(info.get("warmKernels", 0)) >= int(info.get("warmTarget", 1)) and int(
            info.get("heldKernels", 0)
        ) >= int(info.get("heldTarget", 0)):
            time.sleep(0.15)  # and the blank kernel behind it, and what was just killed
            return
        time.sleep(0.02)
    raise RuntimeError("the kernel pool does not fill")


def kernels(data: str) -> list[str]:
    """The pids of the sentries of a server."""
    found = []
    for proc in Path("/proc").iterdir():
        try:
            cmd = (proc / "cmdline").read_bytes() if proc.name.isdigit() else b""
            if (
                cmd.startswith(b"runsc-sandbox\0")
                and data.encode() in cmd
                and os.getsid(int(proc.name)) == int(proc.name)
            ):
                found.append(proc.name)  # not a stub: those are in its session
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def kernel_memory(pids: list[str]) -> list[int]:
    """Proportional memory (bytes) of kernels: each sentry with its stubs.

    PSS, so that the pages of the runsc binary, mapped by all, are shared out; the
    EROFS image is page cache and belongs to nobody. Stubs that share one address
    space (systrap clones them with CLONE_VM) each report all of it: it is counted
    once."""
    sums = []
    for sentry in pids:
        total = 0
        counted: list[str] = []
        for pid in [sentry, *children(sentry)]:
            if any(same_memory(pid, other) for other in counted):
                continue
            counted.append(pid)
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        sums.append(total)
    return sums


def same_memory(a: str, b: str) -> bool:
    """kcmp(2): whether two processes have one address space."""
    KCMP, KCMP_VM = {"x86_64": 312, "aarch64": 272}[os.uname().machine], 1
    r = ctypes.CDLL(None, use_errno=True).syscall(KCMP, int(a), int(b), KCMP_VM, 0, 0)
    if r < 0:
        raise OSError(ctypes.get_errno(), "kcmp")
    return bool(r == 0)


def available() -> int:
    """Bytes the machine could still give out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no MemAvailable")


def children(pid: str) -> list[str]:
    out: list[str] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for c in (task / "children").read_text().split():
            out += [c, *children(c)]
    return out
