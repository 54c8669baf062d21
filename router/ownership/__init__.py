"""The ownership map: which member holds which block, and how busy is it?

Members are replicas (they own blocks) and routers (they *claim*, for a replica, the blocks that a request in flight
is about to compute there). Each `join` starts an incarnation: a new slot and a new epoch. From then on nothing that an
earlier incarnation of the member wrote gives credit, and its later writes are refused (`Fenced`).
A lease ends by itself `lease_s` after the last `renew`; with it ends all credit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from router.types import BlockHash, Load, Slot

Kind = Literal["replica", "router"]


@dataclass(frozen=True, slots=True)
class Lease:
    """One incarnation of a member. `epoch` grows with every join in the fleet."""

    member: str
    kind: Kind
    slot: Slot
    epoch: int


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """What a replica tells about itself with every `renew`.

    `trusted` is False while its collector is not sure of its engine's blocks or of what the map says of them, and for
    good where its engine was found not to cache what the router computes (`doubt` says what differs). Such a replica
    gets no credit. `digest` is that of the `blocks` it holds (see `BlockSet`); `pending` of them, or of those that it
    held, are still to be told. `unused` counts what its engine's events told that could not be used, by the collector's
    name for the reason; empty where all was. `media`: it was seen to cache what stands before an image as the router
    computes it. `dp_rank`: it is one of several data-parallel ranks behind `url`. `asleep`: its engine computes nothing
    until it is woken.
    """

    replica_id: str
    model: str
    block_size: int
    url: str = ""
    blocks: int = 0
    seq: int = -1
    trusted: bool = True
    doubt: str = ""
    pending: int = 0
    digest: int = 0
    unused: Mapping[str, int] = field(default_factory=dict)
    media: bool = False
    dp_rank: int | None = None
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """What a router tells with every `renew`: its own bookings in full, by replica slot; never increments. `doubted`:
    slots of replicas whose engines reused far less than their ownership promised; their collectors should start anew.
    """

    loads: Mapping[int, Load] = field(default_factory=dict)
    doubted: tuple[int, ...] = ()


Record = ReplicaRecord | RouterRecord


@dataclass(frozen=True, slots=True)
class Write:
    """Blocks that came and went for one owner. `owner` is the replica's slot: the writer's own, or, in a router's
    claim, that of the replica which is about to compute them. Removals are applied first."""

    owner: Slot
    added: Sequence[BlockHash] = ()
    removed: Sequence[BlockHash] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """Longest prefix of the asked chain at one replica, in blocks. `overlap` also counts live routers' claims;
    `claimed`: how far the claims of each go, by router's slot, of those that go beyond `owned`."""

    owned: int = 0
    overlap: int = 0
    claimed: Mapping[Slot, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The answer to one look-up: live members only, keyed by slot. A replica without a match is not in `matches`."""

    replicas: Mapping[Slot, ReplicaRecord] = field(default_factory=dict)
    routers: Mapping[Slot, RouterRecord] = field(default_factory=dict)
    matches: Mapping[Slot, Match] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Member:
    """One member as the map has it. `expires_in_s` is 0 or less once its lease has lapsed, at `expires_at` (ms) by the
    store's clock."""

    lease: Lease
    record: Record
    expires_in_s: float
    expires_at: float


class OwnershipMap(Protocol):
    """Shared by routers and collectors of one fleet (application + model).

    Every method raises `OwnershipUnavailable` where the store can't be reached in time; `renew` and `write` raise
    `Fenced` when the lease is no longer the member's current one, or the store has lost writes that it had confirmed.
    """

    async def join(self, member: str, record: Record, lease_s: float) -> Lease: ...

    async def renew(self, lease: Lease, record: Record, lease_s: float, writes: Sequence[Write] = ()) -> None:
        """`writes` are applied first, as `write` does; where that raises `OwnershipFull` all else is done."""

    async def leave(self, lease: Lease) -> None:
        """End the lease now. Never raises `Fenced`."""

    async def write(self, lease: Lease, writes: Sequence[Write]) -> None:
        """Apply in order, each block idempotently. Raises `OwnershipFull` where there was no room for what was to be
        added; what was to be removed is removed."""

    async def look_up(self, hashes: Sequence[BlockHash]) -> Snapshot:
        """Longest prefixes of this chain at every live replica, with all live records: one round trip."""


class Sweeper(Protocol):
    """Housekeeping of a map that outlives its members. Sweeping is done in slices by whoever has time."""

    async def sweep(self, max_blocks: int, grace_s: float = 10.0) -> int:
        """Remove what ended members left behind; how many blocks were handled, 0 when there is nothing left. `grace_s`:
        how long after its lease lapsed a member may still come back without writing all anew."""

    async def turn_journal(self, lease: Lease, done: bool) -> None:
        """Keep the memory of what was written in proportion to what is held: call with `done` False, write again all
        that still holds (credit goes on meanwhile), call with `done` True. Raises `Fenced`."""


class Auditor(Protocol):
    """For a store that may lose single blocks, as by eviction."""

    async def missing(self, lease: Lease, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Those which the map does not list as the lease holder's own. Raises `Fenced`."""
