"""One schedule on one system, then the invariants."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.invariants import check_all
from tests.faults.schedule import FAULTS, Fault, draw
from tests.faults.system import System


@dataclass(frozen=True, slots=True)
class Survived:
    """`repaired_s`: from the last fault's end until every invariant held."""

    faults: list[Fault]
    outcomes: Counter[str]
    degraded: int
    repaired_s: float


async def survive(
    seed: int,
    seconds: float,
    faults: int,
    *,
    requests_per_s: float = 40.0,
    bound_s: float = 120.0,
    tell: Callable[[str], None] = lambda line: None,
) -> Survived:
    """Raises `Broken` where an invariant does not hold `bound_s` after all faults have ended."""
    schedule = draw(seed, seconds, faults)
    async with System(seed) as system:
        traffic = asyncio.create_task(_traffic(system, requests_per_s))
        clock = asyncio.get_running_loop().time
        began = clock()
        happening: list[asyncio.Task[None]] = []
        redis = asyncio.Lock()
        for fault in schedule:
            await asyncio.sleep(max(0.0, began + fault.at_s - clock()))
            tell(str(fault))
            happening.append(asyncio.create_task(_happen(system, fault, redis)))
        await asyncio.sleep(max(0.0, began + seconds - clock()))
        await asyncio.gather(*happening)
        traffic.cancel()
        await asyncio.wait([traffic])
        await system.all_ended()
        await system.touch()
        repaired = await check_all(system, bound_s)
        return Survived(schedule, system.tally(), system.degraded, repaired)


async def _traffic(system: System, requests_per_s: float) -> None:
    while True:
        system.send()
        await asyncio.sleep(1 / requests_per_s)


async def _happen(system: System, fault: Fault, redis: asyncio.Lock) -> None:
    if fault.name.startswith("redis"):
        async with redis:  # a stopped process can't be stopped, nor one that isn't there
            await FAULTS[fault.name](system, fault)
    else:
        await FAULTS[fault.name](system, fault)
