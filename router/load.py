"""What this router has booked: requests in flight, by replica, and the blocks that they are about to compute.

A reservation goes waiting -> decoding -> released, or straight to released; each step happens at most once, so that
whoever calls late or twice changes nothing. Clock readings are arguments, in seconds.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from router.ownership import Write
from router.types import BlockHash, Load, ReplicaId, Slot

State = Literal["waiting", "decoding", "released"]

_EXPIRE_BLOCKS = 4096
"""About so many claimed blocks end in one go, which takes a millisecond."""


@dataclass(slots=True, eq=False)
class Reservation:
    """One request on one replica. `claimed` are blocks that `slot` will hold soon; `state` is the book's to change."""

    replica_id: ReplicaId
    slot: Slot | None
    prefill_tokens: int
    claimed: Sequence[BlockHash]
    made_at: float
    state: State = "waiting"


class _Claims:
    """The blocks claimed at one replica, each by one request or more. Nearly all are claimed by one, and a long prompt
    has thousands: those are added and removed all at once."""

    __slots__ = ("_again", "blocks")

    def __init__(self) -> None:
        self.blocks: set[BlockHash] = set()
        self._again: Counter[BlockHash] = Counter()  # how many more claim it than the first

    def add(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Those that nobody claimed before."""
        claimed = list(hashes)
        if self.blocks.isdisjoint(claimed):
            new = hashes
        else:
            new = [block for block in claimed if block not in self.blocks]
            self._again.update(block for block in claimed if block in self.blocks)
        self.blocks.update(claimed)
        return new

    def remove(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Those that nobody claims any more."""
        claimed, gone = list(hashes), hashes
        if not self._again.keys().isdisjoint(claimed):
            gone = [block for block in claimed if block not in self._again]
            self._again.subtract(block for block in claimed if block in self._again)
            self._again = +self._again
        self.blocks.difference_update(gone)
        return gone


class Bookings:
    """The book of one router. Pure: what must be told to the ownership map is collected by `take_writes`."""

    def __init__(self, claim_s: float) -> None:
        self._claim_s = claim_s
        self._loads: dict[ReplicaId, Load] = {}
        self._slots: dict[ReplicaId, Slot] = {}
        self._claims: dict[Slot, _Claims] = {}
        self._ending: list[tuple[float, int, Slot, Sequence[BlockHash]]] = []
        self._released = 0
        self._writes: list[Write] = []

    def reserve(
        self,
        replica_id: ReplicaId,
        slot: Slot | None,
        prefill_tokens: int,
        claimed: Sequence[BlockHash],
        now: float,
    ) -> Reservation:
        """Book a request. `slot`, where known, is the replica's place in the ownership map."""
        reservation = Reservation(replica_id, slot, prefill_tokens, claimed if slot is not None else (), now)
        self._add(replica_id, Load(1, 0, prefill_tokens))
        if slot is not None:
            self._slots[replica_id] = slot
            self._claim(slot, reservation.claimed)
        return reservation

    def first_token(self, reservation: Reservation) -> bool:
        """The prefill is done. False where that was known or the reservation is over."""
        if reservation.state != "waiting":
            return False
        reservation.state = "decoding"
        self._add(reservation.replica_id, Load(-1, 1, -reservation.prefill_tokens))
        return True

    def release(self, reservation: Reservation, now: float) -> bool:
        """The request is over, however it ended. False where it had been released before."""
        state = reservation.state
        if state == "released":
            return False
        reservation.state = "released"
        computed = state == "decoding"
        self._add(reservation.replica_id, Load(0, -1, 0) if computed else Load(-1, 0, -reservation.prefill_tokens))
        if reservation.slot is not None and reservation.claimed:
            end = max(now, reservation.made_at + self._claim_s) if computed else now
            self._released += 1  # settles ties in the heap
            heapq.heappush(self._ending, (end, self._released, reservation.slot, reservation.claimed))
            self.expire(now)
        return True

    def expire(self, now: float) -> bool:
        """End claims whose time has come. False where some are left: those of a burst end all at once."""
        done = 0
        while self._ending and self._ending[0][0] <= now and done < _EXPIRE_BLOCKS:
            _, _, slot, claimed = heapq.heappop(self._ending)
            self._unclaim(slot, claimed)
            done += len(claimed)
        return not self._ending or self._ending[0][0] > now

    def load(self, replica_id: ReplicaId) -> Load:
        return self._loads.get(replica_id, Load())

    def loads(self) -> Mapping[int, Load]:
        """All that is booked, by slot; replicas that the ownership map doesn't know are left out."""
        return {self._slots[replica]: load for replica, load in self._loads.items() if replica in self._slots}

    def claimed_depth(self, slot: Slot, hashes: Sequence[BlockHash], start: int) -> int:
        """How far a prefix of `start` blocks at `slot` reaches when this router's own claims count as held."""
        claims = self._claims[slot].blocks if slot in self._claims else ()
        if not claims or start >= len(hashes) or hashes[start] not in claims:
            return start
        low, high = start, len(hashes)  # a claim covers a run of the chain: blocks up to `low` are in, `high` is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if hashes[middle] in claims else (low, middle)
        return low + 1

    def take_writes(self) -> list[Write]:
        """Claims made and ended since the last call, in order."""
        writes, self._writes = self._writes, []
        return writes

    def all_claims(self) -> list[Write]:
        """Every claim that stands, for a map that lost them; what was still to be told is dropped."""
        self._writes = []
        return [Write(slot, added=list(claims.blocks)) for slot, claims in self._claims.items()]

    def _add(self, replica_id: ReplicaId, change: Load) -> None:
        load = self.load(replica_id) + change
        if load == Load():
            self._loads.pop(replica_id, None)
            self._slots.pop(replica_id, None)
        else:
            self._loads[replica_id] = load

    def _claim(self, slot: Slot, hashes: Sequence[BlockHash]) -> None:
        if hashes and (new := self._claims.setdefault(slot, _Claims()).add(hashes)):
            self._writes.append(Write(slot, added=new))

    def _unclaim(self, slot: Slot, hashes: Sequence[BlockHash]) -> None:
        claims = self._claims[slot]
        if gone := claims.remove(hashes):
            self._writes.append(Write(slot, removed=gone))
        if not claims.blocks:
            del self._claims[slot]
