"""Churn: prompts come and go, replicas and routers die and are replaced, and memory stays where it was."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import replicas.writer
import router.membership
from tests.faults.invariants import Broken, check_all
from tests.faults.schedule import FAULTS, Fault
from tests.faults.system import System

_CHURN = (
    "a replica is killed",
    "an engine restarts",
    "a collector restarts",
    "a router crashes",
    "a cache is cleared",
    "events are lost",
)
_GROWTH = 1.25
_SPEED = 60.0
_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class Soaked:
    """Medians over the second and the last quarter of the time. Redis: `used_memory`; both in MiB."""

    simulated_s: float
    requests: int
    incarnations: int
    rss_mib: tuple[float, float]
    redis_mib: tuple[float, float]


@contextmanager
def _small_journals() -> Iterator[None]:
    """Journals are turned after minutes; here after seconds, so that all of their life is seen."""
    before = replicas.writer._JOURNAL_SLACK, router.membership._JOURNAL_BLOCKS
    replicas.writer._JOURNAL_SLACK, router.membership._JOURNAL_BLOCKS = 500, 1000
    try:
        yield
    finally:
        replicas.writer._JOURNAL_SLACK, router.membership._JOURNAL_BLOCKS = before


async def soak(seconds: float, seed: int = 1, requests_per_s: float = 30.0) -> Soaked:
    """Raises `Broken` where memory grew by a quarter, or an invariant does not hold at the end."""
    dice = random.Random(seed)
    samples: list[tuple[float, float]] = []
    clock = asyncio.get_running_loop().time
    with _small_journals():
        async with System(seed, speed=_SPEED) as system:
            began = last = clock()
            number = 1000
            while clock() < began + seconds:
                system.send()
                system.prompts[dice.randrange(len(system.prompts))] = system.prompt(number)
                number += 1
                if dice.random() < 1 / requests_per_s:
                    name = dice.choice(_CHURN)
                    await FAULTS[name](system, Fault(0, name, dice.randrange(1 << 16), 0.4))
                if clock() > last + _PERIOD_S:
                    last = clock()
                    samples.append((_rss_mib(), await _redis_mib(system)))
                await asyncio.sleep(1 / requests_per_s)
            await system.all_ended()
            await system.touch()
            await check_all(system, 60)
            rss, redis = (_second_and_last([sample[i] for sample in samples]) for i in (0, 1))
            result = Soaked(seconds * _SPEED, len(system.outcomes), len(system.ended), rss, redis)
    for what, (first, then) in (("this process", rss), ("Redis", redis)):
        if then > first * _GROWTH:
            raise Broken(f"the memory of {what} grew from {first:.1f} to {then:.1f} MiB")
    return result


def _second_and_last(values: Sequence[float]) -> tuple[float, float]:
    quarter = max(1, len(values) // 4)
    return median(values[quarter : 2 * quarter]), median(values[-quarter:])


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def _redis_mib(system: System) -> float:
    told = await system.direct._client.call(b"", "INFO", "memory")
    return int(told["used_memory"]) / 2**20
