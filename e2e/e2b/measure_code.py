"""What a code interpreter costs beside a plain sandbox, through E2B's published SDKs, in turn in one run.

    COVE_INTERPRETER=1 scripts/with-server.sh .venv/bin/python e2e/e2b/measure_code.py [ROUNDS]
"""

import os
import statistics
import sys
import time

import conftest  # noqa: F401  sets the variables
from e2b import Sandbox as Plain
from e2b_code_interpreter import Sandbox


def once(samples):
    def timed(name, do):
        began = time.perf_counter()
        value = do()
        samples.setdefault(name, []).append(1000 * (time.perf_counter() - began))
        return value

    base = timed("create of base", lambda: Plain.create("base", timeout=120))
    timed("its first command", lambda: base.commands.run("true"))
    base.kill()
    s = timed("create of code-interpreter-v1", lambda: Sandbox.create(timeout=120))
    assert timed("its first run_code", lambda: s.run_code("x = list(range(1000)); 6 * 7")).text == "42"
    assert timed("a run_code after that", lambda: s.run_code("len(x)")).text == "1000"
    children = timed("fork of the live kernel into 2", lambda: s.fork(count=2, timeout=120))
    assert timed("first run_code in a fork", lambda: children[0].run_code("x.pop()")).text == "999"
    timed("pause", s.pause)
    timed("resume", lambda: s.connect(timeout=120))
    assert timed("first run_code after it", lambda: s.run_code("len(x)")).text == "1000"
    for each in (s, *children):
        each.kill()


def main():
    samples = {}
    for n in range(int(sys.argv[1]) if len(sys.argv) > 1 else 10):
        once(samples if n else {})  # the first warms up
    print(f"load {os.getloadavg()[0]:.1f}\n\n| | median ms | least |\n|---|---|---|")
    for name, values in samples.items():
        print(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} |")
    code = [a + b for a, b in zip(samples["create of code-interpreter-v1"], samples["its first run_code"])]
    plain = [a + b for a, b in zip(samples["create of base"], samples["its first command"])]
    print(f"| **create and first run_code, as a multiple of create and first command** | **{statistics.median(code) / statistics.median(plain):.1f}** | {min(code) / min(plain):.1f} |")


if __name__ == "__main__":
    main()
