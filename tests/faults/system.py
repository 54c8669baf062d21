"""A fleet in one process, of real parts: a Valkey server, ZMQ sockets, collectors and routers; only the engines are
emulated. Whatever talks to Valkey does so through a proxy of its own, so that each can be cut off alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from replicas.collector import Collector
from replicas.emulated.block_hashes import BlockChain
from replicas.emulated.block_pool import KVEvent
from replicas.emulated.fleet import Fleet
from replicas.emulated.publisher import EventPublisher
from replicas.subscriber import Subscriber
from router.config import RouterConfig
from router.hashing import reusable_blocks
from router.ownership import ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from router.router import Router
from router.tasks import end
from router.types import ReplicaId
from serve.embedded_valkey import EmbeddedValkey
from tests.redis_servers import Proxy, proxy
from tests.token_ids import BLOCK, MODEL, TokenIds

LEASE_S, CLAIM_S = 1.0, 1.0
_SUBSCRIBE = partial(Subscriber, replay_timeout_s=0.5, probe_s=0.5)


class LossyPublisher(EventPublisher):
    """`lose`: so many batches more don't reach the wire; `forget`: nor, but for the last one, the replay buffer."""

    lose = 0
    forget = False

    def _send(self, payload: bytes) -> None:
        if self.lose <= 0:
            super()._send(payload)
            return
        self.lose -= 1
        seq = next(self._seq).to_bytes(8, "big")
        if self.forget:
            self._buffer.clear()
        self._buffer.append((seq, payload))


@dataclass(eq=False)
class Replica:
    """An engine, its publisher and its collector; each can be replaced while the others live."""

    name: ReplicaId
    ownership: RedisOwnershipMap
    link: Proxy
    endpoints: tuple[str, str]
    speed: float
    engine: Fleet = field(init=False)
    publisher: LossyPublisher = field(init=False)
    collector: Collector = field(init=False)

    def start_engine(self) -> None:
        self.publisher = LossyPublisher(*self.endpoints)
        self.engine = Fleet(1, num_blocks=300, speed=self.speed, on_events=self._publish)

    def _publish(self, _: int, events: list[KVEvent]) -> None:
        self.publisher.publish(events)

    def stop_engine(self) -> None:
        self.engine.stop()
        self.publisher.close()

    async def start_collector(self) -> None:
        record = ReplicaRecord(self.name, MODEL, BLOCK)
        self.collector = Collector(
            self.ownership, record, *self.endpoints, lease_s=LEASE_S, retry_s=(0.05, 0.5), subscribe=_SUBSCRIBE
        )
        await self.collector.start()

    async def kill_collector(self) -> None:
        """Without a good-bye: its lease has to lapse."""
        await end(self.collector._task)
        if self.collector._subscriber is not None:
            self.collector._subscriber.close()

    def cached(self, ids: Sequence[int]) -> int:
        """Leading blocks that the engine itself would reuse."""
        pool = self.engine.engines[0].scheduler.pool
        return len(pool.find_cached(BlockChain(ids, BLOCK, None, 0)))


