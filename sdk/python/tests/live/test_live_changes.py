"""Diff and replay against a real server, from Python and from the command line."""

from __future__ import annotations

import asyncio

import pytest

import cove

from .test_live_run import name

pytestmark = pytest.mark.live

__all__ = ["name"]  # the fixture

SCRIPT = ["echo hello > /tmp/made; cat /tmp/made", "date +%F; rm /etc/debian_version; echo more >> /etc/profile"]


def test_diff_and_replay(name: str) -> None:
    with cove.Client() as client, cove.Run(name, client=client) as run:
        sb = run.sandbox(episode="e1", deterministic=True, memory="64MiB", cpu=0.5)
        assert sb.diff().changes == []
        for command in SCRIPT:
            sb.exec(command, user="root")
        diff = sb.diff(hash=True)
        assert [(c.kind, c.path, c.what) for c in diff.changes if not c.path.startswith("/var")] == [
            ("deleted", "/etc/debian_version", ()),
            ("modified", "/etc/profile", ("content",)),
            ("added", "/tmp/made", ()),
        ]
        assert (diff.added, diff.modified, diff.deleted) == (1, 1, 1)
        made = diff.changes[-1].now
        assert made is not None
        assert made.hash == "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
        snapshot = sb.snapshot(memory=False)
        sb.files.write("/tmp/made", b"other")
        assert [(c.kind, c.path) for c in sb.diff(snapshot).changes] == [("modified", "/tmp/made")]
        snapshot.delete()

        seen: list[int] = []
        again = run.replay(episode="e1", on_step=lambda seq, _: seen.append(seq))
        assert again.same, again
        assert again.first is None
        assert (again.replayed, again.deterministic) == (2, True)
        assert seen[-1] == 2
        sb.exec("head -c 8 /dev/urandom | od -An -tx1")
        again = run.replay(sb)
        assert again.first is not None
        assert (again.first.what, "urandom" in again.first.command) == ("stdout", True)
        assert [b.id for b in cove.Sandbox.list(client=client) if b.last_info.run == run.id] == [sb.id]


def test_async(name: str) -> None:
    async def main() -> None:
        async with cove.AsyncClient() as client, cove.AsyncRun(name, client=client) as run:
            sb = await run.sandbox(episode="e1", deterministic=True, memory="64MiB", cpu=0.5)
            for command in SCRIPT:
                await sb.exec(command, user="root")
            changed = {c.path for c in (await sb.diff("image")).changes}
            assert changed >= {"/tmp/made", "/etc/debian_version", "/etc/profile"}
            seen: list[int] = []

            async def on_step(seq: int, steps: int) -> None:
                seen.append(seq)

            again = await run.replay(sb, keep=True, on_step=on_step)
            assert again.same, again
            assert seen[-1] == 2
            kept = await cove.AsyncSandbox.connect(again.kept, client=client)
            assert (await kept.exec("cat /tmp/made")).stdout == "hello\n"
            await kept.kill()

    asyncio.run(main())
