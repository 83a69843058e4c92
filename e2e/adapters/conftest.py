"""Each adapter with the published package of its framework, against a real server (COVE_URL, COVE_KEY)."""

import sys
import typing

import pytest

import cove

if sys.version_info < (3, 12):
    import typing_extensions

    # All that harbor's environments need of 3.12.
    was = typing.TypedDict
    typing.override, typing.TypedDict = typing_extensions.override, typing_extensions.TypedDict
    import harbor.environments.base  # noqa: F401

    typing.TypedDict = was


@pytest.fixture(autouse=True)
def nothing_left():
    """A task leaves no sandbox."""
    before = {sb.id for sb in cove.Sandbox.list()}
    yield
    left = {sb.id for sb in cove.Sandbox.list()} - before
    for id in left:
        cove.Sandbox.connect(id).kill()
    assert not left
