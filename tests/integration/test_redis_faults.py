"""Redis refuses, stalls, fails over, runs full, forgets: look-ups stay bounded, nothing wrong is credited, all heals.

Real servers, real collectors and routers; `Fleet` keeps them going and says what is true.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from replicas.collector import Collector
from replicas.events import BlockRemoved, BlockStored, KVEventBatch
from replicas.subscriber import Batch
from router.asked import Placement
from router.config import RouterConfig
from router.errors import OwnershipUnavailable
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Match, ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from router.router import Router
from router.types import BlockHash, HashedPrompt, ReplicaId
from serve.cli.doctor import _redis as check_redis
from serve.embedded_valkey import EmbeddedValkey
from tests.redis_servers import admin, certificate, cluster, fail_over, follow, pair, proxy, sentinel, wait_until

pytestmark = pytest.mark.integration

B = 16
DEADLINE_S = 60.0
REPLICAS = [ReplicaId(name) for name in ("a", "b")]


class Ids:
    """Bodies carry their token ids."""

    off_loop_bytes = 1 << 30

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        return HashedPrompt(len(body["ids"]), prompt(body["ids"]))


def prompt(ids: Sequence[int]) -> list[BlockHash]:
    return chain(root_hash("m"), pack_token_ids(ids), B)


def ids_of(number: int, blocks: int) -> range:
    return range(number * 1_000_000, number * 1_000_000 + blocks * B)


class Fleet:
    """Two collectors and a router on one map's URL. `a`'s engine is told what to store and to remove."""

    def __init__(self, url: str, name: str) -> None:
        # What a request may wait for is shown elsewhere; here no look-up may be cut short by a slow machine.
        self.maps = [RedisOwnershipMap(url, name, timeout_s=20.0, look_up_timeout_s=20.0) for _ in range(3)]
        self.collectors = [
            Collector(one, ReplicaRecord(replica, "m", B), None, lease_s=6.0, retry_s=(0.05, 0.3))
            for one, replica in zip(self.maps, REPLICAS, strict=False)
        ]
        self.router = Router("router", Ids(), self.maps[2], RouterConfig(lease_s=6.0), time.monotonic, seed=1)
        self._seq = 0

    def store(self, number: int, blocks: int, start: int = 0) -> None:
        hashes = tuple(number * 1_000_000 + depth + 1 for depth in range(start, blocks))
        ids = pack_token_ids(ids_of(number, blocks)[start * B :])
        self._tell(BlockStored(hashes, hashes[0] - 1 if start else None, ids, B))

    def remove(self, number: int, depth: int) -> None:
        self._tell(BlockRemoved((number * 1_000_000 + depth + 1,), "GPU"))

    def _tell(self, event: Any) -> None:
        self.collectors[0]._on_item(Batch(self._seq, KVEventBatch(0.0, (event,))))
        self._seq += 1

    async def ask(self, number: int, blocks: int) -> Placement:
        """A request for this chain and one block more, released at once."""
        ids = [*ids_of(number, blocks), *range(B)]
        placed = await self.router.route("/v1/completions", {"ids": ids}, 100, REPLICAS)
        self.router.release(placed)
        return placed

    async def credit(self, number: int, blocks: int) -> int:
        """Blocks that the router believes `a` to own."""
        placed = await self.ask(number, blocks)
        return max(one.view.owned_blocks for one in placed.decision.candidates)

    async def until_credit(self, number: int, blocks: int, owned: int) -> None:
        await until(lambda: self._has(number, blocks, owned))

    async def _has(self, number: int, blocks: int, owned: int) -> bool:
        return await self.credit(number, blocks) == owned

    async def until_healed(self) -> None:
        async def healed() -> bool:
            await self.ask(0, 1)
            return not self.router.degraded and all(one.in_sync for one in self.collectors)

        await until(healed)

    async def until_true(self) -> None:
        """The map says exactly what the collectors hold, and nothing else counts."""
        await until(self.is_true)

    async def is_true(self) -> bool:
        if not all(one.in_sync for one in self.collectors):
            return False
        slots = {one.lease.slot: one.published for one in self.collectors if one.lease is not None}
        found: dict[int, set[BlockHash]] = {slot: set() for slot in slots}
        try:
            async for part in self.maps[0].holdings():
                for block, entries in part:
                    for i in range(0, len(entries), 4):
                        owner, claimant = (int.from_bytes(entries[j : j + 2]) for j in (i, i + 2))
                        if not claimant and owner in found:
                            found[owner].add(block)
        except OwnershipUnavailable:
            return False
        return found == slots


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await check():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def fleet_on(url: str, name: str, *, connect: bool = True) -> AsyncIterator[Fleet]:
    fleet = Fleet(url, name)
    if connect:
        await fleet.maps[0].connect()
    for collector in fleet.collectors:
        await collector.start()
    await fleet.router.start()
    try:
        if connect:
            await fleet.until_healed()
        yield fleet
    finally:
        await fleet.router.close()
        for collector in fleet.collectors:
            await collector.close()
        for one in fleet.maps:
            await one.close()


# --- R1: leases and epochs -------------------------------------------------------------------------------------------


async def test_r1_a_killed_replica_s_blocks_lose_credit_with_the_lease_and_are_swept(
    valkey_url: str, fleet: str
) -> None:
    async with fleet_on(valkey_url, fleet) as live:
        dying = RedisOwnershipMap(valkey_url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
        collector = Collector(dying, ReplicaRecord("w0", "m", B), None, lease_s=0.5)
        await collector.start()
        async with asyncio.timeout(DEADLINE_S):
            await collector.joined.wait()
        hashes = tuple(range(1, 11))
        collector._on_item(Batch(0, KVEventBatch(0.0, (BlockStored(hashes, None, pack_token_ids(ids_of(7, 10)), B),))))
        await until(lambda: _true(collector.in_sync))
        lease = collector.lease
        assert lease is not None
        collector._task.cancel()  # type: ignore[union-attr]  # kill -9: nobody says good-bye
        await asyncio.wait([collector._task])  # type: ignore[list-item]

        async def gone() -> bool:
            return lease.slot not in (await live.maps[2].look_up(prompt(ids_of(7, 10)))).matches

        await until(gone)
        while not await dying.sweep(1000, grace_s=0.001):
            await asyncio.sleep(0.05)
        left = [block async for part in dying.holdings() for block, _ in part]
        assert not set(left) & set(prompt(ids_of(7, 10)))
        await dying.close()


async def _true(value: bool) -> bool:
    return value


# --- R2: failover ----------------------------------------------------------------------------------------------------


async def test_r2_a_demoted_primary_is_left_for_the_new_one_at_the_same_address(fleet: str) -> None:
    """As with a DNS name or a virtual address: connections that are open stay with the old primary."""
    with pair() as (old, new):
        async with proxy(old.port) as address, fleet_on(f"redis://127.0.0.1:{address.port}/0", fleet) as live:
            live.store(1, 20)
            await live.until_credit(1, 20, 20)
            address.target = new.port
            admin(new, "REPLICAOF", "NO", "ONE")
            follow(old, new)
            live.store(1, 30, start=20)
            await live.until_credit(1, 30, 30)
            assert (await live.ask(2, 5)).decision.candidates
            await live.until_true()
            assert admin(new, "INFO", "clients")["connected_clients"] > 1


async def test_r2_sentinel_leads_to_the_new_primary(fleet: str, tmp_path: Path) -> None:
    with pair() as (old, new), sentinel(tmp_path, old) as port:
        async with fleet_on(f"redis+sentinel://127.0.0.1:{port}/main", fleet) as live:
            live.store(1, 20)
            await live.until_credit(1, 20, 20)
            fail_over(port)
            for number in range(2, 12):
                live.store(number, 3)
                assert (await live.ask(number, 3)).decision.candidates
                await asyncio.sleep(0.05)
            wait_until(lambda: admin(new, "INFO", "replication")["role"] == "master")
            live.store(20, 10)
            await live.until_credit(20, 10, 10)
            await live.until_true()
            old.stop()
            await live.until_healed()


async def test_a_promoted_replica_that_lags_gives_no_credit_for_what_it_missed(fleet: str) -> None:
    """Removals that the old primary had confirmed never reached the new one."""
    with pair() as (old, new):
        async with proxy(old.port) as address, fleet_on(f"redis://127.0.0.1:{address.port}/0", fleet) as live:
            live.store(1, 20)
            await live.until_credit(1, 20, 20)
            wait_until(lambda: admin(new, "DBSIZE") == admin(old, "DBSIZE"))
            admin(new, "REPLICAOF", "NO", "ONE")  # from here on it hears no more
            live.remove(1, 5)
            await live.until_credit(1, 20, 5)
            before = [one.lease for one in live.collectors]
            address.target = new.port
            old.stop()
            await live.until_true()
            await live.until_credit(1, 20, 5)
            assert live.collectors[0].lease != before[0]
            assert live.collectors[0].counters["fenced"] >= 1


# --- R3: cluster -----------------------------------------------------------------------------------------------------


async def test_r3_a_cluster_answers_a_300_block_prompt_and_follows_its_slots_to_another_node(fleet: str) -> None:
    with cluster(3) as servers:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers[:2])
        async with fleet_on(url, fleet) as live:
            live.store(1, 300)
            await live.until_credit(1, 300, 300)
            slot = int(admin(servers[0], "CLUSTER KEYSLOT", live.maps[0]._prefix))
            source = next(server for server in servers if _serves(server, slot))
            target = next(server for server in servers if server is not source)
            name = admin(target, "CLUSTER MYID").decode()
            admin(source, "CLUSTER MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", name)
            end = time.monotonic() + DEADLINE_S
            number = 2
            while not _serves(target, slot):  # in traffic
                assert time.monotonic() < end
                live.store(number, 3)
                assert (await live.ask(number, 3)).decision.candidates
                number += 1
            live.store(1, 310, start=300)
            await live.until_credit(1, 310, 310)
            await live.until_true()


async def test_r3_keys_that_are_moved_one_by_one_leave_no_wrong_credit(fleet: str) -> None:
    """The older way to reshard: the slot is open on both nodes while its keys move."""
    with cluster(3) as servers:
        async with fleet_on(f"redis+cluster://127.0.0.1:{servers[0].port}", fleet) as live:
            live.store(1, 100)
            await live.until_credit(1, 100, 100)
            slot = int(admin(servers[0], "CLUSTER KEYSLOT", live.maps[0]._prefix))
            source = next(server for server in servers if _serves(server, slot))
            target = next(server for server in servers if server is not source)
            names = [admin(server, "CLUSTER MYID").decode() for server in (source, target)]
            admin(target, "CLUSTER SETSLOT", slot, "IMPORTING", names[0])
            admin(source, "CLUSTER SETSLOT", slot, "MIGRATING", names[1])
            while keys := admin(source, "CLUSTER GETKEYSINSLOT", slot, 20):
                admin(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "REPLACE", "KEYS", *keys)
                assert (await live.ask(1, 100)).decision.candidates
            live.remove(1, 50)
            for server in (target, source, *servers):
                admin(server, "CLUSTER SETSLOT", slot, "NODE", names[1])
            await live.until_credit(1, 100, 50)
            await live.until_true()


def _serves(server: EmbeddedValkey, slot: int) -> bool:
    me = admin(server, "CLUSTER MYID").decode()
    for line in admin(server, "CLUSTER NODES").values():
        if line["node_id"] == me:
            return any(
                int(first) <= slot <= int(last or first) for first, *rest in line["slots"] for last in [*rest, 0][:1]
            )
    return False


# --- R4: refused, wrong password, stalls -----------------------------------------------------------------------------


async def test_r4_a_server_that_stalls_costs_no_request_more_than_the_limit_and_all_heals(fleet: str) -> None:
    with EmbeddedValkey() as server:
        async with fleet_on(server.url, fleet) as live:
            live.store(1, 20)
            await live.until_credit(1, 20, 20)
            assert server.pid is not None
            live.maps[2]._look_up_timeout_s = 0.02
            os.kill(server.pid, signal.SIGSTOP)
            try:
                answered = 0
                async with asyncio.timeout(DEADLINE_S):
                    while not live.router.degraded or answered < 200:
                        placed = await live.ask(1, 20)
                        assert len(placed.decision.candidates) == 2
                        answered += bool(live.router.degraded)
                assert "no answer" in live.router.degraded
                skipped = live.router.counters["look_up_skipped"] - live.router.counters["map_unavailable"]
                assert skipped > 0  # the circuit: a dead server does not cost every request the limit
            finally:
                os.kill(server.pid, signal.SIGCONT)
            live.maps[2]._look_up_timeout_s = 20.0
            await live.until_healed()
            await live.until_credit(1, 20, 20)
            await live.until_true()


async def test_r4_a_server_that_refuses_connections_is_lived_without(fleet: str) -> None:
    with EmbeddedValkey() as server:
        async with fleet_on(server.url, fleet) as live:
            live.store(1, 20)
            await live.until_credit(1, 20, 20)
            server.stop()
            for _ in range(100):
                assert len((await live.ask(1, 20)).decision.candidates) == 2
            await until(lambda: _true(bool(live.router.degraded)))
            live.store(1, 25, start=20)
            with EmbeddedValkey(server.port) as again:
                await live.until_credit(1, 25, 25)
                await live.until_true()
                assert again.pid is not None


async def test_r4_a_password_that_is_wrong_for_a_while_is_no_end(fleet: str) -> None:
    with EmbeddedValkey() as server:
        async with fleet_on(f"redis://:secret@127.0.0.1:{server.port}/0", fleet, connect=False) as live:
            live.store(1, 5)  # a server without a password refuses one
            await until(lambda: _degraded(live))
            admin(server, "CONFIG", "SET", "requirepass", "secret")
            await live.until_healed()
            await live.until_credit(1, 5, 5)


async def _degraded(live: Fleet) -> bool:
    await live.ask(1, 5)
    return bool(live.router.degraded)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://127.0.0.1:{port}/0", "user or password.*NOAUTH|user or password.*Authentication required"),
        ("redis://:wrong@127.0.0.1:{port}/0", "refuses user or password"),
        ("redis://poor:poor@127.0.0.1:{port}/0", "may not do all that is needed.*ACL SETUSER"),
        ("redis+cluster://:right@127.0.0.1:{port}", "no cluster"),
    ],
)
async def test_what_keeps_a_server_from_being_used_is_one_clear_line_at_the_start(
    fleet: str, url: str, told: str
) -> None:
    with EmbeddedValkey() as server:
        admin(server, "ACL", "SETUSER", "poor", "on", ">poor", "~*", "+get")
        admin(server, "CONFIG", "SET", "requirepass", "right")
        ownership = RedisOwnershipMap(url.format(port=server.port), fleet)
        with pytest.raises(OwnershipUnavailable, match=told) as caught:
            await ownership.connect()
        assert "\n" not in str(caught.value)
        assert "wrong" not in str(caught.value).replace("wrong user", "")
        await ownership.close()


# --- R5: memory ------------------------------------------------------------------------------------------------------


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
            await until(lambda: _true(collector.counters["refused"] >= 2))
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
            await until(lambda: _true(collector.record.pending == 0))  # its journal may just be written anew


async def test_r5_a_chain_with_an_evicted_middle_is_found_and_made_whole(
    fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedValkey() as server:
        async with fleet_on(server.url, fleet) as live:
            live.store(1, 3000)
            await live.until_credit(1, 3000, 3000)
            hashes = prompt(ids_of(1, 3000))
            for depth in range(1000, 1300):
                admin(server, "DEL", live.maps[0]._prefix + b"b" + hashes[depth])
            await until(lambda: _true(live.collectors[0].counters["repairs"] >= 1))
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
            await until(lambda: _true(sum(one.counters["repairs"] for one in live.collectors) >= 1))
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


# --- what is forgotten -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["FLUSHALL", "FUNCTION FLUSH"])
async def test_flushed_keys_or_functions_come_back_by_themselves(fleet: str, command: str) -> None:
    with EmbeddedValkey() as server:
        async with fleet_on(server.url, fleet) as live:
            live.store(1, 500)
            await live.until_credit(1, 500, 500)
            before = live.collectors[0].lease
            admin(server, *command.split())
            await live.until_credit(1, 500, 500)
            await live.until_true()
            after = live.collectors[0].lease
            assert before is not None
            assert after is not None
            assert (after.epoch > before.epoch) == (command == "FLUSHALL")


async def test_members_that_a_server_forgot_are_swept_and_never_credited_again(fleet: str) -> None:
    with EmbeddedValkey() as server:
        async with fleet_on(server.url, fleet) as live:
            live.store(1, 100)
            await live.until_credit(1, 100, 100)
            lost = live.collectors[0].lease
            assert lost is not None
            for key in (b"m", b"s", b"e"):
                admin(server, "DEL", live.maps[0]._prefix + key)
            live.remove(1, 50)
            await live.until_credit(1, 100, 50)

            async def swept() -> bool:
                await live.maps[0].sweep(1000)
                entries = [entry async for part in live.maps[0].holdings() for _, entry in part]
                return not any(lost.slot.to_bytes(2) + b"\0\0" in entry for entry in entries)

            assert live.collectors[0].lease is not None
            assert live.collectors[0].lease.slot != lost.slot
            admin(server, "SADD", live.maps[0]._prefix + b"s", lost.slot.to_bytes(2))
            await until(swept)
            await live.until_true()


# --- ways to get there -----------------------------------------------------------------------------------------------


async def test_tls_and_an_acl_user_with_the_documented_permissions(fleet: str, tmp_path: Path) -> None:
    from router.ownership.client import PERMISSIONS

    key, cert = certificate(tmp_path)
    with EmbeddedValkey() as server:
        admin(server, "ACL", "SETUSER", "whohas", "on", ">p@ss", *PERMISSIONS.split())
        async with proxy(server.port, (key, cert)) as tls:
            url = f"rediss://whohas:p%40ss@127.0.0.1:{tls.port}/0?ssl_ca_certs={cert}"
            async with fleet_on(url, fleet) as live:
                live.store(1, 20)
                await live.until_credit(1, 20, 20)
                live.remove(1, 3)
                await live.until_credit(1, 20, 3)
                await live.until_true()
                while await live.maps[0].sweep(100):
                    pass
            stranger = RedisOwnershipMap(f"rediss://whohas:p%40ss@127.0.0.1:{tls.port}/0", fleet)
            with pytest.raises(OwnershipUnavailable, match="certificate"):
                await stranger.connect()
            await stranger.close()


async def test_two_versions_of_the_functions_work_side_by_side(fleet: str, valkey_url: str) -> None:
    """A rolling update: the newer routers' library has another name, both work on the same keys."""
    async with fleet_on(valkey_url, fleet) as live:
        newer = RedisOwnershipMap(valkey_url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
        newer._code = newer._code.replace(newer._name, "whohas_newer")
        newer._name = "whohas_newer"
        await newer.connect()
        live.store(1, 20)
        await live.until_credit(1, 20, 20)
        found = (await newer.look_up(prompt(ids_of(1, 20)))).matches
        assert list(found.values()) == [Match(20, 20)]
        await newer.close()
