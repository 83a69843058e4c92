"""mini-swe-agent: an environment class.

    environment:
      environment_class: cove.adapters.minisweagent.CoveEnvironment
      image: base
      cwd: /testbed
"""

from __future__ import annotations

import contextlib
import os
import platform
from typing import Any, Optional

from minisweagent.exceptions import Submitted
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel, Field

from .. import CoveError, Sandbox

_DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class CoveEnvironmentConfig(BaseModel):
    image: Optional[str] = None
    cwd: str = "/"
    env: dict[str, str] = Field(default_factory=dict)
    forward_env: list[str] = Field(default_factory=list)
    """Variables of this process that commands get; env comes first."""
    timeout: int = 30
    """Seconds a command has."""
    interpreter: list[str] = Field(default_factory=lambda: ["bash", "-lc"])
    create: dict[str, Any] = Field(default_factory=dict)
    """What else Sandbox.create takes: memory, cpu, network, template, ..."""


class CoveEnvironment:
    def __init__(self, *, config_class: type[CoveEnvironmentConfig] = CoveEnvironmentConfig, **kwargs: Any) -> None:
        kwargs.pop("logger", None)
        self.config = config_class(**kwargs)
        self.sandbox = Sandbox.create(self.config.image, **self.config.create)

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return recursive_merge(self.config.model_dump(), platform.uname()._asdict(), kwargs)  # type: ignore[no-any-return]

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        config = self.config.model_dump(mode="json")
        return {"info": {"config": {"environment": config, "environment_type": kind}, "sandbox": self.sandbox.id}}

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: Optional[int] = None) -> dict[str, Any]:
        env = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        # The model reads one stream: both in the order they were written.
        said: list[str] = []
        limit = timeout or self.config.timeout
        try:
            result = self.sandbox.exec(
                [*self.config.interpreter, action.get("command", "")],
                cwd=cwd or self.config.cwd,
                env={**env, **self.config.env},
                timeout=limit,
                on_stdout=said.append,
                on_stderr=said.append,
            )
        except CoveError as e:
            return _broken("".join(said), e)
        if result.end.cause == "deadline":
            return _broken("".join(said), TimeoutError(f"the command had its {limit} seconds"))
        output = {"output": "".join(said), "returncode": result.exit_code, "exception_info": ""}
        if result.end.cause not in ("exited", "signalled"):
            output["exception_info"] = f"the command ended by {result.end}"
        _raise_if_submitted(output)
        return output

    def cleanup(self) -> None:
        sandbox, self.sandbox = getattr(self, "sandbox", None), None  # type: ignore[assignment]
        if sandbox is not None:
            sandbox.kill()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit; the sandbox's lease ends it
            self.cleanup()


def _broken(said: str, e: Exception) -> dict[str, Any]:
    return {
        "output": said,
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {e}",
        "extra": {"exception_type": type(e).__name__, "exception": str(e)},
    }


def _raise_if_submitted(output: dict[str, Any]) -> None:
    first, _, rest = output["output"].lstrip().partition("\n")
    if first.strip() == _DONE and output["returncode"] == 0:
        extra = {"exit_status": "Submitted", "submission": rest}
        raise Submitted({"role": "exit", "content": rest, "extra": extra})
