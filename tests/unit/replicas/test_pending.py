from replicas.pending import Pending
from router.types import BlockHash

A, B, C, D = (BlockHash(bytes([i]) * 16) for i in range(4))


def test_descendants_come_after_their_ancestors_and_go_before_them() -> None:
    pending = Pending()
    pending.note([A, B], [C, D])
    assert pending.take(3) == ([A], [D, C])
    assert pending.take(3) == ([B], [])
    assert not pending


def test_only_the_last_word_on_a_block_is_kept() -> None:
    pending = Pending()
    pending.note([A, B], [])
    pending.note([], [B])
    pending.note([B], [])
    pending.note([], [A])
    assert (len(pending), pending.removals) == (2, 1)
    assert pending.take(9) == ([B], [A])


def test_removals_can_be_taken_alone_and_additions_put_back() -> None:
    pending = Pending()
    pending.note([A, B], [C])
    assert pending.take(9, removals_only=True) == ([], [C])
    assert pending.take(1) == ([A], [])
    pending.note([], [A])
    pending.put_back([A])
    assert pending.take(9) == ([B], [A])
    assert pending.removals == 0


def test_a_whole_set_replaces_what_waited() -> None:
    pending = Pending()
    pending.note([A], [B])
    pending.write_all([C, D])
    assert (len(pending), pending.rewrite, pending.removals) == (2, 2, 0)
    assert pending.take(9) == ([C, D], [])
    assert pending.rewrite == 0
