"""Redis refuses, stalls or forgets, replicas die: look-ups stay bounded, nothing wrong is credited, all heals."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from replicas.collector import Collector
from replicas.events import BlockStored, KVEventBatch
from replicas.ports import quiet_port
from replicas.subscriber import Batch
from router.errors import OwnershipUnavailable
from router.hashing import pack_token_ids
from router.ownership import Match, ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from serve.embedded_valkey import EmbeddedValkey
from tests.integration.redis_fleet import DEADLINE_S, Fleet, fleet_on, ids_of, true, until
from tests.redis_servers import admin, certificate, proxy
from tests.token_ids import BLOCK as B
from tests.token_ids import blocks_of

pytestmark = pytest.mark.integration


# --- R1: leases and epochs ------------------------------------------------------------------------------------------
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
        await until(lambda: true(collector.in_sync))
        lease = collector.lease
        assert lease is not None
        collector._task.cancel()  # type: ignore[union-attr]  # kill -9: nobody says good-bye
        await asyncio.wait([collector._task])  # type: ignore[list-item]

        async def gone() -> bool:
            return lease.slot not in (await live.maps[2].look_up(blocks_of(ids_of(7, 10)))).matches

        await until(gone)
        while not await dying.sweep(1000, grace_s=0.001):
            await asyncio.sleep(0.05)
        left = [block async for part in dying.holdings() for block, _ in part]
        assert not set(left) & set(blocks_of(ids_of(7, 10)))
        await dying.close()


# --- R4: refused, wrong password, stalls ----------------------------------------------------------------------------
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
    with EmbeddedValkey(quiet_port()) as server:  # nobody takes it while it is down
        async with fleet_on(server.url, fleet) as live:
            live.store(1, 20)
            await live.until_credit(1, 20, 20)
            server.stop()
            for _ in range(100):
                assert len((await live.ask(1, 20)).decision.candidates) == 2
            await until(lambda: true(bool(live.router.degraded)))
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


# --- what is forgotten ----------------------------------------------------------------------------------------------
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


# --- ways to get there ----------------------------------------------------------------------------------------------
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
        found = (await newer.look_up(blocks_of(ids_of(1, 20)))).matches
        assert list(found.values()) == [Match(20, 20)]
        await newer.close()
