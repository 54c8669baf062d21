"""A load run to its end, to its time limit, or to the user's Ctrl-C; whatever was measured until then is kept."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import uvloop

from serve.loadgen.client import Target
from serve.loadgen.stats import quantile
from serve.loadgen.types import UNFINISHED, Outcome

_LAG_PERIOD_S = 0.05
_REPORT_PERIOD_S = 1.0
_LINE_PERIOD_S = 10.0

Report = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measured:
    """`stopped` says why a run ended before its load did. `client_lag_p99_s` (wall seconds): how late the load
    generator itself was; where that nears the latencies measured, it is the client that was too slow."""

    outcomes: Sequence[Outcome]
    wall_s: float
    client_lag_p99_s: float | None
    stopped: Literal["interrupted", "time limit"] | None = None


async def measure(
    target: Target, load: Coroutine[Any, Any, None], *, max_wall_s: float = 3600.0, report: Report | None = None
) -> Measured:
    """Runs `load`, which sends through `target`, from clock 0 on. What it raises is raised here, not in a group."""
    target.clock.restart()
    began = time.monotonic()
    lags: list[float] = []
    stopped: Literal["interrupted", "time limit"] | None = None
    work = asyncio.create_task(load)
    async with _beside(_watch_lag(lags)), _beside(_report(target, report)):
        try:
            with _interruptible(work):
                async with asyncio.timeout(max_wall_s) as limit:
                    await work
        except TimeoutError:
            if not limit.expired():
                raise
            stopped = "time limit"
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                raise
            stopped = "interrupted"
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
    return Measured(target.outcomes, time.monotonic() - began, quantile(lags, 0.99), stopped)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, on the event loop that is the fastest."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def stderr_report() -> Report:
    """One line that is written over on a terminal; elsewhere a line every ten seconds."""
    terminal = sys.stderr.isatty()
    last = 0.0

    def say(text: str) -> None:
        nonlocal last
        if terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
        elif time.monotonic() - last >= _LINE_PERIOD_S or not text:
            last = time.monotonic()
            sys.stderr.write(f"{text}\n" if text else "")
        sys.stderr.flush()

    return say


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def _interruptible(work: asyncio.Task[None]) -> Iterator[None]:
    """Ctrl-C ends the work, not the process. Elsewhere than in the main thread there are no signals to take."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, work.cancel)
    except (ValueError, RuntimeError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _watch_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_LAG_PERIOD_S)
        lags.append(max(0.0, time.perf_counter() - before - _LAG_PERIOD_S))


async def _report(target: Target, report: Report | None) -> None:
    if report is None:
        return
    try:
        while True:
            await asyncio.sleep(_REPORT_PERIOD_S)
            errors = sum(not one.ok and one.error != UNFINISHED for one in target.outcomes)
            report(
                f"{target.clock.now():7.1f} s  {len(target.outcomes) - errors} answered, {target.in_flight} in flight"
                + (f", {errors} errors" if errors else "")
            )
    finally:
        report("")
