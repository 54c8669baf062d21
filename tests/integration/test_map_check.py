"""`whohas map --check` on a real server: what it finds equal, wrong, or left behind."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from replicas.collector import Collector
from replicas.events import BlockStored, KVEventBatch
from replicas.subscriber import Batch
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import ReplicaRecord, RouterRecord, Write
from router.ownership.redis import RedisOwnershipMap
from router.types import BlockHash
from serve.cli.map_check import check
from tests.integration.live import WHOHAS

pytestmark = pytest.mark.integration


class NeverSwept(RedisOwnershipMap):
    """What is left behind stays there."""

    async def sweep(self, max_blocks: int, grace_s: float = 10.0) -> int:
        return 0


@pytest.fixture
async def ownership(valkey_url: str, fleet: str) -> AsyncIterator[RedisOwnershipMap]:
    one = NeverSwept(valkey_url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
    await one.connect()
    yield one
    await one.close()


@pytest.fixture
async def collector(ownership: RedisOwnershipMap) -> AsyncIterator[Collector]:
    """Holds 100 blocks."""
    one = Collector(ownership, ReplicaRecord("a", "m", 16), None, lease_s=9.0)
    await one.start()
    store(one, 100)
    await until_in_sync(one)
    yield one
    await one.close()


def store(collector: Collector, blocks: int) -> None:
    stored = BlockStored(tuple(range(1, blocks + 1)), None, pack_token_ids(range(16 * blocks)), 16)
    collector._on_item(Batch(0, KVEventBatch(0.0, (stored,))))


async def until_in_sync(collector: Collector) -> None:
    async with asyncio.timeout(60):
        while not collector.in_sync:
            await asyncio.sleep(0.01)


def prompt(blocks: int) -> list[BlockHash]:
    return chain(root_hash("m"), pack_token_ids(range(16 * blocks)), 16)


async def test_a_map_that_says_what_the_collectors_hold_is_found_equal(
    ownership: RedisOwnershipMap, collector: Collector
) -> None:
    router = await ownership.join("router", RouterRecord(), 60)
    assert collector.lease is not None
    await ownership.write(router, [Write(collector.lease.slot, added=prompt(5))])
    gone = await ownership.join("gone", ReplicaRecord("gone", "m", 16), 60)
    await ownership.write(gone, [Write(gone.slot, added=prompt(7))])
    await ownership.leave(gone)
    result = await check(ownership)
    assert [(one.replica, one.state, one.in_map, one.told) for one in result.replicas] == [("a", "equal", 100, 100)]
    assert not result.wrong
    assert result.claims == 5
    assert result.left_behind == 7


async def test_a_block_too_many_or_one_too_few_is_found(
    ownership: RedisOwnershipMap, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> list[BlockHash]:
        return []

    monkeypatch.setattr(collector._writer._audit, "_find", nothing)  # nobody repairs
    assert collector.lease is not None
    one = prompt(1)[0]
    entry = collector.lease.slot.to_bytes(2) + b"\0\0"
    async with Redis.from_url(ownership.url) as client:
        await client.set(ownership._prefix + b"b" + bytes(16), entry)
        await client.delete(ownership._prefix + b"b" + one)
        result = await check(ownership, attempts=2)
        assert [(row.state, row.in_map, row.told) for row in result.replicas] == [("differs", 100, 100)]
        await client.delete(ownership._prefix + b"b" + bytes(16))
        result = await check(ownership, attempts=2)
        assert [(row.state, row.in_map, row.told) for row in result.replicas] == [("differs", 99, 100)]
        assert result.wrong
        await client.set(ownership._prefix + b"b" + one, entry)
        assert not (await check(ownership)).wrong


async def test_the_command_tells_it_and_its_exit_status_says_whether_all_is_well(
    ownership: RedisOwnershipMap, collector: Collector, fleet: str
) -> None:
    async def run(*options: str) -> tuple[int, str]:
        command = [WHOHAS, "map", "--redis", ownership.url, "--fleet", fleet, "--check", *options]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout

    status, shown = await run()
    assert status == 0
    assert "100 blocks in the map" in shown
    status, shown = await run("--json")
    assert status == 0
    assert json.loads(shown)[fleet]["replicas"] == [{"replica": "a", "state": "equal", "in_map": 100, "told": 100}]
