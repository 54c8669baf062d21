"""Two replicas at random, the less busy one of them: what most load balancers do, blind to caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies import Request
from router.types import Ranked, ReplicaView


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Costs are the wait for the prefill booked at a replica; only the first two of the ranking are in that order."""

    prefill_tokens_per_s: float = 3800.0

    def rank(self, request: Request, candidates: Sequence[ReplicaView]) -> list[Ranked]:
        n = len(candidates)
        if n == 1:
            return [self._price(candidates[0])]
        first, second = divmod(int(request.draw * n * (n - 1)), n - 1)
        second += second >= first
        pair = sorted(
            (candidates[first], candidates[second]),
            key=lambda view: (view.load.prefill_tokens, view.load.num_waiting + view.load.num_decoding),
        )
        rest = [view for i, view in enumerate(candidates) if i not in (first, second)]
        return [self._price(view) for view in (*pair, *rest)]

    def _price(self, view: ReplicaView) -> Ranked:
        wait = view.load.prefill_tokens / self.prefill_tokens_per_s
        return Ranked(view, wait, {"wait": wait})
