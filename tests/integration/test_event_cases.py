"""What happened to other routers, from bytes on real ZMQ sockets to what a request gets: exact input, right result.

E3-E7, E16, E17 and R7: a publisher as vLLM's, collectors, a Valkey and a router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from replicas.collector import Collector
from replicas.subscriber import Batch, Item, Subscriber
from router.types import ReplicaId
from tests.event_publisher import Publisher
from tests.integration.event_world import DEADLINE_S, World, events, fixture, removed, stored, tokens, until
from tests.token_ids import BLOCK as B
from tests.token_ids import blocks_of

pytestmark = pytest.mark.integration


@pytest.fixture
async def world(valkey_url: str, fleet: str) -> AsyncIterator[World]:
    world = World(valkey_url, fleet)
    await world.ownership.connect()
    await world.router.start()
    yield world
    await world.router.close()
    for collector in world.collectors.values():
        await collector.close()
    for publisher in world.publishers.values():
        await publisher.stop()
    await world.ownership.close()


async def test_e3_lost_batches_are_asked_for_once_and_the_map_is_as_without_the_loss(world: World) -> None:
    publisher, collector = await world.replica("W0")
    ids = tokens(0, 96)
    payloads = [events(stored(100 + depth, 99 + depth if depth else None, ids[depth * B :][:B])) for depth in range(6)]
    for seq in (0, 1, 2):
        await publisher.publish(seq, payload=payloads[seq])
    await world.taken("W0", 3)
    await until(lambda: publisher.questions == [0])
    for seq in (3, 4):
        await publisher.publish(seq, lose=True, payload=payloads[seq])
    await publisher.publish(5, payload=payloads[5])
    await world.until_held(ids, {"W0": 6})
    assert publisher.questions == [0, 3]
    assert collector.stats()["events_gaps"] == 1
    assert collector.published == set(blocks_of(ids))
    assert collector.counters["joins"] == 1


@pytest.mark.parametrize("with_topic", [True, False])
async def test_e4_replayed_and_live_batches_overlap_and_each_is_taken_once_in_order(with_topic: bool) -> None:
    name = uuid4().hex
    endpoints = (f"ipc://@whohas-{name}-events", f"ipc://@whohas-{name}-replay")
    publisher = Publisher(*endpoints, with_topic=with_topic)
    subscriber = Subscriber(*endpoints, replay_timeout_s=DEADLINE_S, probe_s=DEADLINE_S)
    seen: list[int] = []

    async def listen(items: AsyncIterator[Item]) -> None:
        async for item in items:
            assert isinstance(item, Batch)
            seen.append(item.seq)

    async with subscriber as items:
        listening = asyncio.create_task(listen(items))
        await publisher.subscribed()
        for seq in range(3):
            await publisher.publish(seq)
        await until(lambda: seen == [0, 1, 2])
        publisher.silent = True  # the answer comes only after 6 is there
        for seq in (3, 4):
            await publisher.publish(seq, lose=True)
        await publisher.publish(5)
        await until(lambda: publisher.questions[-1:] == [3])
        await publisher.publish(6)
        await until(lambda: len(subscriber.tracker._held) == 2)
        await publisher.answer_again(upto=5)
        await until(lambda: len(seen) == 7)
        listening.cancel()
        await asyncio.wait([listening])
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    await publisher.stop()


async def test_e5_an_engine_restarted_in_place_keeps_no_credit_even_without_a_replay_socket(world: World) -> None:
    publisher, _ = await world.replica("W0", replay=False)
    old = tokens(0, 48)
    for seq in range(42):
        depth = seq - 39
        some = [stored(100 + depth, 99 + depth if depth else None, old[depth * B :][:B])] if depth >= 0 else []
        await publisher.publish(seq, payload=events(*some))
    await world.until_held(old, {"W0": 3})
    assert world.collectors["W0"].record.seq == 41
    await publisher.stop()
    again = world.publish_as("W0", replay=False)
    await again.subscribed()
    await again.publish(0, payload=events(stored(900, None, tokens(900, 16))))
    await world.until_held(tokens(900, 16), {"W0": 1})
    assert await world.held(old) == {}
    assert world.collectors["W0"].published == set(blocks_of(tokens(900, 16)))


async def test_e5_numbers_that_go_back_on_one_connection_are_a_restart(world: World) -> None:
    publisher, collector = await world.replica("W0", replay=False)
    await publisher.publish(
        41, payload=events(*(stored(101 + i, 100 + i if i else None, tokens(B * i, B)) for i in range(3)))
    )
    await world.until_held(tokens(0, 48), {"W0": 3})
    await publisher.publish(0, payload=events(stored(900, None, tokens(900, 16))))
    await world.until_held(tokens(900, 16), {"W0": 1})
    assert await world.held(tokens(0, 48)) == {}
    assert collector.stats()["events_restarts"] == 1


@pytest.mark.parametrize("encoding", ["frames_map", "frames_array"])
async def test_e6_a_cleared_engine_scores_nowhere_and_others_are_untouched(world: World, encoding: str) -> None:
    ids = tokens(0, 32)
    for name in ("W0", "W1"):
        publisher, _ = await world.replica(name)
        await publisher.publish(0, payload=fixture("two_blocks_root", encoding))
    await world.until_held(ids, {"W0": 2, "W1": 2})
    await world.publishers["W0"].publish(1, payload=fixture("cleared", encoding))
    await world.until_held(ids, {"W1": 2})
    slot = world.collectors["W1"].lease
    assert slot is not None
    entries = {block: entry async for part in world.ownership.holdings() for block, entry in part}
    assert entries == dict.fromkeys(blocks_of(ids), slot.slot.to_bytes(2) + b"\0\0")


async def test_e7_a_block_stored_twice_needs_two_removals(world: World) -> None:
    publisher, _ = await world.replica("W0")
    ids = tokens(0, 16)
    store = stored(101, None, ids)
    await publisher.publish(0, payload=events(store, store))
    await world.until_held(ids, {"W0": 1})
    await publisher.publish(1, payload=events(removed(101)))
    await world.taken("W0", 2)
    assert await world.held(ids) == {"W0": 1}
    await publisher.publish(2, payload=events(removed(101)))
    await world.until_held(ids, {})
    await publisher.publish(3, payload=events(store, store, {"type": "AllBlocksCleared"}, store))
    await world.until_held(ids, {"W0": 1})
    await publisher.publish(4, payload=events(removed(101)))
    await world.until_held(ids, {})


async def test_e16_a_block_of_an_unknown_parent_is_no_root_and_finds_its_place_when_the_parent_turns_up(
    world: World,
) -> None:
    publisher, collector = await world.replica("W0")
    await publisher.publish(0, payload=fixture("orphan_parent"))
    await world.taken("W0", 1)
    assert await world.held(tokens(500, 16)) == {}
    assert collector.stats()["parked"] == 1
    await publisher.publish(1, payload=events(stored(202, None, tokens(300, 16))))
    await world.until_held([*tokens(300, 16), *tokens(500, 16)], {"W0": 2})
    assert await world.held(tokens(500, 16)) == {}
    assert collector.stats()["parked"] == 0


async def test_e16_a_parent_that_only_the_replay_has_is_asked_for(world: World) -> None:
    publisher, _ = await world.replica("W0")
    await publisher.publish(0, payload=events())
    await world.taken("W0", 1)
    await publisher.publish(1, lose=True, payload=events(stored(202, None, tokens(300, 16))))
    await publisher.publish(2, payload=fixture("orphan_parent"))
    await world.until_held([*tokens(300, 16), *tokens(500, 16)], {"W0": 2})


async def test_e17_a_batch_delivered_twice_and_a_removal_of_the_unknown_change_nothing(world: World) -> None:
    publisher, collector = await world.replica("W0")
    ids = tokens(0, 48)
    payloads = [events(stored(100 + depth, 99 + depth if depth else None, ids[depth * B :][:B])) for depth in range(3)]
    for seq in (0, 1, 2, 2):
        await publisher.publish(seq, payload=payloads[seq])
    await publisher.publish(3, payload=events(removed(999)))
    await world.taken("W0", 4)
    assert await world.held(ids) == {"W0": 3}
    stats = collector.stats()
    assert stats["events_duplicates"] == 1
    assert stats["blocks_unknown_removals"] == 1
    await publisher.publish(4, payload=events(removed(102)))  # once is enough: it was stored once
    await world.until_held(ids, {"W0": 2})


async def test_r7_a_collector_that_restarts_while_its_engine_lives_knows_all_again(world: World) -> None:
    publisher, first = await world.replica("W0")
    ids = tokens(0, 48)
    for depth in range(3):
        await publisher.publish(
            depth, payload=events(stored(100 + depth, 99 + depth if depth else None, ids[depth * B :][:B]))
        )
    await world.until_held(ids, {"W0": 3})
    await kill(first)
    await publisher.publish(3, payload=events(removed(102)))  # nobody listens
    second = await world.collect("W0")
    await until(lambda: second.joined.is_set())
    assert first.lease != second.lease  # what the first one wrote counts no more, before anything is replayed
    await world.until_held(ids, {"W0": 2})
    await world.taken("W0", 4)


async def test_r7_what_can_t_be_replayed_any_more_is_not_credited(world: World) -> None:
    publisher, first = await world.replica("W0")
    ids = tokens(0, 48)
    for depth in range(3):
        await publisher.publish(
            depth, payload=events(stored(100 + depth, 99 + depth if depth else None, ids[depth * B :][:B]))
        )
    await world.until_held(ids, {"W0": 3})
    await kill(first)
    del publisher.buffer[0]  # the publisher's buffer is full
    second = await world.collect("W0")
    await world.taken("W0", 2)
    assert await world.held(ids) == {}
    assert second.stats()["parked"] == 2
    await publisher.subscribed()
    await publisher.publish(3, payload=events(stored(100, None, ids[:B])))  # computed again
    await world.until_held(ids, {"W0": 3})


async def kill(collector: Collector) -> None:
    """End it without a good-bye."""
    assert collector._task is not None
    while not collector._task.done():
        collector._task.cancel()
        await asyncio.wait([collector._task], timeout=0.2)
    if collector._subscriber is not None:
        collector._subscriber.close()


async def test_p7_a_removed_replica_is_credited_no_more_and_what_it_ran_is_released(world: World) -> None:
    ids = tokens(0, 1600)
    for name in ("W0", "W1"):
        publisher, _ = await world.replica(name)
        if name == "W0":
            blocks = [stored(100 + i, 99 + i if i else None, ids[i * B :][:B]) for i in range(100)]
            await publisher.publish(0, payload=events(*blocks))
    await world.until_held(ids, {"W0": 100})
    both, left = [ReplicaId("W0"), ReplicaId("W1")], [ReplicaId("W1")]
    running = [await world.router.route("/v1/completions", {"ids": [*ids, 1]}, 100, both) for _ in range(3)]
    assert {one.decision.replica_id for one in running} == {"W0"}
    world.router.first_token(running[0])
    await world.collectors["W0"].close()
    assert await world.held(ids) == {}
    for _ in range(5):
        placed = await world.router.route("/v1/completions", {"ids": [*ids, 1]}, 100, left)
        assert placed.decision.replica_id == "W1"
        world.router.release(placed)
    for one in running:
        world.router.release(one)
        world.router.release(one)
    assert all(world.router.load(name).num_decoding == 0 == world.router.load(name).num_waiting for name in both)

    async def told() -> bool:
        return all(not record.loads for record in (await world.ownership.look_up(())).routers.values())

    await until(told)
