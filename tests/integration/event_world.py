"""Publishers as vLLM's on real ZMQ sockets, collectors, a Valkey and a router, for tests of what events lead to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from replicas.collector import Collector
from replicas.subscriber import Subscriber
from router.config import RouterConfig
from router.ownership import ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from router.router import Router
from router.types import ReplicaId
from tests.event_publisher import Publisher
from tests.token_ids import BLOCK as B
from tests.token_ids import TokenIds

DEADLINE_S = 60.0
# On a machine of any speed: no question twice for being late, and none that wasn't asked for.
_PATIENT = partial(Subscriber, replay_timeout_s=DEADLINE_S, probe_s=DEADLINE_S)
FIXTURES = Path(__file__).parent.parent / "fixtures" / "kv_event_fixtures.jsonl"
CASES = {case["name"]: case for case in map(json.loads, FIXTURES.read_text().splitlines())}


def fixture(name: str, encoding: str = "frames_map") -> bytes:
    return bytes.fromhex(CASES[name][encoding][-1])


def tokens(first: int, count: int) -> list[int]:
    """T(first, count)."""
    return list(range(first, first + count))


def stored(name: int, parent: int | None, ids: Sequence[int]) -> dict[str, Any]:
    """store(name, parent, ids): one block."""
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": list(ids),
        "block_size": B,
        "lora_id": None,
        "medium": "GPU",
    }


def removed(*names: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU"}


def events(*some: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, list(some), 0])


async def until(check: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            result = check()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.01)


class World:
    """Publishers and collectors W0, W1... of one fleet, and a router."""

    def __init__(self, url: str, fleet: str) -> None:
        self.ownership = RedisOwnershipMap(url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
        self.router = Router("router", TokenIds(), self.ownership, RouterConfig(lease_s=60), time.monotonic, seed=1)
        self.publishers: dict[str, Publisher] = {}
        self.collectors: dict[str, Collector] = {}
        self._name = uuid4().hex

    async def replica(self, name: str, *, replay: bool = True) -> tuple[Publisher, Collector]:
        """Returns once the collector listens."""
        publisher = self.publish_as(name, replay=replay)
        collector = await self.collect(name, replay=replay)
        await publisher.subscribed()
        return publisher, collector

    def publish_as(self, name: str, *, replay: bool = True) -> Publisher:
        self.publishers[name] = Publisher(*self._endpoints(name, replay))
        return self.publishers[name]

    async def collect(self, name: str, *, replay: bool = True) -> Collector:
        record = ReplicaRecord(name, "m", B)
        collector = Collector(self.ownership, record, *self._endpoints(name, replay), lease_s=60, subscribe=_PATIENT)
        self.collectors[name] = collector
        await collector.start()
        return collector

    def _endpoints(self, name: str, replay: bool) -> tuple[str, str | None]:
        here = f"ipc://@whohas-case-{self._name}-{name}"
        return f"{here}-events", f"{here}-replay" if replay else None

    async def held(self, ids: Sequence[int]) -> dict[str, int]:
        """What a request with these tokens, and one more, finds: leading blocks by replica, where there are any."""
        asked = await self.router.look_up("/v1/completions", {"ids": [*ids, 1]}, 100)
        decision = self.router.decide(asked, [ReplicaId(name) for name in self.collectors])
        views = [candidate.view for candidate in decision.candidates]
        return {view.replica_id: view.owned_blocks for view in views if view.owned_blocks}

    async def until_held(self, ids: Sequence[int], expected: dict[str, int]) -> None:
        async def as_expected() -> bool:
            return await self.held(ids) == expected

        await until(as_expected)

    async def taken(self, name: str, batches: int) -> None:
        """Wait until so many batches were taken and written."""
        collector = self.collectors[name]
        await until(lambda: collector.counters["batches"] >= batches and collector.in_sync)
