"""Where prompts part: the last block that a prompt has in common with all that is held anywhere.

A turn of a chat parts at the end of its own history, at another block each time. Chats that begin with one system
prompt all part at its end. So a block at which many prompts part ends a prefix worth having everywhere.
"""

from __future__ import annotations

from collections import Counter, deque

from router.types import BlockHash

_WINDOW = 256
_SHARE = 1 / 24
_AT_LEAST = 4


class BranchBook:
    """Where the last few hundred prompts of one router parted. Pure."""

    def __init__(self) -> None:
        self._recent: deque[BlockHash] = deque()
        self._counts: Counter[BlockHash] = Counter()

    def note(self, block: BlockHash) -> None:
        """A prompt parted here from all that is held."""
        self._recent.append(block)
        self._counts[block] += 1
        if len(self._recent) > _WINDOW:
            oldest = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def often(self, block: BlockHash) -> bool:
        """Do many prompts part here?"""
        return self._counts[block] >= max(_AT_LEAST, _SHARE * len(self._recent))
