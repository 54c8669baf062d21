from router.branches import BranchBook
from router.types import BlockHash


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def test_a_block_where_many_prompts_part_is_told_from_the_ends_of_single_chats() -> None:
    book = BranchBook()
    for turn in range(100):
        book.note(block(1000 + turn))
        if turn % 10 == 0:
            book.note(block(1))
    assert book.often(block(1))
    assert not any(book.often(block(1000 + turn)) for turn in range(100))


def test_a_few_prompts_prove_nothing() -> None:
    book = BranchBook()
    for _ in range(3):
        book.note(block(1))
    assert not book.often(block(1))
    book.note(block(1))
    assert book.often(block(1))


def test_what_was_often_long_ago_is_forgotten_and_memory_stays_bounded() -> None:
    book = BranchBook()
    for _ in range(50):
        book.note(block(1))
    for number in range(1000):
        book.note(block(2 + number))
    assert not book.often(block(1))
    assert len(book._counts) <= 256
