"""Short schedules of random faults; `make faults` runs long ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from router.ownership.redis import RedisOwnershipMap
from router.types import Slot
from tests.faults import invariants
from tests.faults.invariants import Broken
from tests.faults.run import survive
from tests.faults.schedule import FAULTS, draw
from tests.faults.system import System

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_fleet_survives_whatever_happens_and_is_right_again(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    told = await survive(seed, seconds=4.0, faults=11)
    assert {fault.name for fault in told.faults} == set(FAULTS)
    assert told.outcomes["answered"] > 0


def test_a_schedule_is_drawn_from_its_seed() -> None:
    assert draw(5, 10, 30) == draw(5, 10, 30) != draw(6, 10, 30)
    assert {fault.name for fault in draw(5, 10, 30)} == set(FAULTS)


async def test_a_lost_answer_a_forgotten_booking_and_a_stray_block_are_found(caplog: pytest.LogCaptureFixture) -> None:
    """The invariants do notice what they are there for."""
    caplog.set_level(logging.CRITICAL)
    async with System(1, replicas=1, routers=1) as system:
        for _ in range(20):
            system.send()
        await system.all_ended()
        await system.touch()
        await invariants.check_all(system, 120)
        system.outcomes[99] = []
        with pytest.raises(Broken, match="no outcome"):
            await invariants.every_request_ended_once(system)
        del system.outcomes[99]
        router = system.routers[0][0]
        placed = await router.route("/v1/completions", {"ids": system.prompts[0]}, 10, [system.replicas[0].name])
        with pytest.raises(Broken, match="still has booked"):
            await invariants.counters_are_zero_at_rest(system)
        router.release(placed)
        await invariants.check_all(system, 120)
        lease = system.replicas[0].collector.lease
        assert lease is not None
        await _write_behind_its_back(system.direct, lease.slot)
        await _until_broken(invariants.the_map_says_what_the_collectors_hold, system, "blocks in the map")
        system.ended.append((0.0, lease.slot))
        await _until_broken(invariants.no_credit_to_an_ended_incarnation, system, "have ended")


async def _until_broken(invariant: Callable[[System], Awaitable[None]], system: System, how: str) -> None:
    """A collector checks the stream's end now and then, and isn't in sync meanwhile; a lease may have lapsed."""
    async with asyncio.timeout(120):
        while True:
            try:
                await invariant(system)
            except Broken as error:
                if how in str(error):
                    return
            await asyncio.sleep(0.05)


async def _write_behind_its_back(ownership: RedisOwnershipMap, slot: Slot) -> None:
    await ownership._client.call(
        ownership._prefix, "SET", ownership._prefix + b"b" + bytes(16), slot.to_bytes(2) + b"\0\0"
    )
