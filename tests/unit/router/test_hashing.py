import pytest

from router.hashing import chain, pack_token_ids, reusable_blocks, root_hash

ROOT = root_hash("m")


def test_equal_prefixes_have_equal_hashes_and_differ_from_the_first_other_token_on() -> None:
    one = chain(ROOT, pack_token_ids(range(64)), 16)
    other = chain(ROOT, pack_token_ids([*range(40), 99, *range(41, 64)]), 16)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert one[3] != other[3]


def test_a_chain_can_be_continued_from_any_block() -> None:
    whole = chain(ROOT, pack_token_ids(range(96)), 16)
    assert chain(whole[1], pack_token_ids(range(32, 96)), 16) == whole[2:]


def test_a_partial_block_has_no_hash() -> None:
    assert len(chain(ROOT, pack_token_ids(range(31)), 16)) == 1
    assert chain(ROOT, pack_token_ids(range(15)), 16) == []


def test_model_adapter_and_salt_each_make_another_root_and_cannot_be_confused() -> None:
    roots = [root_hash("m"), root_hash("m2"), root_hash("m", "x"), root_hash("m", None, "x"), root_hash("m", "")]
    roots += [root_hash("m", "x", "y"), root_hash("m", "xy"), root_hash("mx"), root_hash("m", None, "")]
    assert len(set(roots)) == len(roots)
    assert all(len(root) == 16 for root in roots)


def test_media_of_a_block_changes_it_and_all_after_it() -> None:
    ids = pack_token_ids([7] * 48)
    plain, cat, dog = (chain(ROOT, ids, 16, extras) for extras in (None, [None, b"cat", None], [None, b"dog", None]))
    assert plain[0] == cat[0] == dog[0]
    assert len({plain[1], cat[1], dog[1]}) == 3
    assert len({plain[2], cat[2], dog[2]}) == 3


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (64, 3), (65, 4)])
def test_the_last_token_is_always_computed(tokens: int, blocks: int) -> None:
    assert reusable_blocks(tokens, 16) == blocks
