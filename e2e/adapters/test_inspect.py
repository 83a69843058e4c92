"""inspect_ai: its own conformance suite, and an eval."""

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import solver
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from cove.adapters.inspect import CoveConfig, CoveSandboxEnvironment

# root reads and writes what its mode forbids, inside as everywhere.
AS_ROOT = {
    "test_read_file_not_allowed",
    "test_write_text_file_without_permissions",
    "test_write_binary_file_without_permissions",
}


@pytest.fixture(params=["image", "root"])
async def sandbox_env(request):
    if request.param == "root" and request.node.originalname in AS_ROOT:
        request.applymarker(pytest.mark.xfail(reason="root may", strict=True))
    config = CoveConfig(memory="1GiB", network="none")
    if request.param != "image":
        config = CoveConfig(memory="1GiB", network="none", user=request.param, workdir="/sample")
    envs = await CoveSandboxEnvironment.sample_init("self-check", config, {})
    yield envs["default"]
    await CoveSandboxEnvironment.sample_cleanup("self-check", config, envs, False)


@solver
def writes_a_program():
    async def solve(state, generate):
        await sandbox().write_file("answer.py", "print(6 * 7)")
        state.metadata["said"] = (await sandbox().exec(["python3", "answer.py"], timeout=30)).stdout
        return state

    return solve


@scorer(metrics=[accuracy()])
def says_the_answer():
    async def score(state, target):
        return Score(value="C" if state.metadata["said"].strip() == target.text else "I")

    return score


@pytest.mark.parametrize("how", ["name", "config", "file"])
def test_an_eval(how, tmp_path):
    (tmp_path / "cove.yaml").write_text("image: base\nmemory: 256MiB\nnetwork: none\n")
    spec = {
        "name": "cove",
        "config": SandboxEnvironmentSpec("cove", CoveConfig(memory="256MiB")),
        "file": ("cove", str(tmp_path / "cove.yaml")),
    }[how]
    task = Task(
        dataset=[Sample(input="What is 6 * 7?", target="42"), Sample(input="and this?", target="43")],
        solver=writes_a_program(),
        scorer=says_the_answer(),
        sandbox=spec,
    )
    (log,) = eval(task, model="mockllm/model", display="none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 0.5
