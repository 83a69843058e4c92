"""When to send again, without I/O: callers ask for a delay and sleep themselves."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Callable

from .errors import CoveError, DeadlineExceeded, NoCapacity, TransportError, Unavailable


@dataclass(frozen=True)
class Clock:
    """Time as a client sees it; tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    async_sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random


def may_retry(error: CoveError, *, repeatable: bool, wait_capacity: bool = False, server_retries: bool = False) -> bool:
    """Whether sending the same call again can neither do harm nor is pointless.

    server_retries: the server itself has tried for long, so that only a time it
    names is worth another request.
    """
    if isinstance(error, TransportError):
        return repeatable or not error.sent
    if isinstance(error, Unavailable):
        # Mostly refused before anything was done; but a server that drains also
        # cuts off what it is in the middle of.
        return repeatable and (not server_retries or error.retry_after is not None)
    return wait_capacity and is_full(error)


def is_full(error: CoveError) -> bool:
    """Whether a create may succeed later: there was no room, or not in the time the server gives itself."""
    return isinstance(error, (NoCapacity, DeadlineExceeded))


class Backoff:
    """Growing, jittered delays until a deadline.

    From 50 ms (a server restart is over in a few hundred) doubling to 2 s, each
    shortened by up to half, so that 256 callers do not come back in step. A
    time the server named (Retry-After) is a lower bound.
    """

    FIRST, LAST = 0.05, 2.0

    def __init__(self, budget: float, clock: Clock) -> None:
        self._clock = clock
        self._deadline = clock.now() + budget
        self._step = self.FIRST

    def remaining(self) -> float:
        return self._deadline - self._clock.now()

    def delay_after(self, error: CoveError) -> float:
        """Seconds to wait before the next attempt; raises error when there is no time left for one."""
        delay = self._step * (0.5 + self._clock.random() / 2)
        self._step = min(self._step * 2, self.LAST)
        if error.retry_after is not None:
            # The jitter goes on top: everyone was told the same time.
            delay += error.retry_after
        if delay > self.remaining():
            raise error
        return delay
