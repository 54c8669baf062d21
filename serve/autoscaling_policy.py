"""Ray Serve's autoscaling, by what the engines say they are doing.

Requests reach the engines past Serve's own counters, so Serve's default policy would see an idle fleet. Each replica
records what its engine runs and queues (`record_autoscaling_stats`); Serve applies its own up- and downscale delays.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from serve.scaling import desired_replicas

ONGOING = "whohas_ongoing"


class OngoingRequestsPolicy:
    """A class, so that `target_ongoing_requests` can come from the config file."""

    def __init__(self, target_ongoing_requests: float) -> None:
        self._target = target_ongoing_requests

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        told = (context.aggregated_metrics or {}).get(ONGOING, {})
        if not told:
            return context.target_num_replicas, {}
        target = desired_replicas(
            told.values(),
            self._target,
            context.capacity_adjusted_min_replicas,
            context.capacity_adjusted_max_replicas,
        )
        return target, {}
