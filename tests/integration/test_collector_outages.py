"""The collector while the map fails, forgets or fences it, and when it fails itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from replicas.ports import quiet_port
from router.ownership import ReplicaRecord, Write
from router.ownership.redis import RedisOwnershipMap
from serve.embedded_valkey import EmbeddedValkey
from tests.integration.collector_source import (
    RECORD,
    B,
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


async def test_a_fenced_collector_joins_again_and_writes_everything(ownership: FailingMap, source: Source) -> None:
    source.store(1)
    async with collecting(ownership, source, lease_s=0.3) as collector:
        await until_owned(ownership, prompt(1), 3)
        stranger = await ownership.join(RECORD.replica_id, RECORD, 60)
        await until(lambda: collector.counters["fenced"] == 1)
        await until_owned(ownership, prompt(1), 3)
        assert collector.lease is not None
        assert collector.lease.epoch > stranger.epoch


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


async def test_a_collector_whose_writing_fails_is_not_in_sync_before_all_is_written_again(
    ownership: FailingMap, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()

    async def fail(*_: object) -> None:
        failed.set()
        raise ZeroDivisionError

    source.store(1)
    async with collecting(ownership, source) as collector:
        await until_owned(ownership, prompt(1), 3)
        with monkeypatch.context() as patch:
            patch.setattr(ownership, "write", fail)
            source.store(2)
            await failed.wait()
        await until(lambda: collector.in_sync)
        assert [await owned(ownership, prompt(n)) for n in (1, 2)] == [3, 3]
        assert collector.counters["crashes"] == 1


async def test_what_ended_replicas_left_is_swept(ownership: FailingMap, source: Source) -> None:
    lease = await ownership.join("gone", ReplicaRecord("gone", "m", B), 60)
    await ownership.write(lease, [Write(lease.slot, prompt(9, 1000))])
    await ownership.leave(lease)
    async with collecting(ownership, source, lease_s=0.05) as collector:
        await until(lambda: collector.counters["swept"] == 1000)


async def test_a_real_server_that_restarts_empty_is_filled_again(source: Source, fleet: str) -> None:
    valkey = EmbeddedValkey(quiet_port())  # nobody takes it while it is down
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
