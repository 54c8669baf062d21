"""Redis is full or evicts: what it has still counts, what it lost is found and written again."""

from __future__ import annotations

import asyncio

import pytest

from router.errors import OwnershipFull
from router.ownership import Match, ReplicaRecord, RouterRecord, Write
from router.ownership.redis import RedisOwnershipMap
from router.types import Load
from serve.cli.doctor import _redis as check_redis
from serve.embedded_valkey import EmbeddedValkey
from tests.integration.redis_fleet import fleet_on, ids_of, true, until
from tests.redis_servers import admin
from tests.token_ids import blocks_of

pytestmark = pytest.mark.integration


async def test_r5_a_full_server_keeps_what_it_has_and_takes_removals(fleet: str) -> None:
    with EmbeddedValkey(settings={"maxmemory": "20mb", "maxmemory-policy": "noeviction"}) as server:
        async with fleet_on(server.url, fleet) as live:
            live.store(1, 200)
            await live.until_credit(1, 200, 200)
            for number in range(2, 502):
                live.store(number, 1000)
                if number % 10 == 0:
                    await asyncio.sleep(0)
            collector = live.collectors[0]
            await until(lambda: true(collector.counters["refused"] >= 2))
            await live.until_credit(1, 200, 200)
            assert not live.router.degraded
            assert admin(server, "INFO", "memory")["used_memory"] < 40 << 20
            live.remove(1, 100)
            await live.until_credit(1, 200, 100)
            assert collector.record.pending > 1000
            for number in range(2, 502):
                live.remove(number, 0)
            live.store(900, 50)
            await live.until_credit(900, 50, 50)
            await live.until_true()
            await until(lambda: true(collector.record.pending == 0))  # its journal may just be written anew


async def test_r5_on_a_full_server_a_renewal_counts_and_claims_end_though_none_are_added(fleet: str) -> None:
    with EmbeddedValkey() as server:
        ownership = RedisOwnershipMap(server.url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
        await ownership.connect()
        owner = await ownership.join("a", ReplicaRecord("a", "m", 16), 60)
        router = await ownership.join("router", RouterRecord(), 60)
        hashes, busy = blocks_of(ids_of(1, 20)), RouterRecord({owner.slot: Load(1, 0, 320)})
        await ownership.renew(router, RouterRecord(), 60, [Write(owner.slot, added=hashes[:10])])
        admin(server, "CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(OwnershipFull, match="10 blocks were not added"):
            await ownership.renew(router, busy, 60, [Write(owner.slot, added=hashes[10:], removed=hashes[5:10])])
        found = await ownership.look_up(hashes)
        assert (found.matches, found.routers) == ({owner.slot: Match(0, 5)}, {router.slot: busy})
        await ownership.renew(router, RouterRecord(), 60, [Write(owner.slot, removed=hashes[:5])])
        found = await ownership.look_up(hashes)
        assert (found.matches, found.routers) == ({}, {router.slot: RouterRecord()})
        await ownership.close()


async def test_r5_a_chain_with_an_evicted_middle_is_found_and_made_whole(
    fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedValkey() as server:
        async with fleet_on(server.url, fleet) as live:
            live.store(1, 3000)
            await live.until_credit(1, 3000, 3000)
            hashes = blocks_of(ids_of(1, 3000))
            admin(server, "DEL", *(live.maps[0]._prefix + b"b" + block for block in hashes[1000:1300]))
            await until(lambda: true(live.collectors[0].counters["repairs"] >= 1))
            await live.until_true()
            await live.until_credit(1, 3000, 3000)
            assert live.collectors[0].counters["joins"] == 1
    assert "does Redis evict keys?" in caplog.text


async def test_r5_a_server_that_evicts_whatever_it_likes_is_never_believed_for_long(fleet: str) -> None:
    settings = {"maxmemory": "8mb", "maxmemory-policy": "allkeys-lru", "maxmemory-samples": "1"}
    with EmbeddedValkey(settings=settings) as server:
        async with fleet_on(server.url, fleet) as live:
            for number in range(1, 81):
                live.store(number, 1000)
            await until(lambda: true(sum(one.counters["repairs"] for one in live.collectors) >= 1))
            assert admin(server, "INFO", "stats")["evicted_keys"] > 0
            for number in range(11, 81):
                live.remove(number, 0)
            admin(server, "CONFIG", "SET", "maxmemory", "64mb")
            await live.until_true()
            await live.until_credit(5, 1000, 1000)


def test_r5_doctor_warns_of_a_server_that_evicts() -> None:
    with EmbeddedValkey(settings={"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}) as server:
        usable, checks = check_redis(server.url)
    assert usable
    assert [check.status for check in checks if "memory" in check.name] == ["note"]
    assert "noeviction" in checks[-1].text
