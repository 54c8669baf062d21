"""Routers, ownership map, collectors' block sets and engines in one process and in virtual time.

All of it is the product's own code; only what lies between (HTTP, ZMQ, Redis) is replaced by calls that take a given
time. `tests.bench policies` replays recorded traces on it, `tests/sim` asks it about single situations.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from itertools import repeat

import msgspec

from replicas.block_set import BlockSet
from replicas.emulated.block_pool import KVEvent
from replicas.emulated.fleet import Fleet, Served
from replicas.emulated.scheduler import SchedulerConfig
from replicas.emulated.step_time import load_profile
from replicas.events import decode_batch
from router.config import RouterConfig
from router.ownership import Lease, ReplicaRecord, RouterRecord, Snapshot, Write
from router.ownership.memory import MemoryOwnershipMap
from router.router import Router
from router.types import BlockHash, ReplicaId
from tests.token_ids import MODEL, TokenIds

_LEASE_S = 1e9


@dataclass(frozen=True, slots=True)
class Call:
    """One request: when it comes, its prompt, and what the engine answers."""

    at: float
    token_ids: Sequence[int]
    output: Sequence[int] = ()
    num_output: int = 1


@dataclass(frozen=True, slots=True)
class Answered:
    call: Call
    replica: int
    predicted: int
    served: Served


@dataclass(frozen=True, slots=True)
class Setup:
    """`event_delay_s`: from an engine's step to the map. `map_delay_s`: what each call to the map takes, one way and
    back. `profile` is one of `replicas.emulated.step_time`."""

    replicas: int = 4
    num_blocks: int = 20_000
    block_size: int = 16
    routers: int = 1
    policy: str = "predicted_ttft"
    profile: str = "a100x4-qwen72b"
    max_num_seqs: int = 256
    event_delay_s: float = 0.005
    map_delay_s: float = 0.0005
    replicas_known_at_first: int | None = None


class _DistantMap(MemoryOwnershipMap):
    """Every call takes effect half-way through the time that it takes."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._half_s = delay_s / 2

    async def renew(
        self, lease: Lease, record: ReplicaRecord | RouterRecord, lease_s: float, writes: Sequence[Write] = ()
    ) -> None:
        await asyncio.sleep(self._half_s)
        await super().renew(lease, record, lease_s, writes)
        await asyncio.sleep(self._half_s)

    async def write(self, lease: Lease, writes: Sequence[Write]) -> None:
        await asyncio.sleep(self._half_s)
        await super().write(lease, writes)
        await asyncio.sleep(self._half_s)

    async def look_up(self, hashes: Sequence[BlockHash]) -> Snapshot:
        await asyncio.sleep(self._half_s)
        found = await super().look_up(hashes)
        await asyncio.sleep(self._half_s)
        return found


