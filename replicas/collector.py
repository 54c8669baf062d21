"""The write path of one replica: KV events -> the engine's block set -> the ownership map.

Subscriber --Batch--> BlockSet --changes--> MapWriter --slices--> OwnershipMap
    '------Restarted, Lost------> empty BlockSet, new incarnation
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from replicas.block_set import BlockSet
from replicas.sequence import Lost, Restarted
from replicas.subscriber import Batch, Item, Subscriber
from replicas.writer import MapWriter
from router.ownership import Lease, OwnershipMap, ReplicaRecord, RouterRecord
from router.tasks import end
from router.types import BlockHash, Slot

logger = logging.getLogger(__name__)

_DOUBT_PAUSE_S = 60.0
_UNUSED = (
    *("events_undecodable", "events_malformed", "blocks_ignored", "blocks_broken", "blocks_skipped"),
    *("blocks_parked_dropped", "offloaded"),
)


class _Doubted(Exception):
    """Forget everything and listen from the start of what the engine can still replay."""


class Collector:
    """Keeps `record.replica_id`'s entries in `ownership` true from `start` to `close`.

    `record` tells model, block size and URL; blocks, seq and trust are filled in here. `events`, `replay`: the
    engine's ZMQ endpoints; without `events` the replica is in the map with no blocks. The lease is renewed every
    `lease_s / 3`, and where a doubt is over. Changes of more than `max_pending` blocks that can't be written are
    dropped for a rewrite of the set.
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
        subscribe: Callable[[str, str | None], Subscriber] = Subscriber,
    ) -> None:
        self._record = record
        self._events, self._replay, self._subscribe = events, replay, subscribe
        self._lease_s, self._retry_s, self._clock = lease_s, retry_s, clock
        self.counters: Counter[str] = Counter()
        self._blocks = self._new_blocks()
        self._subscriber: Subscriber | None = None
        self._told_block_size = False
        self.media = False  # may what stands before an image be relied on?
        self.doubt = ""  # why no router should rely on these blocks, whatever the events say
        self._asleep = self._discarded = False
        self._doubted_at = float("-inf")
        self._doubted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._writer = MapWriter(
            ownership,
            record.replica_id,
            lambda: self.record,
            lambda: self._blocks.published,
            self.counters,
            self._heed_doubts,
            lease_s=lease_s,
            max_pending=max_pending,
            retry_s=retry_s,
            clock=clock,
        )
        self.joined = self._writer.joined

    # --- for the replica --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns at once; the first join and the replay of past events follow by themselves."""
        self._task = asyncio.create_task(self._run(), name=f"collector {self._record.replica_id}")

    async def close(self) -> None:
        """Stop and leave the map, so that no router gives credit any more. Waits for the map at most its time-out."""
        await end(self._task)
        self._task = None
        await self._writer.leave()

    @property
    def lease(self) -> Lease | None:
        return self._writer.lease

    @property
    def record(self) -> ReplicaRecord:
        subscriber = self._subscriber
        in_doubt = self._writer.repairing or (subscriber is not None and subscriber.tracker.in_doubt)
        doubt = self.doubt or "its engine is asleep" * self._asleep
        return replace(
            self._record,
            blocks=len(self._blocks),
            seq=-1 if subscriber is None else subscriber.seq,
            trusted=not doubt and not in_doubt,
            doubt=doubt,
            asleep=self._asleep,
            pending=len(self._writer.pending),
            digest=self._blocks.digest,
            media=self.media,
            unused=self._unused(),
        )

    def engine_sleeps(self, asleep: bool, *, discarded: bool) -> None:
        """`discarded`: its blocks too. Its event says so only after it has woken."""
        if discarded and not self._discarded:
            self._start_anew()
        if asleep != self._asleep:
            logger.warning("%s: its engine %s", self._record.replica_id, "is asleep" if asleep else "has woken")
        self._asleep, self._discarded = asleep, discarded
        self._writer.wake()

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
        """Has everything that the engine told so far been written, and does the map say whether it may be relied on?"""
        subscriber = self._subscriber
        if self._doubted.is_set():  # about to be forgotten, once the readers have stopped
            return False
        heard = self._events is None or (subscriber is not None and subscriber.caught_up)
        return heard and self._writer.idle and self._writer.told_trusted == self.record.trusted

    def stats(self) -> dict[str, int]:
        """All counters: the collector's, `blocks_*` (see `BlockSet`) and `events_*` (see `Subscriber`)."""
        stats = dict(self.counters)
        for prefix, counters in (
            ("blocks", self._blocks.counters),
            ("events", self._subscriber.counters if self._subscriber else {}),
        ):
            for name, count in counters.items():
                stats[f"{prefix}_{name}"] = stats.get(f"{prefix}_{name}", 0) + count
        return stats | {
            "blocks": len(self._blocks),
            "parked": self._blocks.parked,
            "offloaded": len(self._blocks.offloaded),
            "pending": len(self._writer.pending),
        }

    # --- reading ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._writer.run())
                    tasks.create_task(self._writer.sweep())
                    tasks.create_task(self._stop_when_doubted())
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
        self._subscriber = subscriber = self._subscribe(events, self._replay)
        subscriber.on_doubt = self._writer.wake
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
        self._writer.note(changes)

    def _start_anew(self) -> None:
        self.counters["resets"] += 1
        self._retire(self._blocks)
        self._blocks = self._new_blocks()
        self._writer.start_anew()

    def _heed_doubts(self, slot: Slot, routers: Sequence[RouterRecord]) -> None:
        """A router that saw promises broken asks for a fresh start; not again for a while: it may not help."""
        if self._events is None or self._clock() < self._doubted_at + _DOUBT_PAUSE_S:
            return
        if any(slot in router.doubted for router in routers):
            self._doubted_at = self._clock()
            self.counters["resynchronised"] += 1
            self._doubted.set()

    async def _stop_when_doubted(self) -> None:
        self._doubted.clear()
        await self._doubted.wait()
        raise _Doubted

    def _new_blocks(self) -> BlockSet:
        return BlockSet(self._record.model, self._record.block_size)

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
