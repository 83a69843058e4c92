"""Secrets of a real server: what is kept beside their value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import cove

from ..blocking import Blocking
from .conftest import Live

pytestmark = pytest.mark.live


@pytest.fixture
def name(live: Live) -> Iterator[str]:
    made = live.name("secret")
    yield made
    with contextlib.suppress(cove.NotFound), cove.Client() as client:
        cove.Secret.delete(made, client=client)


def test_labels_and_version(live: Live, name: str) -> None:
    kind: Any = Blocking(cove.AsyncSecret, live.client._loop) if isinstance(live.client, Blocking) else cove.Secret

    def kept(**change: Any) -> tuple[Any, int]:
        said = kind.set(name, client=live.client, **change)
        listed = next(s for s in kind.list(client=live.client) if s.name == name)
        assert said == listed
        return listed.labels, listed.version

    rl, both = {"team": "rl"}, {"team": "eval", "owner": "grüße"}
    assert kept(value="sk-0123456789", hosts=["api.test"], labels=rl) == (rl, 1)
    assert kept(value="sk-9876543210") == (rl, 2)
    assert kept(labels=both) == (both, 2)
    assert kept(header="X-Key") == (both, 2)
    for wrong in ({"a b": "c"}, {"a": "\n"}, {f"k{i}": "v" for i in range(65)}):
        with pytest.raises(cove.InvalidArgument) as refused:
            kept(value="sk-refused-00", labels=wrong)
        assert refused.value.field == "labels"
    assert kept(labels={}) == ({}, 2)
