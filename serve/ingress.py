"""The Ray Serve deployment around the front: the replicas that Serve knows, and the life-cycle."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from ray import serve
from ray.serve.handle import DeploymentHandle

from router.errors import OwnershipUnavailable
from router.ownership.redis import RedisOwnershipMap, key_prefix
from router.prompt import PromptEncoder
from router.router import Router
from serve.asgi import Receive, Scope, Send
from serve.by_model import ByModel
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
    """One process of the front: one connection pool, one set of metrics, and for each model what is its own."""

    async def __init__(self, config: AppConfig, *fleets: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        name = serve.get_replica_context().replica_id.unique_id
        upstream, metrics = Upstream(config.ingress.connect_timeout_s), Metrics()
        exposition = SharedMetrics(metrics, config.redis, f"{key_prefix(config.fleet_name)}x", name)
        self._parts: list[_Part] = []
        fronts: dict[str, Front] = {}
        for one, handle in zip(config.all_models, fleets, strict=True):
            ownership, router = await _router(one, name, upstream)
            front = Front(router, ServeFleet(handle), upstream, metrics, exposition, config.ingress)
            fronts |= dict.fromkeys(one.names, front)
            self._parts += [front, router, ownership]
        self._parts += [exposition, upstream]
        self._app = front if len(fleets) == 1 else ByModel(fronts, metrics, exposition, config.ingress)
        exposition.start()
        # What is loaded by now stays: a full collection would look through all of it and stop everything for 40 ms.
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes objects for ASGI 2
            if scope["type"] == "lifespan":
                await self._lifespan(receive, send)
            else:
                await self._app(scope, receive, send)

        return app

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
                continue
            for part in self._parts:
                try:
                    await part.close()
                except Exception:  # one that fails must not keep the others from leaving
                    logger.exception("closing %s failed", type(part).__name__)
            await send({"type": "lifespan.shutdown.complete"})
            return


class _Part(Protocol):
    async def close(self) -> None: ...


async def _router(config: AppConfig, name: str, upstream: Upstream) -> tuple[RedisOwnershipMap, Router]:
    ownership = RedisOwnershipMap(config.redis, config.fleet_name, look_up_timeout_s=config.router.look_up_timeout_s)
    try:
        await ownership.connect()
    except OwnershipUnavailable as error:
        logger.warning("starting without the ownership map: %s", error)
    load = partial(PromptEncoder.load, config.model, config.tokenizer_source, config.adapters)
    encoder = await asyncio.to_thread(load, fast=True, keep_ids=config.router.hand_over_token_ids)
    engines = EnginePrompts(encoder, upstream)
    router = Router(f"router-{name}", encoder, ownership, config.router, time.monotonic, engines=engines)
    await router.start()
    return ownership, router
