"""mini-swe-agent: its agent with a scripted model."""

import pytest
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel, make_output


@pytest.fixture
def env():
    env = get_environment(
        {
            "environment_class": "cove.adapters.minisweagent.CoveEnvironment",
            "image": "base",
            "cwd": "/tmp",
            "env": {"PAGER": "cat"},
            "create": {"memory": "256MiB", "network": "none"},
        }
    )
    yield env
    env.cleanup()


def commands(*texts):
    return [make_output("", [{"command": text}]) for text in texts]


def test_a_task(env):
    agent = DefaultAgent(
        DeterministicModel(
            outputs=commands(
                "echo 'def f(x): return x + 1' > f.py",
                "python3 -c 'import f; print(f.f(41))'; echo to-stderr >&2; exit 3",
                "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat f.py",
            )
        ),
        env,
        system_template="You fix things.",
        instance_template="{{task}}",
    )
    result = agent.run("write f")
    assert result["exit_status"] == "Submitted"
    assert result["submission"] == "def f(x): return x + 1\n"
    said = "\n".join(str(m.get("content")) for m in agent.messages)
    assert "42" in said
    assert "to-stderr" in said
    assert env.serialize()["info"]["config"]["environment_type"].endswith("CoveEnvironment")


def test_a_command_that_does_not_end(env):
    output = env.execute({"command": "echo before; sleep 60"}, timeout=2)
    assert output["returncode"] == -1
    assert output["output"] == "before\n"
    assert output["extra"]["exception_type"] == "TimeoutError"
    assert env.execute({"command": "pwd; echo $PAGER"})["output"] == "/tmp\ncat\n"