@dataclass
class SimulatedFleet:
    """Made by `simulated`. `names[i]` is the replica id of engine i; `serving` are those that routers may choose."""

    setup: Setup
    map: _DistantMap
    fleet: Fleet
    routers: list[Router] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    sets: list[BlockSet] = field(default_factory=list)
    serving: list[int] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    turn: int = 0

    @property
    def names(self) -> list[ReplicaId]:
        return [ReplicaId(lease.member) for lease in self.leases]

    async def ask(self, call: Call) -> Answered:
        """Routes and serves one request, by one router after the other."""
        router = self.routers[self.turn % len(self.routers)]
        self.turn += 1
        candidates = [self.names[replica] for replica in self.serving]
        placement = await router.route("/v1/completions", {"ids": call.token_ids}, 0, candidates)
        replica = self.names.index(placement.decision.replica_id)
        output: Iterator[int] = joined(call.output, repeat(0))
        try:
            served = await self.fleet.serve(
                replica,
                call.token_ids,
                call.num_output,
                output=output,
                on_first_token=lambda: router.first_token(placement),
            )
        finally:
            router.release(placement)
        router.observe(placement, served.cached_tokens)
        return Answered(call, replica, placement.decision.predicted_cached_tokens, served)

    async def replay(self, calls: Iterable[Call]) -> list[Answered]:
        """All calls at their own times; answers in the order of the calls."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def one(call: Call) -> Answered:
            await asyncio.sleep(began + call.at - loop.time())
            return await self.ask(call)

        return await asyncio.gather(*(one(call) for call in calls))

    async def close(self) -> None:
        for router in self.routers:
            await router.close()
        self.fleet.stop()

    def hear(self, replica: int, events: list[KVEvent]) -> None:
        """An engine's events on their way to the map."""
        payload = msgspec.msgpack.encode([0.0, events, None])
        asyncio.get_running_loop().call_later(self.setup.event_delay_s, self._tell, replica, payload)

    def _tell(self, replica: int, payload: bytes) -> None:
        changes = self.sets[replica].apply(decode_batch(payload))
        lease = self.leases[replica]
        told = asyncio.create_task(self.map.write(lease, [Write(lease.slot, changes.added, changes.removed)]))
        self.tasks.add(told)
        told.add_done_callback(self.tasks.discard)


async def simulated(setup: Setup) -> SimulatedFleet:
    """A fleet at rest. `close` it."""
    heard: list[SimulatedFleet] = []
    fleet = Fleet(
        setup.replicas,
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        scheduler=SchedulerConfig(max_num_seqs=setup.max_num_seqs),
        step_time=load_profile(setup.profile),
        on_events=lambda replica, events: heard[0].hear(replica, events),
    )
    one = SimulatedFleet(setup, _DistantMap(setup.map_delay_s), fleet)
    heard.append(one)
    for replica in range(setup.replicas):
        name = ReplicaId(f"replica-{replica}")
        one.leases.append(await one.map.join(name, ReplicaRecord(name, MODEL, setup.block_size), _LEASE_S))
        one.sets.append(BlockSet(MODEL, setup.block_size))
    one.serving = list(range(setup.replicas_known_at_first or setup.replicas))
    clock = asyncio.get_running_loop().time
    for number in range(setup.routers):
        config = RouterConfig(policy=setup.policy)
        router = Router(f"router-{number}", TokenIds(), one.map, config, clock, seed=number)
        await router.start()
        one.routers.append(router)
    return one


@dataclass(frozen=True, slots=True)
class Figures:
    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    max_mean_requests: float
    max_mean_prefill: float
    goodput: float
    requests: Mapping[int, int]


def figures(answers: Sequence[Answered], replicas: int, slo_ttft_s: float = 2.0) -> Figures:
    """Token hit rate, TTFT, balance of requests and of computed prompt tokens; `goodput`: share of requests that began
    within `slo_ttft_s` and took at most 0.15 s for each further token."""
    ttft = sorted(one.served.ttft_s for one in answers)
    counts = Counter(one.replica for one in answers)
    prompt = sum(one.served.prompt_tokens for one in answers)
    computed: Counter[int] = Counter()
    for one in answers:
        computed[one.replica] += one.served.prompt_tokens - one.served.cached_tokens
    return Figures(
        sum(one.served.cached_tokens for one in answers) / prompt,
        sum(ttft) / len(ttft),
        ttft[len(ttft) // 2],
        ttft[min(len(ttft) - 1, int(len(ttft) * 0.99))],
        max(counts.values()) * replicas / len(answers),
        max(computed.values()) * replicas / sum(computed.values()),
        sum(_good(one.served, slo_ttft_s) for one in answers) / len(answers),
        {replica: counts[replica] for replica in range(replicas)},
    )


def _good(served: Served, slo_ttft_s: float) -> bool:
    decode_s = served.e2e_s - served.ttft_s
    return served.ttft_s <= slo_ttft_s and decode_s <= 0.15 * max(1, served.output_tokens - 1)
