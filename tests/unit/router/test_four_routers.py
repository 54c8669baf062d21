"""Four routers that share their bookings against four that each know their own only: a simulation in virtual time."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.asked import Placement
from router.config import RouterConfig
from router.ownership import Lease, ReplicaRecord, Write
from router.ownership.memory import MemoryOwnershipMap
from router.router import Router
from router.types import BlockHash, ReplicaId
from tests.token_ids import BLOCK as B
from tests.token_ids import TokenIds, blocks_of

RATE = 3800.0
REPLICAS = [ReplicaId(f"r{i}") for i in range(8)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """Replicas that prefill in order, at `RATE` tokens/s, and tell of their blocks when that is done."""

    maps: list[MemoryOwnershipMap]
    routers: list[Router]
    clock: Clock
    leases: dict[str, list[Lease]] = field(default_factory=dict)
    held: dict[str, set[BlockHash]] = field(default_factory=lambda: {name: set() for name in REPLICAS})
    busy_until: Counter[str] = field(default_factory=Counter)
    to_come: list[tuple[float, int, str, Placement, Router, Sequence[BlockHash]]] = field(default_factory=list)
    chosen: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)

    async def send(self, router: Router, ids: Sequence[int]) -> None:
        placed = await router.route("/v1/completions", {"ids": ids}, 100, REPLICAS)
        await settle()
        name = placed.decision.replica_id
        hashes = blocks_of(ids)
        known = next((i for i, block in enumerate(hashes) if block not in self.held[name]), len(hashes))
        done = max(self.clock.now, self.busy_until[name]) + (len(ids) - known * B) / RATE
        self.busy_until[name] = done
        self.held[name].update(hashes)
        self.chosen[name] += 1
        self.ttft_s.append(done - self.clock.now)
        heapq.heappush(self.to_come, (done, len(self.ttft_s), "first token", placed, router, hashes))

    async def go_on(self, until: float) -> None:
        while self.to_come and self.to_come[0][0] <= until:
            now, number, what, placed, router, hashes = heapq.heappop(self.to_come)
            self.clock.now = now
            if what == "first token":
                router.first_token(placed)
                for one, lease in zip(self.maps, self.leases[placed.decision.replica_id], strict=True):
                    await one.write(lease, [Write(lease.slot, added=hashes)])
                heapq.heappush(self.to_come, (now + 1.0, number, "end", placed, router, hashes))
            else:
                router.release(placed)
            await settle()
        self.clock.now = until


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def world(routers: int, *, shared: bool) -> World:
    clock = Clock()
    maps = [MemoryOwnershipMap(clock) for _ in range(1 if shared else routers)]
    leases = {name: [await one.join(name, ReplicaRecord(name, "m", B), 1e9) for one in maps] for name in REPLICAS}
    config = RouterConfig(lease_s=1e8)
    here = [Router(f"router{i}", TokenIds(), maps[i % len(maps)], config, clock, seed=i) for i in range(routers)]
    for router in here:
        await router.start()
    return World(maps, here, clock, leases)


async def end(made: World) -> None:
    await made.go_on(1e6)
    for router in made.routers:
        assert all(not any((load.num_waiting, load.num_decoding)) for load in map(router.load, REPLICAS))
        await router.close()


async def test_a_burst_over_four_routers_is_spread_evenly_and_with_private_load_it_is_not() -> None:
    """16 cold prompts at once, 8 replicas: two each."""
    most = {}
    for shared in (True, False):
        made = await world(4, shared=shared)
        for i in range(16):
            await made.send(made.routers[i % 4], range(100_000 * i, 100_000 * i + 2000))
        most[shared] = max(made.chosen.values())
        await end(made)
    assert most[True] == 2
    assert most[False] > 2


async def mean_ttft_s(routers: int, *, shared: bool) -> float:
    """A minute of chats with ten system prompts, among them prompts that nobody shares, at 0.6 of what fits."""
    made = await world(routers, shared=shared)
    dice = random.Random(7)
    now = 0.0
    for i in range(300):
        now += dice.expovariate(9.0)
        family, own = dice.randrange(10), range(10_000_000 + i * 10_000, 10_000_000 + i * 10_000 + 1500)
        prefix = range(family * 100_000, family * 100_000 + 4096) if dice.random() < 0.6 else range(0)
        router = made.routers[dice.randrange(4) % routers]
        await made.go_on(now)
        await made.send(router, [*prefix, *own])
    await end(made)
    return sum(made.ttft_s) / len(made.ttft_s)


async def test_four_routers_that_share_decide_as_one_and_better_than_four_that_don_t() -> None:
    one = await mean_ttft_s(1, shared=True)
    shared = await mean_ttft_s(4, shared=True)
    private = await mean_ttft_s(4, shared=False)
    assert shared < 1.1 * one
    assert shared < 0.95 * private
