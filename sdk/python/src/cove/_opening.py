"""Calls that are awaited for an object, or entered for its lifetime."""

from __future__ import annotations

import functools
from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, Callable, Generic, Optional, TypeVar, cast

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")

T = TypeVar("T")


class Opening(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine that is also the async context manager of what it returns: `async with AsyncSandbox.create() as sb`.

    A coroutine, not only something to await, so that asyncio.create_task takes it.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._opened: Optional[Any] = None

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> T:
        self._opened = opened = cast("Any", await self._coroutine)
        return cast("T", await opened.__aenter__())

    async def __aexit__(self, *error: Any) -> Optional[bool]:
        assert self._opened is not None
        result: Optional[bool] = await self._opened.__aexit__(*error)
        return result


def opening(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Opening[T]]:
    """Make a coroutine function return an Opening."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Opening[T]:
        return Opening(call(*args, **kwargs))

    return wrapped
