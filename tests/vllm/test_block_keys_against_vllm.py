"""Extra keys and hashes of blocks: what events name, and which blocks are the same block."""

from __future__ import annotations

import random

import pytest

from replicas.emulated.block_hashes import BlockChain, CacheKeys, MediaItem
from tests.vllm.operations import LORAS


def random_media(rng: random.Random, num_tokens: int) -> tuple[MediaItem, ...]:
    """Pictures side by side or apart, some of them the same picture."""
    items, offset = [], rng.randrange(8)
    while offset < num_tokens and rng.random() < 0.8:
        length = min(rng.randrange(1, 12), num_tokens - offset)
        items.append(MediaItem(rng.choice(["img-a", "img-b"]), offset, length))
        offset += length + rng.choice([0, 0, 1, 9])
    return tuple(items)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_sequences_have_vllms_keys_and_share_what_vllm_shares(block_size: int) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import (
        generate_block_hash_extra_keys,
        get_request_block_hasher,
        init_none_hash,
        to_event_extra_keys,
    )
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(block_size, sha256_cbor)
    rng = random.Random(block_size)
    ours_to_vllms: dict[int, bytes] = {}
    vllms_to_ours: dict[bytes, int] = {}
    blocks = 0
    for number in range(600):
        tokens = [rng.randrange(2)] * rng.randrange(1, 5 * block_size + 2)
        media = random_media(rng, len(tokens)) if rng.random() < 0.7 else ()
        lora = rng.choice([None, None, *LORAS])
        salt = rng.choice([None, None, "ada", "img-a"])
        keys = CacheKeys(lora, None if lora is None else LORAS[lora], salt, media)
        chain = BlockChain(tokens, block_size, keys)
        request = Request(
            f"r{number}",
            list(tokens),
            SamplingParams(max_tokens=99),
            None,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=item.identifier,
                    mm_position=PlaceholderRange(offset=item.offset, length=item.length),
                )
                for item in media
            ],
            lora_request=None if lora is None else LoRARequest(lora, LORAS[lora], f"loras/{lora}"),
            cache_salt=salt,
            block_hasher=hasher,
        )
        for token in range(rng.randrange(2 * block_size)):
            chain.append(token % 2)
            request.append_output_token_ids(token % 2)
        assert len(chain.hashes) == len(request.block_hashes)
        position, expected = 0, []
        for block in range(len(chain.hashes)):
            one, position = generate_block_hash_extra_keys(
                request, block * block_size, (block + 1) * block_size, position
            )
            expected.append(one)
        named = [chain.extra_keys(block) for block in range(len(chain.hashes))]
        assert named == (to_event_extra_keys(expected) or [])
        for ours, theirs in zip(chain.hashes, request.block_hashes, strict=True):
            assert ours_to_vllms.setdefault(ours, theirs) == theirs
            assert vllms_to_ours.setdefault(theirs, ours) == ours
            blocks += 1
    assert blocks > len(ours_to_vllms) > 100
