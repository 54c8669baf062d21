"""A router keeps nothing for good of what clients send."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from typing import Any

from router.config import RouterConfig
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import ReplicaRecord
from router.ownership.memory import MemoryOwnershipMap
from router.router import Router
from router.types import HashedPrompt, ReplicaId

REPLICAS = [ReplicaId(name) for name in "abcd"]
_IDS = pack_token_ids(range(80))


class Salted:
    """Every prompt has its own salt, hence blocks that nobody else has."""

    off_loop_bytes = 1000

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        return HashedPrompt(80, chain(root_hash("m", None, body["cache_salt"]), _IDS, block_size))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_r6_a_million_sessions_would_leave_no_trace() -> None:
    clock = Clock()
    ownership = MemoryOwnershipMap(clock)
    for name in REPLICAS:
        await ownership.join(name, ReplicaRecord(name, "m", 16), 1e9)
    router = Router("router", Salted(), ownership, RouterConfig(), clock, seed=1)
    await router.start()
    number = 0

    async def sessions(count: int) -> int:
        """How much memory is in use after so many."""
        nonlocal number
        for _ in range(count):
            number += 1
            placed = await router.route("/v1/completions", {"cache_salt": f"client-{number}"}, 100, REPLICAS)
            router.first_token(placed)
            router.observe(placed, 0)
            router.release(placed)
            clock.now += 0.05
        clock.now += 60.0
        await router._member.tell()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    before = await sessions(1000)
    after = await sessions(3000)
    tracemalloc.stop()
    assert after - before < 200_000
    assert not router._bookings._claims
    assert not router._bookings._ending
    assert not ownership._holders
    assert all(not record.loads for record in (await ownership.look_up(())).routers.values())
    await router.close()
