"""Runs the examples of Markdown files against a server: what is printed works as printed.

    with-server.sh .venv/bin/python scripts/docs.py README.md docs/*.md sdk/python/README.md

Blocks fenced as sh, console or python run: those of one file in order, the shell ones in one bash and the Python
ones in one namespace, in a directory of their own. Comments before a block, which readers do not see:

    <!-- not run: REASON -->                 the block is not run
    <!-- not run: "text" REASON; "…" … -->   lines with the text are not run, the others are
    <!-- first: CODE -->                     runs before the block: files and variables that the text takes for granted

A block in another language is no example, and one in none must not look like one. The count says how many ran, and
--expect N fails when there are fewer.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHELL, PYTHON = ("sh", "console", "bash"), ("python",)
TIMEOUT = 300  # seconds for the blocks of one language of one file

COMMENTS = re.compile(r"<!--\s*(not run|first):\s*(.*?)-->", re.DOTALL)
FENCE = re.compile(r"((?:<!--(?:(?!-->).)*-->\s*\n)*)^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass
class Block:
    file: str
    line: int
    language: str
    code: str
    first: str
    skipped: str  # the reason, where nothing of it runs

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}"


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    if stray := re.search(r"^```\n(?:(?!```).*\n)*?(?:\$ )?(?:bin/)?cove [a-z].*$", "\n".join(outside(text)), re.MULTILINE):
        sys.exit(f"{path}: a block without a language has commands; say ```sh:\n{stray.group()}")
    found = []
    for match in FENCE.finditer(text):
        before, language, code = match.groups()
        if language not in SHELL + PYTHON:
            continue
        first, skipped = "", ""
        for kind, body in COMMENTS.findall(before):
            if kind == "first":
                first += body.strip("\n") + "\n"
                continue
            lines = re.findall(r'"([^"]+)"', body)
            if not lines:
                skipped = body.strip()
            for line in lines:
                if line not in code:
                    sys.exit(f"{path}: no line with {line!r} in the block that it is about")
                code = "".join("# " + c if line in c else c for c in code.splitlines(keepends=True))
        line = text.count("\n", 0, match.start(3))
        found.append(Block(str(path), line, language, code, first, skipped))
    return found


def outside(text: str) -> list[str]:
    """The lines of fences without a language, and what is in them."""
    lines: list[str] = []
    language = None
    for line in text.splitlines():
        if line.startswith("```") and language is None:
            language = line[3:]
        elif line == "```":
            language = None
            continue
        if language == "":
            lines.append(line)
    return lines


def shell(todo: list[Block]) -> str:
    """One script: a failing command ends it, and the last name printed says where."""
    script = "set -e\n"
    for b in todo:
        code = re.sub(r"(?m)^\$ ", "", b.code) if b.language == "console" else b.code
        script += f"echo '--- {b.name}' >&2\n{b.first}{code}\n"
    return script


def python(todo: list[Block]) -> str:
    script = "import sys\n"
    for b in todo:
        script += f"print('--- {b.name}', file=sys.stderr)\n{b.first}{b.code}\n"
    return script


def run(command: list[str], script: str, where: str) -> bool:
    try:
        done = subprocess.run(command, check=False, input=script, cwd=where, text=True, timeout=TIMEOUT, capture_output=True)
        code, said = done.returncode, done.stderr[-3000:]
    except subprocess.TimeoutExpired as err:
        code, said = 124, f"not done within {TIMEOUT} s\n{(err.stderr or b'')[-3000:].decode()}"
    if code != 0:
        print(f"FAILED with {code}:\n{said}")
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--expect", type=int, default=0)
    options = parser.parse_args()
    ran, marked, failed = 0, 0, 0
    for path in options.files:
        found = blocks(path)
        marked += sum(1 for b in found if b.skipped)
        for languages, command, script in (
            (SHELL, ["bash", "-s"], shell),
            (PYTHON, [sys.executable, "-"], python),
        ):
            todo = [b for b in found if b.language in languages and not b.skipped]
            if not todo:
                continue
            with tempfile.TemporaryDirectory() as where:
                (Path(where) / "bin").symlink_to(ROOT / "bin")
                ok = run(["env", f"PATH={ROOT}/bin:{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", *command], script(todo), where)
            ran += len(todo)
            failed += not ok
            print(f"{'ok' if ok else 'FAILED':8}{len(todo):3} {todo[0].language:8}{path}", flush=True)
    print(f"{ran} blocks ran, {marked} are marked as not run")
    if ran < options.expect:
        print(f"fewer than the {options.expect} expected: was an example lost, or its fence?")
        failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
