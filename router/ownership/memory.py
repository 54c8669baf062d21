"""The ownership map in one process: the slow, obvious reference, and the map of simulations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from router.errors import Fenced
from router.ownership import Kind, Lease, Match, Record, ReplicaRecord, RouterRecord, Snapshot, Write
from router.types import BlockHash, Slot

_NO_CLAIMANT = 0


@dataclass(slots=True)
class _Member:
    lease: Lease
    record: Record
    expires_at: float


class MemoryOwnershipMap:
    """`clock` gives seconds; leases are measured on it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._holders: dict[BlockHash, set[tuple[int, int]]] = {}
        self._epoch = 0

    async def join(self, member: str, record: Record, lease_s: float) -> Lease:
        self._epoch += 1
        kind: Kind = "replica" if isinstance(record, ReplicaRecord) else "router"
        lease = Lease(member, kind, Slot(self._epoch), self._epoch)
        self._members[member] = _Member(lease, record, self._clock() + lease_s)
        return lease

    async def renew(self, lease: Lease, record: Record, lease_s: float, writes: Sequence[Write] = ()) -> None:
        member = self._current(lease)
        self._apply(lease, writes)
        member.record = record
        member.expires_at = self._clock() + lease_s

    async def leave(self, lease: Lease) -> None:
        member = self._members.get(lease.member)
        if member is not None and member.lease == lease:
            del self._members[lease.member]

    async def write(self, lease: Lease, writes: Sequence[Write]) -> None:
        self._current(lease)
        self._apply(lease, writes)

    async def look_up(self, hashes: Sequence[BlockHash]) -> Snapshot:
        now = self._clock()
        live = [member for member in self._members.values() if member.expires_at > now]
        replicas = {m.lease.slot: m.record for m in live if isinstance(m.record, ReplicaRecord)}
        routers = {m.lease.slot: m.record for m in live if isinstance(m.record, RouterRecord)}
        matches = {}
        for slot, record in replicas.items():
            owned = self._prefix(hashes, {(slot, _NO_CLAIMANT)})
            overlap = self._prefix(hashes, {(slot, _NO_CLAIMANT), *((slot, router) for router in routers)})
            if overlap and record.trusted:
                matches[slot] = Match(owned, overlap, self._claimed(hashes[owned:overlap], slot, owned, routers))
        return Snapshot(replicas, routers, matches)

    async def sweep(self, max_blocks: int, grace_s: float = 10.0) -> int:
        over = self._clock() - grace_s
        for name, member in list(self._members.items()):
            if member.expires_at < over:
                del self._members[name]
        live = {member.lease.slot for member in self._members.values()}
        dead = [
            (block, entry)
            for block, entries in self._holders.items()
            for entry in entries
            if (entry[1] or entry[0]) not in live
        ]
        for block, entry in dead[:max_blocks]:
            self._drop(block, entry)
        return min(len(dead), max_blocks)

    async def turn_journal(self, lease: Lease, done: bool) -> None:
        self._current(lease)  # there is no journal here

    async def missing(self, lease: Lease, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        self._current(lease)
        entry = (lease.slot, _NO_CLAIMANT)
        return [block for block in hashes if entry not in self._holders.get(block, ())]

    def _apply(self, lease: Lease, writes: Sequence[Write]) -> None:
        for change in writes:
            entry = (change.owner, _NO_CLAIMANT if change.owner == lease.slot else lease.slot)
            for block in change.removed:
                self._drop(block, entry)
            for block in change.added:
                self._holders.setdefault(block, set()).add(entry)

    def _current(self, lease: Lease) -> _Member:
        member = self._members.get(lease.member)
        if member is None or member.lease != lease:
            raise Fenced(lease.member)
        return member

    def _prefix(self, hashes: Sequence[BlockHash], entries: set[tuple[int, int]]) -> int:
        for depth, block in enumerate(hashes):
            if not entries & self._holders.get(block, set()):
                return depth
        return len(hashes)

    def _claimed(
        self, hashes: Sequence[BlockHash], slot: Slot, depth: int, routers: Collection[Slot]
    ) -> dict[Slot, int]:
        claimed: dict[Slot, int] = {}
        for end, block in enumerate(hashes, depth + 1):
            for owner, claimant in self._holders[block]:
                if owner == slot and claimant in routers:
                    claimed[Slot(claimant)] = end
        return claimed

    def _drop(self, block: BlockHash, entry: tuple[int, int]) -> None:
        entries = self._holders.get(block)
        if entries is not None:
            entries.discard(entry)
            if not entries:
                del self._holders[block]
