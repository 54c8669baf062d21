"""Policies rank candidates; they are pure. One file per policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.types import Ranked, ReplicaView


@dataclass(frozen=True, slots=True)
class Request:
    """What a policy knows of a request. Sizes in tokens; `block_size` tokens a block.

    `draw` is a number in [0, 1) and `turn` counts the router's decisions: the only randomness and state there is.
    """

    num_tokens: int
    block_size: int
    draw: float = 0.0
    turn: int = 0


class Policy(Protocol):
    """Named in config as one of `NAMES` or as `package.module:Class`."""

    def rank(self, request: Request, candidates: Sequence[ReplicaView]) -> list[Ranked]:
        """All candidates, best first. Deterministic in its arguments. `candidates` is never empty."""
