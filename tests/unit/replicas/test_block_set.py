from __future__ import annotations

from typing import Any

import pytest

from replicas.block_set import BlockSet, Changes
from replicas.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineBlockHash, KVEvent, KVEventBatch
from router.hashing import chain, pack_token_ids, root_hash
from router.types import BlockHash

B = 16


def ids(first: int, count: int) -> bytes:
    return pack_token_ids(range(first, first + count))


def store(hashes: list[EngineBlockHash], parent: EngineBlockHash | None, token_ids: bytes, **more: Any) -> BlockStored:
    return BlockStored(hashes, parent, token_ids, more.pop("block_size", B), medium=more.pop("medium", "GPU"), **more)


def remove(*hashes: EngineBlockHash, **more: Any) -> BlockRemoved:
    return BlockRemoved(list(hashes), more.pop("medium", "GPU"), **more)


def feed(blocks: BlockSet, *events: KVEvent) -> Changes:
    return blocks.apply(KVEventBatch(0.0, events))


def prompt(token_ids: bytes, lora: str | None = None, salt: str | None = None, size: int = B) -> list[BlockHash]:
    return chain(root_hash("m", lora, salt), token_ids, size)


def overlap(blocks: BlockSet, hashes: list[BlockHash]) -> int:
    return next((i for i, h in enumerate(hashes) if h not in blocks.published), len(hashes))


@pytest.fixture
def blocks() -> BlockSet:
    return BlockSet("m", B)


@pytest.fixture
def abc(blocks: BlockSet) -> BlockSet:
    """One chain of three blocks: 101 <- 102 <- 103."""
    feed(blocks, store([101, 102, 103], None, ids(0, 48)))
    return blocks


CHAIN = prompt(ids(0, 48))


def test_hashes_beyond_a_float_s_precision_stay_apart(blocks: BlockSet) -> None:
    big = 15760518052499183552
    feed(blocks, store([big], None, ids(0, 16)), store([big + 1], None, ids(100, 16)))
    feed(blocks, remove(big))
    assert overlap(blocks, prompt(ids(0, 16))) == 0
    assert overlap(blocks, prompt(ids(100, 16))) == 1


def test_a_cleared_engine_scores_nowhere(abc: BlockSet) -> None:
    changes = feed(abc, AllBlocksCleared())
    assert set(changes.removed) == set(CHAIN)
    assert not abc.published
    assert repr(abc) == "BlockSet(published=0, known=0, parked=0)"


def test_of_a_block_stored_twice_the_first_removal_keeps_it(blocks: BlockSet) -> None:
    feed(blocks, store([101], None, ids(0, 16)), store([101], None, ids(0, 16)))
    assert feed(blocks, remove(101)) == Changes([], [])
    assert overlap(blocks, CHAIN) == 1
    assert feed(blocks, remove(101)) == Changes([], [CHAIN[0]])


def test_a_clear_resets_the_counts_of_copies(blocks: BlockSet) -> None:
    feed(blocks, store([101], None, ids(0, 16)), store([101], None, ids(0, 16)))
    feed(blocks, AllBlocksCleared(), store([101], None, ids(0, 16)), remove(101))
    assert not blocks.published


def test_a_report_of_cache_hits_is_no_further_copy(abc: BlockSet) -> None:
    feed(abc, store([101, 102, 103], None, ids(0, 48)))
    assert abc.counters["reports"] == 3
    feed(abc, remove(103), remove(102), remove(101))
    assert not abc.published


def test_a_report_longer_than_what_is_known_adds_only_the_rest(abc: BlockSet) -> None:
    feed(abc, store([101, 102, 103, 104], None, ids(0, 64)))
    assert len(abc) == 4
    feed(abc, remove(104), remove(103), remove(102), remove(101))
    assert not abc.published


def test_twins_behind_a_common_prefix_are_two_copies(abc: BlockSet) -> None:
    for _ in range(2):
        feed(abc, store([104, 105], 103, ids(48, 32)))
    feed(abc, remove(105), remove(104))
    assert len(abc) == 5
    feed(abc, remove(105), remove(104))
    assert len(abc) == 3


@pytest.mark.parametrize("mamba_first", [True, False])
def test_only_the_dense_group_is_indexed(blocks: BlockSet, mamba_first: bool) -> None:
    mamba = store([601], None, ids(0, 80), group_idx=0, kv_cache_spec_kind="mamba")
    dense = store([611, 612, 613, 614, 615], None, ids(0, 80), group_idx=3, kv_cache_spec_kind="mla_attention")
    feed(blocks, *((mamba, dense) if mamba_first else (dense, mamba)))
    assert overlap(blocks, prompt(ids(0, 80))) == 5
    assert len(blocks) == 5
    assert blocks.counters["skipped_kind"] == 1


