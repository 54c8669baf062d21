"""Redis fails over, lags behind, or moves to other nodes: nothing wrong is credited, and all heals."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from serve.embedded_valkey import EmbeddedValkey
from tests.integration.redis_fleet import DEADLINE_S, fleet_on
from tests.redis_servers import admin, cluster, fail_over, follow, pair, proxy, sentinel, wait_until

pytestmark = pytest.mark.integration


# --- R2: failover ---------------------------------------------------------------------------------------------------
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


# --- R3: cluster ----------------------------------------------------------------------------------------------------
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
                admin(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 30_000, "REPLACE", "KEYS", *keys)
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
