"""The write path of one replica: KV events -> the engine's block set -> the ownership map.

    Subscriber --Batch--> BlockSet --changes--> pending --slices--> OwnershipMap
        '------Restarted, Lost------> empty BlockSet, new incarnation

`pending` maps a block to what the map shall say about it. After anything that leaves the map's content in doubt the
collector joins again: the new incarnation starts without blocks, the old one's give no credit, nor can its late writes,
and the whole published set is written. Rather no credit than wrong credit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from replicas.block_set import BlockSet
from replicas.sequence import Lost, Restarted
from replicas.subscriber import Batch, Item, Subscriber
from router.errors import Fenced, OwnershipUnavailable
from router.ownership import Lease, OwnershipMap, ReplicaRecord, Write
from router.tasks import end
from router.types import BlockHash

logger = logging.getLogger(__name__)

_BLOCKS_A_WRITE = 1024
_BLOCKS_A_SWEEP = 512
_DOUBT_PAUSE_S = 60.0
_UNUSED = (
    "events_undecodable",
    "events_malformed",
    "blocks_skipped",
    "blocks_ignored",
    "blocks_broken",
    "blocks_parked_d",
)
_JOURNAL_SLACK = 65_536
"""A map that keeps a journal may remember so many blocks more than twice what is held."""


class _Doubted(Exception):
    """Forget everything and listen from the start of what the engine can still replay."""


class Collector:
    """Keeps `record.replica_id`'s entries in `ownership` true from `start` to `close`.

    `record` tells model, block size and URL; blocks, seq and trust are filled in here. `events`, `replay`: the
    engine's ZMQ endpoints; without `events` the replica is in the map with no blocks. The lease is renewed every
    `lease_s / 3`. Changes of more than `max_pending` blocks that can't be written are dropped for a rewrite of the set.
    """

    def __init__(
        self,
        ownership: OwnershipMap,
        record: ReplicaRecord,
        events: str | None,
        replay: str | None = None,
        *,
        lease_s: float = 3.0,
        max_pending: int = 65_536,
        retry_s: tuple[float, float] = (0.1, 2.0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._map = ownership
        self._record = record
        self._events, self._replay = events, replay
        self._lease_s, self._max_pending, self._retry_s, self._clock = lease_s, max_pending, retry_s, clock
        self.counters: Counter[str] = Counter()
        self.lease: Lease | None = None
        self._blocks = self._new_blocks()
        self._subscriber: Subscriber | None = None
        self._pending: dict[BlockHash, bool] = {}
        self._must_join = True
        self._writing = False
        self._told_block_size = False
        self._dirty = False  # has this incarnation written anything?
        self.media = False  # may what stands before an image be relied on?
        self.doubt = ""  # why no router should rely on these blocks, whatever the events say
        self._doubted_at = float("-inf")
        self._journal = 0  # blocks added by this incarnation since its journal was last turned
        self._turning = False
        self._rewrite = 0  # size of the set that is being written whole
        self._wake = asyncio.Event()
        self.joined = asyncio.Event()  # set at the first join
        self._renew_at = clock()
        self._retries = 0
        self._task: asyncio.Task[None] | None = None

    # --- for the replica --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns at once; the first join and the replay of past events follow by themselves."""
        self._task = asyncio.create_task(self._run(), name=f"collector {self._record.replica_id}")

    async def close(self) -> None:
        """Stop and leave the map, so that no router gives credit any more. Waits for the map at most its time-out."""
        await end(self._task)
        self._task = None
        lease, self.lease = self.lease, None
        if lease is not None:
            with suppress(OwnershipUnavailable):
                await self._map.leave(lease)

    @property
    def record(self) -> ReplicaRecord:
        subscriber = self._subscriber
        return replace(
            self._record,
            blocks=len(self._blocks),
            seq=-1 if subscriber is None else subscriber.seq,
            trusted=not self.doubt and (subscriber is None or not subscriber.tracker.in_doubt),
            doubt=self.doubt,
            media=self.media,
            unused=self._unused(),
        )

    def _unused(self) -> dict[str, int]:
        return {name: count for name, count in self.stats().items() if count and name.startswith(_UNUSED)}

    async def holds(self, hashes: Sequence[BlockHash]) -> bool:
        """Has the engine told of all these blocks?"""
        return all(block in self._blocks.published for block in hashes)

    @property
    def published(self) -> frozenset[BlockHash]:
        """What the map should say of this replica."""
        return frozenset(self._blocks.published)

    @property
    def in_sync(self) -> bool:
        """Has everything that the engine told so far been written?"""
        subscriber = self._subscriber
        heard = self._events is None or (subscriber is not None and subscriber.caught_up)
        idle = not self._must_join and not self._pending and not self._writing
        return heard and self.lease is not None and idle

    def stats(self) -> dict[str, int]:
        """All counters: the collector's, `blocks_*` (see `BlockSet`) and `events_*` (see `Subscriber`)."""
        stats = dict(self.counters)
        for prefix, counters in (
            ("blocks", self._blocks.counters),
            ("events", self._subscriber.counters if self._subscriber else {}),
        ):
            for name, count in counters.items():
                stats[f"{prefix}_{name}"] = stats.get(f"{prefix}_{name}", 0) + count
        blocks = {"blocks": len(self._blocks), "parked": self._blocks.parked, "offloaded": len(self._blocks.offloaded)}
        return stats | blocks | {"pending": len(self._pending)}

    # --- reading ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._write_all())
                    tasks.create_task(self._sweep())
                    if self._events is not None:
                        tasks.create_task(self._read(self._events))
            except* _Doubted:
                logger.warning("%s starts anew: its engine reuses less than its events say", self._record.replica_id)
            except* Exception:
                logger.exception("the collector of %s failed and starts again", self._record.replica_id)
                self.counters["crashes"] += 1
            self._start_anew()
            await asyncio.sleep(self._retry_s[1])

    async def _read(self, events: str) -> None:
        self._retire(self._subscriber)
        self._subscriber = subscriber = Subscriber(events, self._replay)
        async with subscriber as items:
            async for item in items:
                self._on_item(item)

    def _on_item(self, item: Item) -> None:
        if isinstance(item, Restarted | Lost):
            reason = item.reason if isinstance(item, Lost) else "the engine restarted"
            logger.warning("%s starts without blocks: %s", self._record.replica_id, reason)
            self._start_anew()
            return
        assert isinstance(item, Batch)
        self.counters["batches"] += 1
        if item.events.ignored or item.events.broken:
            self._tell_unknown(item)
        changes = self._blocks.apply(item.events)
        if self._blocks.counters["skipped_block_size"] and not self._told_block_size:
            self._told_block_size = True
            sizes = (self._blocks.seen_block_size, self._record.block_size)
            logger.error(
                "%s: its events tell of blocks of %s tokens, not %d: no credit", self._record.replica_id, *sizes
            )
        if self._must_join:
            return
        # Descendants go before their ancestors, and come after them: the map has no holes between two writes.
        self._pending.update(dict.fromkeys(reversed(changes.removed), False))
        self._pending.update(dict.fromkeys(changes.added, True))
        if len(self._pending) > self._max_pending + self._rewrite:
            self.counters["overflows"] += 1
            self._join_again()
        self._wake.set()

    def _start_anew(self) -> None:
        self.counters["resets"] += 1
        self._retire(self._blocks)
        self._blocks = self._new_blocks()
        if self._dirty:
            self._join_again()
        else:
            self._pending.clear()  # the map has nothing of this incarnation yet

    def _new_blocks(self) -> BlockSet:
        return BlockSet(self._record.model, self._record.block_size)

    def _join_again(self) -> None:
        self._must_join = True
        self._pending.clear()
        self._wake.set()

    def _retire(self, source: BlockSet | Subscriber | None) -> None:
        """Keep the counts of what is replaced."""
        if source is not None:
            prefix = "blocks" if isinstance(source, BlockSet) else "events"
            for name, count in source.counters.items():
                self.counters[f"{prefix}_{name}"] += count

    def _tell_unknown(self, item: Batch) -> None:
        first = not self.counters["strange_batches"]
        self.counters["strange_batches"] += 1
        if first or item.events.broken:
            unknown, broken = dict(item.events.ignored), dict(item.events.broken)
            logger.warning("%s: in batch %d unknown %s, broken %s", self._record.replica_id, item.seq, unknown, broken)

    # --- writing ----------------------------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        while True:
            try:
                await self._write_some()
                self._retries = 0
            except Fenced:
                self.counters["fenced"] += 1
                self._join_again()
            except OwnershipUnavailable as error:
                self.counters["unavailable"] += 1
                if not self._retries:
                    logger.warning("%s can't write: %s", self._record.replica_id, error)
                await asyncio.sleep(min(self._retry_s[0] * 2**self._retries, self._retry_s[1]))
                self._retries = min(self._retries + 1, 16)

    async def _write_some(self) -> None:
        """The one thing that is most urgent."""
        if self._must_join or self.lease is None:
            await self._join()
        elif self._clock() >= self._renew_at:
            # First the time: a renewal that fails is repeated by the retry, after its pause, not in between.
            await self._map.renew(self.lease, self.record, self._lease_s)
            self.counters["renewals"] += 1
            self._renew_at = self._clock() + self._lease_s / 3
            await self._heed_doubts(self.lease)
        elif self._pending:
            await self._write_slice(self.lease)
        elif self._turning or self._journal > 2 * len(self._blocks) + _JOURNAL_SLACK:
            await self._turn_journal(self.lease)
        else:
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._renew_at - self._clock())):
                    await self._wake.wait()

    async def _heed_doubts(self, lease: Lease) -> None:
        """A router that saw promises broken asks for a fresh start; not again for a while: it may not help."""
        if self._events is None or self._clock() < self._doubted_at + _DOUBT_PAUSE_S:
            return
        routers = (await self._map.look_up(())).routers.values()
        if any(lease.slot in router.doubted for router in routers):
            self._doubted_at = self._clock()
            self.counters["resynchronised"] += 1
            raise _Doubted

    async def _join(self) -> None:
        self._must_join = False
        try:
            self.lease = await self._map.join(self._record.replica_id, self.record, self._lease_s)
        except OwnershipUnavailable:
            self._must_join = True
            raise
        self.counters["joins"] += 1
        self.joined.set()
        self._dirty = self._turning = False
        self._journal = 0
        self._renew_at = self._clock() + self._lease_s / 3
        if not self._must_join:
            self._write_whole_set()

    async def _write_slice(self, lease: Lease) -> None:
        part = dict(islice(self._pending.items(), _BLOCKS_A_WRITE))
        for block in part:
            del self._pending[block]
        self._writing = self._dirty = True
        added = [block for block, there in part.items() if there]
        removed = [block for block, there in part.items() if not there]
        try:
            await self._map.write(lease, [Write(lease.slot, added, removed)])
        except OwnershipUnavailable:
            # It may still be carried out, even after a later write: only a new incarnation shuts it out.
            self._join_again()
            raise
        finally:
            self._writing = False
        self._journal += len(added)
        if not self._pending:
            self._rewrite = 0
        self.counters["writes"] += 1
        self.counters["added"] += len(added)
        self.counters["removed"] += len(removed)

    async def _turn_journal(self, lease: Lease) -> None:
        turn = getattr(self._map, "turn_journal", None)
        if turn is None:
            self._journal = 0
            return
        await turn(lease, self._turning)
        self._turning = not self._turning
        if self._turning:
            self.counters["journals_turned"] += 1
            self._journal = 0
            self._write_whole_set()

    def _write_whole_set(self) -> None:
        self._pending = dict.fromkeys(self._blocks.published, True)
        self._rewrite = len(self._pending)

    async def _sweep(self) -> None:
        sweep = getattr(self._map, "sweep", None)
        while sweep is not None:
            await asyncio.sleep(self._lease_s)
            with suppress(OwnershipUnavailable):
                while swept := await sweep(_BLOCKS_A_SWEEP):
                    self.counters["swept"] += swept
                    await asyncio.sleep(0.01)
