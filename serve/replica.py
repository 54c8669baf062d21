"""The Ray actor around one replica: hands its life-cycle to Serve, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray import serve

from replicas.replica import Replica
from router.errors import OwnershipUnavailable
from router.ownership.redis import RedisOwnershipMap
from router.prompt import PromptEncoder
from router.tasks import end
from serve.autoscaling_policy import ONGOING
from serve.config import AppConfig

logger = logging.getLogger("whohas.replica")
_LOAD_PERIOD_S = 1.0


class ReplicaActor:
    """Requests never pass through here: the ingress talks to the engine's own port, named in the metadata."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._drain_s = config.drain_s
        self._map = RedisOwnershipMap(config.redis, config.fleet_name)
        try:
            await self._map.connect()
        except OwnershipUnavailable as error:
            logger.warning("starting without the ownership map: %s", error)
        encoder = await asyncio.to_thread(PromptEncoder.load, config.model, config.tokenizer_source, config.adapters)
        rank = context.rank.rank if context.rank is not None else 0
        self._replica = await Replica.start(
            context.replica_id.unique_id,
            config.engine_config,
            self._map,
            config.router.lease_s,
            rank=rank,
            host=_node_address(),
            encoder=encoder,
            adapters=config.adapters,
        )
        self._load: dict[str, float] = {}
        self._poller = asyncio.create_task(self._poll_load(), name="whohas-load")

    def record_replica_metadata(self) -> dict[str, Any]:
        record = self._replica.record
        told = {"url": record.url, "model": record.model, "block_size": record.block_size}
        return told if record.dp_rank is None else {**told, "dp_rank": record.dp_rank}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {ONGOING: self._load.get("num_running", 0.0) + self._load.get("num_waiting", 0.0)}

    async def check_health(self) -> None:
        await self._replica.check_health()

    async def _poll_load(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                self._load = await self._replica.load()
            await asyncio.sleep(_LOAD_PERIOD_S)

    async def __del__(self) -> None:
        await end(self._poller)
        await self._replica.stop(self._drain_s)
        await self._map.close()


def _node_address() -> str:
    """The address under which Ray knows this node: that is where routers on other nodes reach the engine."""
    here = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next(str(node["NodeManagerAddress"]) for node in nodes if node["NodeID"] == here)
