"""Does the ownership map say what the collectors hold? For `whohas map --check`.

A collector tells with each renewal of its lease how many blocks it holds, and a digest of them. A walk over all keys
gives the same figures for what the map lists. Both are comparable where a replica told the same before and after.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from router.ownership import Member, ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from router.types import Slot

State = Literal["equal", "differs", "changing"]
_ENTRY = struct.Struct(">HH")
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Checked:
    """One replica. `changing`: it stored and evicted all the time, so that the figures can't be compared."""

    replica: str
    state: State
    in_map: int
    told: int


@dataclass(frozen=True, slots=True)
class Result:
    """`left_behind`: entries of members that have ended, which collectors sweep."""

    replicas: tuple[Checked, ...]
    claims: int
    left_behind: int

    @property
    def wrong(self) -> bool:
        return any(one.state == "differs" for one in self.replicas)


@dataclass
class _Found:
    blocks: Counter[int]
    digests: Counter[int]
    claims: Counter[int]  # by the claiming router


async def check(ownership: RedisOwnershipMap, attempts: int = 5) -> Result:
    """Walks again while a replica is changing, at most `attempts` times. Raises `OwnershipUnavailable`."""
    result = await _check_once(ownership)
    for _ in range(attempts - 1):
        if all(one.state == "equal" for one in result.replicas):
            break
        result = await _check_once(ownership)
    return result


async def _check_once(ownership: RedisOwnershipMap) -> Result:
    before = _replicas(await ownership.members())
    found = await _walk(ownership)
    members = await _renewed(ownership)
    after = _replicas(members)
    rows = []
    for slot, record in after.items():
        in_map = (found.blocks[slot], found.digests[slot])
        told = (record.blocks, record.digest)
        earlier = before.get(slot)
        still = earlier is not None and (earlier.blocks, earlier.digest) == told and not record.pending
        state: State = "equal" if in_map == told else "differs" if still else "changing"
        rows.append(Checked(record.replica_id, state, in_map[0], record.blocks))
    live = {one.lease.slot for one in members if one.expires_in_s > 0}
    left = sum(count for slot, count in (found.blocks + found.claims).items() if slot not in live)
    claims = sum(count for slot, count in found.claims.items() if slot in live)
    return Result(tuple(rows), claims, left)


async def _walk(ownership: RedisOwnershipMap) -> _Found:
    found = _Found(Counter(), Counter(), Counter())
    async for part in ownership.holdings():
        for block, entries in part:
            for owner, claimant in _ENTRY.iter_unpack(entries):
                if claimant:
                    found.claims[claimant] += 1
                else:
                    found.blocks[owner] += 1
                    found.digests[owner] ^= int.from_bytes(block[:8])
    return found


async def _renewed(ownership: RedisOwnershipMap) -> list[Member]:
    """The members once each live replica has told of itself anew: what it told before may be older than the walk."""
    seen = {one.lease.slot: one.expires_at for one in await ownership.members()}
    while True:
        members = await ownership.members()
        replicas = [one for one in members if one.lease.kind == "replica" and one.expires_in_s > 0]
        if all(one.expires_at != seen.get(one.lease.slot) for one in replicas):
            return members
        await asyncio.sleep(_POLL_S)


def _replicas(members: list[Member]) -> dict[Slot, ReplicaRecord]:
    return {
        one.lease.slot: one.record for one in members if isinstance(one.record, ReplicaRecord) and one.expires_in_s > 0
    }
