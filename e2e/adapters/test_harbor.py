"""Harbor: an environment as its trials drive one, with the reward read from where its verifier reads it."""

import json
from pathlib import Path

import pytest
from harbor.environments.base import BaseEnvironment
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from cove.adapters.harbor import CoveEnvironment


def environment(tmp_path: Path, **options) -> CoveEnvironment:
    (tmp_path / "environment").mkdir(exist_ok=True)
    config = EnvironmentConfig(docker_image=options.pop("docker_image", "base"), cpus=1, memory_mb=512, storage_mb=1024)
    return CoveEnvironment(
        environment_dir=tmp_path / "environment",
        environment_name="task",
        session_id="task__abc1234__env",
        trial_paths=TrialPaths(tmp_path / "trial"),
        task_env_config=config,
        **options,
    )


async def test_a_trial(tmp_path):
    env = environment(tmp_path, persistent_env={"MODE": "test"})
    assert isinstance(env, BaseEnvironment)
    (tmp_path / "environment" / "data.txt").write_text("given")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text(
        "mkdir -p /logs/verifier; test \"$(cat /tmp/answer)\" = 42 && r=1 || r=0\n"
        "echo \"{\\\"reward\\\": $r}\" > /logs/verifier/reward.json; ln -s /etc/shadow /logs/verifier/link\n"
    )
    await env.start(force_build=False)
    try:
        assert (await env.exec("cat data.txt")).stdout == "given"
        ran = await env.exec("echo $MODE $X; whoami; pwd; exit 3", env={"X": "1"}, cwd="/tmp", user="nobody")
        assert (ran.stdout, ran.return_code) == ("test 1\nnobody\n/tmp\n", 3)
        with env.with_default_user("nobody"):
            assert (await env.exec("whoami")).stdout == "nobody\n"
        with pytest.raises(TimeoutError):
            await env.exec("sleep 60", timeout_sec=1)
        assert (await env.exec("echo 42 > /tmp/answer")).return_code == 0
        assert await env.is_dir("/tmp")
        assert not await env.is_file("/tmp")

        await env.upload_dir(tests, "/tests")
        await env.exec("bash /tests/test.sh", user="root")
        await env.download_dir("/logs/verifier", tmp_path / "out")
        assert json.loads((tmp_path / "out" / "reward.json").read_text()) == {"reward": 1}
        assert not (tmp_path / "out" / "link").exists()
        await env.download_file("/tmp/answer", tmp_path / "answer")
        assert (tmp_path / "answer").read_text() == "42\n"
        await env.download_dir_filtered(source_dir="/logs/verifier", target_dir=tmp_path / "some", include=["*.json"])
        assert (tmp_path / "some" / "reward.json").exists()
    finally:
        await env.stop(delete=True)


async def test_the_network_changes_by_phase(tmp_path):
    env = environment(tmp_path, network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK))
    await env.start(force_build=False)
    try:
        assert (await env.sandbox.network()).network.mode == "none"
        hosts = ["pypi.org", "*.pythonhosted.org", "10.0.0.0/8"]
        await env.set_network_policy(NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=hosts))
        policy = (await env.sandbox.network()).network
        assert policy.mode == "rules"
        assert {r.domain or r.cidr for r in policy.rules} == set(hosts)
    finally:
        await env.stop(delete=True)


def test_a_task_without_an_image_is_told_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="cove image build"):
        environment(tmp_path, docker_image=None)
