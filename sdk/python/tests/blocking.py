"""The async API driven like the sync one, so that one test speaks for both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import cove

_KINDS = (
    cove.AsyncClient,
    cove.AsyncSandbox,
    cove.AsyncPort,
    cove.AsyncProcess,
    cove.AsyncRepl,
    cove.AsyncShell,
    cove.AsyncCallback,
    cove.AsyncFiles,
    cove.AsyncWatch,
    cove.AsyncSnapshot,
    cove.AsyncTemplate,
    cove.AsyncVolume,
    cove.AsyncVolumeFiles,
    cove.AsyncRecording,
    cove.AsyncRun,
    cove.AsyncShipment,
    cove.AsyncCheckpoints,
    cove.client.AsyncImages,
)


def _unwrap(value: Any) -> Any:
    """The async objects in an argument, as those in `volumes`."""
    if isinstance(value, Blocking):
        return value._target
    if type(value) is dict:
        return {key: _unwrap(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unwrap(item) for item in value)
    return value


class Blocking:
    """Wraps an async object or class: calls run to their end, async iteration becomes iteration."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._target, self._loop = target, loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value) or isinstance(value, _KINDS):
            return self._wrap(value)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run(value(*_unwrap(list(args)), **_unwrap(kwargs)))

        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Of a class whose objects are made without asking the server."""
        return self._wrap(self._target(*_unwrap(list(args)), **_unwrap(kwargs)))

    def _run(self, value: Any) -> Any:
        if inspect.isasyncgen(value):
            return self._iterate(value)
        if inspect.isawaitable(value):
            value = self._loop.run_until_complete(value)
        return self._wrap(value)

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, list):
            value[:] = [self._wrap(item) for item in value]  # in place: it may be a subclass that says more
        return Blocking(value, self._loop) if isinstance(value, _KINDS) else value

    def _iterate(self, source: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    value = self._loop.run_until_complete(source.__anext__())
                except StopAsyncIteration:
                    return
                yield self._wrap(value)
        finally:
            self._loop.run_until_complete(source.aclose())

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._target.__aiter__())

    def __enter__(self) -> Any:
        return self._run(self._target.__aenter__())

    def __exit__(self, *args: Any) -> Any:
        return self._run(self._target.__aexit__(*args))
