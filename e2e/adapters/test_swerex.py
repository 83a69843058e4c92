"""SWE-ReX: sessions, commands and files of a deployment."""

import pytest
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

from cove.adapters.swerex import CoveDeployment


@pytest.fixture
async def deployment():
    deployment = CoveDeployment(image="base", memory="256MiB", network="none")
    with pytest.raises(DeploymentNotStartedError):
        deployment.runtime  # noqa: B018
    await deployment.start()
    yield deployment
    await deployment.stop()


@pytest.fixture
async def runtime(deployment):
    assert await deployment.is_alive()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    return deployment.runtime


async def run(runtime, command, **options):
    return await runtime.run_in_session(BashAction(command=command, **options))


async def test_a_session_keeps_its_state(runtime):
    await run(runtime, "cd /tmp && export A=1\nf() { echo f-$1; }")
    seen = await run(runtime, 'echo "$PWD $A"; f x')
    assert seen.output == "/tmp 1\nf-x\n"
    assert seen.exit_code == 0
    with pytest.raises(SessionExistsError):
        await runtime.create_session(CreateBashSessionRequest())
    await runtime.create_session(CreateBashSessionRequest(session="other"))
    assert (await run(runtime, "pwd", session="other")).output != "/tmp\n"
    await runtime.close_session(CloseBashSessionRequest(session="other"))
    with pytest.raises(SessionDoesNotExistError):
        await run(runtime, "pwd", session="other")


async def test_lines_heredocs_and_long_commands(runtime):
    long = "x" * 20_000
    seen = await run(runtime, f"cat <<'EOF'\na $b\nEOF\necho {long} | wc -c\nprintf 'no newline'")
    assert seen.output == "a $b\n20001\nno newline"


async def test_exit_codes(runtime):
    assert (await run(runtime, "(exit 7)", check="silent")).exit_code == 7
    assert (await run(runtime, "(exit 7)", check="ignore")).exit_code is None
    with pytest.raises(NonZeroExitCodeError, match="it broke"):
        await run(runtime, "ls /nowhere", error_msg="it broke")
    with pytest.raises(BashIncorrectSyntaxError):
        await run(runtime, "if then")
    assert (await run(runtime, "echo still")).output == "still\n"


async def test_a_command_that_does_not_end(runtime):
    with pytest.raises(CommandTimeoutError):
        await run(runtime, "echo begun; sleep 60", timeout=1)
    await runtime.run_in_session(BashInterruptAction(timeout=5))
    assert (await run(runtime, "echo again")).output == "again\n"


async def test_an_interactive_program(runtime):
    begun = await run(runtime, "python3 -q", is_interactive_command=True, expect=[">>> "], timeout=20)
    assert begun.expect_string == ">>> "
    seen = await run(runtime, "print(6 * 7)", is_interactive_command=True, expect=[">>> "], timeout=20)
    assert "42" in seen.output
    await run(runtime, "exit()", is_interactive_quit=True, timeout=20)
    assert (await run(runtime, "echo back")).output.endswith("back\n")


async def test_commands_and_files(runtime, tmp_path):
    done = await runtime.execute(Command(command=["sh", "-c", "echo out; echo err >&2; exit 2"]))
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 2)
    merged = await runtime.execute(Command(command="echo a; echo b >&2", shell=True, merge_output_streams=True))
    assert sorted(merged.stdout.split()) == ["a", "b"]
    with pytest.raises(CommandTimeoutError):
        await runtime.execute(Command(command=["sleep", "60"], timeout=1))
    await runtime.write_file(WriteFileRequest(path="/d/e/f", content="ä"))
    assert (await runtime.read_file(ReadFileRequest(path="/d/e/f"))).content == "ä"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_text("x")
    await runtime.upload(UploadRequest(source_path=str(tmp_path / "in"), target_path="/up"))
    assert (await runtime.read_file(ReadFileRequest(path="/up/x"))).content == "x"
