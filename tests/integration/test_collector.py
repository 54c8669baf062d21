"""From events on real ZMQ sockets to what the ownership map answers, through restarts, losses and outages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from replicas.collector import Collector
from replicas.emulated.publisher import EventPublisher
from router.errors import OwnershipUnavailable
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Lease, OwnershipMap, Record, ReplicaRecord, RouterRecord, Write
from router.ownership.memory import MemoryOwnershipMap
from router.ownership.redis import RedisOwnershipMap
from router.types import BlockHash
from serve.embedded_valkey import EmbeddedValkey

pytestmark = pytest.mark.integration

B = 16
DEADLINE_S = 30.0
RECORD = ReplicaRecord("r1", "m", B, "http://127.0.0.1:1")
QUICK = (0.02, 0.1)


class FailingMap(MemoryOwnershipMap):
    """Says `OwnershipUnavailable` while `down`, sometimes after having done the work: as a time-out may."""

    down = False
    late = False

    async def write(self, lease: Lease, writes: Sequence[Write]) -> None:
        if self.down and not self.late:
            raise OwnershipUnavailable("down")
        await super().write(lease, writes)
        if self.down:
            raise OwnershipUnavailable("too late")

    async def renew(self, lease: Lease, record: Record, lease_s: float) -> None:
        if self.down:
            raise OwnershipUnavailable("down")
        await super().renew(lease, record, lease_s)

    async def join(self, member: str, record: Record, lease_s: float) -> Lease:
        if self.down:
            raise OwnershipUnavailable("down")
        return await super().join(member, record, lease_s)


class Source:
    """An engine as far as its events go. Blocks are named by a chain's number and their depth in it."""

    def __init__(self) -> None:
        name = uuid4().hex
        self.endpoints = (f"ipc://@whohas-test-{name}-e", f"ipc://@whohas-test-{name}-r")
        self._publisher = EventPublisher(*self.endpoints)

    def store(self, number: int, blocks: int = 3, start: int = 0) -> None:
        ids = list(range(number * 100_000 + start * B, number * 100_000 + blocks * B))
        hashes = [number * 10_000 + depth for depth in range(start, blocks)]
        parent = hashes[0] - 1 if start else None
        self.publish(type="BlockStored", block_hashes=hashes, parent_block_hash=parent, token_ids=ids, block_size=B)

    def remove(self, number: int, *depths: int) -> None:
        self.publish(type="BlockRemoved", block_hashes=[number * 10_000 + depth for depth in depths])

    def publish(self, **event: Any) -> None:
        self._publisher.publish([event | {"medium": "GPU"}])  # type: ignore[list-item]

    def restart(self) -> None:
        self._publisher.close()
        self._publisher = EventPublisher(*self.endpoints)

    def close(self) -> None:
        self._publisher.close()


def prompt(number: int, blocks: int = 3) -> list[BlockHash]:
    first = number * 100_000
    return chain(root_hash("m"), pack_token_ids(range(first, first + blocks * B)), B)


async def owned(ownership: OwnershipMap, hashes: list[BlockHash]) -> int:
    snapshot = await ownership.look_up(hashes)
    return max((match.owned for match in snapshot.matches.values()), default=0)


