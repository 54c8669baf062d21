from __future__ import annotations

from typing import Any

import pytest

from replicas.emulated.block_hashes import BlockChain, CacheKeys, MediaItem
from replicas.emulated.block_pool import BlockPool

BLOCK = 4


def chain(tokens: list[int], **keys: Any) -> BlockChain:
    return BlockChain(tokens, BLOCK, CacheKeys(**keys))


def compute(pool: BlockPool, sequence: BlockChain) -> list[int]:
    """What a scheduler does for a whole prompt at once."""
    hits = pool.find_cached(sequence)
    pool.share(hits)
    blocks = hits + pool.allocate(pool.blocks_for(sequence.num_tokens) - len(hits))
    pool.store(sequence, blocks, len(hits), sequence.num_tokens // BLOCK)
    return blocks


def test_hits_stop_before_the_last_token() -> None:
    for num_tokens, hits in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2)):
        pool = BlockPool(8, BLOCK)
        pool.release(compute(pool, chain(list(range(num_tokens)))))
        assert len(pool.find_cached(chain(list(range(num_tokens))))) == hits


def test_hashes_are_unsigned_64_bit_and_use_the_upper_half() -> None:
    hashes = chain(list(range(400))).hashes
    assert all(0 <= value < 2**64 for value in hashes)
    assert any(value > 2**63 for value in hashes)


def test_a_hash_depends_on_everything_before_it_and_on_the_seed() -> None:
    plain = chain([1, 2, 3, 4, 5, 6, 7, 8])
    other_start = chain([9, 2, 3, 4, 5, 6, 7, 8])
    other_seed = BlockChain([1, 2, 3, 4, 5, 6, 7, 8], BLOCK, hash_seed=1)
    assert plain.hashes[1] != other_start.hashes[1]
    assert set(plain.hashes).isdisjoint(other_seed.hashes)


def test_a_chain_that_grew_equals_one_made_whole() -> None:
    grown = chain([1, 2, 3])
    for token in range(4, 12):
        grown.append(token)
    assert grown.hashes == chain(list(range(1, 12))).hashes


def test_extra_keys_are_in_vllms_order_and_the_salt_is_on_the_first_block_only() -> None:
    keys = CacheKeys(lora_name="ada", lora_id=1, cache_salt="s", media=(MediaItem("img", 2, 4),))
    assert keys.of_block(0, 4) == ("ada", ("img", 2), "s")
    assert keys.of_block(4, 8) == ("ada", ("img", -2))
    assert keys.of_block(8, 12) == ("ada",)
    assert CacheKeys(cache_salt="s").of_block(4, 8) is None


@pytest.mark.parametrize("keys", [{"cache_salt": "s"}, {"lora_name": "ada"}, {"media": (MediaItem("img", 1, 2),)}])
def test_other_extra_keys_share_nothing(keys: dict[str, Any]) -> None:
    pool = BlockPool(16, BLOCK)
    compute(pool, chain(list(range(12))))
    assert pool.find_cached(chain(list(range(12)), **keys)) == []


def test_a_salt_that_reads_like_an_adapter_is_not_that_adapter() -> None:
    salted, adapted = chain(list(range(4)), cache_salt="ada"), chain(list(range(4)), lora_name="ada")
    assert salted.extra_keys(0) == adapted.extra_keys(0) == ("ada",)
    assert salted.hashes != adapted.hashes


def test_a_stored_event_has_vllms_fields() -> None:
    pool = BlockPool(8, BLOCK)
    first = chain([1, 2, 3, 4, 5], lora_name="ada", lora_id=7, cache_salt="s")
    compute(pool, first)
    (event,) = pool.take_events()
    assert event == {
        "type": "BlockStored",
        "block_hashes": first.hashes,
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": BLOCK,
        "lora_id": 7,
        "medium": "GPU",
        "lora_name": "ada",
        "extra_keys": [("ada", "s")],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_a_stored_event_names_the_parent_that_was_hit() -> None:
    pool = BlockPool(8, BLOCK)
    pool.release(compute(pool, chain([1, 2, 3, 4, 5])))
    pool.take_events()
    longer = chain([1, 2, 3, 4, 5, 6, 7, 8])
    compute(pool, longer)
    (event,) = pool.take_events()
    assert event["parent_block_hash"] == longer.hashes[0]
    assert event["block_hashes"] == longer.hashes[1:]
    assert event["extra_keys"] == [None]


def test_twins_store_two_copies_and_one_removal_leaves_a_hit() -> None:
    pool = BlockPool(4, BLOCK)
    twins = [chain([1, 2, 3, 4]), chain([1, 2, 3, 4])]
    held = []
    for twin in twins:
        blocks = pool.allocate(1)
        pool.store(twin, blocks, 0, 1)
        held.append(blocks)
    assert [event["block_hashes"] for event in pool.take_events()] == [twins[0].hashes] * 2
    for blocks in held:
        pool.release(blocks)
    pool.allocate(3)  # two blocks were never used; the third evicts the twin that was freed first
    (removed,) = pool.take_events()
    assert removed == {"type": "BlockRemoved", "block_hashes": twins[0].hashes, "medium": "GPU", "group_idx": 0}
    assert pool.find_cached(chain([1, 2, 3, 4, 5])) == held[1]


def test_a_sequences_tail_is_evicted_before_its_head() -> None:
    pool = BlockPool(3, BLOCK)
    sequence = chain(list(range(12)))
    pool.release(compute(pool, sequence))
    pool.take_events()
    pool.allocate(2)
    assert [event["block_hashes"] for event in pool.take_events()] == [[sequence.hashes[2]], [sequence.hashes[1]]]


def test_a_hit_moves_blocks_away_from_eviction() -> None:
    pool = BlockPool(2, BLOCK)
    old, new = chain([1, 2, 3, 4]), chain([5, 6, 7, 8])
    pool.release(compute(pool, old))
    pool.release(compute(pool, new))
    old.append(9)
    hits = pool.find_cached(old)
    pool.share(hits)
    pool.release(hits)
    pool.allocate(1)
    assert len(pool.find_cached(old)) == 1


def test_a_block_that_never_got_a_hash_is_taken_first() -> None:
    pool = BlockPool(4, BLOCK)
    blocks = compute(pool, chain([1, 2, 3, 4, 5]))
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[1]]


def test_a_reset_waits_for_blocks_in_use_and_then_clears_all() -> None:
    pool = BlockPool(4, BLOCK)
    blocks = compute(pool, chain([1, 2, 3, 4, 5]))
    pool.take_events()
    assert not pool.reset()
    pool.release(blocks)
    assert pool.reset()
    assert pool.take_events() == [{"type": "AllBlocksCleared"}]
    assert pool.find_cached(chain([1, 2, 3, 4, 5])) == []


def test_more_blocks_than_are_free_change_nothing() -> None:
    pool = BlockPool(2, BLOCK)
    with pytest.raises(ValueError, match="3 blocks asked for"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_pool_without_events_works_the_same() -> None:
    pool = BlockPool(2, BLOCK, events=False)
    pool.release(compute(pool, chain([1, 2, 3, 4, 5])))
    pool.allocate(2)
    assert pool.take_events() == []
