"""Harbor (terminal-bench 2): an environment class, without a change to Harbor.

    harbor run --environment-import-path cove.adapters.harbor:CoveEnvironment ...

Tasks name an image (docker_image) that the server has or can pull; for one with a
Dockerfile, build it with `cove image build` and name it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional, Union

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import effective_exec_cwd
from harbor.models.task.config import NetworkMode, NetworkPolicy

from .. import AsyncSandbox, Network, Rule, errors

_LIFETIME = 24 * 3600


class CoveEnvironment(BaseEnvironment):
    def __init__(self, *args: Any, image: Optional[str] = None, **kwargs: Any) -> None:
        self._image = image
        self._sandbox: Optional[AsyncSandbox] = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "cove"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            dynamic_network_policy=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    @property
    def _image_name(self) -> Optional[str]:
        return self._image or self.task_env_config.docker_image

    def _validate_definition(self) -> None:
        if self._image_name is None:
            raise FileNotFoundError(
                f"the task in {self.environment_dir} names no docker_image: build its Dockerfile with"
                " `cove image build -t NAME` and pass the name (--ek image=NAME)"
            )

    @property
    def sandbox(self) -> AsyncSandbox:
        if self._sandbox is None:
            raise RuntimeError("the environment is not started, or stopped")
        return self._sandbox

    async def start(self, force_build: bool) -> None:
        size: dict[str, Any] = {}
        if self._effective_memory_mb:
            size["memory"] = self._effective_memory_mb << 20
        if self._effective_storage_mb:
            size["disk"] = self._effective_storage_mb << 20
        self._sandbox = await AsyncSandbox.create(
            self._image_name,
            cpu=self._effective_cpus,
            env=self._startup_env(),
            labels={"harbor-session": self.session_id[:63]},
            network=_network(self.network_policy),
            timeout=_LIFETIME,
            **size,
        )
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """delete=False leaves the sandbox as it is, for `cove exec`, until its lifetime is over."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is None:
            return
        if delete:
            await sandbox.kill()
        else:
            await sandbox.keep()

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        await self.sandbox.set_network(_network(network_policy))

    async def exec(
        self,
        command: str,
        cwd: Optional[str] = None,
        env: Optional[dict[str, str]] = None,
        timeout_sec: Optional[int] = None,
        user: Union[str, int, None] = None,
    ) -> ExecResult:
        emit = self._output_callback()
        try:
            result = await self.sandbox.exec(
                ["bash", "-c", command],
                cwd=effective_exec_cwd(cwd, self.task_env_config.workdir, None),
                env=self._merge_env(env),
                timeout=timeout_sec,
                user=self._resolve_user(user),
                on_stdout=None if emit is None else lambda text: emit(text, "stdout"),
                on_stderr=None if emit is None else lambda text: emit(text, "stderr"),
            )
        except errors.CommandNotFound as e:
            return ExecResult(stdout="", stderr=str(e), return_code=127)
        if result.end.cause == "deadline":
            raise TimeoutError(f"the command had its {timeout_sec} seconds: {command[:200]!r}")
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code)

    async def upload_file(self, source_path: Union[Path, str], target_path: str) -> None:
        await self.sandbox.files.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Union[Path, str], target_dir: str) -> None:
        await self.sandbox.files.upload_dir(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Union[Path, str]) -> None:
        await self.sandbox.files.download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Union[Path, str]) -> None:
        # An agent may have left a pipe or a link out of it there: nothing of it is followed.
        skipped = await self.sandbox.files.download_dir(source_dir, target_dir, on_unsafe="skip")
        if skipped:
            self.logger.warning("not copied out of %s: %s", source_dir, ", ".join(skipped[:20]))


def _network(policy: NetworkPolicy) -> Network:
    if policy.network_mode == NetworkMode.PUBLIC:
        return Network(mode="public")
    if policy.network_mode == NetworkMode.NO_NETWORK:
        return Network(mode="none")
    return Network(mode="rules", rules=tuple(Rule.parse(f"allow {host}") for host in policy.allowed_hosts))
