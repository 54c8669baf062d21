"""Every ownership map keeps the same promises; the in-memory one is the reference."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from router.errors import Fenced
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Lease, Match, OwnershipMap, ReplicaRecord, RouterRecord, Sweeper, Write
from router.ownership.memory import MemoryOwnershipMap
from router.ownership.redis import RedisOwnershipMap
from router.types import BlockHash, Load

LEASE_S = 30.0
ROOT = root_hash("model")


class SweepingMap(OwnershipMap, Sweeper): ...


@pytest.fixture(params=["memory", "redis"])
async def ownership(request: pytest.FixtureRequest) -> AsyncIterator[SweepingMap]:
    if request.param == "memory":
        yield MemoryOwnershipMap(time.monotonic)  # type: ignore[misc]
        return
    url, fleet = request.getfixturevalue("valkey_url"), request.getfixturevalue("fleet")
    redis_map = RedisOwnershipMap(url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
    await redis_map.connect()
    yield redis_map  # type: ignore[misc]
    await redis_map.close()


def blocks(n: int, first: int = 0) -> list[BlockHash]:
    return chain(ROOT, pack_token_ids(range(first, first + 16 * n)), 16)


def replica(name: str, **fields: object) -> ReplicaRecord:
    return ReplicaRecord(name, "model", 16, **fields)  # type: ignore[arg-type]


async def joined(ownership: OwnershipMap, name: str, lease_s: float = LEASE_S) -> Lease:
    return await ownership.join(name, replica(name), lease_s)


async def depths(ownership: OwnershipMap, hashes: list[BlockHash]) -> dict[str, Match]:
    snapshot = await ownership.look_up(hashes)
    return {snapshot.replicas[slot].replica_id: match for slot, match in snapshot.matches.items()}


async def test_each_replica_is_credited_with_its_longest_prefix(ownership: SweepingMap) -> None:
    long, short, none = [await joined(ownership, name) for name in ("long", "short", "none")]
    hashes = blocks(100)
    await ownership.write(long, [Write(long.slot, added=hashes[:77])])
    await ownership.write(short, [Write(short.slot, added=hashes[:1])])
    await ownership.write(none, [Write(none.slot, added=blocks(5, first=7))])
    assert await depths(ownership, hashes) == {"long": Match(77, 77), "short": Match(1, 1)}


@pytest.mark.parametrize("depth", [1, 2, 3, 15, 16, 17, 255, 256])
async def test_every_depth_is_found_exactly(ownership: SweepingMap, depth: int) -> None:
    lease = await joined(ownership, "a")
    hashes = blocks(256)
    await ownership.write(lease, [Write(lease.slot, added=hashes[:depth])])
    assert await depths(ownership, hashes) == {"a": Match(depth, depth)}


async def test_an_empty_chain_still_tells_who_is_there(ownership: SweepingMap) -> None:
    lease = await ownership.join("a", replica("a", url="http://127.0.0.1:1", blocks=3), LEASE_S)
    snapshot = await ownership.look_up([])
    assert snapshot.replicas == {lease.slot: replica("a", url="http://127.0.0.1:1", blocks=3)}
    assert not snapshot.matches


async def test_removed_blocks_give_no_credit_and_writing_twice_changes_nothing(ownership: SweepingMap) -> None:
    lease = await joined(ownership, "a")
    hashes = blocks(8)
    for _ in range(2):
        await ownership.write(lease, [Write(lease.slot, added=hashes)])
    for _ in range(2):
        await ownership.write(lease, [Write(lease.slot, removed=hashes[5:])])
    assert await depths(ownership, hashes) == {"a": Match(5, 5)}


async def test_long_lists_are_written_whole(ownership: SweepingMap) -> None:
    lease = await joined(ownership, "a")
    hashes = blocks(5000)
    await ownership.write(lease, [Write(lease.slot, added=hashes)])
    assert await depths(ownership, hashes) == {"a": Match(5000, 5000)}
    await ownership.write(lease, [Write(lease.slot, added=blocks(1500, first=3), removed=hashes[2500:])])
    assert await depths(ownership, hashes) == {"a": Match(2500, 2500)}


async def test_a_claim_extends_the_overlap_but_not_what_is_owned(ownership: SweepingMap) -> None:
    owner = await joined(ownership, "a")
    router = await ownership.join("router", RouterRecord(), LEASE_S)
    hashes = blocks(20)
    await ownership.write(owner, [Write(owner.slot, added=hashes[:4])])
    await ownership.write(router, [Write(owner.slot, added=hashes[4:])])
    assert await depths(ownership, hashes) == {"a": Match(4, 20)}
    await ownership.write(owner, [Write(owner.slot, added=hashes[4:10])])
    await ownership.write(router, [Write(owner.slot, removed=hashes[4:])])
    assert await depths(ownership, hashes) == {"a": Match(10, 10)}


async def test_a_renewal_takes_writes_along(ownership: SweepingMap) -> None:
    owner = await joined(ownership, "a")
    router = await ownership.join("router", RouterRecord(), LEASE_S)
    hashes, busy = blocks(3000), RouterRecord({owner.slot: Load(1, 0, 48_000)})
    await ownership.renew(router, busy, LEASE_S, [Write(owner.slot, added=hashes)])
    snapshot = await ownership.look_up(hashes)
    assert (snapshot.matches, snapshot.routers) == ({owner.slot: Match(0, 3000)}, {router.slot: busy})
    await ownership.renew(router, RouterRecord(), LEASE_S)
    await ownership.write(router, [Write(owner.slot, removed=hashes[2000:])])
    await ownership.renew(router, RouterRecord(), LEASE_S, [Write(owner.slot, removed=hashes[7:2000])])
    snapshot = await ownership.look_up(hashes)
    assert (snapshot.matches, snapshot.routers) == ({owner.slot: Match(0, 7)}, {router.slot: RouterRecord()})
    await ownership.join("router", RouterRecord(), LEASE_S)
    with pytest.raises(Fenced):
        await ownership.renew(router, busy, LEASE_S, [Write(owner.slot, added=hashes)])
    assert await depths(ownership, hashes) == {}


async def test_each_routers_claims_are_told_apart_where_they_go_beyond_what_is_owned(
    ownership: SweepingMap,
) -> None:
    owner, other = await joined(ownership, "a"), await joined(ownership, "b")
    first, second = [await ownership.join(name, RouterRecord(), LEASE_S) for name in ("r1", "r2")]
    hashes = blocks(300)
    await ownership.write(first, [Write(owner.slot, added=hashes[:260]), Write(other.slot, added=hashes[:7])])
    await ownership.write(second, [Write(owner.slot, added=hashes[:256])])
    found = (await ownership.look_up(hashes)).matches
    assert found[owner.slot].claimed == {first.slot: 260, second.slot: 256}
    assert found[other.slot].claimed == {first.slot: 7}
    await ownership.write(owner, [Write(owner.slot, added=hashes[:257])])
    assert (await ownership.look_up(hashes)).matches[owner.slot].claimed == {first.slot: 260}


async def test_two_routers_claims_end_separately(ownership: SweepingMap) -> None:
    owner = await joined(ownership, "a")
    first, second = [await ownership.join(name, RouterRecord(), LEASE_S) for name in ("r1", "r2")]
    hashes = blocks(6)
    for router in (first, second):
        await ownership.write(router, [Write(owner.slot, added=hashes)])
    await ownership.write(first, [Write(owner.slot, removed=hashes)])
    assert await depths(ownership, hashes) == {"a": Match(0, 6)}
    await ownership.write(second, [Write(owner.slot, removed=hashes)])
    assert await depths(ownership, hashes) == {}


async def test_a_router_that_left_claims_nothing(ownership: SweepingMap) -> None:
    owner = await joined(ownership, "a")
    router = await ownership.join("router", RouterRecord({owner.slot: Load(1, 0, 64)}), LEASE_S)
    await ownership.write(router, [Write(owner.slot, added=blocks(6))])
    await ownership.leave(router)
    snapshot = await ownership.look_up(blocks(6))
    assert not snapshot.matches
    assert not snapshot.routers


async def test_loads_are_told_whole_and_replace_what_was_told_before(ownership: SweepingMap) -> None:
    router = await ownership.join("router", RouterRecord({7: Load(1, 2, 300)}), LEASE_S)
    await ownership.renew(router, RouterRecord({7: Load(0, 3, 0)}), LEASE_S)
    snapshot = await ownership.look_up([])
    assert snapshot.routers == {router.slot: RouterRecord({7: Load(0, 3, 0)})}


async def test_a_new_incarnation_has_a_higher_epoch_and_none_of_the_old_credit(ownership: SweepingMap) -> None:
    old = await joined(ownership, "a")
    await ownership.write(old, [Write(old.slot, added=blocks(4))])
    new = await joined(ownership, "a")
    assert new.epoch > old.epoch
    assert new.slot != old.slot
    assert await depths(ownership, blocks(4)) == {}


async def test_an_older_incarnation_can_write_nothing_more(ownership: SweepingMap) -> None:
    old = await joined(ownership, "a")
    new = await joined(ownership, "a")
    with pytest.raises(Fenced):
        await ownership.write(old, [Write(old.slot, added=blocks(4))])
    with pytest.raises(Fenced):
        await ownership.renew(old, replica("a"), LEASE_S)
    await ownership.leave(old)  # too late to end anything
    assert set((await ownership.look_up([])).replicas) == {new.slot}


async def test_a_lapsed_lease_gives_no_credit_and_a_renewed_one_does(ownership: SweepingMap) -> None:
    lease = await joined(ownership, "a", lease_s=0.05)
    await ownership.write(lease, [Write(lease.slot, added=blocks(4))])
    await asyncio.sleep(0.1)
    assert await depths(ownership, blocks(4)) == {}
    await ownership.renew(lease, replica("a"), LEASE_S)
    assert await depths(ownership, blocks(4)) == {"a": Match(4, 4)}


async def test_an_untrusted_replica_is_known_but_gets_no_credit(ownership: SweepingMap) -> None:
    lease = await joined(ownership, "a")
    await ownership.write(lease, [Write(lease.slot, added=blocks(4))])
    await ownership.renew(lease, replica("a", trusted=False), LEASE_S)
    assert await depths(ownership, blocks(4)) == {}
    assert (await ownership.look_up([])).replicas[lease.slot].trusted is False


async def test_sweeping_frees_what_the_ended_left_and_nothing_else(ownership: SweepingMap) -> None:
    gone, stays = await joined(ownership, "gone"), await joined(ownership, "stays")
    await ownership.write(gone, [Write(gone.slot, added=blocks(50))])
    await ownership.write(stays, [Write(stays.slot, added=blocks(30))])
    await ownership.leave(gone)
    handled = 0
    while (slice_ := await ownership.sweep(16)) > 0:
        handled += slice_
    assert handled == 50
    assert await depths(ownership, blocks(50)) == {"stays": Match(30, 30)}


async def test_a_lapsed_member_may_come_back_until_the_grace_is_over(ownership: SweepingMap) -> None:
    lease = await joined(ownership, "a", lease_s=0.001)
    await ownership.write(lease, [Write(lease.slot, added=blocks(10))])
    await asyncio.sleep(0.1)
    assert await ownership.sweep(100, grace_s=60) == 0
    await ownership.renew(lease, replica("a"), 0.001)
    await asyncio.sleep(0.1)
    assert await ownership.sweep(100, grace_s=0.001) == 10
    with pytest.raises(Fenced):
        await ownership.renew(lease, replica("a"), LEASE_S)


async def test_hashes_that_differ_in_one_bit_stay_apart(ownership: SweepingMap) -> None:
    lease = await joined(ownership, "a")
    high = BlockHash(b"\xff" * 16)
    await ownership.write(lease, [Write(lease.slot, added=[high, BlockHash(bytes(16))])])
    for near in (b"\xff" * 15 + b"\xfe", b"\x7f" + b"\xff" * 15, bytes(15) + b"\x01", b"\r\n" * 8):
        assert await depths(ownership, [BlockHash(near)]) == {}
    assert await depths(ownership, [high]) == {"a": Match(1, 1)}


async def test_turning_the_journal_changes_no_credit_and_what_is_left_is_still_swept(ownership: SweepingMap) -> None:
    lease = await joined(ownership, "a")
    hashes = blocks(50)
    await ownership.write(lease, [Write(lease.slot, added=hashes)])
    await ownership.write(lease, [Write(lease.slot, removed=hashes[30:])])
    await ownership.turn_journal(lease, done=False)
    assert await depths(ownership, hashes) == {"a": Match(30, 30)}
    await ownership.write(lease, [Write(lease.slot, added=hashes[:30])])
    await ownership.turn_journal(lease, done=True)
    assert await depths(ownership, hashes) == {"a": Match(30, 30)}
    await ownership.leave(lease)
    handled = 0
    while (slice_ := await ownership.sweep(16)) > 0:
        handled += slice_
    assert handled == 30