def test_a_removal_in_another_group_leaves_the_dense_block(blocks: BlockSet) -> None:
    feed(blocks, store([1], None, ids(0, 16), group_idx=1, kv_cache_spec_kind="full_attention"))
    feed(blocks, remove(1, group_idx=0))
    assert len(blocks) == 1
    feed(blocks, remove(1, group_idx=1))
    assert not blocks.published


def test_a_sparse_event_without_a_kind_is_told_by_its_shape(blocks: BlockSet) -> None:
    feed(blocks, store([601], None, ids(0, 3840)))
    assert not blocks.published
    assert blocks.counters["skipped_shape"] == 1


def test_the_cpu_tier_never_makes_or_breaks_a_gpu_hit(blocks: BlockSet) -> None:
    feed(blocks, store([101, 102], None, ids(0, 32)))
    feed(blocks, store([101], None, b"", block_size=0, medium="CPU"), store([9], None, ids(90, 16), medium="CPU"))
    assert len(blocks) == 2
    feed(blocks, remove(101, medium="CPU"))
    assert overlap(blocks, CHAIN) == 2
    feed(blocks, remove(101))
    assert not blocks.published
    assert blocks.counters["skipped_medium"] == 3


def test_an_engine_block_of_64_credits_whole_blocks_only() -> None:
    blocks = BlockSet("m", 64)
    feed(blocks, store([701], None, ids(0, 64), block_size=64))
    shares_32 = prompt(ids(0, 32) + ids(900, 32), size=64)
    assert overlap(blocks, shares_32) == 0
    assert overlap(blocks, prompt(ids(0, 64), size=64)) == 1


def test_another_block_size_than_expected_is_never_indexed_but_told(blocks: BlockSet) -> None:
    feed(blocks, store([701], None, ids(0, 64), block_size=64))
    assert not blocks.published
    assert blocks.counters["skipped_block_size"] == 1
    assert (blocks.block_size, blocks.seen_block_size) == (16, 64)


def test_an_adapter_s_blocks_are_not_the_base_model_s(blocks: BlockSet) -> None:
    feed(blocks, store([301], None, ids(0, 16), lora_id=117, lora_name="adapter-a", extra_keys=[["adapter-a"]]))
    assert overlap(blocks, prompt(ids(0, 16), lora="adapter-a")) == 1
    assert overlap(blocks, prompt(ids(0, 16))) == 0


def test_a_salt_equal_to_the_adapter_s_name_is_still_a_salt(blocks: BlockSet) -> None:
    keys = [["a", "a"], ["a"]]
    feed(blocks, store([1, 2], None, ids(0, 32), lora_id=1, lora_name="a", extra_keys=keys))
    assert overlap(blocks, prompt(ids(0, 32), lora="a", salt="a")) == 2
    assert overlap(blocks, prompt(ids(0, 32), lora="a")) == 0


def test_an_adapter_without_a_name_is_not_taken_for_the_base_model(blocks: BlockSet) -> None:
    feed(blocks, store([1], None, ids(0, 16), lora_id=7))
    assert not blocks.published
    assert blocks.counters["skipped_lora"] == 1


def test_salted_blocks_are_found_with_the_salt_only(blocks: BlockSet) -> None:
    feed(blocks, store([401, 402], None, ids(0, 32), extra_keys=[["tenant-a"], None]))
    prompts = {salt: prompt(ids(0, 33), salt=salt) for salt in ("tenant-a", "tenant-b", None)}
    assert {salt: overlap(blocks, hashes) for salt, hashes in prompts.items()} == {
        "tenant-a": 2,
        "tenant-b": 0,
        None: 0,
    }
    assert b"tenant" not in b"".join(blocks.published)
    assert "tenant" not in repr(blocks)


def test_a_salt_in_a_child_event_is_unreadable_and_not_indexed(abc: BlockSet) -> None:
    feed(abc, store([104], 103, ids(48, 16), extra_keys=[["what is this"]]))
    assert len(abc) == 3
    assert abc.counters["skipped_extra_keys"] == 1


def test_two_images_are_two_blocks(blocks: BlockSet) -> None:
    placeholder = pack_token_ids([151655] * B)
    for name, engine_hash in (("image-a", 501), ("image-b", 502)):
        feed(blocks, store([engine_hash], None, placeholder, extra_keys=[[[name, 0]]]))
    assert len(blocks) == 2
    assert overlap(blocks, prompt(placeholder)) == 0


