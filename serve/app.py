"""`serve.app:build`: the Serve application, from the `args` of a config file."""

# No `from __future__ import annotations`: Serve looks at the type of `build`'s argument to turn the file's into it.
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from replicas.engine import cores_and_gpus
from serve.config import AppConfig
from serve.ingress import Ingress
from serve.replica import ReplicaActor

_REQUEST_ROUTER = "serve.request_router:PrefixRequestRouter"
_MANY = 100_000  # Serve's own limit on requests in flight must never be the one that bites: policies decide


def build(args: AppConfig) -> Application:
    """Ingress in front, one fleet of replicas behind it for each model."""
    fleets = [
        serve.deployment(name=f"Replica-{i}" if i else "Replica", **_replica_options(one))(ReplicaActor).bind(one)
        for i, one in enumerate(args.all_models)
    ]
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=args.ingress.num_replicas,
        max_ongoing_requests=_MANY,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=max(one.drain_s for one in args.all_models) + 10,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config={"enable_access_log": args.ingress.access_log},
    )(serve.ingress()(Ingress))
    return ingress.bind(args, *fleets)


def _replica_options(args: AppConfig) -> dict[str, Any]:
    cores, gpus = cores_and_gpus(args.engine)
    options: dict[str, Any] = {
        "max_ongoing_requests": _MANY,
        "ray_actor_options": {"num_cpus": cores, "num_gpus": gpus},
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        # The actor's own drain must be able to finish before Serve kills it.
        "graceful_shutdown_timeout_s": args.drain_s + 20,
        "graceful_shutdown_wait_loop_s": 0.2,
        "request_router_config": RequestRouterConfig(request_router_class=_REQUEST_ROUTER),  # type: ignore[arg-type]
    }
    if args.autoscaling is None:
        return {**options, "num_replicas": args.num_replicas}
    bounds = args.autoscaling
    options["autoscaling_config"] = AutoscalingConfig(
        min_replicas=bounds.min_replicas,
        max_replicas=bounds.max_replicas,
        initial_replicas=max(bounds.min_replicas, min(args.replicas, bounds.max_replicas)),
        upscale_delay_s=bounds.upscale_delay_s,
        downscale_delay_s=bounds.downscale_delay_s,
        metrics_interval_s=bounds.metrics_interval_s,
        look_back_period_s=bounds.look_back_period_s,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function="serve.autoscaling_policy:OngoingRequestsPolicy",
            policy_kwargs={"target_ongoing_requests": bounds.target_ongoing_requests},
        ),
    )
    return options
