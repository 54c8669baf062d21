from router.load import Bookings
from router.ownership import Write
from router.types import BlockHash, Load, ReplicaId, Slot

A = ReplicaId("a")
SLOT = Slot(3)
HASHES = [BlockHash(bytes([i]) * 16) for i in range(10)]


def test_a_request_is_waiting_then_decoding_then_gone() -> None:
    book = Bookings(claim_s=5)
    reservation = book.reserve(A, SLOT, 640, HASHES, now=0)
    assert book.load(A) == Load(1, 0, 640)
    assert book.first_token(reservation)
    assert book.load(A) == Load(0, 1, 0)
    assert book.release(reservation, now=1)
    assert book.load(A) == Load()
    assert book.loads() == {}


def test_steps_that_come_late_or_twice_change_nothing() -> None:
    book = Bookings(claim_s=5)
    reservation = book.reserve(A, SLOT, 640, (), now=0)
    assert book.release(reservation, now=1)
    assert not book.release(reservation, now=1)
    assert not book.first_token(reservation)
    assert book.load(A) == Load()


def test_what_was_not_computed_is_claimed_no_longer() -> None:
    book = Bookings(claim_s=5)
    reservation = book.reserve(A, SLOT, 640, HASHES, now=0)
    book.release(reservation, now=1)
    assert book.take_writes() == [Write(SLOT, added=HASHES), Write(SLOT, removed=HASHES)]


def test_what_was_computed_stays_claimed_until_events_had_time_to_tell() -> None:
    book = Bookings(claim_s=5)
    reservation = book.reserve(A, SLOT, 640, HASHES, now=0)
    book.first_token(reservation)
    book.release(reservation, now=1)
    assert book.claimed_depth(SLOT, HASHES, 0) == 10
    book.expire(4.9)
    assert book.claimed_depth(SLOT, HASHES, 0) == 10
    book.expire(5)
    assert book.claimed_depth(SLOT, HASHES, 0) == 0
    assert book.all_claims() == []


def test_a_block_claimed_twice_is_told_once_and_ends_with_the_second() -> None:
    book = Bookings(claim_s=0)
    first = book.reserve(A, SLOT, 160, HASHES, now=0)
    second = book.reserve(A, SLOT, 80, HASHES[:5], now=0)
    book.release(first, now=0)
    assert book.claimed_depth(SLOT, HASHES, 0) == 5
    book.release(second, now=0)
    assert book.take_writes() == [
        Write(SLOT, added=HASHES),
        Write(SLOT, removed=HASHES[5:]),
        Write(SLOT, removed=HASHES[:5]),
    ]


def test_a_claim_counts_only_where_it_continues_what_is_held() -> None:
    book = Bookings(claim_s=5)
    book.reserve(A, SLOT, 80, HASHES[4:8], now=0)
    assert book.claimed_depth(SLOT, HASHES, 4) == 8
    assert book.claimed_depth(SLOT, HASHES, 6) == 8
    assert book.claimed_depth(SLOT, HASHES, 3) == 3
    assert book.claimed_depth(SLOT, HASHES, 8) == 8
    assert book.claimed_depth(Slot(9), HASHES, 4) == 4


def test_a_replica_unknown_to_the_map_is_charged_but_claims_nothing() -> None:
    book = Bookings(claim_s=5)
    book.reserve(A, None, 640, HASHES, now=0)
    assert book.load(A) == Load(1, 0, 640)
    assert book.loads() == {}
    assert book.take_writes() == []


def test_the_claims_of_a_burst_end_a_few_at_a_time() -> None:
    book = Bookings(claim_s=5)
    for chat in range(5):
        chain = [BlockHash(f"{chat}-{depth}".encode()) for depth in range(3000)]
        reservation = book.reserve(A, SLOT, 48_000, chain, now=0)
        book.first_token(reservation)
        book.release(reservation, now=1)
    assert [book.expire(5) for _ in range(3)] == [False, False, True]
    assert book.all_claims() == []
