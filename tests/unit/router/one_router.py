"""A router on the in-memory map, its clock, and prompts that are their own token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from router.config import RouterConfig
from router.errors import InvalidRequest, OwnershipUnavailable, UnknownPrompt
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Lease, ReplicaRecord, Snapshot, Write
from router.ownership.memory import MemoryOwnershipMap
from router.router import Router
from router.types import BlockHash, HashedPrompt, ReplicaId

ROOT = root_hash("m")
REPLICAS = [ReplicaId(name) for name in "abcd"]


class Ids:
    """Bodies carry their token ids."""

    off_loop_bytes = 1000

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        if "ids" not in body:
            raise UnknownPrompt("media")
        if body["ids"] is None:
            raise InvalidRequest("no ids")
        hashes = chain(ROOT, pack_token_ids(body["ids"]), block_size)
        if "image" in body:
            return HashedPrompt(len(body["ids"]) + 1000, hashes, whole=False)
        return HashedPrompt(len(body["ids"]), hashes, reusable=not body.get("echo"))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class FlakyMap(MemoryOwnershipMap):
    down = False
    asked = 0

    async def look_up(self, hashes: Sequence[BlockHash]) -> Snapshot:
        self.asked += 1
        if self.down:
            raise OwnershipUnavailable("down")
        return await super().look_up(hashes)


async def joined(ownership: MemoryOwnershipMap, *names: str, block_size: int = 16) -> dict[str, Lease]:
    return {name: await ownership.join(name, ReplicaRecord(name, "m", block_size), 60) for name in names}


async def started(ownership: MemoryOwnershipMap, clock: Clock, name: str = "router") -> Router:
    router = Router(name, Ids(), ownership, RouterConfig(), clock, seed=1)
    await router.start()
    return router


def body(n: int, first: int = 0) -> dict[str, Any]:
    return {"ids": list(range(first, first + n))}


async def own(ownership: MemoryOwnershipMap, lease: Lease, n: int) -> None:
    await ownership.write(lease, [Write(lease.slot, added=chain(ROOT, pack_token_ids(range(n)), 16))])


async def settle() -> None:
    """Let the router tell the map what it booked."""
    for _ in range(5):
        await asyncio.sleep(0)
