"""`extra_keys` of a stored block: what besides its tokens and its parent made it another block.

One entry per block, its values untagged and in this order: the adapter's name where there is one (in every block), a
(media hash, offset in the block) pair for each media item in it, the cache salt (in the first block of a chain only).
Source: vllm/v1/core/kv_cache_utils.py, to_event_extra_keys.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from replicas.events import BlockStored


class UnreadableKeys(Exception):
    """They say something that whohas can't put into a hash. (The message never quotes them: a salt is a secret.)"""


def read_extra_keys(event: BlockStored) -> tuple[str | None, Sequence[bytes | None] | None]:
    """The chain's cache salt, and for each block the bytes that tell its media apart (None: all blocks are plain)."""
    if not event.extra_keys or not any(event.extra_keys):
        return None, None
    if len(event.extra_keys) != len(event.block_hashes):
        raise UnreadableKeys
    salt: str | None = None
    extras: list[bytes | None] = []
    for i, keys in enumerate(event.extra_keys):
        rest = list(keys or ())
        if rest and event.lora_name is not None and rest[0] == event.lora_name:
            del rest[0]
        if rest and isinstance(rest[-1], str) and i == 0 and event.parent_block_hash is None:
            salt = rest.pop()
        extras.append(media_extra(rest) if rest else None)
    return salt, extras if any(extras) else None


def media_extra(keys: Sequence[Any]) -> bytes:
    """Identity of one block's media, as hashed behind its tokens: for each (hash, offset in the block) pair the hash's
    length and the offset as little-endian int64, then the hash in UTF-8."""
    parts = []
    for key in keys:
        match key:
            case [str() as identity, int() as offset]:
                raw = identity.encode("utf-8", "surrogatepass")
                parts.append(struct.pack("<qq", len(raw), offset) + raw)
            case _:
                raise UnreadableKeys
    return b"".join(parts)
