"""The least that Ray Serve can serve, added to a running cluster: what the front costs before whohas does anything.

python -m tests.bench.trivial_app GCS_ADDRESS        # in the environment of that cluster's processes
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray import cloudpickle, serve

from tests.bench import answers

NAME = "trivial"
ROUTE = "/trivial"


class Trivial:
    """Raw ASGI, as whohas' ingress is."""

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await answers.answer(scope, receive, send)
                return
            while (message := await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": message["type"] + ".complete"})

        return app


def main(address: str) -> None:
    cloudpickle.register_pickle_by_value(answers)  # the cluster's processes have no `tests` to import
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    deployment = serve.deployment(
        name="Trivial", num_replicas=1, max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0.1}
    )(serve.ingress()(Trivial))
    serve.run(deployment.bind(), name=NAME, route_prefix=ROUTE)


if __name__ == "__main__":
    main(sys.argv[1])
