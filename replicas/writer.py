"""Tells the ownership map of one replica's blocks, in batches, and keeps its lease.

After anything that leaves the map's content in doubt the writer joins again: the new incarnation starts without blocks,
the old one's give no credit, nor can its late writes, and the whole published set is written. Rather no credit than
wrong credit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress

from replicas.audit import Audit
from replicas.block_set import Changes
from replicas.pending import Pending
from router.errors import Fenced, OwnershipFull, OwnershipUnavailable
from router.ownership import Lease, OwnershipMap, ReplicaRecord, RouterRecord, Write
from router.types import BlockHash, Slot

logger = logging.getLogger(__name__)

_BLOCKS_A_WRITE = 1024
_BLOCKS_A_SWEEP = 512
_JOURNAL_SLACK = 65_536
"""A map that keeps a journal may remember so many blocks more than twice what is held."""


class MapWriter:
    """`record` and `published` give what the replica tells of itself and the blocks that the map should list.

    `on_routers` is told after each renewal what the routers say. See `Collector` for the rest. Counters: joins,
    renewals, writes, added, removed, fenced, unavailable, refused, overflows, journals_turned, swept, and `Audit`'s.
    """

    def __init__(
        self,
        ownership: OwnershipMap,
        name: str,
        record: Callable[[], ReplicaRecord],
        published: Callable[[], AbstractSet[BlockHash]],
        counters: Counter[str],
        on_routers: Callable[[Slot, Sequence[RouterRecord]], None],
        *,
        lease_s: float,
        max_pending: int,
        retry_s: tuple[float, float],
        clock: Callable[[], float],
    ) -> None:
        self.lease: Lease | None = None
        self.joined = asyncio.Event()  # set at the first join
        self.must_join = True
        self.told_trusted: bool | None = False  # by the record that the map has; None where that isn't known
        self.pending = Pending()
        self.counters = counters
        self._map, self._record, self._published, self._on_routers = ownership, record, published, on_routers
        self._lease_s, self._max_pending, self._retry_s, self._clock = lease_s, max_pending, retry_s, clock
        self._name = name
        self._audit = Audit(ownership, self.pending, counters, name)
        self._writing = False  # or joining
        self._dirty = False  # has this incarnation written anything?
        self._journal = 0  # blocks added by this incarnation since its journal was last turned
        self._turning = False
        self._full_until = float("-inf")  # until then the map is taken to have no room
        self._wake = asyncio.Event()
        self._renew_at = clock()
        self._retries = 0

    @property
    def idle(self) -> bool:
        """Has everything been written, and nothing been found missing since?"""
        written = self.lease is not None and not self.must_join and not self.pending and not self._writing
        return written and not self.repairing

    @property
    def repairing(self) -> bool:
        """Is the map known to lack blocks that it was told of?"""
        return self._audit.repairing

    def note(self, changes: Changes) -> None:
        if not self.must_join:
            self.pending.note(changes.added, changes.removed)
            full = self._clock() < self._full_until  # then what waits is at most what the engine holds
            if len(self.pending) > self._max_pending + self.pending.rewrite and not full:
                self.counters["overflows"] += 1
                self.join_again()
            self._wake.set()

    def wake(self) -> None:
        """There may be something to tell."""
        self._wake.set()

    def start_anew(self) -> None:
        """Nothing that was told so far holds."""
        if self._dirty:
            self.join_again()
        else:
            self.pending.clear()  # the map has nothing of this incarnation yet

    def join_again(self) -> None:
        self.must_join = True
        self.pending.clear()
        self._wake.set()

    async def leave(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            with suppress(OwnershipUnavailable):
                await self._map.leave(lease)

    async def run(self) -> None:
        while True:
            try:
                await self._write_some()
                if self._clock() >= self._full_until:
                    self._retries = 0
            except Fenced:
                self.counters["fenced"] += 1
                self.join_again()
            except OwnershipUnavailable as error:
                self.counters["unavailable"] += 1
                if not self._retries:
                    logger.warning("%s can't write: %s", self._name, error)
                await asyncio.sleep(self._retry_pause())

    async def sweep(self) -> None:
        """Now and then, in slices, what ended members left behind."""
        sweep = getattr(self._map, "sweep", None)
        while sweep is not None:
            await asyncio.sleep(self._lease_s)
            with suppress(OwnershipUnavailable):
                while swept := await sweep(_BLOCKS_A_SWEEP):
                    self.counters["swept"] += swept
                    await asyncio.sleep(0.01)

    # ----------------------------------------------------------------------------------------------------------------

    def _retry_pause(self) -> float:
        pause = min(self._retry_s[0] * 2.0**self._retries, self._retry_s[1])
        self._retries = min(self._retries + 1, 16)
        return pause

    async def _write_some(self) -> None:
        """The one thing that is most urgent."""
        now = self._clock()
        if self.must_join or self.lease is None:
            await self._join()
        elif now >= self._renew_at:
            await self._renew(self.lease)
        elif self.pending.removals or (self.pending and now >= self._full_until):
            await self._write_slice(self.lease)
        elif self._audit.repairing and not self.pending:
            await self._audit.repair(self.lease, self._published())
            if not self._audit.repairing:
                self._renew_at = now  # credit from now on
        elif self.told_trusted is None or (self._record().trusted and not self.told_trusted):
            # A doubt waits for the next renewal, as most are over by then; its end doesn't.
            await self._renew(self.lease)
        elif self._turning or self._journal > 2 * len(self._published()) + _JOURNAL_SLACK:
            await self._turn_journal(self.lease)
        else:
            self._wake.clear()
            until = min(self._renew_at, self._full_until) if self.pending else self._renew_at
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - self._clock())):
                    await self._wake.wait()

    async def _join(self) -> None:
        self.must_join, self._writing = False, True
        record = self._record()
        try:
            self.lease = await self._map.join(self._name, record, self._lease_s)
        except BaseException:  # also where it is stopped: the server may have carried it out
            self.must_join = True
            raise
        finally:
            self._writing = False
        self.told_trusted = record.trusted
        self.counters["joins"] += 1
        self.joined.set()
        self._dirty = self._turning = False
        self._journal = 0
        self._full_until = float("-inf")
        self._audit.forget()
        self._renew_at = self._clock() + self._lease_s / 3
        if not self.must_join:
            self.pending.write_all(self._published())

    async def _renew(self, lease: Lease) -> None:
        record = self._record()
        try:
            await self._map.renew(lease, record, self._lease_s)
        except BaseException:
            self.told_trusted = None  # it may still be carried out; so it is repeated after the retry's pause
            raise
        self.told_trusted = record.trusted
        self.counters["renewals"] += 1
        self._renew_at = self._clock() + self._lease_s / 3
        self._on_routers(lease.slot, list((await self._map.look_up(())).routers.values()))
        if not self.must_join and await self._audit.sample(lease, self._published()):
            self._renew_at = self._clock()  # no credit from now on

    async def _write_slice(self, lease: Lease) -> None:
        full = self._clock() < self._full_until
        added, removed = self.pending.take(_BLOCKS_A_WRITE, removals_only=full)
        self._writing = self._dirty = True
        try:
            await self._map.write(lease, [Write(lease.slot, added, removed)])
        except OwnershipFull as error:
            self._keep_for_later(added, error)
            added = []
        except BaseException:
            # It may still be carried out, even after a later write: only a new incarnation shuts it out.
            self.join_again()
            raise
        finally:
            self._writing = False
        self._journal += len(added)
        self.counters["writes"] += 1
        self.counters["added"] += len(added)
        self.counters["removed"] += len(removed)

    def _keep_for_later(self, added: Sequence[BlockHash], error: OwnershipFull) -> None:
        """The map has no room: what it has still counts, removals go on, the rest is tried now and then."""
        if not self.counters["refused"]:
            logger.error("%s: %s", self._name, error)
        self.counters["refused"] += 1
        self.pending.put_back(added)
        self._full_until = self._clock() + self._retry_pause()

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
            self.pending.write_all(self._published())
