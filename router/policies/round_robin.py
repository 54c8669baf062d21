"""Each replica in turn, whatever it holds: the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies import Request
from router.types import Ranked, ReplicaView


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Costs are all zero: the order is the reason."""

    def rank(self, request: Request, candidates: Sequence[ReplicaView]) -> list[Ranked]:
        first = request.turn % len(candidates)
        return [Ranked(view, 0.0, {}) for view in (*candidates[first:], *candidates[:first])]
