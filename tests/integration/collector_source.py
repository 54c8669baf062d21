"""What the tests of the collector share: an engine as far as its events go, and a map that can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from replicas.collector import Collector
from replicas.emulated.publisher import EventPublisher
from router.errors import OwnershipUnavailable
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Lease, OwnershipMap, Record, ReplicaRecord, Write
from router.ownership.memory import MemoryOwnershipMap
from router.types import BlockHash

B = 16
DEADLINE_S = 30.0
RECORD = ReplicaRecord("r1", "m", B, "http://127.0.0.1:1")
QUICK = (0.02, 0.1)


class FailingMap(MemoryOwnershipMap):
    """Says `OwnershipUnavailable` while `down`, sometimes after having done the work: as a time-out may. Its time is
    `now`: no lease lapses because this process was late."""

    down = False
    late = False

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(lambda: self.now)

    async def write(self, lease: Lease, writes: Sequence[Write]) -> None:
        if self.down and not self.late:
            raise OwnershipUnavailable("down")
        await super().write(lease, writes)
        if self.down:
            raise OwnershipUnavailable("too late")

    async def renew(self, lease: Lease, record: Record, lease_s: float, writes: Sequence[Write] = ()) -> None:
        if self.down:
            raise OwnershipUnavailable("down")
        await super().renew(lease, record, lease_s, writes)

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
