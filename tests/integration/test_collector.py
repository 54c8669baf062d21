"""From events on real ZMQ sockets to what the ownership map answers, through restarts and losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from replicas.collector import Collector
from replicas.subscriber import Subscriber
from router.ownership import RouterRecord
from tests.event_publisher import Publisher
from tests.integration.collector_source import (
    QUICK,
    RECORD,
    FailingMap,
    Source,
    collecting,
    owned,
    prompt,
    until,
    until_owned,
)

pytestmark = pytest.mark.integration


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    source = Source()
    yield source
    source.close()


@pytest.fixture
def ownership() -> FailingMap:
    return FailingMap()


async def test_blocks_appear_and_vanish_with_the_engine_s_events(ownership: FailingMap, source: Source) -> None:
    source.store(1)  # before anybody listens
    async with collecting(ownership, source) as collector:
        await until_owned(ownership, prompt(1), 3)
        source.store(1, 5, start=3)
        await until_owned(ownership, prompt(1, 5), 5)
        source.remove(1, 2)
        await until_owned(ownership, prompt(1, 5), 2)
        await until(lambda: collector.in_sync)
        assert (collector.record.blocks, collector.record.seq) == (2, 2)
        assert collector.stats()["blocks_stored"] == 5


async def test_after_close_there_is_no_credit(ownership: FailingMap, source: Source) -> None:
    source.store(1)
    async with collecting(ownership, source):
        await until_owned(ownership, prompt(1), 3)
    assert await owned(ownership, prompt(1)) == 0


async def test_an_engine_restarted_in_place_owns_only_what_it_stored_since(
    ownership: FailingMap, source: Source
) -> None:
    source.store(1)
    source.store(2)
    async with collecting(ownership, source) as collector:
        await until_owned(ownership, prompt(2), 3)
        first = collector.lease
        source.restart()
        source.store(3)
        await until_owned(ownership, prompt(3), 3)
        assert await owned(ownership, prompt(1)) == await owned(ownership, prompt(2)) == 0
        assert first is not None
        assert collector.lease is not None
        assert collector.lease.epoch > first.epoch


async def test_a_loss_ends_all_credit_and_what_follows_counts_again(ownership: FailingMap, source: Source) -> None:
    source.store(1)
    async with collecting(ownership, source) as collector:
        await until_owned(ownership, prompt(1), 3)
        source._publisher._send(b"not a batch")
        await until_owned(ownership, prompt(1), 0)
        source.store(2)
        await until_owned(ownership, prompt(2), 3)
        assert collector.counters["joins"] == 2


async def test_a_loss_with_nothing_written_needs_no_new_incarnation(ownership: FailingMap, source: Source) -> None:
    async with collecting(ownership, source) as collector:
        await until(lambda: collector.in_sync)
        for _ in range(20):
            source._publisher._send(b"not a batch")
        source.store(1)
        await until_owned(ownership, prompt(1), 3)
        assert collector.counters["resets"] == 20
        assert collector.counters["joins"] == 1


async def test_events_of_another_block_size_give_no_credit_and_are_told(
    ownership: FailingMap, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.publish(
        type="BlockStored", block_hashes=[1], parent_block_hash=None, token_ids=list(range(64)), block_size=64
    )
    async with collecting(ownership, source) as collector:
        await until(lambda: collector.counters["batches"] == 1)
        assert collector.stats()["blocks_skipped_block_size"] == 1
    assert "blocks of 64 tokens, not 16" in caplog.text


async def test_a_lease_is_renewed_as_long_as_the_collector_lives(ownership: FailingMap, source: Source) -> None:
    source.store(1)
    async with collecting(ownership, source, lease_s=0.3) as collector:
        await until_owned(ownership, prompt(1), 3)
        for _ in range(5):
            before = collector.counters.copy()
            await until(lambda before=before: collector.counters["renewals"] > before["renewals"])
            ownership.now += 0.2
            snapshot = await ownership.look_up([])
            assert [record.blocks for record in snapshot.replicas.values()] == [3]
        assert collector.counters["joins"] == 1


async def test_without_events_a_replica_is_there_but_owns_nothing(ownership: FailingMap) -> None:
    collector = Collector(ownership, RECORD, None)
    await collector.start()
    await until(lambda: collector.in_sync)
    snapshot = await ownership.look_up(prompt(1))
    assert [record.replica_id for record in snapshot.replicas.values()] == ["r1"]
    assert not snapshot.matches
    await collector.close()


async def test_many_events_end_in_the_same_map(ownership: FailingMap, source: Source) -> None:
    async with collecting(ownership, source) as collector:
        for number in range(1, 301):
            source.store(number, 20)
            source.remove(number, *range(19, number % 20, -1))
        source.store(999)
        await until_owned(ownership, prompt(999), 3)
        await until(lambda: collector.in_sync)
        assert set(ownership._holders) == collector.published
        assert [await owned(ownership, prompt(number, 20)) for number in (20, 25, 219)] == [1, 6, 20]


class SlowToClose(Subscriber):
    async def __aexit__(self, *exc: Any) -> None:
        await asyncio.sleep(0.1)
        await super().__aexit__(*exc)


async def test_a_collector_that_a_router_doubts_starts_anew_once_and_tells_the_same_again(
    ownership: FailingMap, source: Source
) -> None:
    async with collecting(ownership, source, lease_s=0.3, subscribe=SlowToClose) as collector:
        source.store(1)
        await until(lambda: collector.in_sync and collector.counters["batches"] == 1)
        before = collector.lease
        assert before is not None
        router = await ownership.join("router", RouterRecord(doubted=(before.slot,)), 60)
        await until(lambda: collector.counters["resynchronised"] == 1 and collector.in_sync)
        assert collector.lease is not None
        assert collector.lease.epoch > before.epoch
        assert await owned(ownership, prompt(1)) == 3
        await ownership.renew(router, RouterRecord(doubted=(collector.lease.slot,)), 60)
        renewals = collector.counters["renewals"]
        await until(lambda: collector.counters["renewals"] > renewals + 3)
        assert collector.counters["resynchronised"] == 1  # it has just done all it can


async def test_a_replay_that_ends_with_nothing_new_ends_the_doubt_at_once(ownership: FailingMap) -> None:
    name = f"ipc://@whohas-test-{uuid4().hex}"
    publisher = Publisher(f"{name}-e", f"{name}-r")
    publisher.may_end.clear()
    await publisher.publish(0, lose=True)
    collector = Collector(ownership, RECORD, f"{name}-e", f"{name}-r", lease_s=600, retry_s=QUICK)
    await collector.start()
    await until(lambda: collector.counters["batches"] == 1)
    collector._writer.join_again()  # and so it is told while the replay goes on
    await until(lambda: collector.counters["joins"] == 2)
    (record,) = (await ownership.look_up([])).replicas.values()
    assert not record.trusted
    publisher.may_end.set()
    await until(lambda: collector.in_sync)
    (record,) = (await ownership.look_up([])).replicas.values()
    assert record.trusted
    await collector.close()
    await publisher.stop()
