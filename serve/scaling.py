"""How many replicas the load asks for. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable


def desired_replicas(ongoing: Iterable[float], target_ongoing: float, lowest: int, highest: int) -> int:
    """Enough replicas for `target_ongoing` requests, running and waiting, on each; within `lowest`..`highest`.

    `ongoing` holds each running replica's requests, as the engines report them.
    """
    total = sum(ongoing)
    return max(lowest, min(highest, math.ceil(total / target_ongoing)))
