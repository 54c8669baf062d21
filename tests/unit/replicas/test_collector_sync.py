"""`Collector.in_sync` is never said too early: the map must have all of it, and say whether it may be relied on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from replicas.collector import Collector
from replicas.events import BlockStored, KVEventBatch
from replicas.sequence import Restarted
from replicas.subscriber import Batch, Item
from router.errors import OwnershipUnavailable
from router.hashing import pack_token_ids
from router.ownership import Lease, ReplicaRecord
from router.ownership.memory import MemoryOwnershipMap
from router.tasks import end

RECORD = ReplicaRecord("r", "m", 4)


class HeldMap(MemoryOwnershipMap):
    """Joins wait for `free`."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.free = asyncio.Event()
        self.free.set()
        self.joining = 0

    async def join(self, member: str, record: Any, lease_s: float) -> Lease:
        self.joining += 1
        await self.free.wait()
        return await super().join(member, record, lease_s)


class Quiet:
    """A subscriber that hears nothing."""

    def __init__(self) -> None:
        self.tracker = SimpleNamespace(in_doubt=False)
        self.counters: Counter[str] = Counter()
        self.seq, self.caught_up = 0, True
        self.on_doubt: Callable[[], None] = lambda: None

    async def __aenter__(self) -> AsyncIterator[Item]:
        return self._nothing()

    async def __aexit__(self, *_: object) -> None: ...

    async def _nothing(self) -> AsyncIterator[Item]:
        await asyncio.Event().wait()
        yield Restarted()


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.001)


async def test_not_while_a_new_incarnation_joins() -> None:
    ownership = HeldMap()
    collector = Collector(ownership, RECORD, None)
    await collector.start()
    stored = KVEventBatch(0.0, (BlockStored((1, 2), None, pack_token_ids(range(8)), 4),))
    collector._on_item(Batch(0, stored))
    await until(lambda: collector.in_sync)
    ownership.free.clear()
    collector._on_item(Restarted())
    assert not collector.in_sync
    await until(lambda: ownership.joining == 2)
    assert not collector.in_sync
    ownership.free.set()
    await until(lambda: collector.in_sync)
    await end(collector._task)


async def test_not_before_the_map_says_that_a_doubt_is_over() -> None:
    ownership, quiet = MemoryOwnershipMap(time.monotonic), Quiet()
    collector = Collector(ownership, RECORD, "events", lease_s=0.3, subscribe=lambda *_: quiet)  # type: ignore[arg-type,return-value]
    await collector.start()
    await until(lambda: collector.in_sync)

    quiet.tracker.in_doubt = True
    assert not collector.in_sync
    await until(lambda: not record_of(ownership).trusted)
    quiet.tracker.in_doubt = False
    assert not collector.in_sync
    await until(lambda: collector.in_sync)
    assert record_of(ownership).trusted
    await end(collector._task)


def record_of(ownership: MemoryOwnershipMap) -> ReplicaRecord:
    record = ownership._members["r"].record
    assert isinstance(record, ReplicaRecord)
    return record


async def joined_in_doubt(ownership: MemoryOwnershipMap, quiet: Quiet) -> Collector:
    """Its next renewal is minutes away."""
    collector = Collector(ownership, RECORD, "events", lease_s=600, retry_s=(0.01, 0.01), subscribe=lambda *_: quiet)  # type: ignore[arg-type,return-value]
    await collector.start()
    await until(lambda: collector.in_sync)
    quiet.tracker.in_doubt = True
    collector._writer.join_again()
    await until(lambda: collector.in_sync)
    assert not record_of(ownership).trusted
    return collector


async def test_a_doubt_that_is_over_is_told_at_once_not_with_the_next_renewal() -> None:
    ownership, quiet = MemoryOwnershipMap(time.monotonic), Quiet()
    collector = await joined_in_doubt(ownership, quiet)
    quiet.tracker.in_doubt = False
    assert not collector.in_sync
    quiet.on_doubt()
    await until(lambda: collector.in_sync)
    assert record_of(ownership).trusted
    await end(collector._task)


async def test_a_renewal_that_failed_may_have_been_carried_out_and_is_repeated() -> None:
    class TooLate(MemoryOwnershipMap):
        async def renew(self, *args: Any) -> None:
            await super().renew(*args)
            if record_of(self).trusted:
                quiet.tracker.in_doubt = True  # again, before anybody knows that the map says otherwise
                raise OwnershipUnavailable("no answer in time")

    ownership, quiet = TooLate(time.monotonic), Quiet()
    collector = await joined_in_doubt(ownership, quiet)
    quiet.tracker.in_doubt = False
    quiet.on_doubt()
    await until(lambda: collector.counters["unavailable"] == 1)
    await until(lambda: collector.in_sync)
    assert not record_of(ownership).trusted
    await end(collector._task)
