"""What must hold after any schedule, however the faults fell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from router.hashing import reusable_blocks
from router.types import BlockHash, Slot
from tests.faults.system import System
from tests.token_ids import BLOCK, blocks_of


class Broken(AssertionError):
    """An invariant does not hold."""


async def every_request_ended_once(system: System) -> None:
    odd = {number: outcomes for number, outcomes in system.outcomes.items() if len(outcomes) != 1}
    if odd:
        raise Broken(f"requests with no outcome or several: {odd}")


async def counters_are_zero_at_rest(system: System) -> None:
    for router, _, _ in system.routers:
        left = {one.name: router.load(one.name) for one in system.replicas if any(_figures(router.load(one.name)))}
        if left:
            raise Broken(f"{router.name} still has booked {left}")
    told = await system.direct.look_up(())
    for record in told.routers.values():
        if record.loads:
            raise Broken(f"a router still tells {dict(record.loads)}")
    if len(told.routers) != len(system.routers):
        raise Broken(f"{len(told.routers)} routers in the map, not {len(system.routers)}")


def _figures(load: object) -> list[int]:
    return [getattr(load, name) for name in ("num_waiting", "num_decoding", "prefill_tokens")]


async def no_credit_to_an_ended_incarnation(system: System) -> None:
    ended = {slot for _, slot in system.ended}
    for prompt in system.prompts:
        matches = (await system.direct.look_up(blocks_of(prompt))).matches
        if wrong := ended & set(matches):
            raise Broken(f"slots {wrong} have ended and are credited")


async def the_map_says_what_the_collectors_hold(system: System) -> None:
    held: dict[Slot, frozenset[BlockHash]] = {}
    for replica in system.replicas:
        lease = replica.collector.lease
        if lease is None or not replica.collector.in_sync:
            raise Broken(f"{replica.name} has not written everything")
        held[lease.slot] = replica.collector.published
    found: dict[int, set[BlockHash]] = {slot: set() for slot in held}
    async for part in system.direct.holdings():
        for block, entries in part:
            for i in range(0, len(entries), 4):
                owner, claimant = int.from_bytes(entries[i : i + 2]), int.from_bytes(entries[i + 2 : i + 4])
                if claimant:
                    raise Broken(f"router {claimant} still claims a block")
                if owner not in held:
                    raise Broken(f"a block of {owner}, who has ended, is left")
                found[owner].add(block)
    for replica in system.replicas:
        lease = replica.collector.lease
        assert lease is not None
        if found[lease.slot] != held[lease.slot]:
            raise Broken(f"{replica.name}: {len(found[lease.slot])} blocks in the map, {len(held[lease.slot])} held")


async def no_more_is_promised_than_engines_hold(system: System) -> None:
    slots = {one.collector.lease.slot: one for one in system.replicas if one.collector.lease is not None}
    for prompt in system.prompts:
        asked = blocks_of(prompt)[: reusable_blocks(len(prompt), BLOCK)]
        snapshot = await system.direct.look_up(asked)
        for slot, match in snapshot.matches.items():
            replica = slots.get(slot)
            if replica is None or match.overlap > replica.cached(prompt):
                raise Broken(f"slot {slot} is credited with {match}, its engine holds less")


async def everybody_is_back(system: System) -> None:
    snapshot = await system.direct.look_up(())
    names = {record.replica_id for record in snapshot.replicas.values() if record.trusted}
    if names != {one.name for one in system.replicas}:
        raise Broken(f"trusted in the map: {names}")
    if late := [router.name for router, _, _ in system.routers if router.degraded]:
        raise Broken(f"{late} still route by load alone")


async def nothing_is_left_behind(system: System) -> None:
    """Redis keeps keys of the living only."""
    live = {one.collector.lease.slot for one in system.replicas if one.collector.lease is not None}
    live |= {router.lease.slot for router, _, _ in system.routers if router.lease is not None}
    prefix = system.direct._prefix
    async with Redis.from_url(system.valkey.url, socket_timeout=None) as client:
        for kind in (b"w", b"o"):
            start = len(prefix) + 1
            keys = [key async for key in client.scan_iter(match=prefix + kind + b"*", count=1000)]
            if odd := [key for key in keys if int.from_bytes(key[start:]) not in live]:
                raise Broken(f"journals of the dead: {odd}")
        for one in await client.smembers(prefix + b"s"):
            if int.from_bytes(one) not in live:
                raise Broken("a slot of the dead is in use")


INVARIANTS: tuple[Callable[[System], Awaitable[None]], ...] = (
    every_request_ended_once,
    counters_are_zero_at_rest,
    no_credit_to_an_ended_incarnation,
    everybody_is_back,
    the_map_says_what_the_collectors_hold,
    no_more_is_promised_than_engines_hold,
    nothing_is_left_behind,
)


async def check_all(system: System, bound_s: float) -> float:
    """Raises `Broken` with the first that doesn't hold within the bound; returns how many seconds it took."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        try:
            for invariant in INVARIANTS:
                await invariant(system)
            return clock() - began
        except Broken:
            if clock() - began > bound_s:
                raise
        await asyncio.sleep(0.05)
