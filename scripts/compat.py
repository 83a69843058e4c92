"""Runs the same test suites beside and inside a sandbox, with the same files, and prints what differs.

    with-server.sh compat.py [SUITE...]

A suite is a test module of CPython (test_os), "psutil", "go-os" or "fsnotify". Beside means a chroot in namespaces of its
own, under the kernel of this machine. Differences that the table "Suites" of docs/compatibility.md lists are known; the
exit code says whether there are others, or a suite that did not run. Tests that pass inside and fail beside are no
difference. The files are made once, under .cache/compat, out of the ordinary registries.
"""

from __future__ import annotations

import collections
import fnmatch
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
COVE = str(ROOT / "bin/cove")
CACHE = ROOT / ".cache/compat"
TREE = CACHE / "root"
LIMIT = 900
"""Seconds that one suite may take on either side."""

SUITES = [
    *("test_os", "test_posix", "test_fcntl", "test_socket", "test_resource", "test_runpy", "test_logging", "test_import"),
    *("test_importlib", "test_bdb", "test_support", "test_asyncore", "go-os", "fsnotify", "psutil"),
]
"""What runs by default: those that differed once, but for test_multiprocessing_spawn, which takes long."""

# The release is fixed: the tests are CPython's of that release, and the table lists them by name.
SUITE = "bookworm"
PACKAGES = "bash,ca-certificates,procps,python3,python3-pytest,libpython3.11-testsuite,sudo,iproute2,strace,gcc,libc6-dev"
PSUTIL, FSNOTIFY = "psutil==5.9.8", "github.com/fsnotify/fsnotify@v1.8.0"
SETUP = 'chroot "$1" useradd --create-home --uid 1000 --user-group --shell /bin/bash user && chmod 0755 "$1/root"'

# $1 is a directory to mount at, $2 the tree, $3 the command. All of it goes with the namespaces.
BESIDE = """set -e
mount -t tmpfs tmpfs "$1"; cd "$1"; mkdir u w m
mount -t overlay o -o "lowerdir=$2,upperdir=u,workdir=w" m
mount -t proc proc m/proc; mount -t sysfs sysfs m/sys; mount -t tmpfs dev m/dev
mkdir m/dev/pts m/dev/shm; mount -t devpts -o newinstance,ptmxmode=0666,mode=620 pts m/dev/pts; mount -t tmpfs shm m/dev/shm
for n in 'null 1 3' 'zero 1 5' 'full 1 7' 'random 1 8' 'urandom 1 9' 'tty 5 0'; do
  set -- "$1" "$2" "$3" $n; mknod -m 666 m/dev/$4 c $5 $6
done
ln -s pts/ptmx m/dev/ptmx; ln -s /proc/self/fd m/dev/fd
ip link set lo up; hostname compat; echo '127.0.0.1 localhost compat' > m/etc/hosts
exec chroot m setpriv --reuid=user --regid=user --init-groups sh -c "$3"
"""

Results = dict[str, str]
"""Of each test: passed, failed or skipped."""


def tree() -> None:
    """Makes the files both sides run, whole or not at all."""
    if TREE.exists():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    new = CACHE / "new"
    shutil.rmtree(new, ignore_errors=True)
    print("making the image of the suites: some minutes, once", flush=True)
    run(
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--", "mmdebstrap", "--mode=root"),
        *("--variant=minbase", '--aptopt=APT::Install-Recommends "false"', '--aptopt=APT::Sandbox::User "root"'),
        *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=force-unsafe-io", "--include=" + PACKAGES),
        *("--customize-hook=" + SETUP, SUITE, str(new)),
    )
    at = new / "compat"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(at / "python"), PSUTIL)
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod"}
    source = pathlib.Path(run("go", "env", "GOROOT").strip()) / "src/os"
    shutil.copytree(source, at / "os")
    run("go", "test", "-c", "-o", str(at / "os/suite"), "os", env={**env, "GOFLAGS": ""})
    found = re.search(r'"Dir": "(.*)"', run("go", "mod", "download", "-json", FSNOTIFY, env=env))
    assert found, "go mod download names no directory"
    shutil.copytree(found[1], at / "fsnotify")
    run("chmod", "-R", "u+w", str(at / "fsnotify"))
    run("go", "test", "-c", "-o", "suite", ".", env=env, cwd=at / "fsnotify")
    run("chown", "-R", "1000:1000", str(at))  # tests write beside their sources
    new.rename(TREE)


def run(*command: str, env: dict[str, str] | None = None, cwd: pathlib.Path | None = None) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env, cwd=cwd).stdout


def command(suite: str) -> str:
    """A line of shell that ends with the results on stdout, as JUnit's XML or Go's lines."""
    clean = "cd /tmp && exec </dev/null && env -i HOME=/home/user USER=user LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin"
    if suite == "psutil":
        return f"{clean} PYTHONPATH=/compat/python python3 -m pytest -q -p no:cacheprovider --junitxml=/tmp/r.xml --pyargs psutil.tests >&2; cat /tmp/r.xml"
    if suite in ("go-os", "fsnotify"):
        return f"{clean.replace('/tmp', '/compat/' + suite.removeprefix('go-'))} ./suite -test.v -test.timeout {LIMIT - 30}s"
    # Of UDP-Lite, which gVisor does not have, the tests end the whole module: an error within a thread.
    return f"{clean} python3 -m test --timeout {LIMIT // 2} --junit-xml /tmp/r.xml -i '*UDPLITE*' {suite} >&2; cat /tmp/r.xml"


