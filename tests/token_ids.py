"""Prompts for tests that are about anything but text: bodies carry their token ids, {"ids": [...]}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.hashing import chain, pack_token_ids, root_hash
from router.types import BlockHash, HashedPrompt

MODEL, BLOCK = "m", 16


def blocks_of(ids: Sequence[int], block_size: int = BLOCK) -> list[BlockHash]:
    return chain(root_hash(MODEL), pack_token_ids(ids), block_size)


class TokenIds:
    """A `PromptSource`; hashed as in the product."""

    off_loop_bytes = 1 << 60

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        return HashedPrompt(len(body["ids"]), blocks_of(body["ids"], block_size))
