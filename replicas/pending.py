"""What the ownership map is still to be told of one replica's blocks. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from router.types import BlockHash


class Pending:
    """Blocks with what the map shall say about each: there or gone. Only the last word on a block is kept.

    Descendants go before their ancestors and come after them, so that the map has no holes between two slices.
    `rewrite`: size of the whole set, while that is being written. `resets` counts how often everything was forgotten.
    """

    def __init__(self) -> None:
        self.rewrite = self.resets = 0
        self._blocks: dict[BlockHash, bool] = {}
        self._removals = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._blocks

    @property
    def removals(self) -> int:
        return self._removals

    def note(self, added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        """Both as they came: ancestors first."""
        for block in reversed(removed):
            self._removals += self._blocks.get(block, True)
            self._blocks[block] = False
        for block in added:
            self._removals -= not self._blocks.get(block, True)
            self._blocks[block] = True

    def take(self, limit: int, *, removals_only: bool = False) -> tuple[list[BlockHash], list[BlockHash]]:
        """The next blocks to add and to remove, no longer pending."""
        chosen: Iterable[tuple[BlockHash, bool]] = self._blocks.items()
        if removals_only:
            chosen = (item for item in chosen if not item[1])
        part = list(islice(chosen, limit))
        for block, _ in part:
            del self._blocks[block]
        if not self._blocks:
            self.rewrite = 0
        added = [block for block, there in part if there]
        removed = [block for block, there in part if not there]
        self._removals -= len(removed)
        return added, removed

    def put_back(self, added: Sequence[BlockHash]) -> None:
        """These were not written. What was noted since counts more."""
        newer, self._blocks = self._blocks, dict.fromkeys(added, True)
        self._blocks.update(newer)

    def write_all(self, blocks: Collection[BlockHash]) -> None:
        """Forget the rest and write all these."""
        self._blocks = dict.fromkeys(blocks, True)
        self._removals = 0
        self.rewrite = len(blocks)
        self.resets += 1

    def clear(self) -> None:
        self.write_all(())
