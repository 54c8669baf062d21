"""One replica: a supervised engine and the collector of its KV events. The actor's body, without Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

from replicas import handshake
from replicas.collector import Collector
from replicas.config import EngineConfig
from replicas.engine import Engine, EngineEndpoints, make_engine
from replicas.engine_api import EngineFacts, get, pinned, read_facts, read_load
from replicas.handshake import Encoder, Finding
from replicas.process import EngineFailed
from router.ownership import OwnershipMap, ReplicaRecord

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.2
_QUIET_POLLS = 3


class Replica:
    """Made by `Replica.start`; ends with `stop`."""

    def __init__(self, engine: Engine, endpoints: EngineEndpoints, facts: EngineFacts, collector: Collector) -> None:
        self.facts = facts
        self.collector = collector
        self._engine = engine
        self._endpoints = endpoints
        self._stopped = False

    @classmethod
    async def start(
        cls,
        replica_id: str,
        config: EngineConfig,
        ownership: OwnershipMap,
        lease_s: float = 3.0,
        *,
        rank: int = 0,
        host: str = "127.0.0.1",
        encoder: Encoder | None = None,
        adapters: Sequence[str] = (),
    ) -> Replica:
        """Start the engine, wait until it serves, follow its events from the first one on, join the map, shake hands.

        `host`: this machine's address for the routers; the engine listens there. `rank`: which one of `external`
        endpoints. Raises `EngineFailed` or, for a wrong configuration, ValueError. A map that can't be reached is no
        error: the collector goes on trying. With an `encoder` the engine must show that it caches what that computes;
        if it doesn't, the replica serves, but no router relies on its blocks.
        """
        engine = make_engine(config, replica_id, host, rank)
        try:
            endpoints = await engine.start()
            facts = await _facts(endpoints.url, config)
            record = ReplicaRecord(
                replica_id, config.name, facts.block_size or 0, endpoints.url, dp_rank=endpoints.dp_rank
            )
            collector = Collector(ownership, record, endpoints.events, endpoints.replay, lease_s=lease_s)
            await collector.start()
        except BaseException:
            await engine.stop()
            raise
        with suppress(TimeoutError):
            async with asyncio.timeout(lease_s):
                await collector.joined.wait()
        replica = cls(engine, endpoints, facts, collector)
        if facts.ranks > config.data_parallel_size:
            # Which of them gets a request is the engine's choice, so nothing about its cache can be promised.
            ranks = f"it has {facts.ranks} data-parallel ranks, and data_parallel_size is {config.data_parallel_size}"
            logger.error("%s: %s", replica_id, ranks)
            collector.doubt = ranks
        elif encoder is not None:
            await replica.shake_hands(encoder, adapters)
        return replica

    async def shake_hands(self, encoder: Encoder, adapters: Sequence[str] = ()) -> list[Finding]:
        """See `replicas.handshake`. What differs is logged as an error, and told to the map as the replica's doubt."""
        collector, record = self.collector, self.collector.record
        holds = collector.holds if self._endpoints.events else None
        headers = pinned(record.dp_rank)
        under_test = handshake.Engine(self.url, record.model, record.block_size, holds, self._stats, headers)
        try:
            findings = await handshake.shake_hands(under_test, encoder, uuid4().hex, adapters)
        except OSError as error:
            findings = [Finding("base", f"the canary got no answer: {error}")]
        doubts = [finding.doubt for finding in findings if finding.doubt]
        for doubt in doubts:
            logger.error("%s does not cache what the router computes: %s", record.replica_id, doubt)
        collector.doubt = "; ".join(doubts)
        media = [finding for finding in findings if finding.variant == handshake.MEDIA]
        for finding in media:
            if finding.problem:
                logger.warning("%s: requests with media are routed by load: %s", record.replica_id, finding.problem)
        collector.media = any(not finding.problem for finding in media)
        return findings

    async def _stats(self) -> dict[str, int]:
        return self.collector.stats()

    @property
    def record(self) -> ReplicaRecord:
        return self.collector.record

    @property
    def url(self) -> str:
        return self._endpoints.url

    async def check_health(self) -> None:
        """Raises `EngineFailed` when the engine's process is gone or /health isn't 200, OSError when it's silent."""
        self._engine.check()
        status, _ = await get(f"{self.url}/health")
        if status != 200:
            raise EngineFailed(f"{self.url}/health answered {status}")

    async def load(self) -> dict[str, float]:
        """As `read_load`. An engine that is found asleep gets neither credit nor requests until it is found awake."""
        load = await read_load(self.url, self._endpoints.dp_rank)
        self.collector.engine_sleeps(bool(load.get("asleep")), discarded=bool(load.get("discarded")))
        return load

    async def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Leave the map, let the engine finish what it runs for at most `drain_timeout_s`, and stop it."""
        if self._stopped:
            return
        self._stopped = True
        try:
            await self.collector.close()
            await self._drain(drain_timeout_s)
        finally:
            await self._engine.stop()

    async def _drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        quiet = 0
        while time.monotonic() < deadline:
            try:
                self._engine.check()
                load = await self.load()
            except (EngineFailed, OSError):
                return
            # A request that was routed here before the map was left may still be on its way.
            quiet = 0 if load.get("num_running") or load.get("num_waiting") else quiet + 1
            if quiet == _QUIET_POLLS:
                return
            await asyncio.sleep(_DRAIN_POLL_S)
        if timeout_s > 0:
            logger.warning("%s still had requests after %g s", self.record.replica_id, timeout_s)


async def _facts(url: str, config: EngineConfig) -> EngineFacts:
    """Block size and context length come from the engine; a setting counts only where it doesn't tell."""
    try:
        told = await read_facts(url)
    except OSError as error:
        raise EngineFailed(f"the engine at {url} doesn't answer: {error}") from error
    if told.block_size is None and config.block_size is None:
        raise EngineFailed(f"{url}/metrics has no vllm:cache_config_info with a block_size; set block_size")
    for name in ("block_size", "max_model_len"):
        has, wanted = getattr(told, name), getattr(config, name)
        if has is not None and wanted is not None and has != wanted:
            logger.warning("the engine at %s has %s %d, not %d as configured; its own counts", url, name, has, wanted)
    if told.ranks < config.data_parallel_size:
        raise EngineFailed(f"{url} has {told.ranks} data-parallel ranks, not {config.data_parallel_size} as configured")
    return replace(
        told,
        block_size=told.block_size or config.block_size,
        max_model_len=told.max_model_len or config.max_model_len,
    )
