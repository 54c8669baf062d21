"""The handshake with servers that somebody else runs, before whohas is in front of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from replicas.engine_api import get
from replicas.process import EngineFailed
from replicas.replica import Replica
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder
from serve.cli.fleet_check import Line, agreed, by_load
from serve.config import AppConfig


async def examine(app: AppConfig, encoder: PromptEncoder) -> list[Line]:
    """One line for each of the configuration's external engines, or each data-parallel rank of one."""
    return [await _engine(app, encoder, rank) for rank in range(app.engine.num_external)]


async def _engine(app: AppConfig, encoder: PromptEncoder, rank: int) -> Line:
    server, dp_rank = divmod(rank, app.engine.data_parallel_size)
    url = app.engine.endpoints[server]
    name = f"engine {url}" + (f" rank {dp_rank}" if app.engine.data_parallel_size > 1 else "")
    try:
        replica = await Replica.start(name, app.engine_config, MemoryOwnershipMap(time.monotonic), rank=rank)
    except (EngineFailed, OSError) as error:
        return Line(name, True, str(error))
    try:
        if app.model not in replica.facts.models:
            serves = ", ".join(replica.facts.models) or "no model"
            return Line(name, True, f"it serves {serves}, not {app.model}: mend model, or --served-model-name there")
        findings = [] if replica.record.doubt else await replica.shake_hands(encoder, app.adapters)
        sources = "" if app.engine.events_endpoints else await _sources(replica.url)
    finally:
        await replica.stop()
    if replica.record.doubt:
        return Line(name, True, f"does not cache what is computed for it: {replica.record.doubt}")
    seen = "in its KV events and " if app.engine.events_endpoints else ""
    text = f"canaries ({agreed(findings)}) are {seen}cached as computed{by_load(findings)}"
    return Line(name, False, text if seen else f"{text}; its KV events are not read{sources}")


async def _sources(url: str) -> str:
    """Where a vLLM server says that its events are."""
    status, body = await get(f"{url}/kv_event_sources")
    try:
        told = json.loads(body) if status == 200 else {}
    except ValueError:
        return ""
    found = list(_endpoints(told))
    return f" (it publishes them at {', '.join(found)}: name that in events_endpoints)" if found else ""


def _endpoints(told: Any) -> Iterator[str]:
    for source in told.values() if isinstance(told, Mapping) else ():
        if isinstance(source, Mapping) and isinstance(endpoint := source.get("endpoint"), str):
            yield endpoint
