"""The emulated pool and scheduler against what vLLM 0.32 itself did: same requests in, same event stream out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replicas.emulated.block_hashes import BlockChain, CacheKeys
from replicas.emulated.block_pool import BlockPool
from replicas.emulated.scheduler import EngineRequest, Scheduler

FIXTURES = Path(__file__).parents[3] / "fixtures" / "vllm"
BLOCK = 32
USABLE_BLOCKS = 63  # the engine ran with --num-gpu-blocks-override 64

# Hashes are each engine's own: both streams are compared with hashes numbered by first appearance.
Batches = list[list[dict[str, Any]]]


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURES / name).read_text().splitlines()]


def numbered(batches: Batches) -> Batches:
    numbers: dict[str, int] = {}

    def number(block_hash: Any) -> int | None:
        return None if block_hash is None else numbers.setdefault(str(block_hash), len(numbers))

    result: Batches = json.loads(json.dumps(batches))
    for batch in result:
        for event in batch:
            if "block_hashes" in event:
                event["block_hashes"] = [number(block_hash) for block_hash in event["block_hashes"]]
            if "parent_block_hash" in event:
                event["parent_block_hash"] = number(event["parent_block_hash"])
    return result


def request(recorded: dict[str, Any]) -> EngineRequest:
    options, output = recorded["kw"], recorded["token_ids"]
    keys = CacheKeys(cache_salt=options.get("cache_salt"))
    return EngineRequest(
        recorded["tag"],
        BlockChain(recorded["prompt_token_ids"], BLOCK, keys),
        num_output=len(output),
        output=iter(output),
        session_id=options.get("session_id"),
        report_hits="vllm_xargs" in options,
    )


def replay(recorded: list[dict[str, Any]]) -> tuple[Batches, list[int | None]]:
    """Event batches of an engine that gets the recorded requests, and the cached tokens of each."""
    engine = Scheduler(BlockPool(USABLE_BLOCKS, BLOCK))
    batches: Batches = []
    requests = [request(one) for one in recorded]
    now = 0.0
    for index, one in enumerate(requests):
        if index == len(requests) - 1:
            assert engine.reset_prefix_cache()
        engine.add(one)
        while engine.schedule(now) is not None:
            now += 1.0
            engine.finish(now)
            if events := engine.pool.take_events():
                batches.append(events)
            if one.request_id.startswith("twin") and requests[index + 1].request_id.startswith("twin"):
                break  # its sibling came while it ran
    return batches, [one.cached_tokens for one in requests]


@pytest.mark.parametrize("suffix", ["", "_xxhash_cbor_seed42_bytes"])
def test_the_same_requests_give_vllms_own_events_and_cached_tokens(suffix: str) -> None:
    recorded = lines(f"session{suffix}.jsonl")
    batches, cached = replay(recorded)
    assert cached == [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in recorded]
    assert numbered(batches) == numbered([line["batch"][1] for line in lines(f"events{suffix}.jsonl")])
