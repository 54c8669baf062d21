"""Bytes that vLLM sends (or sent, or may send one day) against what the collector makes of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replicas.block_set import BlockSet
from replicas.events import AllBlocksCleared, BlockRemoved, BlockStored, DecodeError, decode_batch
from replicas.extra_keys import media_extra
from router.hashing import chain, pack_token_ids, reusable_blocks, root_hash
from router.types import BlockHash

FIXTURES = Path(__file__).parent.parent / "fixtures"
MODEL = "m"
CASES = {
    case["name"]: case for case in map(json.loads, (FIXTURES / "kv_event_fixtures.jsonl").read_text().splitlines())
}
IN_BOTH_ENCODINGS = sorted(name for name, case in CASES.items() if {"frames_map", "frames_array"} <= case.keys())
ENCODINGS = ("frames_map", "frames_array")


def payload(name: str, encoding: str = "frames_map") -> bytes:
    return bytes.fromhex(CASES[name][encoding][-1])


def tokens(first: int, count: int) -> bytes:
    return pack_token_ids(range(first, first + count))


def prompt(token_ids: bytes, lora: str | None = None, salt: str | None = None, size: int = 16) -> list[BlockHash]:
    return chain(root_hash(MODEL, lora, salt), token_ids, size)


def overlap(blocks: BlockSet, hashes: list[BlockHash]) -> int:
    return next((i for i, h in enumerate(hashes) if h not in blocks.published), len(hashes))


def replay(names: list[str], encoding: str = "frames_map", block_size: int = 16) -> BlockSet:
    blocks = BlockSet(MODEL, block_size)
    for name in names:
        blocks.apply(decode_batch(payload(name, encoding)))
    return blocks


@pytest.mark.parametrize("name", IN_BOTH_ENCODINGS)
def test_both_encodings_give_the_same_events(name: str) -> None:
    as_map, as_array = (decode_batch(payload(name, encoding)) for encoding in ENCODINGS)
    kind_added = {"kv_cache_spec_kind": None}  # arrays of old ended before this field
    assert [_fields(e) | kind_added for e in as_map.events] == [_fields(e) | kind_added for e in as_array.events]
    assert (as_map.ts, as_map.dp_rank) == (as_array.ts, as_array.dp_rank)
    assert not as_map.broken
    assert not as_array.broken


def _fields(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__dataclass_fields__} | {"event": type(event).__name__}


@pytest.mark.parametrize("name", IN_BOTH_ENCODINGS)
def test_both_encodings_lead_to_the_same_state(name: str) -> None:
    block_size = 64 if name == "big_block" else 16
    states = [replay(["two_blocks_root", "extend_parent", name], encoding, block_size) for encoding in ENCODINGS]
    assert states[0].published == states[1].published


def test_one_batch_may_mix_both_encodings() -> None:
    first, second = (
        msgspec.msgpack.decode(payload("captured_qwen3_8b_vllm026")),
        msgspec.msgpack.decode(payload("two_blocks_root", "frames_array")),
    )
    batch = decode_batch(msgspec.msgpack.encode([1.0, [*first[1], *second[1]], 0]))
    assert [type(event) for event in batch.events] == [BlockStored, BlockStored]
    blocks = BlockSet(MODEL, 16)
    blocks.apply(batch)
    assert overlap(blocks, prompt(tokens(0, 32))) == 2
    assert len(blocks) == 3


def test_hashes_above_signed_64_bits_stay_themselves_and_apart() -> None:
    (event,) = decode_batch(payload("captured_qwen3_8b_vllm026")).events
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [15760518052499183552]
    raw = msgspec.msgpack.decode(payload("captured_qwen3_8b_vllm026"))
    raw[1][0]["block_hashes"] = [15760518052499183553]
    raw[1][0]["token_ids"][0] += 1
    blocks = BlockSet(MODEL, 16)
    blocks.apply(decode_batch(payload("captured_qwen3_8b_vllm026")))
    blocks.apply(decode_batch(msgspec.msgpack.encode(raw)))
    assert len(blocks) == 2


def test_a_signed_hash_names_the_same_block_as_the_unsigned_one() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [15760518052499183552 - 2**64], "medium": "GPU"}
    blocks = replay(["captured_qwen3_8b_vllm026"])
    blocks.apply(decode_batch(msgspec.msgpack.encode([1.0, [removed], 0])))
    assert not blocks.published


def test_hashes_may_be_bytes() -> None:
    (event,) = decode_batch(payload("bytes_hash")).events
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [bytes(31) + b"\x01"]
    assert overlap(replay(["bytes_hash"]), prompt(tokens(0, 16))) == 1


def test_an_unknown_event_is_ignored_and_counted() -> None:
    batch = decode_batch(payload("unknown_event"))
    assert not batch.events
    assert batch.ignored == {"TierBlocksCleared": 1}
    assert replay(["unknown_event"]).counters["ignored"] == 1


def test_an_unknown_field_is_ignored_and_counted() -> None:
    batch = decode_batch(payload("unknown_field"))
    assert [type(event) for event in batch.events] == [BlockStored]
    assert batch.ignored == {"BlockStored.brand_new_field": 1}


def test_further_array_fields_are_ignored_and_counted() -> None:
    batch = decode_batch(msgspec.msgpack.encode([1.0, [["AllBlocksCleared", "GPU"]]]))
    assert batch.events == [AllBlocksCleared()]
    assert batch.ignored == {"AllBlocksCleared.0": 1}
    assert batch.dp_rank is None


@pytest.mark.parametrize(
    "broken",
    [
        {"type": "BlockStored", "block_hashes": [1]},
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [-1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1.5], "parent_block_hash": None, "token_ids": [1], "block_size": 1},
        {"type": "BlockRemoved", "block_hashes": "abc"},
        ["BlockRemoved"],
        {"no": "type"},
        {"type": ["BlockRemoved"]},
        None,
        [],
    ],
)
def test_a_broken_event_does_not_lose_its_neighbours(broken: Any) -> None:
    good = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
    batch = decode_batch(msgspec.msgpack.encode([1.0, [good, broken, good], 0]))
    assert batch.events == [BlockRemoved([7], "GPU")] * 2
    assert sum(batch.broken.values()) == 1


def test_an_event_that_is_no_valid_msgpack_value_does_not_lose_its_neighbours() -> None:
    good = msgspec.msgpack.encode({"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"})
    not_utf8 = b"\x81\xa4type\xa2\xff\xfe"
    raw = b"\x93\xcb" + bytes(8) + b"\x93" + good + not_utf8 + good + b"\x00"
    batch = decode_batch(raw)
    assert batch.events == [BlockRemoved([7], "GPU")] * 2
    assert batch.broken == {"?": 1}


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x01", b"\x80", b"\x91\x01", b"\x93\x01\x02\x03", b"junk" * 9])
def test_a_payload_without_a_list_of_events_is_an_error(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_batch(raw)


def test_a_truncated_payload_is_an_error() -> None:
    whole = payload("two_blocks_root")
    for end in range(len(whole)):
        with pytest.raises(DecodeError):
            decode_batch(whole[:end])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_fixtures_in_order_end_where_vllm_would(encoding: str) -> None:
    blocks = replay(["two_blocks_root", "extend_parent"], encoding)
    assert overlap(blocks, prompt(tokens(0, 48))) == 3
    blocks.apply(decode_batch(payload("orphan_parent", encoding)))
    assert overlap(blocks, prompt(tokens(500, 16))) == 0
    blocks.apply(decode_batch(payload("remove_middle", encoding)))
    assert overlap(blocks, prompt(tokens(0, 48))) == 1
    assert len(blocks) == 1
    blocks.apply(decode_batch(payload("cleared", encoding)))
    assert not blocks.published


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("flip", [False, True])
def test_a_mamba_group_never_enters_the_index(encoding: str, flip: bool) -> None:
    raw = msgspec.msgpack.decode(payload("mamba_group", encoding))
    if flip:
        raw[1].reverse()
    blocks = BlockSet(MODEL, 768)
    blocks.apply(decode_batch(msgspec.msgpack.encode(raw)))
    assert overlap(blocks, prompt(tokens(0, 3840), size=768)) == 5
    assert sum(n for name, n in blocks.counters.items() if name.startswith("skipped_")) == 1


def test_media_tell_equal_placeholder_tokens_apart() -> None:
    blocks = replay(["mm_block"])
    ids = pack_token_ids([151655] * 16)
    with_image = {
        name: chain(root_hash(MODEL), ids, 16, [media_extra([[name, 0]])]) for name in ("imghash-A", "imghash-B")
    }
    assert overlap(blocks, with_image["imghash-A"]) == 1
    assert overlap(blocks, with_image["imghash-B"]) == 0
    assert overlap(blocks, prompt(ids)) == 0


# --- captured from a real vLLM --------------------------------------------------------------------------------------

CAPTURES = ("", "_xxhash_cbor_seed42_bytes")
CAPTURE_BLOCK = 32


def captured_events(capture: str) -> list[tuple[float, bytes]]:
    rows = map(json.loads, (FIXTURES / "vllm" / f"events{capture}.jsonl").read_text().splitlines())
    return [(row["recv_ts"], base64.b64decode(row["frames_b64"][-1])) for row in rows]


def captured_requests(capture: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURES / "vllm" / f"session{capture}.jsonl").read_text().splitlines()]


def predictions(capture: str, as_array: bool = False) -> Iterator[tuple[dict[str, Any], int]]:
    """Each captured request with the tokens that the block set, just before it, says the engine can reuse."""
    blocks, events = BlockSet(MODEL, CAPTURE_BLOCK), captured_events(capture)
    for request in sorted(captured_requests(capture), key=lambda r: r["t0"]):
        while events and _sent(events[0][1]) < request["t0"]:
            blocks.apply(decode_batch(_as_arrays(events.pop(0)[1]) if as_array else events.pop(0)[1]))
        ids = pack_token_ids(request["prompt_token_ids"])
        hashes = prompt(ids, salt=request["kw"].get("cache_salt"), size=CAPTURE_BLOCK)
        usable = reusable_blocks(len(request["prompt_token_ids"]), CAPTURE_BLOCK)
        yield request, min(overlap(blocks, hashes), usable) * CAPTURE_BLOCK


def _sent(raw: bytes) -> float:
    return decode_batch(raw).ts


def _as_arrays(raw: bytes) -> bytes:
    order = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    removed = ("block_hashes", "medium", "group_idx")
    batch = msgspec.msgpack.decode(raw)
    names = {"BlockStored": (*order, "extra_keys", "group_idx"), "BlockRemoved": removed, "AllBlocksCleared": ()}
    batch[1] = [[e["type"], *(e[name] for name in names[e["type"]])] for e in batch[1]]
    return msgspec.msgpack.encode(batch)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("as_array", [False, True])
def test_predictions_equal_what_the_real_engine_reused(capture: str, as_array: bool) -> None:
    resets = 0
    seen_first_turn: set[str] = set()
    twins: list[tuple[int, int]] = []
    for request, predicted in predictions(capture, as_array):
        cached = request["usage"]["prompt_tokens_details"]["cached_tokens"]
        tag = request["tag"]
        if tag.startswith("twin"):  # sent together: the second one reused what the first was computing
            twins.append((predicted, cached))
            continue
        if request is captured_requests(capture)[-1] or (tag == "alice/0" and len(seen_first_turn) > 8):
            resets += 1
        seen_first_turn.add(tag)
        if (resets, tag) == (2, "alice/0"):
            # The reset before the last request is told only with the engine's next step (an idle engine is silent).
            assert cached == 0
            continue
        assert predicted == cached, tag
    assert resets == 2
    assert sorted(twins) == [(0, 0), (0, 320)]


@pytest.mark.parametrize("capture", CAPTURES)
def test_after_a_captured_clear_only_what_followed_it_is_held(capture: str) -> None:
    blocks = BlockSet(MODEL, CAPTURE_BLOCK)
    for _, raw in captured_events(capture):
        blocks.apply(decode_batch(raw))
    last = captured_requests(capture)[-1]
    ids = pack_token_ids([*last["prompt_token_ids"], *last["token_ids"]])
    # The id that a request ends with was sampled, never fed back: it is in no block.
    expected = prompt(ids[:-4], size=CAPTURE_BLOCK)
    assert blocks.published == set(expected)
    assert blocks.counters["cleared"] == 1
    assert blocks.counters["parked"] == 0


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_salt_is_needed_to_find_salted_blocks_and_shows_nowhere(capture: str) -> None:
    blocks = BlockSet(MODEL, CAPTURE_BLOCK)
    request = next(r for r in captured_requests(capture) if r["kw"].get("cache_salt"))
    ids = pack_token_ids(request["prompt_token_ids"])
    for _, raw in captured_events(capture):
        blocks.apply(decode_batch(raw))
        assert b"tenant" not in b"".join(blocks.published)
        assert "tenant" not in repr(blocks) + repr(decode_batch(raw).events)
        if overlap(blocks, prompt(ids, salt="tenant-A", size=CAPTURE_BLOCK)) == len(ids) // 4 // CAPTURE_BLOCK:
            break
    else:
        pytest.fail("the salted prompt was never found")
    assert overlap(blocks, prompt(ids, salt="tenant-B", size=CAPTURE_BLOCK)) == 0
