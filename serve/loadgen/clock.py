"""Time as the engines count it."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Engine seconds since the start, `factor` of them to a second of the wall. Raises ValueError for a factor <= 0."""

    def __init__(self, factor: float = 1.0) -> None:
        if not factor > 0:
            raise ValueError(f"a time factor is above 0, not {factor}")
        self.factor = factor
        self.restart()

    def restart(self) -> None:
        self._origin = time.perf_counter()

    def now(self) -> float:
        return (time.perf_counter() - self._origin) * self.factor

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / self.factor)

    async def sleep_until(self, at: float) -> None:
        await self.sleep(at - self.now())
