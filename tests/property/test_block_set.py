"""`BlockSet` against an obvious model: what the engine holds, and from it, slowly, what may be published."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from replicas.block_set import BlockSet
from replicas.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from router.hashing import chain, pack_token_ids, root_hash
from router.types import BlockHash

B = 2
SALTS = (None, "s")
Path = tuple[int, ...]
"""Names a block: the salt's index, then the first token of each block of the chain that ends with it."""

# Few blocks, so that they meet often: a chain of four, a branch of it, and the same tokens under a salt.
LEAVES: tuple[Path, ...] = ((0, 0, 0, 0, 0), (0, 0, 1, 0), (1, 0, 0))
PATHS = sorted({leaf[:length] for leaf in LEAVES for length in range(2, len(leaf) + 1)})
paths = st.sampled_from(PATHS)


def engine_hash(path: Path) -> int:
    return int("1" + "".join(map(str, path)))


def token_ids(path: Path) -> bytes:
    return b"".join(pack_token_ids([step, 7]) for step in path[1:])


def own_hash(path: Path) -> BlockHash:
    return chain(root_hash("m", cache_salt=SALTS[path[0]]), token_ids(path), B)[-1]


def stored(path: Path, from_depth: int) -> BlockStored:
    """Blocks `from_depth`.. of the chain that `path` names; depth 1 is the first block."""
    blocks = [path[: depth + 1] for depth in range(from_depth, len(path))]
    salt = SALTS[path[0]]
    extra = [[salt] if salt and len(block) == 2 else None for block in blocks]
    parent = engine_hash(blocks[0][:-1]) if from_depth > 1 else None
    tokens = token_ids(path)[(from_depth - 1) * B * 4 :]
    return BlockStored([engine_hash(b) for b in blocks], parent, tokens, B, medium="GPU", extra_keys=extra)


class BlockSetMachine(RuleBasedStateMachine):
    """The engine here is freer than a real one: any chain part may be stored, any block removed, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.real = BlockSet("m", B)
        self.copies: Counter[Path] = Counter()
        self.mirror: set[BlockHash] = set()

    def feed(self, *events: KVEvent) -> None:
        changes = self.real.apply(KVEventBatch(0.0, events))
        added, removed = set(changes.added), set(changes.removed)
        assert (len(added), len(removed)) == (len(changes.added), len(changes.removed))
        assert not added & self.mirror
        assert removed <= self.mirror
        self.mirror = self.mirror - removed | added

    @rule(path=paths, data=st.data())
    def store(self, path: Path, data: st.DataObject) -> None:
        start = data.draw(st.integers(1, len(path) - 1))
        blocks = [path[: depth + 1] for depth in range(start, len(path))]
        may_be_hits = start == 1 and len(blocks) > 1
        self.copies.update(block for block in blocks if not (may_be_hits and self.copies[block]))
        self.feed(stored(path, start))

    @rule(path=paths)
    def remove(self, path: Path) -> None:
        if self.copies[path]:
            self.copies[path] -= 1
        self.feed(BlockRemoved([engine_hash(path)], "GPU"))

    @rule()
    def clear(self) -> None:
        self.copies.clear()
        self.feed(AllBlocksCleared())

    @rule(path=paths)
    def come_and_go(self, path: Path) -> None:
        if not self.copies[path]:
            self.feed(stored(path, len(path) - 1), BlockRemoved([engine_hash(path)], "GPU"))

    @invariant()
    def publishes_exactly_the_held_prefixes(self) -> None:
        held = {path for path, copies in self.copies.items() if copies}
        closed = {path for path in held if all(path[:depth] in held for depth in range(2, len(path)))}
        assert set(self.real.published) == {own_hash(path) for path in closed}
        assert self.mirror == set(self.real.published)

    @invariant()
    def forgets_what_nobody_needs(self) -> None:
        if not any(self.copies.values()):
            assert repr(self.real) == "BlockSet(published=0, known=0, parked=0)"


TestBlockSet = BlockSetMachine.TestCase
TestBlockSet.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
