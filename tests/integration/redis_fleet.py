"""Collectors and a router on a real Redis, for tests of what can go wrong with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from replicas.collector import Collector
from replicas.events import BlockRemoved, BlockStored, KVEventBatch
from replicas.subscriber import Batch
from router.asked import Placement
from router.config import RouterConfig
from router.errors import OwnershipUnavailable
from router.hashing import pack_token_ids
from router.ownership import ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from router.router import Router
from router.types import BlockHash, ReplicaId
from tests.token_ids import BLOCK as B
from tests.token_ids import TokenIds

DEADLINE_S = 60.0
REPLICAS = [ReplicaId(name) for name in ("a", "b")]


def ids_of(number: int, blocks: int) -> range:
    return range(number * 1_000_000, number * 1_000_000 + blocks * B)


class Fleet:
    """Two collectors and a router on one map's URL. `a`'s engine is told what to store and to remove."""

    def __init__(self, url: str, name: str) -> None:
        # What a request may wait for is shown elsewhere; here no look-up may be cut short by a slow machine.
        self.maps = [RedisOwnershipMap(url, name, timeout_s=20.0, look_up_timeout_s=20.0) for _ in range(3)]
        self.collectors = [
            Collector(one, ReplicaRecord(replica, "m", B), None, lease_s=6.0, retry_s=(0.05, 0.3))
            for one, replica in zip(self.maps, REPLICAS, strict=False)
        ]
        self.router = Router("router", TokenIds(), self.maps[2], RouterConfig(lease_s=6.0), time.monotonic, seed=1)
        self._seq = 0

    def store(self, number: int, blocks: int, start: int = 0) -> None:
        hashes = tuple(number * 1_000_000 + depth + 1 for depth in range(start, blocks))
        ids = pack_token_ids(ids_of(number, blocks)[start * B :])
        self._tell(BlockStored(hashes, hashes[0] - 1 if start else None, ids, B))

    def remove(self, number: int, depth: int) -> None:
        self._tell(BlockRemoved((number * 1_000_000 + depth + 1,), "GPU"))

    def _tell(self, event: Any) -> None:
        self.collectors[0]._on_item(Batch(self._seq, KVEventBatch(0.0, (event,))))
        self._seq += 1

    async def ask(self, number: int, blocks: int) -> Placement:
        """A request for this chain and one block more, released at once."""
        ids = [*ids_of(number, blocks), *range(B)]
        placed = await self.router.route("/v1/completions", {"ids": ids}, 100, REPLICAS)
        self.router.release(placed)
        return placed

    async def credit(self, number: int, blocks: int) -> int:
        """Blocks that the router believes `a` to own."""
        placed = await self.ask(number, blocks)
        return max(one.view.owned_blocks for one in placed.decision.candidates)

    async def until_credit(self, number: int, blocks: int, owned: int) -> None:
        await until(lambda: self._has(number, blocks, owned))

    async def _has(self, number: int, blocks: int, owned: int) -> bool:
        return await self.credit(number, blocks) == owned

    async def until_healed(self) -> None:
        async def healed() -> bool:
            await self.ask(0, 1)
            return not self.router.degraded and all(one.in_sync for one in self.collectors)

        await until(healed)

    async def until_true(self) -> None:
        """The map says exactly what the collectors hold, and nothing else counts."""
        await until(self.is_true)

    async def is_true(self) -> bool:
        if not all(one.in_sync for one in self.collectors):
            return False
        slots = {one.lease.slot: one.published for one in self.collectors if one.lease is not None}
        found: dict[int, set[BlockHash]] = {slot: set() for slot in slots}
        try:
            async for part in self.maps[0].holdings():
                for block, entries in part:
                    for i in range(0, len(entries), 4):
                        owner, claimant = (int.from_bytes(entries[j : j + 2]) for j in (i, i + 2))
                        if not claimant and owner in found:
                            found[owner].add(block)
        except OwnershipUnavailable:
            return False
        return found == slots


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await check():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def fleet_on(url: str, name: str, *, connect: bool = True) -> AsyncIterator[Fleet]:
    fleet = Fleet(url, name)
    if connect:
        await fleet.maps[0].connect()
    for collector in fleet.collectors:
        await collector.start()
    await fleet.router.start()
    try:
        if connect:
            await fleet.until_healed()
        yield fleet
    finally:
        await fleet.router.close()
        for collector in fleet.collectors:
            await collector.close()
        for one in fleet.maps:
            await one.close()


async def true(value: bool) -> bool:
    return value
