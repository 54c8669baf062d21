"""The Ray Serve deployment around the front: the replicas that Serve knows, and the life-cycle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from router.errors import OwnershipUnavailable
from router.ownership.redis import RedisOwnershipMap, key_prefix
from router.prompt import PromptEncoder
from router.router import Router
from serve.asgi import Receive, Scope, Send
from serve.config import AppConfig
from serve.dispatch import Pick
from serve.engine_prompts import EnginePrompts
from serve.front import Front
from serve.metrics import Metrics, SharedMetrics
from serve.running import Candidate, candidate_of, candidates
from serve.upstream import Upstream

logger = logging.getLogger("whohas.ingress")


class ServeFleet:
    """The replicas behind a handle. See `serve.request_router` for what becomes of a pick."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._deployment = (handle.app_name, handle.deployment_name)

    def candidates(self) -> Sequence[Candidate]:
        return candidates(*self._deployment)

    async def pick(self, pick: Pick) -> Candidate:
        # Pick only: the request goes to the engine's own port, so Serve must not hold a slot for it.
        async with self._handle.choose_replica(pick, _reserve=False) as selection:
            return candidate_of(selection.replica_id, selection.replica_metadata)


class Ingress:
    """One process of the front."""

    async def __init__(self, replicas: DeploymentHandle[Any], config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        name = serve.get_replica_context().replica_id.unique_id
        self._map = RedisOwnershipMap(
            config.redis, config.fleet_name, look_up_timeout_s=config.router.look_up_timeout_s
        )
        try:
            await self._map.connect()
        except OwnershipUnavailable as error:
            logger.warning("starting without the ownership map: %s", error)
        load = partial(PromptEncoder.load, config.model, config.tokenizer_source, config.adapters)
        encoder = await asyncio.to_thread(load, fast=True, keep_ids=config.router.hand_over_token_ids)
        self._upstream = Upstream(config.ingress.connect_timeout_s)
        engines = EnginePrompts(encoder, self._upstream)
        self._router = Router(f"router-{name}", encoder, self._map, config.router, time.monotonic, engines=engines)
        await self._router.start()
        metrics = Metrics()
        self._shared_metrics = SharedMetrics(metrics, config.redis, f"{key_prefix(config.fleet_name)}x", name)
        self._shared_metrics.start()
        fleet = ServeFleet(replicas)
        self._front = Front(self._router, fleet, self._upstream, metrics, self._shared_metrics, config.ingress)

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes objects for ASGI 2
            if scope["type"] == "lifespan":
                await self._lifespan(receive, send)
            else:
                await self._front(scope, receive, send)

        return app

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
                continue
            for part in (self._front, self._shared_metrics, self._router, self._upstream, self._map):
                try:
                    await part.close()
                except Exception:  # one that fails must not keep the others from leaving
                    logger.exception("closing %s failed", type(part).__name__)
            await send({"type": "lifespan.shutdown.complete"})
            return
