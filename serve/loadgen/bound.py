"""The most that any cache could hit, for a load whose prompts are known."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from router.hashing import TOKEN_BYTES, chain, reusable_blocks
from router.prompt import PromptEncoder
from serve.loadgen.types import Call


def infinite_cache_hit_rate(calls: Iterable[Call], encoder: PromptEncoder, block_size: int) -> float:
    """Share of prompt tokens in leading blocks that an earlier prompt had: one cache for all, without a limit.

    What engines generate isn't counted, as the next prompt of a recorded conversation holds the recorded answer. 0.0
    without calls. Raises `UnknownPrompt` for a call that the encoder can't tell the ids of.
    """
    seen: set[bytes] = set()
    hits = tokens = 0
    for call in calls:
        prompt = encoder.prompt(call.path, msgspec.json.decode(call.body))
        count = len(prompt.token_ids) // TOKEN_BYTES
        hashes = chain(prompt.root, prompt.token_ids, block_size)
        cached = next((index for index, block in enumerate(hashes) if block not in seen), len(hashes))
        hits += min(cached, reusable_blocks(count, block_size)) * block_size
        tokens += count
        seen.update(hashes)
    return hits / tokens if tokens else 0.0
