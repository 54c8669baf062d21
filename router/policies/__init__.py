"""Policies rank candidates; they are pure. One file per policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from router.types import Ranked, ReplicaView


@dataclass(frozen=True, slots=True)
class Request:
    """What a policy knows of a request. Sizes in tokens; `block_size` tokens a block.

    `draw` is a number in [0, 1) and `turn` counts the router's decisions: the only randomness and state there is.
    `burst_key`: None, or, where the longest prefix found is still being computed, a number that is the same for all who
    wait for it, whichever router they ask. `shared_blocks`: the longest prefix that anybody holds, in blocks, if many
    prompts have been seen to part there; else 0.
    """

    num_tokens: int
    block_size: int
    draw: float = 0.0
    turn: int = 0
    burst_key: int | None = None
    shared_blocks: int = 0


class Policy(Protocol):
    """Named in config as one of `NAMES` or as `package.module:Class`."""

    def rank(self, request: Request, candidates: Sequence[ReplicaView]) -> list[Ranked]:
        """All candidates, best first. Deterministic in its arguments. `candidates` is never empty."""


NAMES = {
    "predicted_ttft": "router.policies.predicted_ttft:PredictedTTFT",
    "round_robin": "router.policies.round_robin:RoundRobin",
    "power_of_two": "router.policies.power_of_two:PowerOfTwo",
}


def load_policy(name: str) -> Policy:
    """The policy called `name`: one of `NAMES`, or `package.module:Class` of your own, made without arguments.

    Raises ValueError that says what is wrong with the name.
    """
    module, _, attribute = NAMES.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"unknown policy {name!r}: use one of {', '.join(NAMES)}, or package.module:Class")
    try:
        policy = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"policy {name!r} can't be loaded: {error}") from error
    if not callable(getattr(policy, "rank", None)):
        raise ValueError(f"policy {name!r} has no rank() method")
    return cast(Policy, policy)
