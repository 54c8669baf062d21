from router.trust import DOUBT, TrustBook
from router.types import Slot

SLOT, OTHER = Slot(1), Slot(2)


def test_kept_promises_keep_trust() -> None:
    book = TrustBook()
    for _ in range(20):
        book.observe(SLOT, 1600, 1600)
    assert book.trust(SLOT) == 1
    assert book.credit(SLOT, 100) == 100
    assert book.doubted() == ()


def test_more_than_promised_is_no_lie_and_nothing_promised_proves_nothing() -> None:
    book = TrustBook()
    book.observe(SLOT, 160, 1600)
    book.observe(SLOT, 0, 0)
    assert book.trust(SLOT) == 1


def test_broken_promises_shrink_the_credit_until_the_replica_is_doubted_and_only_that_one() -> None:
    book = TrustBook()
    credits = []
    for _ in range(5):
        book.observe(SLOT, 1600, 0)
        credits.append(book.credit(SLOT, 100))
    assert credits == sorted(credits, reverse=True)
    assert book.trust(SLOT) < DOUBT
    assert book.doubted() == (SLOT,)
    assert book.credit(OTHER, 100) == 100


def test_one_evicted_prompt_costs_nothing_for_long() -> None:
    book = TrustBook()
    book.observe(SLOT, 1600, 800)
    assert book.credit(SLOT, 100) == 100
    for _ in range(10):
        book.observe(SLOT, 1600, 1600)
    assert book.trust(SLOT) > 0.98


def test_a_new_incarnation_starts_with_a_clean_record() -> None:
    book = TrustBook()
    for _ in range(9):
        book.observe(SLOT, 1600, 0)
    book.keep({OTHER})
    assert book.trust(SLOT) == 1
