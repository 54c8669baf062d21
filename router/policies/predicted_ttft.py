"""The default policy: predicted time to first token, and what the choice costs everybody else.

    cost = wait + prefill + share * prefill * (2 + requests decoding or waiting there) + 2 ms * requests decoding there
           - spread

`wait` is the uncached prefill booked there and not yet done, `prefill` this request's own uncached part, both over the
replica's prefill rate. The third term is the delay that this prefill adds for everyone who shares the replica's steps;
the 2 stands for those who come next. Without it a burst that shares a new prefix computes it on every idle replica,
since waiting for the first computation takes just as long as repeating it.

`spread` makes an idle replica free of charge for a prefix that many prompts share while everybody who holds it is busy.
Otherwise a replica that started late, or cold, would stay idle for good at light load: a single request never gains by
leaving the holders, all later ones together do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies import Request
from router.types import Load, Ranked, ReplicaView

_EXTERNALITY = 0.2
_NEXT_ONES = 2
_DECODE_S = 0.002
_CRUMB = 0.02
_CRUMB_TOKENS = 64
"""An overlap below this share of the prompt, or below this many tokens (their prefill is lost in one step), is no
reason to prefer a replica: all cold or short prompts that start alike would gather on one of several idle replicas."""


@dataclass(frozen=True, slots=True)
class PredictedTTFT:
    """`prefill_tokens_per_s`: with equal replicas the order hardly depends on it."""

    prefill_tokens_per_s: float = 3800.0

    def rank(self, request: Request, candidates: Sequence[ReplicaView]) -> list[Ranked]:
        wanted = _wanted_tokens(request, candidates)
        ranked = [self._price(request, view, wanted) for view in candidates]
        burst = request.burst_key is not None and any(_held_tokens(request, view) for view in candidates)
        # Equal costs take turns, but what overflows from a burst goes to one and the same replica.
        first = ((request.burst_key or 0) if burst else request.turn) % len(ranked)
        return sorted(ranked[first:] + ranked[:first], key=lambda one: one.cost_s)

    def _price(self, request: Request, view: ReplicaView, wanted: int) -> Ranked:
        held = _held_tokens(request, view)
        prefill = self._seconds(max(0, request.num_tokens - held))
        busy_share = _EXTERNALITY * (_NEXT_ONES + _busy(view))
        terms = {
            "wait": self._seconds(view.load.prefill_tokens),
            "prefill": prefill,
            "others": busy_share * prefill,
            "decode": _DECODE_S * view.load.num_decoding,
        }
        if held < wanted and view.load == Load():
            terms["spread"] = -(1 + busy_share) * self._seconds(wanted - held)
        return Ranked(view, max(0.0, sum(terms.values())), terms)  # rounding may leave a hair below

    def _seconds(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s


def _busy(view: ReplicaView) -> int:
    return view.load.num_decoding + view.load.num_waiting


def _held_tokens(request: Request, view: ReplicaView) -> int:
    held = view.overlap_blocks * request.block_size
    return held if held >= max(_CRUMB_TOKENS, _CRUMB * request.num_tokens) else 0


def _wanted_tokens(request: Request, candidates: Sequence[ReplicaView]) -> int:
    """How much of the prompt an idle replica should come to hold: what many share, if all who hold it are busy."""
    if all(_busy(view) for view in candidates if view.owned_blocks >= request.shared_blocks):
        return min(request.shared_blocks * request.block_size, request.num_tokens)
    return 0
