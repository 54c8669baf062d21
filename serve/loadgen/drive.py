"""When requests go out. Each of these returns when its load is done, or is cancelled by whoever bounds it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

from serve.loadgen.client import Target
from serve.loadgen.types import Call, Session, TimedCall

_AHEAD_S = 1.0
"""Wall seconds before its time that a request is made ready: a whole trace at once would fill the memory."""


def poisson(calls: Iterable[Call], rate: float, seconds: float, seed: int = 0) -> Iterator[TimedCall]:
    """Calls at `rate` a second on average, independent of each other, for `seconds`.

    Raises ValueError for a rate that isn't above 0.
    """
    if not rate > 0:
        raise ValueError(f"a rate is above 0 requests a second, not {rate}")
    draw, at = random.Random(seed), 0.0
    for call in calls:
        at += draw.expovariate(rate)
        if at >= seconds:
            return
        yield TimedCall(at, call)


async def closed_loop(
    target: Target, calls: Iterable[Call], concurrency: int, ramp_s: float = 0.0, until_s: float | None = None
) -> None:
    """`concurrency` clients, each sending its next call as soon as it has its answer.

    They start evenly over `ramp_s`. With `until_s` everything is broken off then, whatever is still in flight.
    """
    queue = iter(calls)

    async def client(start_s: float) -> None:
        await target.clock.sleep_until(start_s)
        for call in queue:
            if target.exhausted:
                return
            await target.call(call)

    starts = [ramp_s * number / concurrency for number in range(concurrency)]
    try:
        async with asyncio.timeout(None if until_s is None else (until_s - target.clock.now()) / target.clock.factor):
            await _all(client(start) for start in starts)
    except TimeoutError:
        return


async def open_loop(target: Target, calls: Iterable[TimedCall]) -> None:
    """Every call at its time, however many are still in flight. `calls` are in order of time."""

    async def one(timed: TimedCall) -> None:
        await target.clock.sleep_until(timed.at)
        await target.call(timed.call)

    async with asyncio.TaskGroup() as group:
        for timed in calls:
            if target.exhausted:
                return
            await target.clock.sleep(timed.at - target.clock.now() - _AHEAD_S * target.clock.factor)
            group.create_task(one(timed))


async def sessions(target: Target, conversations: Iterable[Session], concurrency: int | None = None) -> None:
    """Conversations, each at its own time; with `concurrency`, never more than so many at once."""

    async def one(session: Session) -> None:
        await target.clock.sleep_until(session.at)
        for turn in session.turns:
            if target.exhausted:
                return
            await target.clock.sleep(turn.think_s)
            await target.call(turn.call)

    if concurrency is None:
        await _all(one(session) for session in conversations)
        return
    queue = iter(conversations)

    async def client() -> None:
        for session in queue:
            await one(session)

    await _all(client() for _ in range(concurrency))


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)
