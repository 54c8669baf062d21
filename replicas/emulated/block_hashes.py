"""Hashes of an engine's own blocks, chained as vLLM chains them.

    None --+--> h1 = H(None, ids of block 1, extra keys 1) --+--> h2 = H(h1, ids of block 2, extra keys 2) --> ...

Not the hashes that routers use: what leaves the engine is unsigned 64-bit numbers that mean nothing elsewhere, and
another seed gives other numbers, as a restart of vLLM does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

import msgspec
from xxhash import xxh64_intdigest

EngineBlockHash = NewType("EngineBlockHash", int)
"""One engine's hash of one block: 0 <= hash < 2**64."""

ExtraKey = str | tuple[str, int]
"""What besides its tokens tells a block apart: a LoRA name, a salt, or (media hash, offset in the block)."""

_pack = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or the like that stands for prompt tokens `offset` .. `offset + length - 1`."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """What makes equal token ids different blocks. `media` is sorted by offset."""

    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    media: tuple[MediaItem, ...] = ()

    def of_block(self, start: int, stop: int) -> tuple[ExtraKey, ...] | None:
        """Extra keys of the block of tokens `start` .. `stop - 1`, as events name them; None where it has none."""
        return tuple(key for _, key in self.tagged(start, stop)) or None

    def tagged(self, start: int, stop: int) -> list[tuple[str, ExtraKey]]:
        """The same keys, each with what it is: hashes tell a salt from an adapter of that name, events don't."""
        keys: list[tuple[str, ExtraKey]] = []
        if self.lora_name is not None:
            keys.append(("lora", self.lora_name))
        keys += [
            ("media", (item.identifier, item.offset - start))
            for item in self.media
            if item.offset < stop and item.offset + item.length > start
        ]
        if start == 0 and self.cache_salt is not None:
            keys.append(("salt", self.cache_salt))
        return keys


class BlockChain:
    """The tokens of one sequence and the hashes of its full blocks; grows as the engine generates.

    Raises OverflowError for token ids outside 0 .. 2**32 - 1.
    """

    __slots__ = ("_seed", "_tokens", "block_size", "hashes", "keys")

    def __init__(
        self, token_ids: Iterable[int], block_size: int, keys: CacheKeys | None = None, hash_seed: int = 0
    ) -> None:
        self.block_size = block_size
        self.keys = keys or CacheKeys()
        self.hashes: list[EngineBlockHash] = []
        self._seed = hash_seed
        self._tokens = array("I", token_ids)
        self._hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def append(self, token_id: int) -> None:
        self._tokens.append(token_id)
        if len(self._tokens) % self.block_size == 0:
            self._hash_full_blocks()

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        return self._tokens[start:stop].tolist()

    def extra_keys(self, block: int) -> tuple[ExtraKey, ...] | None:
        start = block * self.block_size
        return self.keys.of_block(start, start + self.block_size)

    def _hash_full_blocks(self) -> None:
        tokens, size, hashes = self._tokens, self.block_size, self.hashes
        parent = hashes[-1].to_bytes(8, "big") if hashes else b""
        for block in range(len(hashes), len(tokens) // size):
            start = block * size
            extra = self.keys.tagged(start, start + size)
            content = parent + tokens[start : start + size].tobytes()
            value = xxh64_intdigest(content + _pack(extra) if extra else content, self._seed)
            hashes.append(EngineBlockHash(value))
            parent = value.to_bytes(8, "big")
