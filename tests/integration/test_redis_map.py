"""What only a real server shows: keys, functions that vanish, addresses where nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from router.errors import OwnershipUnavailable
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Match, ReplicaRecord, Write
from router.ownership.redis import RedisOwnershipMap, safe_url

pytestmark = pytest.mark.integration
RECORD = ReplicaRecord("a", "model", 16)


@pytest.fixture
async def ownership(valkey_url: str, fleet: str) -> AsyncIterator[RedisOwnershipMap]:
    redis_map = RedisOwnershipMap(valkey_url, fleet, look_up_timeout_s=2.0)
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


async def test_a_lapsed_member_is_over_for_good_after_the_grace(ownership: RedisOwnershipMap) -> None:
    lease = await ownership.join("a", RECORD, 0.001)
    await ownership.write(lease, [Write(lease.slot, added=chain(root_hash("m"), pack_token_ids(range(160)), 16))])
    assert await ownership.sweep(100, grace_s=60) == 0
    await asyncio.sleep(0.1)
    assert await ownership.sweep(100, grace_s=0.001) == 10


async def test_functions_come_back_after_a_flush(ownership: RedisOwnershipMap, valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as client:
        await client.function_flush()
    lease = await ownership.join("a", RECORD, 30)
    hashes = chain(root_hash("m"), pack_token_ids(range(64)), 16)
    await ownership.write(lease, [Write(lease.slot, added=hashes)])
    snapshot = await ownership.look_up(hashes)
    assert snapshot.matches == {lease.slot: Match(4, 4)}


async def test_fleets_on_one_server_do_not_see_each_other(ownership: RedisOwnershipMap, valkey_url: str) -> None:
    other = RedisOwnershipMap(valkey_url, "another fleet", look_up_timeout_s=2.0)
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