def test_equal_tokens_in_two_engines_are_one_chain() -> None:
    first, second = BlockSet("m", B), BlockSet("m", B)
    feed(first, store([101, 102], None, ids(0, 32)))
    feed(second, store([b"\x08" * 32, b"\x09" * 32], None, ids(0, 32)))
    assert first.published == second.published == set(CHAIN[:2])


def test_a_child_of_an_unknown_parent_is_not_a_root(blocks: BlockSet) -> None:
    assert feed(blocks, store([203], 202, ids(500, 16))) == Changes([], [])
    assert overlap(blocks, prompt(ids(500, 16))) == 0
    assert (blocks.parked, blocks.counters["parked"]) == (1, 1)


def test_parked_blocks_are_attached_when_their_parent_turns_up(blocks: BlockSet) -> None:
    feed(blocks, store([105], 104, ids(64, 16)), store([103, 104], 102, ids(32, 32)))
    assert blocks.parked == 3
    changes = feed(blocks, store([101, 102], None, ids(0, 32)))
    assert set(changes.added) == set(prompt(ids(0, 80)))
    assert (blocks.parked, blocks.counters["attached"]) == (0, 3)


def test_a_parked_block_that_was_removed_does_not_come_back(blocks: BlockSet) -> None:
    feed(blocks, store([103, 104], 102, ids(32, 32)), remove(104), remove(103))
    assert repr(blocks) == "BlockSet(published=0, known=0, parked=0)"
    feed(blocks, store([101, 102], None, ids(0, 32)))
    assert set(blocks.published) == set(CHAIN[:2])


def test_parking_is_bounded() -> None:
    blocks = BlockSet("m", B, max_parked=3)
    feed(blocks, store([1, 2, 3], 99, ids(0, 48)), store([11, 12], 98, ids(0, 32)))
    assert (blocks.parked, blocks.counters["parked_dropped"]) == (3, 2)
    feed(blocks, remove(1, 2, 3))
    assert blocks.parked == 0


def test_a_removal_of_an_unknown_block_is_ignored(abc: BlockSet) -> None:
    assert feed(abc, remove(999)) == Changes([], [])
    assert abc.counters["unknown_removals"] == 1


def test_removed_parent_cuts_its_descendants_and_brings_them_back(abc: BlockSet) -> None:
    assert feed(abc, remove(102)) == Changes([], CHAIN[1:])
    assert set(abc.published) == {CHAIN[0]}
    assert feed(abc, store([102], 101, ids(16, 16))) == Changes(CHAIN[1:], [])


def test_a_descendant_removed_while_cut_off_stays_away(abc: BlockSet) -> None:
    feed(abc, remove(102), remove(103))
    feed(abc, store([102], 101, ids(16, 16)))
    assert set(abc.published) == set(CHAIN[:2])


def test_what_came_and_went_in_one_batch_is_no_change(abc: BlockSet) -> None:
    assert feed(abc, store([7], None, ids(700, 16)), remove(7)) == Changes([], [])
    assert feed(abc, remove(103), store([103], 102, ids(32, 16))) == Changes([], [])


def test_nothing_is_left_of_a_chain_that_was_removed_tail_first(abc: BlockSet) -> None:
    feed(abc, remove(103), remove(102), remove(101))
    assert repr(abc) == "BlockSet(published=0, known=0, parked=0)"


def test_nothing_is_left_of_a_chain_that_was_removed_head_first(abc: BlockSet) -> None:
    feed(abc, remove(101), remove(102), remove(103))
    assert repr(abc) == "BlockSet(published=0, known=0, parked=0)"


def test_two_engine_hashes_of_one_block_need_two_removals(blocks: BlockSet) -> None:
    feed(blocks, store([1], None, ids(0, 16)), store([2], None, ids(0, 16)))
    assert len(blocks) == 1
    feed(blocks, remove(1))
    assert len(blocks) == 1
    feed(blocks, remove(2))
    assert not blocks.published


def test_a_very_long_chain_needs_no_recursion(blocks: BlockSet) -> None:
    depth = 20_000
    feed(blocks, store(list(range(1, depth + 1)), None, ids(0, B * depth)))
    assert len(blocks) == depth
    assert len(feed(blocks, remove(1)).removed) == depth
    assert len(feed(blocks, store([1], None, ids(0, B))).added) == depth
    assert len(feed(blocks, remove(*range(1, depth + 1))).removed) == depth
    assert repr(blocks) == "BlockSet(published=0, known=0, parked=0)"


def test_a_long_parked_chain_needs_no_recursion(blocks: BlockSet) -> None:
    depth = 15_000
    feed(blocks, store(list(range(2, depth + 1)), 1, ids(B, B * (depth - 1))))
    assert blocks.parked == depth - 1
    assert len(feed(blocks, store([1], None, ids(0, B))).added) == depth