def beside(line: str) -> list[str]:
    at = CACHE / "mnt"
    at.mkdir(exist_ok=True)
    return ["unshare", "-mpnuif", "--kill-child", "--", "sh", "-c", BESIDE, "beside", str(at), str(TREE), line]


def results(suite: str, side: str, argv: list[str]) -> Results:
    """Runs one suite on one side. What it prints is kept in .cache/compat, for a look at a failure."""
    log = CACHE / f"{suite}.{side}.log"
    with open(log, "w") as err:
        try:
            out = subprocess.run(argv, stdout=subprocess.PIPE, stderr=err, text=True, errors="replace", timeout=LIMIT).stdout
        except subprocess.TimeoutExpired as late:
            out = (late.stdout or b"").decode(errors="replace")
        err.write(out)
    found: Results = {}
    if suite in ("go-os", "fsnotify"):
        for m in re.finditer(r"^\s*--- (PASS|FAIL|SKIP): (\S+)", out, re.M):
            found[f"{suite}:{m[2]}"] = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}[m[1]]
        return found
    start = out.find("<?xml")
    if start < 0:
        start = out.find("<testsuite")
    try:
        cases = ElementTree.fromstring(out[max(start, 0) :]).iter("testcase")
    except ElementTree.ParseError:
        return found
    for case in cases:
        name = re.sub(r" at 0x[0-9a-f]+", "", (case.get("classname") or "") + "." + (case.get("name") or "")).lstrip(".")
        bad = any(case.find(kind) is not None for kind in ("failure", "error"))
        skipped = case.find("skipped") is not None or case.get("result") == "skipped"
        found[f"{suite}:{name}"] = "failed" if bad else "skipped" if skipped else "passed"
    return found


def known() -> list[str]:
    """The patterns of the table in the documentation: the first cell of each row."""
    text = (ROOT / "docs/compatibility.md").read_text().partition("\n## Suites\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row)]


def inside(suite: str, line: str) -> Results:
    """A sandbox for each: what one suite leaves is no other's."""
    sandbox = run(COVE, "create", "compat", "--memory", "2GiB", "--cpu", "2", "--network", "none", "--timeout", "1h").strip()
    try:
        return results(suite, "inside", [COVE, "exec", "-u", "user", sandbox, "--", "sh", "-c", line])
    finally:
        run(COVE, "rm", sandbox)


def differences(there: Results, here: Results) -> list[tuple[str, str, str]]:
    """Tests with their results beside and inside. One that only fails beside is none."""
    both = [(t, there.get(t, "absent"), here.get(t, "absent")) for t in sorted(there.keys() | here.keys())]
    return [(t, a, b) for t, a, b in both if a != b and b != "passed" and a != "failed"]


def unlisted(there: Results, here: Results, listed: list[str]) -> list[str]:
    return [t for t, _, _ in differences(there, here) if not any(fnmatch.fnmatchcase(t, p) for p in listed)]


def main() -> int:
    suites = sys.argv[1:] or SUITES
    tree()
    run(COVE, "image", "import", "compat", str(TREE))
    listed = known()
    used: set[str] = set()
    news = 0
    print(f"{'suite':28} {'beside':>24} {'inside':>24}")
    for suite in suites:
        line = command(suite)
        start = time.monotonic()
        there = results(suite, "beside", beside(line))
        half = time.monotonic()
        here = inside(suite, line)
        if there and here and unlisted(there, here, listed):
            # Many of these tests go by the clock, fsnotify's by 50 ms: what differs differs twice.
            again = inside(suite, line)
            late = [t for t in unlisted(there, here, listed) if again.get(t) == "passed"]
            print("".join(f"  {t}: passed inside at the second try\n" for t in late), end="")
            here.update(dict.fromkeys(late, "passed"))
        print(f"{suite:28} {tally(there, half - start):>24} {tally(here, time.monotonic() - half):>24}", flush=True)
        if not there or not here:
            print(f"  no results: see {CACHE.relative_to(ROOT)}/{suite}.*.log")
            news += 1
            continue
        for test, a, b in differences(there, here):
            match = next((p for p in listed if fnmatch.fnmatchcase(test, p)), None)
            print(f"  {test}: {a} beside, {b} inside{' (listed)' if match else ''}")
            if match:
                used.add(match)
            else:
                news += 1
    for pattern in listed:
        if pattern not in used and pattern.partition(":")[0] in suites:
            print(f"  {pattern} is listed and did not differ this time")
    print("nothing differs that is not listed" if not news else f"{news} differences that docs/compatibility.md does not list")
    return 1 if news else 0


def tally(found: Results, seconds: float) -> str:
    n = collections.Counter(found.values())
    return f"{n['passed']} ok {n['failed']} bad {n['skipped']} skip {seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
