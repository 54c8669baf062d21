"""A router's place in the fleet: its lease in the ownership map, what it tells there, and what it may ask.

A map that can't be reached costs no request its time-out: after a failure it is left alone for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from router.config import RouterConfig
from router.errors import Fenced, OwnershipFull, OwnershipUnavailable
from router.ownership import Lease, OwnershipMap, RouterRecord, Snapshot, Write
from router.tasks import end
from router.types import BlockHash

_RETRY_S = 0.5
"""How long after a failed look-up the map is left alone: a dead Redis must not cost every request the time-out."""
_LATE_IN_A_ROW = 3
_JOURNAL_BLOCKS = 100_000
"""After so many claimed blocks a router joins anew, so that the map can forget what it wrote: little still stands."""

logger = logging.getLogger("whohas.router")

Tell = Callable[[bool], tuple[RouterRecord, Sequence[Write]]]
"""What the router has to tell: its record, and claims: all that stand (True), or those made and ended since."""


class Membership:
    """`fleet`: replicas and routers as last heard of, without matches. `degraded`: why the map can't be asked just now,
    "" when it can. Counters: map_unavailable, look_up_skipped, claims_refused."""

    def __init__(
        self,
        name: str,
        ownership: OwnershipMap,
        config: RouterConfig,
        clock: Callable[[], float],
        to_tell: Tell,
        counters: Counter[str],
    ) -> None:
        self.fleet = Snapshot()
        self.degraded = ""
        self.lease: Lease | None = None
        self.changed = asyncio.Event()  # there is something to tell
        self.counters = counters
        self._name, self._map, self._clock, self._to_tell = name, ownership, clock, to_tell
        self._lease_s = config.lease_s
        self._written = self._late = 0
        self._teller: asyncio.Task[None] | None = None
        self._retry_at = self._fleet_at = float("-inf")

    async def start(self) -> None:
        """Join the fleet. A map that can't be reached is no reason to fail: it is tried again and again."""
        await self.tell()
        self._teller = asyncio.create_task(self._keep_telling(), name="whohas-teller")

    async def close(self) -> None:
        await end(self._teller)
        if self.lease is not None:
            with contextlib.suppress(OwnershipUnavailable):
                await self._map.leave(self.lease)

    async def ask(self, hashes: Sequence[BlockHash]) -> Snapshot:
        """The map's answer, or, while it can't be had in time, the last known members without any match."""
        if self._clock() >= self._retry_at:
            try:
                snapshot = await self._map.look_up(hashes)
            except OwnershipUnavailable as error:
                self._unavailable(error)
            else:
                self._available(snapshot)
                return snapshot
        self.counters["look_up_skipped"] += 1
        return Snapshot(replicas=self.fleet.replicas)

    def _available(self, snapshot: Snapshot) -> None:
        if self.degraded:
            logger.info("the ownership map answers again")
        self.degraded, self._retry_at, self._late = "", float("-inf"), 0
        self.fleet, self._fleet_at = Snapshot(snapshot.replicas, snapshot.routers), self._clock()

    def _unavailable(self, error: OwnershipUnavailable) -> None:
        if not self.degraded:
            logger.warning("routing by load alone: %s", error)
        self.counters["map_unavailable"] += 1
        self.degraded = str(error)
        self._late = self._late + 1 if isinstance(error.__cause__, TimeoutError) else _LATE_IN_A_ROW
        if self._late >= _LATE_IN_A_ROW:  # one late answer says little; several, or none at all, say it is down
            self._retry_at = self._clock() + _RETRY_S

    async def _keep_telling(self) -> None:
        """Tell the fleet what is booked here: at once when it changes, and often enough to keep the lease."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self.changed.wait()
            self.changed.clear()
            if not await self.tell():
                await asyncio.sleep(_RETRY_S)

    async def tell(self) -> bool:
        record, writes = self._to_tell(self.lease is None)
        try:
            if self.lease is None:
                self.lease = await self._map.join(self._name, record, self._lease_s)
                if writes:
                    await self._renew(self.lease, record, writes)
            else:
                await self._renew(self.lease, record, writes)
            self._written += sum(len(write.added) for write in writes)
            if self._written > _JOURNAL_BLOCKS:
                self.lease, self._written = None, 0
                self.changed.set()
            if self.degraded or self._clock() >= self._fleet_at + self._lease_s / 3:
                self._available(await self._map.look_up(()))
        except Fenced:
            self.lease = None
            self.changed.set()
        except OwnershipUnavailable as error:
            self.lease = None  # what was to be told may be lost: join anew and tell all
            self._unavailable(error)
            return False
        return True

    async def _renew(self, lease: Lease, record: RouterRecord, claims: Sequence[Write]) -> None:
        """Claims go first: who sees a replica busy must also see with what."""
        try:
            await self._map.renew(lease, record, self._lease_s, claims)
        except OwnershipFull:  # others see less of what is claimed here; what is held still counts
            self.counters["claims_refused"] += 1
