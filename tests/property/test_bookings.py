"""Bookings against a slow reference, whatever happens in whatever order: each released once, never below zero, and the
map told exactly which claims stand."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from router.load import Bookings, Reservation
from router.types import BlockHash, Load, ReplicaId, Slot

CLAIM_S = 5.0
CHAINS = [[BlockHash(bytes([family, depth]) * 8) for depth in range(6)] for family in range(2)]
names = st.sampled_from("ab").map(ReplicaId)
slots = st.sampled_from([None, Slot(1), Slot(2), Slot(3)])  # a replica that flaps comes back in another slot


class Books(RuleBasedStateMachine):
    made = Bundle("made")

    def __init__(self) -> None:
        super().__init__()
        self.book = Bookings(CLAIM_S)
        self.now = 0.0
        self.requests: list[tuple[Reservation, float]] = []
        self.states: dict[int, str] = {}
        self.ends: dict[int, float] = {}  # when a released request's claim is over
        self.told: set[tuple[Slot, BlockHash]] = set()

    @rule(
        target=made,
        name=names,
        slot=slots,
        tokens=st.integers(0, 100),
        chain=st.sampled_from(CHAINS),
        start=st.integers(0, 6),
    )
    def reserve(self, name: ReplicaId, slot: Slot | None, tokens: int, chain: list[BlockHash], start: int) -> object:
        reservation = self.book.reserve(name, slot, tokens, chain[start:], self.now)
        self.requests.append((reservation, self.now))
        self.states[id(reservation)] = "waiting"
        return reservation

    @rule(target=made)
    def nothing(self) -> object:
        return multiple()

    @rule(reservation=made)
    def first_token(self, reservation: Reservation) -> None:
        waiting = self.states[id(reservation)] == "waiting"
        assert self.book.first_token(reservation) == waiting
        if waiting:
            self.states[id(reservation)] = "decoding"

    @rule(reservation=made)
    def release(self, reservation: Reservation) -> None:
        state = self.states[id(reservation)]
        assert self.book.release(reservation, self.now) == (state != "released")
        if state != "released":
            self.states[id(reservation)] = "released"
            kept = max(self.now, reservation.made_at + CLAIM_S) if state == "decoding" else self.now
            self.ends[id(reservation)] = kept

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tell(self) -> None:
        """The map hears of the changes."""
        self.book.expire(self.now)
        for write in self.book.take_writes():
            self.told -= {(write.owner, block) for block in write.removed}
            self.told |= {(write.owner, block) for block in write.added}
        assert self.told == self.standing()

    @rule()
    def tell_all_anew(self) -> None:
        """The map forgot everything and is told what stands."""
        self.book.expire(self.now)
        writes = self.book.all_claims()
        assert all(not write.removed for write in writes)
        self.told = {(write.owner, block) for write in writes for block in write.added}
        assert self.told == self.standing()

    def standing(self) -> set[tuple[Slot, BlockHash]]:
        return {
            (one.slot, block)
            for one, _ in self.requests
            if one.slot is not None and self.ends.get(id(one), float("inf")) > self.now
            for block in one.claimed
        }

    @invariant()
    def loads_are_the_sum_of_what_runs(self) -> None:
        total = Load()
        for name in (ReplicaId("a"), ReplicaId("b")):
            expected = Load()
            for one, _ in self.requests:
                state = self.states[id(one)]
                if one.replica_id == name and state != "released":
                    expected += Load(1, 0, one.prefill_tokens) if state == "waiting" else Load(0, 1, 0)
            assert self.book.load(name) == expected
            total += expected
        assert all(
            min(load.num_waiting, load.num_decoding, load.prefill_tokens) >= 0 for load in self.book.loads().values()
        )
        if total == Load():
            assert not self.book.loads()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
