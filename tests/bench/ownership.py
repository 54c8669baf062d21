"""The ownership map on a real server: what a look-up and a write cost the client and the server, and memory a block."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Lease, ReplicaRecord, Write
from router.ownership.redis import RedisOwnershipMap
from router.types import BlockHash
from serve.embedded_valkey import EmbeddedValkey
from tests.bench.report import Benchmark, Options, Table, load_average, quantile

_BLOCK = 16
_CHAIN = 8192
_REPLICAS = (4, 64)
_ASKED = (256, 2048, 8192)
_BATCH = 256
_CONCURRENT = 32


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of call. Microseconds; CPU a call, client and server apart."""

    wall_us: list[float]
    client_us: float
    server_us: float


class Fleet:
    """One fleet in the server. All replicas share one long chain, each to a depth of its own; the rest is filler."""

    def __init__(self, ownership: RedisOwnershipMap, admin: Redis) -> None:
        self.ownership = ownership
        self.admin = admin
        self.leases: list[Lease] = []
        self.chain = _hashes("shared", _CHAIN)
        self.blocks = 0

    async def join(self, replicas: int) -> None:
        for i in range(replicas):
            record = ReplicaRecord(f"replica{i:04}", "bench", _BLOCK, f"http://127.0.0.1:{10000 + i}")
            self.leases.append(await self.ownership.join(record.replica_id, record, 3600))

    async def write_chain(self) -> None:
        for i, lease in enumerate(self.leases):
            depth = _CHAIN * (i + 1) // len(self.leases)
            await self.ownership.write(lease, [Write(lease.slot, added=self.chain[:depth])])
        self.blocks += _CHAIN

    async def fill(self, blocks: int) -> None:
        """Unrelated blocks, each at one replica, until the map has so many."""
        for i, batch in enumerate(_batches(f"filler{self.blocks}", blocks - self.blocks)):
            lease = self.leases[i % len(self.leases)]
            await self.ownership.write(lease, [Write(lease.slot, added=batch)])
        self.blocks = blocks

    async def measure(self, calls: list[Callable[[], Awaitable[Any]]], concurrent: int = 1) -> Cost:
        wall: list[float] = []
        waiting = iter(calls)

        async def work() -> None:
            for call in waiting:
                began = time.perf_counter()
                await call()
                wall.append((time.perf_counter() - began) * 1e6)

        server, client = await self.server_cpu_s(), time.process_time()
        await asyncio.gather(*(work() for _ in range(concurrent)))
        client = time.process_time() - client
        server = await self.server_cpu_s() - server
        return Cost(wall, client * 1e6 / len(calls), server * 1e6 / len(calls))

    async def server_cpu_s(self) -> float:
        cpu = await self.admin.info("cpu")
        return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

    async def memory(self) -> int:
        return int((await self.admin.info("memory"))["used_memory"])


def run(options: Options) -> list[Table]:
    return asyncio.run(_run(options))


async def _run(options: Options) -> list[Table]:
    look_ups: list[list[str | int | float]] = []
    for replicas in _REPLICAS:
        async with _fleet(replicas) as fleet:
            await fleet.write_chain()
            for blocks in (100_000, options.times(1_000_000, 200_000)):
                await fleet.fill(blocks)
                look_ups += [await _look_up_row(fleet, asked, options) for asked in _ASKED]
    return [
        Table(
            "look-up: one chain, k replicas that hold it to k different depths",
            [
                *("replicas", "blocks in map", "blocks asked", "p50 us", "p99 us", "client CPU us", "server CPU us"),
                *(f"p50 us, {_CONCURRENT} at once", "look-ups/s", "client CPU us", "server CPU us", "server alone/s"),
            ],
            look_ups,
            [
                "one client process in Python: look-ups/s is its limit; server alone = 1 / server CPU",
                f"load after {load_average()}",
            ],
        ),
        await _write_table(options),
    ]


async def _look_up_row(fleet: Fleet, asked: int, options: Options) -> list[str | int | float]:
    hashes = fleet.chain[:asked]

    async def look_up() -> None:
        snapshot = await fleet.ownership.look_up(hashes)
        if len(snapshot.matches) != len(fleet.leases):
            raise RuntimeError(f"{len(snapshot.matches)} matches for {len(fleet.leases)} replicas")

    times = options.times(1000, 200)
    await fleet.measure([look_up] * 20)
    one = await fleet.measure([look_up] * times)
    began = time.perf_counter()
    many = await fleet.measure([look_up] * times * 2, _CONCURRENT)
    rate = times * 2 / (time.perf_counter() - began)
    return [
        *(len(fleet.leases), fleet.blocks, asked),
        *(quantile(one.wall_us, 0.5), quantile(one.wall_us, 0.99), one.client_us, one.server_us),
        *(quantile(many.wall_us, 0.5), rate, many.client_us, many.server_us, 1e6 / many.server_us),
    ]


async def _write_table(options: Options) -> Table:
    rows: list[list[str | int | float]] = []
    blocks = options.times(400_000, 50_000)
    for batch in (16, _BATCH, 1024):
        async with _fleet(4) as fleet:
            lease = fleet.leases[0]
            batches = list(_batches(f"write{batch}", min(blocks, batch * 4000), batch))
            count = sum(map(len, batches))
            before = await fleet.memory()
            for what in ("stored", "stored again", "removed"):
                cost, rate = await _write(fleet, lease, batches, removed=what == "removed")
                memory = (await fleet.memory() - before) / count
                share = len(batches) / count
                cpu = cost.client_us * share, cost.server_us * share
                rows.append([what, batch, count, rate, *cpu, 1e6 / cpu[1], memory])
    return Table(
        "write: block updates through RedisOwnershipMap.write, one call after the other",
        [
            *("", "blocks a call", "blocks", "updates/s", "client CPU us/block", "server CPU us/block"),
            *("server alone/s", "memory B/block"),
        ],
        rows,
        [
            "memory: growth of used_memory since before the first write, over the blocks stored; one owner a block",
            f"load after {load_average()}",
        ],
    )


async def _write(fleet: Fleet, lease: Lease, batches: list[list[BlockHash]], *, removed: bool) -> tuple[Cost, float]:
    def call(batch: list[BlockHash]) -> Callable[[], Awaitable[None]]:
        write = Write(lease.slot, removed=batch) if removed else Write(lease.slot, added=batch)
        return lambda: fleet.ownership.write(lease, [write])

    began = time.perf_counter()
    cost = await fleet.measure([call(batch) for batch in batches])
    return cost, sum(map(len, batches)) / (time.perf_counter() - began)


@asynccontextmanager
async def _fleet(replicas: int) -> Any:
    with EmbeddedValkey() as valkey:
        ownership = RedisOwnershipMap(valkey.url, "bench", timeout_s=10.0, look_up_timeout_s=10.0)
        async with Redis.from_url(valkey.url) as admin:
            await ownership.connect()
            try:
                fleet = Fleet(ownership, admin)
                await fleet.join(replicas)
                yield fleet
            finally:
                await ownership.close()


def _hashes(name: str, blocks: int) -> list[BlockHash]:
    return chain(root_hash(name), pack_token_ids(range(blocks * _BLOCK)), _BLOCK)


def _batches(name: str, blocks: int, size: int = _BATCH) -> Iterator[list[BlockHash]]:
    for i in range(blocks // size):
        yield _hashes(f"{name}-{i}", size)


BENCHMARK = Benchmark("ownership", "look-ups, writes and memory of the ownership map on a real Valkey", run)
