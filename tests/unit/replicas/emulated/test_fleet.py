from __future__ import annotations

import asyncio

import pytest

from replicas.emulated.block_pool import KVEvent
from replicas.emulated.fleet import Fleet
from replicas.emulated.step_time import load_profile

LINEAR = load_profile("linear:1000")


async def test_each_replica_has_a_cache_of_its_own() -> None:
    fleet = Fleet(2, step_time=LINEAR, speed=1e4)
    first = await fleet.serve(0, range(100), 2)
    again = await fleet.serve(0, range(100), 2)
    other = await fleet.serve(1, range(100), 2)
    assert [one.cached_tokens for one in (first, again, other)] == [0, 96, 0]
    assert (first.prompt_tokens, first.output_tokens) == (100, 2)
    assert first.ttft_s == pytest.approx(0.1)
    assert other.e2e_s >= other.ttft_s


async def test_events_tell_of_their_replica_in_its_own_hashes() -> None:
    told: list[tuple[int, list[KVEvent]]] = []
    fleet = Fleet(2, step_time=LINEAR, speed=1e4, on_events=lambda replica, events: told.append((replica, events)))
    for replica in (0, 1):
        await fleet.serve(replica, range(40), 1)
    (zero, (first,)), (one, (second,)) = told
    assert (zero, one) == (0, 1)
    assert first["token_ids"] == second["token_ids"]
    assert set(first["block_hashes"]).isdisjoint(second["block_hashes"])


async def test_the_first_token_is_told_of() -> None:
    fleet = Fleet(1, step_time=LINEAR, speed=1e4)
    told: list[str] = []
    await fleet.serve(0, range(40), 5, on_first_token=lambda: told.append("first"))
    assert told == ["first"]


async def test_cancelling_aborts_and_stopping_raises() -> None:
    fleet = Fleet(1, step_time=LINEAR, speed=1e-3)
    tasks = [asyncio.create_task(fleet.serve(0, range(400), 5)) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    (engine,) = fleet.engines
    assert len(engine.scheduler.running) + len(engine.scheduler.waiting) == 1
    fleet.stop()
    with pytest.raises(RuntimeError, match="ended the request"):
        await tasks[1]


async def test_a_fleet_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Fleet(0)
