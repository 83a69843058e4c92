"""Batches without I/O to a server: the journal, whose doing an end was, and functions as programs.

The journal has the format of `cove batch` (Go, package batch): either goes on with the other's.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import secrets
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Optional

from . import errors
from .errors import FailedPrecondition, InvalidArgument
from .models import Result

# Ends that a command brought on itself; all others are the platform's.
_OWN = {"exited", "signalled", "deadline", "oom", "disk_full", "init_killed"}

# Errors that no other try would mend, so that the whole batch ends with them.
FATAL = (
    errors.InvalidArgument,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.NotFound,
    errors.Unsupported,
    errors.TooLarge,
)


@dataclass(frozen=True)
class BatchResult:
    """What became of one input."""

    index: int
    input: Any
    status: str
    """ok; failed: the command's own doing; error: the platform failed it, as often as it was tried."""
    cause: str
    exit_code: int = 0
    stdout: str = ""
    stderr: str = ""
    detail: str = ""
    attempts: int = 1
    duration_s: float = 0.0
    sandbox_id: str = ""
    key: str = field(default="", repr=False)
    value: Any = None
    """What a function returned."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def text_of(value: Any) -> str:
    """An input as the line the command reads."""
    if isinstance(value, str):
        if "\n" in value:
            hint = "give what has lines as a list or dict"
            raise InvalidArgument("inputs: an input is one line", field="inputs", hint=hint)
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as e:
        raise InvalidArgument(f"inputs: {e}", field="inputs") from None


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def judge(result: Result) -> str:
    if result.ok:
        return "ok"
    return "failed" if result.end.cause in _OWN else "error"


class Journal:
    """A file of results. What is in it when it is opened has been done, but for errors. Not safe for concurrent use."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "a+b")  # noqa: SIM115
        self.done: dict[int, BatchResult] = {}
        self._file.seek(0)
        whole = 0
        for n, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break  # of a process that died while it wrote
            try:
                j = json.loads(line)
                names = BatchResult.__dataclass_fields__
                result = BatchResult(**{k: v for k, v in j.items() if k in names})
            except (ValueError, TypeError, AttributeError):
                self._file.close()
                hint = "name a file that a batch wrote, or one that is not there"
                raise FailedPrecondition(f"line {n} of {path} is no result", hint=hint) from None
            whole += len(line)
            self.done.pop(result.index, None)
            if result.status != "error":
                self.done[result.index] = result
        self._file.truncate(whole)

    def get(self, index: int, text: str) -> Optional[BatchResult]:
        result = self.done.get(index)
        if result is not None and result.key != key_of(text):
            raise FailedPrecondition(
                f"input {index} is not the one that {self._path} has a result of",
                hint="give the inputs of before, or another journal",
            )
        return result

    def add(self, result: BatchResult) -> None:
        j = {k: v for k, v in asdict(result).items() if v not in (None, "") or k in ("input", "stdout")}
        self._file.write(json.dumps(j).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class Function:
    """A function as a program inside: its source, called with the input, its result behind a mark.

    It stands alone: what it uses it imports itself, and what it captures is not there.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._mark = "cove-" + secrets.token_hex(16)
        try:
            source = textwrap.dedent(inspect.getsource(function))
            tree: Optional[ast.stmt] = ast.parse(source).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            tree = None
        if not isinstance(tree, ast.FunctionDef):
            what = f"command: the source of {function!r} is not there"
            raise InvalidArgument(what, field="command", hint="give a function of a file, by def")
        tree.decorator_list = []
        self.program = (
            "import json, sys\n"
            f"{ast.unparse(tree)}\n"
            f"_result = json.dumps({tree.name}(json.loads(sys.stdin.read())))\n"
            f"sys.stdout.write('\\n{self._mark} ' + _result + '\\n')\n"
        )

    def split(self, stdout: str) -> tuple[str, Any]:
        """What was printed, and what was returned. The program is the user's own, its input need not be."""
        said, mark, value = stdout.rpartition(f"\n{self._mark} ")
        if not mark:
            return stdout, None
        try:
            return said, json.loads(value)
        except ValueError:
            return stdout, None