class System:
    """`async with System(seed) as system`. `outcomes`: what became of each request."""

    def __init__(self, seed: int, replicas: int = 3, routers: int = 2, speed: float = 15.0) -> None:
        self.random = random.Random(seed)
        self.valkey = EmbeddedValkey()
        self.fleet = f"faults-{uuid4().hex}"
        self.replicas: list[Replica] = []
        self.routers: list[tuple[Router, RedisOwnershipMap, Proxy]] = []
        self.outcomes: dict[int, list[str]] = {}
        self.degraded = 0
        self.prompts = [self.prompt(number) for number in range(24)]
        self.ended: list[tuple[float, int]] = []  # when, and which slot
        self._sizes = replicas, routers
        self._speed = speed
        self._names = iter(range(1_000_000))
        self._clients: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()
        self.direct = RedisOwnershipMap("redis://127.0.0.1:1/0", self.fleet)

    def prompt(self, number: int) -> list[int]:
        """A prefix shared by six, then something of its own; 5 to 40 blocks."""
        family = number // 6
        shared = range(family * 10_000, family * 10_000 + 64 * (family % 4 + 1))
        return [*shared, *range(1_000_000 + number * 1000, 1_000_000 + number * 1000 + 40 + 16 * (number % 24))]

    async def __aenter__(self) -> System:
        self.valkey.start()
        await self.direct.close()
        self.direct = RedisOwnershipMap(self.valkey.url, self.fleet, timeout_s=30.0, look_up_timeout_s=30.0)
        await self.direct.connect()
        for _ in range(self._sizes[0]):
            await self.add_replica()
        for _ in range(self._sizes[1]):
            await self.add_router()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._clients):
            await end(task)
        for router, ownership, _ in self.routers:
            await router.close()
            await ownership.close()
        for replica in self.replicas:
            await replica.collector.close()
            replica.stop_engine()
            await replica.ownership.close()
        await self.direct.close()
        await self._stack.aclose()
        self.valkey.stop()

    async def _connection(self) -> tuple[RedisOwnershipMap, Proxy]:
        link = await self._stack.enter_async_context(proxy(self.valkey.port))
        return RedisOwnershipMap(f"redis://127.0.0.1:{link.port}/0", self.fleet, timeout_s=0.5), link

    async def add_replica(self) -> None:
        name = ReplicaId(f"replica-{next(self._names)}")
        endpoints = (f"ipc://@{self.fleet}-{name}-e", f"ipc://@{self.fleet}-{name}-r")
        replica = Replica(name, *(await self._connection()), endpoints, self._speed)
        replica.start_engine()
        await replica.start_collector()
        self.replicas.append(replica)

    async def add_router(self) -> None:
        ownership, link = await self._connection()
        name, config = f"router-{next(self._names)}", RouterConfig(lease_s=LEASE_S, claim_s=CLAIM_S)
        router = Router(name, TokenIds(), ownership, config, time.monotonic, seed=self.random.randrange(1 << 30))
        await router.start()
        self.routers.append((router, ownership, link))

    # --- requests ---------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """One more request, by any of the routers."""
        number = len(self.outcomes)
        self.outcomes[number] = []
        prompt, router = self.random.choice(self.prompts), self.random.choice(self.routers)[0]
        patience = self.random.choice((None, None, None, self.random.uniform(0, 0.05)))
        task = asyncio.create_task(self._serve(number, router, prompt, patience))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, number: int, router: Router, prompt: list[int], leaves_after_s: float | None) -> None:
        """As the ingress does: once more elsewhere where nothing of an answer was sent."""
        tried: list[ReplicaId] = []
        for _ in range(2):
            candidates = [one.name for one in self.replicas if one.name not in tried]
            if not candidates:
                break
            placed = await router.route("/v1/completions", {"ids": prompt}, 100, candidates)
            self.degraded += bool(router.degraded)
            tried.append(placed.decision.replica_id)
            replica = next((one for one in self.replicas if one.name == tried[-1]), None)
            answering: list[bool] = []

            def first(placed: Any = placed, answering: list[bool] = answering) -> None:
                answering.append(True)
                router.first_token(placed)

            try:
                if replica is None:
                    continue
                async with asyncio.timeout(leaves_after_s):
                    served = await replica.engine.serve(0, prompt, 8, on_first_token=first)
                router.observe(placed, served.cached_tokens)
                self.outcomes[number].append("answered")
                return
            except TimeoutError:
                self.outcomes[number].append("client left")
                return
            except RuntimeError:
                if answering:
                    self.outcomes[number].append("broken off with its engine")
                    return
            finally:
                router.release(placed)
        self.outcomes[number].append("refused")

    async def all_ended(self) -> None:
        while self._clients:
            await asyncio.wait(set(self._clients))

    async def touch(self) -> None:
        """An engine tells of a cleared cache with its next step: give each one something to do."""
        for replica in self.replicas:
            await replica.engine.serve(0, range(5), 1)

    def tally(self) -> Counter[str]:
        return Counter(outcome for outcomes in self.outcomes.values() for outcome in outcomes)

    def blocks_at(self, replica: Replica, prompt: list[int]) -> int:
        return min(replica.cached(prompt), reusable_blocks(len(prompt), BLOCK))
