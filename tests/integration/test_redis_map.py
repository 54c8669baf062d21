"""What only a real server shows: keys, functions that vanish, addresses where nobody answers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
import redis
from redis.asyncio import Redis

from replicas.collector import Collector
from replicas.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from replicas.subscriber import Batch
from router.config import RouterConfig
from router.errors import OwnershipUnavailable
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Match, ReplicaRecord, Write
from router.ownership.client import safe_url
from router.ownership.redis import RedisOwnershipMap
from router.router import Router
from router.types import HashedPrompt, ReplicaId
from serve.embedded_valkey import EmbeddedValkey

pytestmark = pytest.mark.integration
RECORD = ReplicaRecord("a", "model", 16)


@pytest.fixture
async def ownership(valkey_url: str, fleet: str) -> AsyncIterator[RedisOwnershipMap]:
    redis_map = RedisOwnershipMap(valkey_url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
    await redis_map.connect()
    yield redis_map
    await redis_map.close()


async def test_a_swept_fleet_leaves_no_block_behind(ownership: RedisOwnershipMap, valkey_url: str, fleet: str) -> None:
    hashes = chain(root_hash("m"), pack_token_ids(range(16 * 300)), 16)
    lease = await ownership.join("a", RECORD, 30)
    await ownership.write(lease, [Write(lease.slot, added=hashes)])
    await ownership.leave(lease)
    while await ownership.sweep(100):
        pass
    async with Redis.from_url(valkey_url) as client:
        left = [key async for key in client.scan_iter(match=f"{ownership._prefix.decode()}*", count=1000)]
    assert left == [ownership._prefix + b"e"]


async def test_a_member_that_ends_while_its_journal_turns_leaves_nothing(
    ownership: RedisOwnershipMap, valkey_url: str
) -> None:
    hashes = chain(root_hash("m"), pack_token_ids(range(16 * 30)), 16)
    lease = await ownership.join("a", RECORD, 30)
    await ownership.write(lease, [Write(lease.slot, added=hashes)])
    await ownership.turn_journal(lease, done=False)
    await ownership.write(lease, [Write(lease.slot, added=hashes[:10])])
    await ownership.leave(lease)
    while await ownership.sweep(100):
        pass
    async with Redis.from_url(valkey_url) as client:
        left = [key async for key in client.scan_iter(match=f"{ownership._prefix.decode()}*", count=1000)]
    assert left == [ownership._prefix + b"e"]


async def test_a_collectors_journal_stays_in_proportion_to_what_it_holds(
    ownership: RedisOwnershipMap, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.writer._JOURNAL_SLACK", 500)
    collector = Collector(ownership, RECORD, events=None, lease_s=60.0)
    await collector.start()
    async with asyncio.timeout(120):
        await collector.joined.wait()
        for turn in range(30):
            ids = tuple(range(1000 * turn, 1000 * turn + 160))
            names = tuple(range(10 * turn + 1, 10 * turn + 11))
            gone = BlockRemoved(tuple(range(10 * turn - 9, 10 * turn + 1))) if turn else AllBlocksCleared()
            stored = BlockStored(names, None, pack_token_ids(ids), 16)
            for _ in range(5):  # an engine that forgets and learns the same again
                for events in ((gone, stored), (BlockRemoved(names[::-1]),), (stored,)):
                    collector._on_item(Batch(turn, KVEventBatch(0.0, events)))
                    while not collector.in_sync:
                        await asyncio.sleep(0.001)
    assert collector.lease is not None
    async with Redis.from_url(valkey_url) as client:
        slot = collector.lease.slot.to_bytes(2, "big")
        journal = await client.lrange(ownership._prefix + b"w" + slot, 0, -1)
        old = await client.lrange(ownership._prefix + b"o" + slot, 0, -1)
    assert sum((len(one) - 4) // 16 for one in [*journal, *old]) <= 2 * 10 + 500 + 40
    assert collector.counters["journals_turned"] >= 1
    hashes = chain(root_hash("model"), pack_token_ids(ids), 16)
    assert (await ownership.look_up(hashes)).matches == {collector.lease.slot: Match(10, 10)}
    await collector.close()


async def test_functions_come_back_after_a_flush(ownership: RedisOwnershipMap, valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as client:
        await client.function_flush()
    lease = await ownership.join("a", RECORD, 30)
    hashes = chain(root_hash("m"), pack_token_ids(range(64)), 16)
    await ownership.write(lease, [Write(lease.slot, added=hashes)])
    snapshot = await ownership.look_up(hashes)
    assert snapshot.matches == {lease.slot: Match(4, 4)}


async def test_fleets_on_one_server_do_not_see_each_other(ownership: RedisOwnershipMap, valkey_url: str) -> None:
    other = RedisOwnershipMap(valkey_url, "another fleet", timeout_s=30.0, look_up_timeout_s=30.0)
    await other.connect()
    await ownership.join("a", RECORD, 30)
    assert not (await other.look_up([])).replicas
    await other.close()


async def test_nobody_there_is_said_with_what_to_do_and_without_the_password() -> None:
    nowhere = RedisOwnershipMap("redis://user:secret@127.0.0.1:1/0", "fleet")
    with pytest.raises(OwnershipUnavailable, match="is it running and reachable") as caught:
        await nowhere.connect()
    assert "secret" not in str(caught.value)
    await nowhere.close()


def test_safe_url_hides_user_and_password() -> None:
    assert safe_url("redis://user:p@ss@host:1/0") == "redis://host:1/0"


async def test_an_answer_that_came_while_our_own_loop_was_late_still_counts(
    ownership: RedisOwnershipMap, valkey_url: str, fleet: str
) -> None:
    await ownership.join("a", RECORD, 30)
    quick = RedisOwnershipMap(valkey_url, fleet, timeout_s=30.0, look_up_timeout_s=0.02)
    await quick.connect()
    before = look_ups(valkey_url)
    asked = asyncio.create_task(quick.look_up([]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    while look_ups(valkey_url) == before:
        time.sleep(0.01)  # noqa: ASYNC251 -- this is the lateness
    time.sleep(0.5)  # noqa: ASYNC251
    assert len((await asked).replicas) == 1
    await quick.close()


def look_ups(url: str) -> int:
    """How many the server has done. Keeps the event loop waiting."""
    with redis.Redis.from_url(url, socket_timeout=30) as client:
        return int(client.info("commandstats")["cmdstat_fcall_ro"]["calls"])


async def test_a_server_that_stalls_is_waited_for_only_so_long(fleet: str) -> None:
    with EmbeddedValkey() as server:
        quick = RedisOwnershipMap(server.url, fleet, look_up_timeout_s=0.02)
        await quick.connect()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(OwnershipUnavailable, match=r"no answer within 0\.02 s"):
                await quick.look_up([])
        finally:
            os.kill(server.pid, signal.SIGCONT)
        quick._look_up_timeout_s = 2.0
        async with asyncio.timeout(60):
            while True:
                try:
                    await quick.look_up([])
                    break
                except OwnershipUnavailable:
                    await asyncio.sleep(0.1)
        await quick.close()


async def test_closing_a_busy_router_always_ends(ownership: RedisOwnershipMap) -> None:
    class NoPrompts:
        off_loop_bytes = 1000

        def hashed(self, path: str, body: object, block_size: int) -> HashedPrompt:
            return HashedPrompt(100, ())

    for delay in range(40):
        router = Router(f"r{delay}", NoPrompts(), ownership, RouterConfig(), time.monotonic)
        await router.start()
        placed = await router.route("/v1/completions", {}, 10, [ReplicaId("a")])
        await asyncio.sleep(delay * 0.00002)
        router.release(placed)
        async with asyncio.timeout(60):
            await router.close()
