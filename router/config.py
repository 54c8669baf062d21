"""Settings of the read path. The defaults are meant to be left alone."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies import load_policy


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`policy`: a name of `router.policies.NAMES` or `package.module:Class`.

    `look_up_timeout_s` bounds what a slow Redis may add to a request. `lease_s`: a router or replica that is silent
    for so long has no credit and books nothing. `claim_s`: how long at least a decision counts as ownership of the
    blocks it will compute; longer than KV events take to arrive. `hand_over_token_ids`: send a text chat's ids along to
    engines that have shown to have the same ones, so that they don't render and tokenise it again.
    """

    policy: str = "predicted_ttft"
    look_up_timeout_s: float = 0.02
    lease_s: float = 3.0
    claim_s: float = 5.0
    hand_over_token_ids: bool = False

    def __post_init__(self) -> None:
        load_policy(self.policy)
        for name in ("look_up_timeout_s", "lease_s", "claim_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
