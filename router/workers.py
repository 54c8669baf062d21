"""Threads for work that would hold up the event loop.

Few, as each one that computes may keep the interpreter lock from the loop for a moment; and started beforehand, as a
loop that starts a thread waits until that thread has run, behind all the others.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Barrier
from typing import ParamSpec, TypeVar

_COUNT = 2
_START_S = 10.0
_SWITCH_S = 0.001
"""How long a thread may keep the interpreter lock from the event loop, for the whole process; Python's own is 5 ms."""

P = ParamSpec("P")
R = TypeVar("R")


class Workers:
    """Cancelling a call leaves its thread to finish what it has begun; one that hasn't begun never does."""

    def __init__(self, count: int = _COUNT) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="whohas-prompt")
        self._met = Barrier(count)  # so that no thread does the work of two

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        for _ in range(self._count):
            self._threads.submit(self._met.wait, _START_S)

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        context = copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: context.run(call, *args, **kwargs))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._met.abort()  # a thread whose fellow never began would go on waiting for it
