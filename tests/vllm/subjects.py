"""The two engines under comparison behind one face. Only `vllm_scheduler()` needs vLLM to be installed."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from replicas.emulated.block_hashes import BlockChain, CacheKeys
from replicas.emulated.block_pool import BlockPool
from replicas.emulated.scheduler import EngineRequest, Scheduler, SchedulerConfig
from tests.vllm.operations import LORAS, Add, Setup

Event = dict[str, Any]
Scheduled = list[tuple[str, int]]
"""Request names with their tokens in a step, in the step's order."""


class Subject(Protocol):
    """An engine without a model. A `step` is begun and then ended; block ids count from 0."""

    def add(self, add: Add) -> None: ...
    def abort(self, name: str) -> None: ...
    def reset(self, preempt_running: bool) -> bool: ...
    def begin(self) -> Scheduled: ...
    def end(self) -> list[Event]: ...
    def state(self, *, in_step: bool) -> dict[str, Any]: ...
    def free_queue(self) -> list[int]: ...


def plain(event: Any) -> Event:
    """An event as a decoder would see it on the other end of the wire."""
    result: Event = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    return result


class EmulatedSubject:
    pool_class = BlockPool
    scheduler_class = Scheduler

    def __init__(self, setup: Setup) -> None:
        config = SchedulerConfig(
            setup.max_num_seqs, setup.max_num_batched_tokens, setup.policy, setup.enable_prefix_caching
        )
        self._engine = self.scheduler_class(self.pool_class(setup.num_blocks, setup.block_size), config)
        self._requests: dict[str, EngineRequest] = {}
        self.first_tokens: dict[str, int | None] = {}

    def add(self, add: Add) -> None:
        lora_id = None if add.lora is None else LORAS[add.lora]
        keys = CacheKeys(lora_name=add.lora, lora_id=lora_id, cache_salt=add.salt)
        request = EngineRequest(
            add.name,
            BlockChain(add.prompt, self._engine.pool.block_size, keys),
            len(add.output),
            iter(add.output),
            arrival=add.arrival,
            priority=add.priority,
            session_id=add.session_id,
            reuse_cache=add.reuse_cache,
            report_hits=add.report_hits,
        )
        self._requests[add.name] = request
        self._engine.add(request)

    def abort(self, name: str) -> None:
        self._engine.abort(self._requests[name])

    def reset(self, preempt_running: bool) -> bool:
        return self._engine.reset_prefix_cache(preempt_running=preempt_running)

    def begin(self) -> Scheduled:
        self._engine.schedule(float("inf"))
        return [(request.request_id, count) for request, count in self._engine._step]

    def end(self) -> list[Event]:
        for request in self._engine.finish(0.0):
            self.first_tokens.setdefault(request.request_id, request.cached_tokens)
        return [plain(event) for event in self._engine.pool.take_events()]

    def state(self, *, in_step: bool) -> dict[str, Any]:
        engine, stats = self._engine, self._engine.stats
        known = engine.running
        return {
            "running": [one.request_id for one in engine.running],
            "waiting": [one.request_id for one in engine.waiting],
            "blocks": {one.request_id: one.blocks for one in known},
            "tokens": {one.request_id: one.chain.num_tokens for one in known},
            "preemptions": {one.request_id: one.num_preemptions for one in known},
            # vLLM counts a step's tokens as computed when the step begins and its hits when it ends.
            "computed": {} if in_step else {one.request_id: one.num_computed for one in known},
            "cached tokens at the first token": self.first_tokens,
            "usage": round(engine.pool.usage, 9),
            "hits": None if in_step else (stats.prefix_cache_queries, stats.prefix_cache_hits),
            "preemptions in all": stats.num_preemptions,
        }

    def free_queue(self) -> list[int]:
        return list(self._engine.pool._free)
