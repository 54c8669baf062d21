"""Does the ownership map still say what was written to it? A server that evicts keys forgets single blocks, and a chain
with a hole in the middle looks longer than it is.

With every renewal of the lease a few blocks from all over the set are asked for. Is one missing, then the replica gets
no credit until the whole set has been gone through, in slices, and what was missing is written again.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Set as AbstractSet
from itertools import islice

from replicas.pending import Pending
from router.ownership import Lease, OwnershipMap
from router.types import BlockHash

logger = logging.getLogger(__name__)

_SAMPLE = 256
_SLICE = 1024


class Audit:
    """For maps that can tell what is missing (`router.ownership.Auditor`); for others it does nothing.

    What is found missing goes into `pending`. Counters: audited, missing (blocks), repairs.
    """

    def __init__(self, ownership: OwnershipMap, pending: Pending, counters: Counter[str], name: str) -> None:
        self._find = getattr(ownership, "missing", None)
        self._pending, self._counters, self._name = pending, counters, name
        self._left: list[BlockHash] | None = None
        self._draw = random.Random(name)

    @property
    def repairing(self) -> bool:
        return self._left is not None

    def forget(self) -> None:
        """A new incarnation's set is written whole anyway."""
        self._left = None

    async def sample(self, lease: Lease, published: AbstractSet[BlockHash]) -> bool:
        """Every n-th block, from a start that changes, so that no run of lost ones longer than n goes unseen. True when
        a repair begins."""
        if self._find is None or not published or self.repairing:
            return False
        step = max(1, len(published) // _SAMPLE)
        if await self._missing(lease, list(islice(published, self._draw.randrange(step), None, step)), published):
            logger.error(
                "the map lost blocks of %s, which are written again; does Redis evict keys? More `maxmemory`, and "
                "`maxmemory-policy noeviction`, keep them",
                self._name,
            )
            self._counters["repairs"] += 1
            self._left = list(published)
        return self.repairing

    async def repair(self, lease: Lease, published: AbstractSet[BlockHash]) -> None:
        """One slice more."""
        if self._left is None:
            return
        if not self._left:
            self._left = None
            return
        part, self._left = self._left[:_SLICE], self._left[_SLICE:]
        gone = await self._missing(lease, part, published)
        self._pending.note(gone, ())

    async def _missing(
        self, lease: Lease, asked: list[BlockHash], published: AbstractSet[BlockHash]
    ) -> list[BlockHash]:
        assert self._find is not None
        written = [block for block in asked if block in published and block not in self._pending]
        self._counters["audited"] += len(written)
        resets = self._pending.resets
        gone: list[BlockHash] = await self._find(lease, written)
        if self._pending.resets != resets:
            return []  # meanwhile everything is to be written anew
        gone = [block for block in gone if block in published and block not in self._pending]
        self._counters["missing"] += len(gone)
        return gone
