"""A request before and after it is placed, and what its look-up says. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from router.load import Reservation
from router.ownership import Match, Snapshot
from router.trust import DOUBT
from router.types import BlockHash, Decision, ReplicaId, ReplicaView, Slot


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with all that is known about its prompt, not placed yet.

    `hashes`: every full block; an engine can reuse the first `reusable` of them. `head_only`: what follows them is not
    known, for there are media in it. `note` says why nothing is known. `session` stands for its conversation, where its
    client told: among replicas of equal cost it has a favourite. `token_ids` as in `HashedPrompt`.
    """

    num_tokens: int
    block_size: int = 0
    hashes: Sequence[BlockHash] = ()
    reusable: int = 0
    snapshot: Snapshot = field(default_factory=Snapshot)
    note: str = ""
    session: int = 0
    head_only: bool = False
    token_ids: bytes = b""


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision and what it booked; the holder must release the reservation exactly when the request is over.

    `promised`: cached tokens by the replica's own events: without claims, which others may have given up meanwhile, and
    without any discount for earlier promises that were not kept. `token_ids`: for the engine, see `router.handover`;
    empty for one that has not shown that it has the same ids.
    """

    decision: Decision
    reservation: Reservation
    promised: int = 0
    token_ids: bytes = b""


def favourite(session: int, candidates: Sequence[ReplicaId]) -> int:
    """Index of the replica that this conversation has first turn at; most keep theirs when replicas come and go."""
    return max(range(len(candidates)), key=lambda i: xxh3_64_intdigest(candidates[i].encode(), session))


def slots(snapshot: Snapshot) -> dict[str, Slot]:
    return {record.replica_id: slot for slot, record in snapshot.replicas.items()}


def credited(asked: Asked, slot: Slot) -> bool:
    """May this replica's blocks be compared with the prompt's, and relied on?"""
    record = asked.snapshot.replicas[slot]
    comparable = record.media or not asked.head_only
    return record.trusted and record.block_size == asked.block_size and comparable


def proven(asked: Asked, slot: Slot) -> bool:
    """Has this replica's engine shown that it makes the same ids of a prompt?"""
    return credited(asked, slot) and not asked.snapshot.replicas[slot].doubt


def promised(asked: Asked, slot: Slot | None) -> int:
    if slot is None or not credited(asked, slot):
        return 0
    return asked.snapshot.matches.get(slot, Match()).owned * asked.block_size


def fleet_block_size(snapshot: Snapshot) -> int:
    """The fleet's block size; where replicas differ, that of most of them. 0 while none is known."""
    sizes = Counter(record.block_size for record in snapshot.replicas.values())
    return sizes.most_common(1)[0][0] if sizes else 0


def held_blocks(asked: Asked) -> int:
    """The longest prefix that anybody holds by its events."""
    return max((match.owned for match in asked.snapshot.matches.values()), default=0)


def burst_key(asked: Asked, views: Sequence[ReplicaView]) -> int | None:
    longest = max(view.overlap_blocks for view in views)
    if longest <= max(view.owned_blocks for view in views):
        return None
    return int.from_bytes(asked.hashes[longest - 1][:4], "little")


def reason(asked: Asked, best: ReplicaView, views: Sequence[ReplicaView]) -> str:
    if asked.note:
        return f"by load alone: {asked.note}"
    longest = max(view.overlap_blocks for view in views)
    doubted = [view.replica_id for view in views if view.trust < DOUBT]
    if doubted:
        return f"by what is held, but {', '.join(doubted)} reused far less than its events promised and is discounted"
    if longest == 0:
        return "nobody holds a block of this prompt: the least busy replica"
    held = f"{best.overlap_blocks} of {len(asked.hashes)} blocks held"
    if best.overlap_blocks == longest:
        return f"{held}, the most anywhere, at the lowest cost"
    return f"{held}; another replica holds {longest} but costs more"
