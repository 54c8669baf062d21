"""The paged KV cache of one engine: blocks, reference counts, prefix cache, KV events, as in vLLM v1.

    free queue:  [ never hashed, latest first | cached, least recently used first ... ]
                   ^ allocation takes from here, and evicts what it takes

A block is either in the free queue (nobody refers to it) or referred to by one or more requests. Both kinds may be in
the prefix cache. Twins that computed the same block side by side hold two copies under one hash; each copy is stored
and removed with its own event, and the hash hits as long as one copy is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from replicas.emulated.block_hashes import BlockChain, EngineBlockHash

KVEvent = dict[str, Any]
"""One event as vLLM puts it on the wire: a map tagged by "type"."""

MEDIUM = "GPU"


class BlockPool:
    """`num_blocks` usable blocks of `block_size` tokens; block ids are 0 .. num_blocks - 1.

    vLLM keeps one further block as a null block, so its `--num-gpu-blocks-override N` is N - 1 here.
    """

    def __init__(self, num_blocks: int, block_size: int, *, events: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least 1 block of at least 1 token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._refs = [0] * num_blocks
        self._hash_of: list[EngineBlockHash | None] = [None] * num_blocks
        # A bare block id where there is one copy: a dict for each of many thousand hashes costs memory and GC time.
        self._cached: dict[EngineBlockHash, int | dict[int, None]] = {}
        self._events: list[KVEvent] | None = [] if events else None

    def __repr__(self) -> str:
        used = self.num_blocks - len(self._free)
        return f"<BlockPool {used}/{self.num_blocks} used, {len(self._cached)} hashes cached>"

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks that requests refer to, 0..1. Cached blocks nobody uses count as free."""
        return 1.0 - len(self._free) / self.num_blocks

    @property
    def cached_hashes(self) -> Collection[EngineBlockHash]:
        return self._cached.keys()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached(self, chain: BlockChain) -> list[int]:
        """Blocks of the longest cached prefix. At least the last token is left to compute. Takes no reference."""
        found = []
        for block_hash in chain.hashes[: max(0, chain.num_tokens - 1) // self.block_size]:
            copies = self._cached.get(block_hash)
            if copies is None:
                break
            found.append(copies if isinstance(copies, int) else next(iter(copies)))
        return found

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody refers to: sharing them takes as many out of the free queue."""
        return sum(self._refs[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one reference to each of these blocks, which `find_cached` gave."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, evicting what they held. Raises ValueError when too few are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._evict(block)
            self._refs[block] = 1
        return blocks

    def store(
        self, chain: BlockChain, blocks: Sequence[int], start: int, stop: int, *, session_id: str | None = None
    ) -> None:
        """Makes blocks `start` .. `stop - 1` of a sequence hittable; `blocks` are all blocks of that sequence."""
        if start >= stop:
            return
        for index in range(start, stop):
            self._insert(chain.hashes[index], blocks[index])
        self.report(chain, start, stop, session_id=session_id)

    def report(self, chain: BlockChain, start: int, stop: int, *, session_id: str | None = None) -> None:
        """Queues a BlockStored event for blocks `start` .. `stop - 1` without storing anything."""
        if self._events is None or start >= stop:
            return
        event: KVEvent = {
            "type": "BlockStored",
            "block_hashes": chain.hashes[start:stop],
            "parent_block_hash": chain.hashes[start - 1] if start else None,
            "token_ids": chain.token_ids(start * self.block_size, stop * self.block_size),
            "block_size": self.block_size,
            "lora_id": chain.keys.lora_id,
            "medium": MEDIUM,
            "lora_name": chain.keys.lora_name,
            "extra_keys": [chain.extra_keys(index) for index in range(start, stop)],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if session_id is not None:
            event["session_id"] = session_id
        self._events.append(event)

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back a sequence's blocks, in the sequence's order: its tail will be evicted before its head."""
        never_hashed = []
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            if self._hash_of[block] is None:
                never_hashed.append(block)
            else:
                self._free[block] = None
        for block in reversed(never_hashed):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Empties the prefix cache; False, and nothing changes, while any block is in use."""
        if len(self._free) < self.num_blocks:
            return False
        self._cached.clear()
        self._hash_of = [None] * self.num_blocks
        if self._events is not None:
            self._events.append({"type": "AllBlocksCleared"})
        return True

    def take_events(self) -> list[KVEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, None if self._events is None else []
        return events or []

    def check(self, held: Mapping[int, int]) -> None:
        """Raises AssertionError unless all books agree; `held` counts the references to each block by requests."""
        for block in range(self.num_blocks):
            assert self._refs[block] == held.get(block, 0), f"block {block}: wrong reference count"
            assert (self._refs[block] == 0) == (block in self._free), f"block {block}: neither free nor in use, or both"
        copies = [
            (block, block_hash)
            for block_hash, blocks in self._cached.items()
            for block in ([blocks] if isinstance(blocks, int) else blocks)
        ]
        hashed = [(block, block_hash) for block, block_hash in enumerate(self._hash_of) if block_hash is not None]
        assert sorted(copies) == hashed, "the cache and the blocks disagree"

    def _insert(self, block_hash: EngineBlockHash, block: int) -> None:
        self._hash_of[block] = block_hash
        copies = self._cached.get(block_hash)
        if copies is None:
            self._cached[block_hash] = block
        elif isinstance(copies, int):
            self._cached[block_hash] = {copies: None, block: None}
        else:
            copies[block] = None

    def _evict(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        copies = self._cached[block_hash]
        if isinstance(copies, int):
            del self._cached[block_hash]
        else:
            del copies[block]
            if len(copies) == 1:
                self._cached[block_hash] = next(iter(copies))
        if self._events is not None:
            self._events.append(
                {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": MEDIUM, "group_idx": 0}
            )
