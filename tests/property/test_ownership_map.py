"""Whatever members do, Redis answers as the slow reference does.

Holdings are kept prefix-closed here, as collectors and routers keep them: that is what the look-up relies on.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from router.errors import Fenced
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Lease, Match, OwnershipMap, ReplicaRecord, RouterRecord, Write
from router.ownership.memory import MemoryOwnershipMap
from router.ownership.redis import RedisOwnershipMap
from router.types import BlockHash

T = TypeVar("T")
# Three prompts that share 20 blocks, two of which share 35: a tree as chats make it.
_SHARED, _MORE = list(range(80)), list(range(1000, 1060))
CHAINS = [
    chain(root_hash("m"), pack_token_ids(ids), 4)
    for ids in (_SHARED + _MORE + [1] * 40, _SHARED + _MORE + [2] * 80, _SHARED + [3] * 60)
]
REPLICAS, ROUTERS = ("a", "b", "c"), ("r1", "r2")
replicas, routers = st.sampled_from(REPLICAS), st.sampled_from(ROUTERS)
chains, depths = st.sampled_from(CHAINS), st.integers(0, 60)


class Both(RuleBasedStateMachine):
    """The same calls to both maps."""

    url: str

    @initialize()
    def connect(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.reference = MemoryOwnershipMap(time.monotonic)
        self.redis = RedisOwnershipMap(self.url, uuid.uuid4().hex, timeout_s=30.0, look_up_timeout_s=30.0)
        self.run(self.redis.connect())
        self.leases: dict[str, tuple[Lease, Lease]] = {}
        self.owned: dict[str, set[BlockHash]] = {}
        self.claims: dict[tuple[str, str], list[BlockHash]] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def both(self) -> tuple[OwnershipMap, OwnershipMap]:
        return self.reference, self.redis

    @rule(name=st.sampled_from(REPLICAS + ROUTERS))
    def join(self, name: str) -> None:
        record = ReplicaRecord(name, "m", 4) if name in REPLICAS else RouterRecord()
        old = self.leases.get(name)
        first, second = (self.run(one.join(name, record, 60)) for one in self.both())
        self.leases[name] = (first, second)
        self.forget(name)
        if old:
            for one, lease in zip(self.both(), old, strict=True):
                with pytest.raises(Fenced):
                    self.run(one.write(lease, [Write(lease.slot, added=CHAINS[0][:1])]))

    @rule(name=st.sampled_from(REPLICAS + ROUTERS))
    def leave(self, name: str) -> None:
        for one, lease in zip(self.both(), self.leases.pop(name, ()), strict=False):
            self.run(one.leave(lease))
        self.forget(name)

    def forget(self, name: str) -> None:
        self.owned.pop(name, None)
        self.claims = {key: blocks for key, blocks in self.claims.items() if name not in key}

    @rule(name=replicas, blocks=chains, depth=depths)
    def store(self, name: str, blocks: list[BlockHash], depth: int) -> None:
        if name in self.leases:
            self.write(name, name, added=blocks[:depth])
            self.owned.setdefault(name, set()).update(blocks[:depth])

    @rule(name=replicas, depth=depths)
    def evict(self, name: str, depth: int) -> None:
        if name not in self.leases or any(replica == name for _, replica in self.claims):
            return  # blocks of requests in flight are pinned
        gone = [block for blocks in CHAINS for block in blocks[depth:] if block in self.owned.get(name, set())]
        self.write(name, name, removed=list(dict.fromkeys(gone)))
        self.owned.get(name, set()).difference_update(gone)

    @rule(router=routers, name=replicas, blocks=chains, depth=depths)
    def claim(self, router: str, name: str, blocks: list[BlockHash], depth: int) -> None:
        if router in self.leases and name in self.leases and (router, name) not in self.claims:
            start = next((i for i, b in enumerate(blocks) if b not in self.owned.get(name, set())), len(blocks))
            self.claims[router, name] = blocks[start:depth]
            self.write(router, name, added=blocks[start:depth])

    @rule(router=routers, name=replicas)
    def unclaim(self, router: str, name: str) -> None:
        self.write(router, name, removed=self.claims.pop((router, name), []))

    @rule(limit=st.integers(1, 50))
    def sweep(self, limit: int) -> None:
        self.run(self.redis.sweep(limit))

    def write(self, writer: str, owner: str, **blocks: list[BlockHash]) -> None:
        """Replicas write, routers tell their claims with a renewal."""
        if writer in self.leases and owner in self.leases:
            for i, one in enumerate(self.both()):
                lease, writes = self.leases[writer][i], [Write(self.leases[owner][i].slot, **blocks)]
                self.run(
                    one.write(lease, writes) if writer in REPLICAS else one.renew(lease, RouterRecord(), 60, writes)
                )

    @invariant()
    def same_answers(self) -> None:
        for blocks in CHAINS:
            assert self.answer(self.redis, blocks) == self.answer(self.reference, blocks)

    def answer(self, one: OwnershipMap, blocks: list[BlockHash]) -> tuple[dict[str, Match], int]:
        snapshot = self.run(one.look_up(blocks))
        matches = {snapshot.replicas[slot].replica_id: match for slot, match in snapshot.matches.items()}
        return matches, len(snapshot.routers)

    def teardown(self) -> None:
        self.run(self.redis.close())
        self.loop.close()


class Careless(RedisOwnershipMap):
    """Loses the first block of each write."""

    async def write(self, lease: Lease, writes: Any) -> None:
        await super().write(lease, [Write(w.owner, w.added[1:], w.removed) for w in writes])


_SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


def test_redis_answers_as_the_reference_does(valkey_url: str) -> None:
    machine = type("BothHere", (Both,), {"url": valkey_url})
    run_state_machine_as_test(machine, settings=_SETTINGS)


def test_a_map_that_loses_a_block_is_caught(valkey_url: str) -> None:
    class Broken(Both):
        url = valkey_url

        @initialize()
        def connect(self) -> None:
            super().connect()
            self.run(self.redis.close())
            self.redis = Careless(self.url, uuid.uuid4().hex, timeout_s=30.0, look_up_timeout_s=30.0)
            self.run(self.redis.connect())

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=settings(_SETTINGS, database=None, print_blob=False))
