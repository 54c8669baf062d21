from __future__ import annotations

import asyncio
from itertools import repeat

import pytest

from replicas.emulated.block_hashes import BlockChain
from replicas.emulated.block_pool import BlockPool, KVEvent
from replicas.emulated.engine import Engine
from replicas.emulated.scheduler import EngineRequest, Scheduler, State
from replicas.emulated.step_time import StepTime

PREFILL_1000_A_SECOND = StepTime(a=0.0, b=1e-3, c=0.0, d=0.0, e=0.0)


def request(first_id: int, num_tokens: int, num_output: int = 1) -> EngineRequest:
    chain = BlockChain(range(first_id, first_id + num_tokens), 16)
    return EngineRequest(f"r{first_id}", chain, num_output, repeat(9))


def engine(speed: float, published: list[list[KVEvent]] | None = None) -> Engine:
    sink = [] if published is None else published
    return Engine(Scheduler(BlockPool(500, 16)), PREFILL_1000_A_SECOND, publish=sink.append, speed=speed)


async def served(where: Engine, *requests: EngineRequest) -> None:
    """Submits all at once and waits for their ends."""
    ended = asyncio.Queue[EngineRequest]()
    for one in requests:
        where.submit(one, lambda got: ended.put_nowait(got) if got.state is not State.RUNNING else None)
    for _ in requests:
        await ended.get()


async def test_lag_of_the_process_leaves_simulated_times_exact() -> None:
    where = engine(speed=1e6)
    one, two = request(0, 500), request(1000, 250, num_output=3)
    await served(where, one, two)
    assert one.first_token_at is not None
    assert two.first_token_at is not None
    assert one.first_token_at - one.arrival == pytest.approx(0.5)
    # The second came in the middle of the first one's step, or, for all the loop knows, long after it.
    assert two.first_token_at == pytest.approx(max(one.first_token_at, two.arrival) + 0.25)


async def test_many_engines_share_one_loop() -> None:
    engines = [engine(speed=1e4) for _ in range(20)]
    requests = [request(index * 1000, 100, num_output=5) for index in range(20)]
    await asyncio.gather(*(served(where, one) for where, one in zip(engines, requests, strict=True)))
    assert {one.num_generated for one in requests} == {5}


async def test_events_are_published_before_the_token_of_their_step_is_told() -> None:
    published: list[list[KVEvent]] = []
    seen: list[int] = []
    where = engine(1e4, published)
    done = asyncio.Event()

    def on_token(one: EngineRequest) -> None:
        seen.append(len(published))
        done.set()

    where.submit(request(0, 40), on_token)
    assert published == []
    await done.wait()
    assert seen == [1]


async def test_an_aborted_request_is_never_heard_of_again() -> None:
    where = engine(speed=1e4)
    heard: list[EngineRequest] = []
    one = request(0, 400, num_output=50)
    where.submit(one, heard.append)
    where.abort(one)
    where.abort(one)
    await served(where, request(1000, 10))
    assert heard == []
    assert where.scheduler.pool.usage == 0.0


async def test_a_stop_tells_everyone_who_waits() -> None:
    where = engine(speed=1e-3)
    requests = [request(0, 400), request(1000, 400)]
    waiting = asyncio.create_task(served(where, *requests))
    await asyncio.sleep(0)
    where.stop()
    await waiting
    assert [one.state for one in requests] == [State.ABORTED] * 2
    with pytest.raises(RuntimeError, match="stopped"):
        where.submit(request(2000, 4), print)


async def test_a_speed_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="speed"):
        engine(speed=0.0)


@pytest.mark.parametrize("keep", [False, True])
async def test_an_engine_that_is_only_paused_keeps_its_cache(keep: bool) -> None:
    where = engine(1e4)
    await served(where, request(0, 40))
    running = asyncio.create_task(served(where, one := request(1000, 400, num_output=50)))
    await asyncio.sleep(0)
    where.sleep(0, keep_running=keep)
    queued = asyncio.create_task(served(where, request(0, 40)))
    await asyncio.sleep(0.01)
    assert (queued.done(), running.done()) == (False, not keep)
    where.wake_up()
    await queued
    await running
    assert one.state is (State.FINISHED if keep else State.ABORTED)
    assert where.scheduler.stats.prefix_cache_hits > 0


@pytest.mark.parametrize("keep", [False, True])
async def test_a_sleeping_engine_computes_nothing_and_forgets_its_cache(keep: bool) -> None:
    published: list[list[KVEvent]] = []
    where = engine(1e4, published)
    await served(where, request(0, 40))
    running = asyncio.create_task(served(where, one := request(1000, 400, num_output=50)))
    await asyncio.sleep(0)
    where.sleep(1, keep_running=keep)
    queued = asyncio.create_task(served(where, request(0, 40)))
    await asyncio.sleep(0.01)
    assert (queued.done(), running.done()) == (False, not keep)
    where.wake_up()
    await queued
    await running
    assert one.state is (State.FINISHED if keep else State.ABORTED)
    # What the interrupted step had stored is told, and gone with the rest.
    assert [event["type"] for event in published[1]][:2] == ["BlockStored", "AllBlocksCleared"]
    assert where.scheduler.stats.prefix_cache_hits == 0
