"""The chain of block hashes: xxh3-128 over the parent's hash and the block's token ids.

    root --+--> h1 = H(root + ids of block 1) --+--> h2 = H(h1 + ids of block 2) --> ...

Only full blocks have a hash, as in vLLM. `root` stands for all that makes equal ids different blocks: model, LoRA
adapter, cache salt. What differs within the chain (images) is mixed into the block where it stands.
xxh3 is no cryptographic hash: a forged collision may misroute a request, never mix up answers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import overload

from xxhash import xxh3_128_digest

from router.types import BlockHash

HASH_BYTES = 16
TOKEN_BYTES = 4
_SCHEME = b"whohas-1"


def root_hash(model: str, lora: str | None = None, cache_salt: str | None = None) -> BlockHash:
    """Parent of the first block. `model` is the base model's served name; salts go in as a keyed digest only."""
    digest = blake2b(digest_size=HASH_BYTES, person=_SCHEME)
    for part in (model, lora, cache_salt):
        raw = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<?Q", part is not None, len(raw)))
        digest.update(raw)
    return BlockHash(digest.digest())


def chain(
    parent: BlockHash, token_ids: bytes, block_size: int, extras: Sequence[bytes | None] | None = None
) -> list[BlockHash]:
    """Hashes of the full blocks in `token_ids` (little-endian uint32), the first one a child of `parent`.

    `extras[i]`, where given, identifies the media items of block i. A tail shorter than `block_size` has no hash.
    """
    width = block_size * TOKEN_BYTES
    full = len(token_ids) // width * width
    blocks = struct.iter_unpack(f"{width}s", memoryview(token_ids)[:full])
    if extras is None:
        return [parent := BlockHash(xxh3_128_digest(parent + block)) for (block,) in blocks]
    hashes = []
    for i, (block,) in enumerate(blocks):
        extra = extras[i] if i < len(extras) else None
        parent = BlockHash(xxh3_128_digest(parent + block + (extra or b"")))
        hashes.append(parent)
    return hashes


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32 bytes. Raises `struct.error` outside 0..2**32-1."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


class HashChain(Sequence[BlockHash]):
    """Block hashes in one piece of memory, as look-ups send them: 8,192 of them are 128 KiB and one object."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw) // HASH_BYTES

    @overload
    def __getitem__(self, at: int) -> BlockHash: ...
    @overload
    def __getitem__(self, at: slice) -> HashChain: ...
    def __getitem__(self, at: int | slice) -> BlockHash | HashChain:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                raise ValueError("a chain has no steps")
            return HashChain(self.raw[start * HASH_BYTES : max(start, stop) * HASH_BYTES])
        index = at + len(self) if at < 0 else at
        if not 0 <= index < len(self):
            raise IndexError(at)
        return BlockHash(self.raw[index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def __iter__(self) -> Iterator[BlockHash]:
        return (BlockHash(one) for (one,) in struct.iter_unpack(f"{HASH_BYTES}s", self.raw))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashChain) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"HashChain({len(self)} blocks)"


def reusable_blocks(num_tokens: int, block_size: int) -> int:
    """Most blocks an engine can reuse of a prompt: it always recomputes at least the last token."""
    return max(0, num_tokens - 1) // block_size
