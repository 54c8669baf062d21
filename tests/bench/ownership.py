"""The ownership map on a real server: what a look-up and a write cost the client and the server, and memory a block."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from replicas.block_set import BlockSet
from replicas.events import BlockRemoved, BlockStored, KVEventBatch
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Lease, Match, ReplicaRecord, Write
from router.ownership.redis import RedisOwnershipMap
from router.types import BlockHash
from serve.embedded_valkey import EmbeddedValkey
from tests.bench.report import Benchmark, Options, Table, load_average, quantile

_BLOCK = 16
_CHAIN = 8192
_REPLICAS = 64
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
    """One fleet in the server: long chains that many replicas hold to some depth, and filler."""

    def __init__(self, ownership: RedisOwnershipMap, admin: Redis) -> None:
        self.ownership = ownership
        self.admin = admin
        self.leases: list[Lease] = []
        self.random = random.Random(1)
        self.blocks = 0

    async def join(self, replicas: int) -> None:
        for i in range(replicas):
            record = ReplicaRecord(f"replica{i:04}", "bench", _BLOCK, f"http://127.0.0.1:{10000 + i}")
            self.leases.append(await self.ownership.join(record.replica_id, record, 3600))

    async def write_chain(self, name: str, depths: Sequence[int]) -> list[BlockHash]:
        """One chain, held by each replica as far as its number says."""
        chain = _hashes(name, _CHAIN)
        for lease, depth in zip(self.leases, depths, strict=True):
            await self.ownership.write(lease, [Write(lease.slot, added=chain[:depth])])
        self.blocks += max(depths)
        return chain

    async def write_holey_chain(self, name: str) -> tuple[list[BlockHash], list[int]]:
        """Engines that evicted every thousandth block of a chain, at random, through their collectors. Returns
        also how much of the chain each one can reuse."""
        ids, chain, usable = pack_token_ids(range(_CHAIN * _BLOCK)), _hashes(name, _CHAIN), []
        for lease in self.leases:
            blocks = BlockSet(name, _BLOCK)
            blocks.apply(KVEventBatch(0.0, (BlockStored(tuple(range(1, _CHAIN + 1)), None, ids, _BLOCK),)))
            holes = sorted(self.random.sample(range(1, _CHAIN + 1), _CHAIN // 1000))
            blocks.apply(KVEventBatch(0.0, (BlockRemoved(tuple(holes), "GPU"),)))
            await self.ownership.write(lease, [Write(lease.slot, added=list(blocks.published))])
            usable.append(holes[0] - 1)
        return chain, usable

    async def fill(self, blocks: int) -> None:
        """Unrelated blocks, each at one replica, until the map has so many."""
        for i, batch in enumerate(_batches(f"filler{self.blocks}", blocks - self.blocks, 1024)):
            lease = self.leases[i % len(self.leases)]
            await self.ownership.write(lease, [Write(lease.slot, added=batch)])
        self.blocks = blocks

    async def piped(self, hashes: list[BlockHash], calls: int) -> float:
        """Look-ups a second that the server answers to a client that costs nothing: the same bytes again and again."""
        ownership = self.ownership
        command = [b"FCALL_RO", f"{ownership._name}_look_up".encode(), b"1", ownership._prefix, b"".join(hashes)]
        raw = b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in command)
        port = int(self.admin.connection_pool.connection_kwargs["port"])
        return await asyncio.to_thread(_piped, port, raw, calls)

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
    rows: list[list[str | int | float]] = []
    async with _fleet(_REPLICAS) as fleet:
        chats, worst = [_CHAIN // 4] * _REPLICAS, [_CHAIN * (i + 1) // _REPLICAS for i in range(_REPLICAS)]
        chats[:4] = [_CHAIN, _CHAIN * 3 // 4, _CHAIN // 2, _CHAIN // 3]
        shapes = [
            ("a chat: 4 of 64 beyond the shared quarter", await fleet.write_chain("chat", chats), chats),
            ("0.1 % holes", *await fleet.write_holey_chain("holes")),
            ("worst: 64 depths", await fleet.write_chain("worst", worst), worst),
        ]
        await fleet.fill(options.times(2_500_000, 200_000))
        for what, chain, depths in shapes:
            rows += [await _look_up_row(fleet, what, chain, depths, asked, options) for asked in _ASKED]
    return [
        Table(
            f"look-up: {_REPLICAS} replicas, {fleet.blocks:,} blocks in the map; every answer is checked",
            [
                *("held", "blocks asked", "p50 us", "p99 us", "client CPU us", "server CPU us"),
                *(f"p50 us, {_CONCURRENT} at once", "look-ups/s", "piped/s"),
            ],
            rows,
            [
                "look-ups/s: one client process in Python; piped/s: a raw connection, so that the server is the limit",
                f"load after {load_average()}",
            ],
        ),
        await _write_table(options),
        await _memory_table(options),
    ]


async def _look_up_row(
    fleet: Fleet, what: str, chain: list[BlockHash], depths: Sequence[int], asked: int, options: Options
) -> list[str | int | float]:
    hashes = chain[:asked]
    expected = {lease.slot: Match(*[min(depth, asked)] * 2) for lease, depth in zip(fleet.leases, depths, strict=True)}
    expected = {slot: match for slot, match in expected.items() if match.owned}

    async def look_up() -> None:
        if (await fleet.ownership.look_up(hashes)).matches != expected:
            raise RuntimeError("a look-up was not exact")

    times = options.times(1000, 200)
    await fleet.measure([look_up] * 20)
    one = await fleet.measure([look_up] * times)
    began = time.perf_counter()
    many = await fleet.measure([look_up] * times * 2, _CONCURRENT)
    rate = times * 2 / (time.perf_counter() - began)
    return [
        *(what, asked, quantile(one.wall_us, 0.5), quantile(one.wall_us, 0.99), one.client_us, one.server_us),
        *(quantile(many.wall_us, 0.5), rate, await fleet.piped(hashes, times * 5)),
    ]


def _piped(port: int, raw: bytes, calls: int) -> float:
    """A thread sends, this one reads; an answer ends as the first one did, as all are of one length."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(raw)
        time.sleep(0.5)
        length = len(connection.recv(1 << 24))
        began = time.perf_counter()
        sender = threading.Thread(target=lambda: [connection.sendall(raw) for _ in range(calls)])
        sender.start()
        left = length * calls
        while left > 0:
            left -= len(connection.recv(1 << 20))
        took = time.perf_counter() - began
        sender.join()
        return calls / took


async def _memory_table(options: Options) -> Table:
    rows: list[list[str | int | float]] = []
    async with _fleet(_REPLICAS) as fleet:
        before = await fleet.memory()
        for blocks in (1_000_000, 5_000_000):
            goal = blocks // options.times(1, 20)
            began, already = time.perf_counter(), fleet.blocks
            await fleet.fill(goal)
            rate = (goal - already) / (time.perf_counter() - began)
            rows.append([goal, (await fleet.memory() - before) / goal, rate])
    return Table(
        f"memory: one owner a block, {_REPLICAS} replicas",
        ["blocks", "memory B/block", "updates/s, 1,024 a call"],
        rows,
        [f"used_memory, journals included; load after {load_average()}"],
    )


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
