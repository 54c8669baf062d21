"""Data-parallel ranks behind one URL: each is a replica with blocks of its own, and requests are pinned to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from replicas.config import EngineConfig
from replicas.engine import EngineEndpoints
from replicas.engine_api import pinned, post, read_facts
from replicas.process import EngineFailed
from replicas.replica import Replica
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Match
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder
from serve.cli import engine_check
from serve.config import AppConfig
from serve.running import candidate_of
from tests.integration.rank_server import two_ranks

pytestmark = pytest.mark.integration

MODEL = "m"
EMULATED = EngineConfig(model=MODEL, tokenizer="builtin", speed=100.0, num_blocks=3000)
DEADLINE_S = 60.0


@pytest.fixture
async def server() -> AsyncIterator[EngineEndpoints]:
    async with two_ranks(EMULATED) as endpoints:
        yield endpoints


@pytest.fixture
def encoder() -> PromptEncoder:
    return PromptEncoder.load(MODEL, "builtin")


def external(server: EngineEndpoints, ranks: int = 2) -> EngineConfig:
    assert server.events is not None
    assert server.replay is not None
    return EngineConfig(
        "external",
        MODEL,
        endpoints=(server.url,),
        events_endpoints=(server.events,),
        replay_endpoints=(server.replay,),
        data_parallel_size=ranks,
    )


async def test_each_rank_is_a_replica_with_its_own_blocks_and_passes_the_handshake(
    server: EngineEndpoints, encoder: PromptEncoder
) -> None:
    assert (await read_facts(server.url)).ranks == 2
    ownership = MemoryOwnershipMap(time.monotonic)
    replicas = []
    for rank in range(2):
        replica = await Replica.start(f"r{rank}", external(server), ownership, 30.0, rank=rank, encoder=encoder)
        replicas.append(replica)
    try:
        assert [one.record.doubt for one in replicas] == ["", ""]
        assert [one.record.dp_rank for one in replicas] == [0, 1]
        assert {one.record.url for one in replicas} == {server.url}
        assert await ask(server.url, range(64, 129), replicas[1].record.dp_rank) == 0
        await until_owned(ownership, range(64, 129), {"r1": 4})
        assert await ask(server.url, range(64, 129), 1) == 64
        assert await ask(server.url, range(64, 129), 0) == 0
        assert set(await replicas[0].load()) >= {"num_running", "num_waiting", "kv_cache_usage"}
    finally:
        await asyncio.gather(*(one.stop() for one in replicas))


async def ask(url: str, ids: Sequence[int], rank: int | None) -> int:
    """Cached tokens, as reported."""
    body = {"model": MODEL, "prompt": list(ids), "max_tokens": 1}
    status, raw = await post(f"{url}/v1/completions", body, headers=pinned(rank))
    assert status == 200, raw
    return int(json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"])


async def until_owned(ownership: MemoryOwnershipMap, ids: Sequence[int], wanted: dict[str, int]) -> None:
    hashes = chain(root_hash(MODEL), pack_token_ids(ids), 16)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            told = await ownership.look_up(hashes)
            held = {one.replica_id: told.matches.get(slot, Match()).owned for slot, one in told.replicas.items()}
            if {name: blocks for name, blocks in held.items() if blocks} == wanted:
                return
            await asyncio.sleep(0.02)


async def test_ranks_that_nobody_configured_mean_no_credit(server: EngineEndpoints, encoder: PromptEncoder) -> None:
    replica = await Replica.start("r", external(server, 1), MemoryOwnershipMap(time.monotonic), encoder=encoder)
    try:
        assert "2 data-parallel ranks" in replica.record.doubt
        assert not replica.record.trusted
    finally:
        await replica.stop()


async def test_ranks_that_are_not_there_are_an_error(server: EngineEndpoints) -> None:
    with pytest.raises(EngineFailed, match="2 data-parallel ranks, not 3"):
        await Replica.start("r", external(server, 3), MemoryOwnershipMap(time.monotonic))
    with pytest.raises(EngineFailed, match="replica 2, but endpoints has 1 entries of 2 ranks"):
        await Replica.start("r", external(server), MemoryOwnershipMap(time.monotonic), rank=2)


async def test_doctor_checks_every_rank(server: EngineEndpoints, encoder: PromptEncoder) -> None:
    app = AppConfig(model=MODEL, tokenizer="builtin", engine=external(server))
    lines = await engine_check.examine(app, encoder)
    assert [line.name for line in lines] == [f"engine {server.url} rank {rank}" for rank in range(2)]
    expected = "canaries (base, salt, tools) are in its KV events and cached as computed"
    assert [line.text for line in lines] == [expected] * 2
    unpinned = AppConfig(model=MODEL, tokenizer="builtin", engine=external(server, 1))
    (line,) = await engine_check.examine(unpinned, encoder)
    assert line.wrong
    assert "data_parallel_size is 1" in line.text


def test_a_request_is_pinned_to_its_replica_s_rank_whatever_the_client_asked_for() -> None:
    sent = [(b"accept", b"*/*"), (b"X-Data-Parallel-Rank", b"0")]
    to_rank = candidate_of("r", {"url": "http://h", "dp_rank": 1}).pin(sent)
    assert to_rank == [(b"accept", b"*/*"), (b"x-data-parallel-rank", b"1")]
    assert candidate_of("r", {"url": "http://h"}).pin(sent) is sent


def test_replicas_of_external_engines_are_counted_not_set() -> None:
    at = ("http://a", "http://b")
    engine = EngineConfig("external", endpoints=at, data_parallel_size=4)
    assert AppConfig(model=MODEL, engine=engine).num_replicas == 8
    with pytest.raises(ValueError, match="stands for 8"):
        AppConfig(model=MODEL, engine=engine, replicas=2)
    with pytest.raises(ValueError, match="data_parallel_size is for external engines"):
        replace(EMULATED, data_parallel_size=2)
