"""The default policy: predicted time to first token, and what the choice costs everybody else.

    cost = wait + prefill + share * prefill * (1 + requests decoding or waiting there) + 2 ms * requests decoding there

`wait` is the uncached prefill booked there and not yet done, `prefill` this request's own uncached part, both over the
replica's prefill rate. The third term is the delay that this prefill adds for everyone who shares the replica's steps;
the 1 stands for whoever comes next. Without it a burst that shares a new prefix computes it on every idle replica,
since waiting for the first computation takes just as long as repeating it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policies import Request
from router.types import Ranked, ReplicaView

_EXTERNALITY = 0.2
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
        ranked = [self._price(request, view) for view in candidates]
        first = request.turn % len(ranked)  # equal costs take turns
        return sorted(ranked[first:] + ranked[:first], key=lambda one: one.cost_s)

    def _price(self, request: Request, view: ReplicaView) -> Ranked:
        held = view.overlap_blocks * request.block_size
        if held < max(_CRUMB_TOKENS, _CRUMB * request.num_tokens):
            held = 0
        wait = view.load.prefill_tokens / self.prefill_tokens_per_s
        prefill = max(0, request.num_tokens - held) / self.prefill_tokens_per_s
        others = view.load.num_decoding + view.load.num_waiting
        terms = {
            "wait": wait,
            "prefill": prefill,
            "others": _EXTERNALITY * prefill * (1 + others),
            "decode": _DECODE_S * view.load.num_decoding,
        }
        return Ranked(view, sum(terms.values()), terms)
