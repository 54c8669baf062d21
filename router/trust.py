"""Are promises kept? What engines report as cached, against what the ownership map promised.

A replica's trust is a moving average of reported over promised tokens, 1 at first. It shrinks the replica's overlap,
and below `DOUBT` the replica's collector is asked to start anew. Kept by slot: a new incarnation has a clean record.
"""

from __future__ import annotations

from collections.abc import Collection

from router.types import Slot

DOUBT = 0.5
_WEIGHT = 0.2
_FULL = 0.9
"""From here up nothing is discounted: under load a block is evicted now and then between promise and prefill."""


class TrustBook:
    """One router's experience. Pure."""

    def __init__(self) -> None:
        self._trust: dict[Slot, float] = {}

    def observe(self, slot: Slot, promised: int, reported: int) -> None:
        """One answer of the replica in `slot`, in tokens. What was not promised proves nothing."""
        if promised > 0:
            kept = min(1.0, reported / promised)
            self._trust[slot] = (1 - _WEIGHT) * self.trust(slot) + _WEIGHT * kept

    def trust(self, slot: Slot) -> float:
        """0 (every promise broken) to 1."""
        return self._trust.get(slot, 1.0)

    def credit(self, slot: Slot, blocks: int) -> int:
        """How many of `blocks` to count on."""
        trust = self.trust(slot)
        return blocks if trust >= _FULL else int(blocks * trust)

    def doubted(self) -> tuple[int, ...]:
        return tuple(slot for slot, trust in self._trust.items() if trust < DOUBT)

    def keep(self, slots: Collection[Slot]) -> None:
        """Forget everybody else."""
        self._trust = {slot: trust for slot, trust in self._trust.items() if slot in slots}
