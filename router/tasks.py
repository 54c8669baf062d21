"""Ending background tasks, and waiting for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_PATIENCE_S = 0.2
TURNS = 3
"""So many turns of the loop after a pause: sockets are read, then the waiting are woken."""


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel until it is over. Once is not always enough in Python 3.11: a cancellation that meets another exception in
    a task group, or a result in `asyncio.wait_for`, is lost."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_PATIENCE_S)


@asynccontextmanager
async def others_timeout(timeout_s: float) -> AsyncIterator[None]:
    """`asyncio.timeout` for what others take: where this process's own loop was late, what has arrived meanwhile still
    counts."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer: asyncio.Handle = loop.call_later(timeout_s, lambda: late(TURNS))

        def late(turns: int) -> None:
            nonlocal timer
            if turns:
                timer = loop.call_soon(late, turns - 1)
            else:
                limit.reschedule(loop.time())

        try:
            yield
        finally:
            timer.cancel()
