"""A whole replica without Ray: the emulated engine as a process, its events, and the ownership map."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from replicas.config import EngineConfig
from replicas.engine_api import post
from replicas.process import EngineFailed
from replicas.replica import Replica
from router.errors import OwnershipUnavailable
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Lease, Record
from router.ownership.memory import MemoryOwnershipMap

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
MODEL = "test-model"
EMULATED = EngineConfig(
    model=MODEL,
    tokenizer="builtin",
    num_blocks=400,
    max_model_len=4096,
    profile="linear:100000",
    start_timeout_s=DEADLINE_S,
)
PROMPT = [1000 + i for i in range(160)]


class DeadMap(MemoryOwnershipMap):
    async def join(self, member: str, record: Record, lease_s: float) -> Lease:
        raise OwnershipUnavailable("down")


@pytest.fixture
def ownership() -> MemoryOwnershipMap:
    return MemoryOwnershipMap(time.monotonic)


@pytest.fixture
async def replica(ownership: MemoryOwnershipMap) -> AsyncIterator[Replica]:
    replica = await Replica.start("r1", EMULATED, ownership)
    yield replica
    await replica.stop()


def complete(url: str, **body: Any) -> dict[str, Any]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=DEADLINE_S)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1} | body
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 200, answer
    return dict(answer)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not check():
            await asyncio.sleep(0.02)


async def owned(ownership: MemoryOwnershipMap, salt: str | None = None) -> int:
    hashes = chain(root_hash(MODEL, None, salt), pack_token_ids(PROMPT), 16)
    snapshot = await ownership.look_up(hashes)
    return max((match.owned for match in snapshot.matches.values()), default=0)


async def until_owned(ownership: MemoryOwnershipMap, blocks: int, salt: str | None = None) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await owned(ownership, salt) != blocks:
            await asyncio.sleep(0.02)


async def test_what_the_map_promises_is_what_the_engine_reuses(replica: Replica, ownership: MemoryOwnershipMap) -> None:
    assert await owned(ownership) == 0
    await asyncio.to_thread(complete, replica.url)
    await until_owned(ownership, 10)
    answer = await asyncio.to_thread(complete, replica.url, prompt=[*PROMPT, 7])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
    await asyncio.to_thread(complete, replica.url, cache_salt="s")
    await until_owned(ownership, 10, "s")


async def test_a_replica_tells_where_it_is_and_what_it_is(replica: Replica) -> None:
    record = replica.record
    assert (record.replica_id, record.model, record.block_size) == ("r1", MODEL, 16)
    assert record.url == replica.url
    assert (replica.facts.block_size, replica.facts.max_model_len) == (16, 4096)
    await replica.check_health()
    idle = {"num_running": 0.0, "num_waiting": 0.0, "kv_cache_usage": 0.0, "asleep": 0.0, "discarded": 0.0}
    assert await replica.load() == idle


async def test_e6_an_engine_that_sleeps_has_no_credit_and_none_for_what_it_discarded_once_it_is_awake(
    replica: Replica, ownership: MemoryOwnershipMap
) -> None:
    """Whoever put it to sleep: its event of the empty cache comes only with its first step after waking."""

    async def call(path: str) -> None:
        assert (await post(replica.url + path, {}))[0] == 200
        await replica.load()

    await asyncio.to_thread(complete, replica.url)
    await until_owned(ownership, 10)
    await call("/sleep?level=0")
    assert (replica.record.asleep, replica.record.trusted, replica.record.doubt) == (
        True,
        False,
        "its engine is asleep",
    )
    await call("/wake_up")
    assert (replica.record.asleep, replica.record.trusted, replica.record.doubt) == (False, True, "")
    assert replica.record.blocks == 10
    await call("/sleep?level=1")
    assert replica.record.blocks == 0
    await until_owned(ownership, 0)
    await call("/wake_up")
    assert replica.record.trusted
    await asyncio.to_thread(complete, replica.url)
    await until_owned(ownership, 10)


async def test_a_dead_engine_makes_the_replica_unhealthy(replica: Replica) -> None:
    process = replica._engine._process  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not process.alive)
    with pytest.raises(EngineFailed, match="status 137"):
        await replica.check_health()


async def test_stop_leaves_the_map_first_and_waits_for_running_requests(ownership: MemoryOwnershipMap) -> None:
    replica = await Replica.start("r1", EMULATED, ownership)
    running = asyncio.create_task(asyncio.to_thread(complete, replica.url, max_tokens=64, ignore_eos=True))
    await until(lambda: replica.record.blocks > 0 or running.done())
    await replica.stop(drain_timeout_s=DEADLINE_S)
    assert (await running)["usage"]["completion_tokens"] == 64
    assert not (await ownership.look_up([])).replicas
    with pytest.raises(EngineFailed):
        await replica.check_health()
    await replica.stop()


async def test_a_map_that_is_down_makes_no_replica_unhealthy() -> None:
    replica = await Replica.start("r1", EMULATED, DeadMap(time.monotonic), lease_s=0.2)
    await replica.check_health()
    assert replica.collector.lease is None
    await replica.stop()


async def test_the_engine_s_block_size_counts(ownership: MemoryOwnershipMap, caplog: pytest.LogCaptureFixture) -> None:
    engine = await Replica.start("r1", EMULATED, ownership)
    config = EngineConfig("external", MODEL, block_size=64, endpoints=(engine.url + "/v1",))
    with caplog.at_level(logging.WARNING):
        replica = await Replica.start("r2", config, ownership)
    assert replica.record.block_size == 16
    assert "block_size 16, not 64" in caplog.text
    await replica.stop()
    await engine.check_health()
    await engine.stop()


async def test_an_external_engine_is_followed_but_not_stopped(ownership: MemoryOwnershipMap) -> None:
    engine = await Replica.start("r1", EMULATED, MemoryOwnershipMap(time.monotonic))
    at = engine._endpoints
    assert at.events is not None
    assert at.replay is not None
    config = EngineConfig(
        "external", MODEL, endpoints=(at.url,), events_endpoints=(at.events,), replay_endpoints=(at.replay,)
    )
    replica = await Replica.start("r2", config, ownership)
    await asyncio.to_thread(complete, engine.url)
    await until_owned(ownership, 10)
    with pytest.raises(EngineFailed, match="replica 1"):
        await Replica.start("r3", config, ownership, rank=1)
    await replica.stop()
    await engine.check_health()
    await engine.stop()


async def test_two_replicas_of_one_machine_share_nothing(ownership: MemoryOwnershipMap) -> None:
    first, second = await asyncio.gather(
        Replica.start("r1", EMULATED, ownership), Replica.start("r2", EMULATED, ownership)
    )
    assert first.url != second.url
    await asyncio.to_thread(complete, second.url)
    await until(lambda: second.record.blocks == 10)
    assert first.record.blocks == 0
    await asyncio.gather(first.stop(), second.stop())


async def test_an_engine_that_can_t_start_says_why(ownership: MemoryOwnershipMap) -> None:
    config = EngineConfig(model=MODEL, profile="no-such-profile", start_timeout_s=DEADLINE_S)
    with pytest.raises(EngineFailed, match="no-such-profile"):
        await Replica.start("r1", config, ownership)
    assert not (await ownership.look_up([])).replicas