async def until_owned(ownership: OwnershipMap, hashes: list[BlockHash], blocks: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await owned(ownership, hashes) != blocks:
            await asyncio.sleep(0.01)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not check():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def collecting(ownership: OwnershipMap, source: Source, **more: Any) -> AsyncIterator[Collector]:
    collector = Collector(ownership, RECORD, *source.endpoints, retry_s=QUICK, **more)
    await collector.start()
    try:
        yield collector
    finally:
        await collector.close()


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    source = Source()
    yield source
    source.close()


@pytest.fixture
def ownership() -> FailingMap:
    return FailingMap(time.monotonic)


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


async def test_a_fenced_collector_joins_again_and_writes_everything(ownership: FailingMap, source: Source) -> None:
    source.store(1)
    async with collecting(ownership, source, lease_s=0.3) as collector:
        await until_owned(ownership, prompt(1), 3)
        stranger = await ownership.join(RECORD.replica_id, RECORD, 60)
        await until(lambda: collector.counters["fenced"] == 1)
        await until_owned(ownership, prompt(1), 3)
        assert collector.lease is not None
        assert collector.lease.epoch > stranger.epoch


async def test_a_lease_is_renewed_as_long_as_the_collector_lives(ownership: FailingMap, source: Source) -> None:
    source.store(1)
    async with collecting(ownership, source, lease_s=0.3) as collector:
        await until_owned(ownership, prompt(1), 3)
        await until(lambda: collector.counters["renewals"] >= 5)
        assert collector.counters["joins"] == 1
        snapshot = await ownership.look_up([])
        assert [record.blocks for record in snapshot.replicas.values()] == [3]


@pytest.mark.parametrize("late", [False, True])
async def test_after_an_outage_the_map_equals_the_engine_again(
    ownership: FailingMap, source: Source, late: bool
) -> None:
    source.store(1)
    async with collecting(ownership, source) as collector:
        await until_owned(ownership, prompt(1), 3)
        ownership.down, ownership.late = True, late
        source.store(2)
        await until(lambda: collector.counters["unavailable"] >= 1)
        source.remove(1, 2)
        source.store(3)
        source.remove(2, 0, 1, 2)
        await until(lambda: collector.counters["batches"] == 5)
        ownership.down = False
        await until_owned(ownership, prompt(3), 3)
        await until(lambda: collector.in_sync)
        assert [await owned(ownership, prompt(n)) for n in (1, 2, 3)] == [2, 0, 3]


async def test_an_outage_from_the_start_only_delays(ownership: FailingMap, source: Source) -> None:
    ownership.down = True
    source.store(1)
    async with collecting(ownership, source) as collector:
        await until(lambda: collector.counters["unavailable"] >= 2)
        assert collector.lease is None
        ownership.down = False
        await until_owned(ownership, prompt(1), 3)


async def test_what_can_t_be_written_takes_bounded_memory(ownership: FailingMap, source: Source) -> None:
    async with collecting(ownership, source, max_pending=100, lease_s=0.3) as collector:
        await until(lambda: collector.in_sync)
        ownership.down = True
        await until(lambda: collector.counters["unavailable"] >= 1)
        for number in range(1, 31):
            source.store(number, 10)
        await until(lambda: collector.counters["batches"] == 30)
        assert collector.stats()["pending"] <= 100
        ownership.down = False
        await until_owned(ownership, prompt(30, 10), 10)
        assert await owned(ownership, prompt(1, 10)) == 10


async def test_without_events_a_replica_is_there_but_owns_nothing(ownership: FailingMap) -> None:
    collector = Collector(ownership, RECORD, None)
    await collector.start()
    await until(lambda: collector.in_sync)
    snapshot = await ownership.look_up(prompt(1))
    assert [record.replica_id for record in snapshot.replicas.values()] == ["r1"]
    assert not snapshot.matches
    await collector.close()


async def test_a_collector_that_fails_starts_again_from_the_replay(
    ownership: FailingMap, source: Source, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.store(1)
    async with collecting(ownership, source) as collector:
        await until_owned(ownership, prompt(1), 3)
        with monkeypatch.context() as patch:
            patch.setattr(collector, "_on_item", lambda _item: 1 / 0)
            source.store(2)
            await until(lambda: collector.counters["crashes"] >= 1)
        await until_owned(ownership, prompt(2), 3)
        await until_owned(ownership, prompt(1), 3)
    assert "failed and starts again" in caplog.text


async def test_what_ended_replicas_left_is_swept(ownership: FailingMap, source: Source) -> None:
    lease = await ownership.join("gone", ReplicaRecord("gone", "m", B), 60)
    await ownership.write(lease, [Write(lease.slot, prompt(9, 1000))])
    await ownership.leave(lease)
    async with collecting(ownership, source, lease_s=0.05) as collector:
        await until(lambda: collector.counters["swept"] == 1000)


async def test_a_real_server_that_restarts_empty_is_filled_again(source: Source, fleet: str) -> None:
    valkey = EmbeddedValkey()
    valkey.start()
    ownership = RedisOwnershipMap(valkey.url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
    await ownership.connect()
    try:
        source.store(1, 3000)
        async with collecting(ownership, source) as collector:
            await until_owned(ownership, prompt(1, 3000), 3000)
            valkey.stop()
            await until(lambda: collector.counters["unavailable"] >= 1)
            source.remove(1, 2999)
            source.store(2)
            again = EmbeddedValkey(valkey.port)
            again.start()
            try:
                await until_owned(ownership, prompt(2), 3)
                await until_owned(ownership, prompt(1, 3000), 2999)
            finally:
                await collector.close()
                again.stop()
    finally:
        await ownership.close()
        valkey.stop()


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


async def test_a_set_larger_than_the_bound_on_changes_is_written_once_and_not_over_and_over(
    ownership: FailingMap, source: Source
) -> None:
    async with collecting(ownership, source, max_pending=100, lease_s=0.3) as collector:
        for number in range(1, 301):
            source.store(number, 10)
        await until(lambda: collector.in_sync and collector.counters["batches"] == 300)
        joins = collector.counters["joins"]
        await ownership.leave(collector.lease)
        for number in range(301, 401):
            source.store(number, 1)
            await asyncio.sleep(0.005)
        await until(lambda: collector.in_sync and collector.counters["batches"] == 400)
        assert joins < collector.counters["joins"] <= joins + 2


async def test_a_collector_that_a_router_doubts_starts_anew_once_and_tells_the_same_again(
    ownership: FailingMap, source: Source
) -> None:
    async with collecting(ownership, source, lease_s=0.3) as collector:
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
