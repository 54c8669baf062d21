"""Ending background tasks."""

from __future__ import annotations

import asyncio
from typing import Any

_PATIENCE_S = 0.2


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel until it is over. Once is not always enough in Python 3.11: a cancellation that meets another exception in
    a task group, or a result in `asyncio.wait_for`, is lost."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_PATIENCE_S)
