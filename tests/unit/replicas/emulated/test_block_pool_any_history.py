"""The block pool against a slow reference with the same rules over plain lists, for any history of sequences."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from replicas.emulated.block_hashes import BlockChain, CacheKeys
from replicas.emulated.block_pool import BlockPool, KVEvent

BLOCK = 4


def mirror(events: list[KVEvent], counts: Counter[int]) -> None:
    """Follows events as a listener has to: by counting the copies of each hash."""
    for event in events:
        if event["type"] == "AllBlocksCleared":
            counts.clear()
        elif event["type"] == "BlockStored":
            counts.update(event["block_hashes"])
        else:
            counts.subtract(event["block_hashes"])
    for block_hash in [h for h, count in counts.items() if count == 0]:
        del counts[block_hash]


Prefix = tuple[Any, ...]


class SlowPool:
    """The same rules over plain lists; a hash is the whole prefix, so nothing can collide or be chained wrongly."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.refs = Counter[int]()
        self.prefix_of: dict[int, Prefix] = {}
        self.copies: list[tuple[Prefix, int]] = []

    @staticmethod
    def prefixes(tokens: list[int], salt: str | None) -> list[Prefix]:
        return [(salt, *tokens[: end + BLOCK]) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]

    def find(self, tokens: list[int], salt: str | None) -> list[int]:
        found: list[int] = []
        for prefix in self.prefixes(tokens[:-1], salt):
            holders = [block for stored, block in self.copies if stored == prefix]
            if not holders:
                break
            found.append(holders[0])
        return found

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] += 1
        self.free = [block for block in self.free if self.refs[block] == 0]

    def allocate(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.prefix_of.pop(block, None)
            self.refs[block] = 1
        self.copies = [copy for copy in self.copies if copy[1] not in taken]
        return taken

    def store(self, tokens: list[int], salt: str | None, blocks: list[int], start: int) -> None:
        for index, prefix in enumerate(self.prefixes(tokens, salt)):
            if index >= start:
                self.prefix_of[blocks[index]] = prefix
                self.copies.append((prefix, blocks[index]))

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
        idle = [block for block in reversed(blocks) if self.refs[block] == 0]
        bare = [block for block in idle if block not in self.prefix_of]
        self.free = bare + self.free + [block for block in idle if block in self.prefix_of]

    def reset(self) -> None:
        self.prefix_of, self.copies = {}, []


class Held:
    def __init__(self, tokens: list[int], salt: str | None, blocks: list[int]) -> None:
        self.tokens = tokens
        self.salt = salt
        self.blocks = blocks
        self.stored = len(tokens) // BLOCK
        self.chain = BlockChain(tokens, BLOCK, CacheKeys(cache_salt=salt))


class PoolAgainstReference(RuleBasedStateMachine):
    """Sequences over two tokens and two salts, so that prefixes and twins are common, in a pool of 12 blocks."""

    sequences = Bundle("sequences")
    SIZE = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE, BLOCK)
        self.slow = SlowPool(self.SIZE)
        self.held: list[Held] = []
        self.counts = Counter[int]()
        self.prefix_of_hash: dict[int, Prefix] = {}

    @rule(
        target=sequences,
        runs=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        tail=st.integers(0, BLOCK),
        salt=st.sampled_from([None, None, "s"]),
        look_up=st.booleans(),
    )
    def admit(self, runs: list[int], tail: int, salt: str | None, look_up: bool) -> Held | None:
        """`look_up` False is the twin that started before its sibling's blocks were there."""
        tokens = [token for run in runs for token in [run] * BLOCK] + [7] * tail
        held = Held(tokens, salt, [])
        hits = self.pool.find_cached(held.chain) if look_up else []
        assert hits == (self.slow.find(tokens, salt) if look_up else [])
        needed = self.pool.blocks_for(len(tokens)) - len(hits)
        if needed + self.pool.num_unused(hits) > self.pool.num_free:
            return None
        self.pool.share(hits)
        self.slow.share(hits)
        fresh = self.pool.allocate(needed)
        assert fresh == self.slow.allocate(needed)
        held.blocks = hits + fresh
        self.pool.store(held.chain, held.blocks, len(hits), held.stored)
        self.slow.store(tokens, salt, held.blocks, len(hits))
        self.prefix_of_hash.update(zip(held.chain.hashes, self.slow.prefixes(tokens, salt), strict=True))
        self.held.append(held)
        return held

    @rule(held=sequences, token=st.integers(0, 1))
    def grow(self, held: Held | None, token: int) -> None:
        if held not in self.held or held is None:
            return
        if len(held.tokens) % BLOCK == 0:
            if self.pool.num_free == 0:
                return
            fresh = self.pool.allocate(1)
            assert fresh == self.slow.allocate(1)
            held.blocks += fresh
        held.tokens.append(token)
        held.chain.append(token)
        full = len(held.tokens) // BLOCK
        self.pool.store(held.chain, held.blocks, held.stored, full)
        self.slow.store(held.tokens, held.salt, held.blocks, held.stored)
        self.prefix_of_hash.update(zip(held.chain.hashes, self.slow.prefixes(held.tokens, held.salt), strict=True))
        held.stored = full

    @rule(held=consumes(sequences))
    def finish(self, held: Held | None) -> None:
        if held in self.held and held is not None:
            self.held.remove(held)
            self.pool.release(held.blocks)
            self.slow.release(held.blocks)

    @precondition(lambda self: not self.held)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset()
        self.slow.reset()

    @precondition(lambda self: self.held)
    @rule()
    def refuse_reset(self) -> None:
        assert not self.pool.reset()

    @invariant()
    def every_book_agrees(self) -> None:
        self.pool.check(Counter(block for held in self.held for block in held.blocks))
        assert self.pool.num_free == len(self.slow.free)
        mirror(self.pool.take_events(), self.counts)
        assert self.counts.keys() == self.pool.cached_hashes
        by_prefix = Counter({self.prefix_of_hash[h]: count for h, count in self.counts.items()})
        assert by_prefix == Counter(prefix for prefix, _ in self.slow.copies)


TestPoolAgainstReference = PoolAgainstReference.TestCase
TestPoolAgainstReference.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
