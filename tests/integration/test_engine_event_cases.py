"""Bugs that other routers had with engines' events, replayed: bytes on a real ZMQ socket, through decoder, collector
and the map in a real Valkey, up to what a router credits a request with."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from redis.asyncio import Redis

from replicas.collector import Collector
from replicas.config import EngineConfig
from replicas.emulated.publisher import EventPublisher
from replicas.engine_api import post
from replicas.replica import Replica
from router.config import RouterConfig
from router.ownership import ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from router.prompt import COMPLETIONS_PATH, PromptEncoder
from router.router import Router
from router.types import ReplicaId
from serve.metrics import FleetState, Metrics

pytestmark = pytest.mark.integration

FIXTURES = Path(__file__).parent.parent / "fixtures" / "kv_event_fixtures.jsonl"
CASES = {case["name"]: case for case in map(json.loads, FIXTURES.read_text().splitlines())}
ENCODINGS = ("frames_map", "frames_array")
MODEL = "m"
DEADLINE_S = 60.0
LEASE_S = 12.0  # long enough for a slow machine, short enough that news in a record (every third of it) comes soon


def frame(name: str, encoding: str = "frames_map") -> bytes:
    """The payload of a fixture."""
    return bytes.fromhex(CASES[name][encoding][-1])


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, [{"medium": "GPU"} | event for event in events], 0])


def store(hashes: list[int], parent: int | None, ids: Sequence[int], **more: Any) -> dict[str, Any]:
    size = len(ids) // len(hashes)
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": list(ids), "block_size": size}
    return {"type": "BlockStored", **fields, **more}


def remove(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes)}


class Wire(EventPublisher):
    """An engine's event sockets, for bytes as they are."""

    def __init__(self) -> None:
        name = uuid4().hex
        self.endpoints = (f"ipc://@whohas-test-{name}-e", f"ipc://@whohas-test-{name}-r")
        self.sent = -1
        super().__init__(*self.endpoints)

    def send(self, payload: bytes) -> None:
        self.sent += 1
        self._send(payload)


class Engine:
    """A wire with the collector that listens to it."""

    def __init__(self, wire: Wire, collector: Collector) -> None:
        self.wire, self.collector = wire, collector

    async def send(self, *payloads: bytes) -> None:
        """Until all of it has reached the map."""
        for payload in payloads:
            self.wire.send(payload)
        await until(lambda: self.collector.record.seq == self.wire.sent and self.collector.in_sync)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not check():
            await asyncio.sleep(0.01)


class Fleet:
    """Engines w0, w1..., their map, and a router."""

    def __init__(self, ownership: RedisOwnershipMap, router: Router) -> None:
        self.ownership, self.router = ownership, router
        self._engines: list[Engine] = []

    async def engine(self, block_size: int = 16) -> Engine:
        wire = Wire()
        record = ReplicaRecord(f"w{len(self._engines)}", MODEL, block_size, "http://127.0.0.1:1")
        engine = Engine(wire, Collector(self.ownership, record, *wire.endpoints, lease_s=LEASE_S))
        self._engines.append(engine)
        await engine.collector.start()
        await until(lambda: engine.collector.in_sync)
        return engine

    async def credit(self, prompt: Sequence[int], model: str = MODEL, salt: str | None = None) -> dict[str, int]:
        """Tokens of the prompt that each replica is said to hold; without those that hold none."""
        body = {"model": model, "prompt": list(prompt)} | ({"cache_salt": salt} if salt else {})
        asked = await self.router.look_up(COMPLETIONS_PATH, body, 100)
        replicas = asked.snapshot.replicas
        return {replicas[slot].replica_id: m.owned * asked.block_size for slot, m in asked.snapshot.matches.items()}

    async def close(self) -> None:
        for engine in self._engines:
            await engine.collector.close()
            engine.wire.close()


@pytest.fixture
async def engines(valkey_url: str, fleet: str) -> AsyncIterator[Fleet]:
    ownership = RedisOwnershipMap(valkey_url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
    await ownership.connect()
    encoder = PromptEncoder.load(MODEL, "builtin", ("adapter-a",))
    router = Router("router", encoder, ownership, RouterConfig(lease_s=LEASE_S), time.monotonic)
    fleet_of_engines = Fleet(ownership, router)
    yield fleet_of_engines
    await fleet_of_engines.close()
    await router.close()
    await ownership.close()


def captured_ids() -> list[int]:
    (event,) = CASES["captured_qwen3_8b_vllm026"]["events"]
    return list(event["token_ids"])


async def test_e1_events_as_maps_as_arrays_and_mixed_in_one_batch_lead_to_the_same_credit(engines: Fleet) -> None:
    names = ("captured_qwen3_8b_vllm026", "two_blocks_root")
    as_maps, as_arrays, mixed = [await engines.engine() for _ in range(3)]
    await as_maps.send(*(frame(name) for name in names))
    await as_arrays.send(*(frame(name, "frames_array") for name in names))
    first = msgspec.msgpack.decode(frame(names[0]))
    second = msgspec.msgpack.decode(frame(names[1], "frames_array"))
    await mixed.send(msgspec.msgpack.encode([0.0, [*first[1], *second[1]], 0]))
    assert await engines.credit(range(33)) == {"w0": 32, "w1": 32, "w2": 32}
    assert await engines.credit([*captured_ids(), 1]) == {"w0": 16, "w1": 16, "w2": 16}
    assert as_maps.collector.published == as_arrays.collector.published == mixed.collector.published
    assert [dict(one.collector.record.unused) for one in (as_maps, as_arrays, mixed)] == [{}, {}, {}]


async def test_e1_unknown_events_and_fields_cost_nothing_and_are_told(
    engines: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await engines.engine()
    await engine.send(frame("two_blocks_root"), frame("unknown_event"), frame("unknown_field"))
    assert await engines.credit(range(33)) == {"w0": 32}
    assert engine.collector.record.unused == {"blocks_ignored": 2}
    assert "TierBlocksCleared" in caplog.text


async def test_e1_a_message_that_can_t_be_decoded_is_logged_counted_and_leaves_no_credit_in_doubt(
    engines: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await engines.engine()
    await engine.send(frame("two_blocks_root"), b"\xc1 no msgpack", batch(store([9], None, range(900, 916))))
    assert await engines.credit(range(33)) == {}  # the lost message may have removed them
    assert await engines.credit(range(900, 917)) == {"w0": 16}
    assert engine.collector.record.unused == {"events_undecodable": 1}
    assert "message 1 can't be decoded" in caplog.text
    metrics = Metrics()
    async with asyncio.timeout(DEADLINE_S):
        while "events_undecodable" not in metrics.text():
            snapshot = (await engines.router.look_up(COMPLETIONS_PATH, {"prompt": [1]}, 1)).snapshot
            metrics.observe_fleets([FleetState(snapshot, {}, False, 0)])
            await asyncio.sleep(0.02)


async def test_e2_hashes_beyond_signed_64_bits_and_a_float_s_precision_stay_apart(engines: Fleet) -> None:
    engine = await engines.engine()
    raw = msgspec.msgpack.decode(frame("captured_qwen3_8b_vllm026"))
    (event,) = raw[1]
    assert event["block_hashes"] == [15760518052499183552]
    event["block_hashes"], event["token_ids"] = [15760518052499183553], list(range(700, 716))
    await engine.send(frame("captured_qwen3_8b_vllm026"), msgspec.msgpack.encode(raw))
    assert await engines.credit([*captured_ids(), 1]) == {"w0": 16}
    assert await engines.credit(range(700, 717)) == {"w0": 16}
    await engine.send(batch(remove(15760518052499183552)))
    assert await engines.credit([*captured_ids(), 1]) == {}
    assert await engines.credit(range(700, 717)) == {"w0": 16}


async def test_e2_hashes_may_be_bytes(engines: Fleet) -> None:
    engine = await engines.engine()
    await engine.send(frame("bytes_hash"))
    assert await engines.credit(range(17)) == {"w0": 16}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dense_first", [False, True])
async def test_e8_only_the_full_attention_group_of_a_hybrid_model_counts(
    engines: Fleet, encoding: str, dense_first: bool
) -> None:
    raw = msgspec.msgpack.decode(frame("mamba_group", encoding))
    if dense_first:
        raw[1].reverse()
    engine = await engines.engine(block_size=768)
    await engine.send(msgspec.msgpack.encode(raw))
    assert await engines.credit(range(3841)) == {"w0": 3840}
    assert len(engine.collector.published) == 5
    assert sum(engine.collector.record.unused.values()) == 1


async def test_e9_a_block_in_the_cpu_tier_is_known_as_such_and_never_a_gpu_hit(engines: Fleet) -> None:
    engine = await engines.engine()
    await engine.send(frame("two_blocks_root"), frame("cpu_tier_no_tokens"))
    assert await engines.credit(range(33)) == {"w0": 32}
    assert len(engine.collector.published) == 2  # and no root block without tokens
    await engine.send(batch(remove(101)))
    assert await engines.credit(range(33)) == {}
    assert engine.collector.record.unused == {"blocks_skipped_medium": 1, "offloaded": 1}
    await engine.send(batch(remove(101) | {"medium": "CPU"}))
    assert engine.collector.stats()["offloaded"] == 0


async def test_e10_of_a_block_of_64_tokens_32_shared_ones_are_worth_nothing(engines: Fleet) -> None:
    engine = await engines.engine(block_size=64)
    await engine.send(frame("big_block"))
    assert await engines.credit([*range(32), *range(900, 940)]) == {}
    assert await engines.credit([*range(64), 1]) == {"w0": 64}


async def test_e10_an_engine_whose_blocks_are_not_what_it_says_is_an_error_and_gets_no_credit(
    engines: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await engines.engine(block_size=16)
    await engine.send(frame("big_block"))
    assert await engines.credit([*range(64), 1]) == {}
    assert engine.collector.record.unused == {"blocks_skipped_block_size": 1}
    assert [one.levelname for one in caplog.records if "blocks of 64 tokens, not 16" in one.message] == ["ERROR"]


async def test_e12_an_adapter_s_block_is_found_by_the_adapter_s_requests_only(engines: Fleet) -> None:
    with_adapter, base = await engines.engine(), await engines.engine()
    await with_adapter.send(frame("lora_block"))
    await base.send(frame("two_blocks_root"))
    assert await engines.credit(range(17), model="adapter-a") == {"w0": 16}
    assert await engines.credit(range(17)) == {"w1": 16}


async def test_e13_tenants_never_share_credit_and_the_salt_is_nowhere_in_the_clear(
    engines: Fleet, valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    engine = await engines.engine()
    await engine.send(frame("salted_block"))
    assert await engines.credit(range(33), salt="tenant-a") == {"w0": 32}
    assert await engines.credit(range(33), salt="tenant-b") == {}
    assert await engines.credit(range(33)) == {}
    assert b"tenant" not in await everything_in(valkey_url)
    assert "tenant" not in caplog.text + repr(engine.collector.stats()) + repr(engine.collector.record)


async def everything_in(url: str) -> bytes:
    client = Redis.from_url(url)
    try:
        keys: list[bytes] = [key async for key in client.scan_iter(count=1000)]
        return b"\n".join(keys + [await client.dump(key) or b"" for key in keys])
    finally:
        await client.aclose()


async def test_e14_blocks_of_one_image_are_no_credit_for_another_nor_for_bare_placeholders(engines: Fleet) -> None:
    engine = await engines.engine()
    await engine.send(frame("mm_block"))
    assert len(engine.collector.published) == 1
    assert await engines.credit([151655] * 17) == {}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QkJC"}, "uuid": "imghash-B"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}
    asked = await engines.router.look_up("/v1/chat/completions", body, 100)
    assert not asked.snapshot.matches


async def test_e15_equal_tokens_are_one_chain_whatever_each_engine_calls_its_blocks(engines: Fleet) -> None:
    first, second = await engines.engine(), await engines.engine()
    await first.send(batch(store([101, 102], None, range(32))))
    await second.send(batch(store([801, 802], None, range(32))))
    assert await engines.credit(range(33)) == {"w0": 32, "w1": 32}
    await second.send(batch(remove(101, 102)))  # the other engine's names mean nothing here
    assert await engines.credit(range(33)) == {"w0": 32, "w1": 32}
    await second.send(batch(remove(802)))
    assert await engines.credit(range(33)) == {"w0": 32, "w1": 16}


# --- with engine processes ------------------------------------------------------------------------------------------


@pytest.fixture
async def pair(engines: Fleet) -> AsyncIterator[list[Replica]]:
    """Two replicas on this host that nobody gave any port."""
    config = EngineConfig(model=MODEL, tokenizer="builtin", speed=100.0, num_blocks=3000)
    started: list[Replica] = []
    try:
        for name in ("p0", "p1"):
            replica = await Replica.start(name, config, engines.ownership, lease_s=30.0)
            started.append(replica)
        yield started
    finally:
        for replica in started:
            await replica.stop()


async def complete(replica: Replica, ids: Sequence[int]) -> int:
    """Cached tokens, as the engine reports them."""
    body = {"model": MODEL, "prompt": list(ids), "max_tokens": 1}
    status, raw = await post(f"{replica.url}{COMPLETIONS_PATH}", body)
    assert status == 200, raw
    return int(json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"])


async def until_credited(engines: Fleet, ids: Sequence[int], wanted: dict[str, int]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await engines.credit(ids) != wanted:
            await asyncio.sleep(0.02)


async def test_e11_two_engines_on_one_host_are_told_apart(engines: Fleet, pair: list[Replica]) -> None:
    assert len({value for one in pair for value in (one._endpoints.events, one._endpoints.replay)}) == 4
    await complete(pair[0], range(100, 165))
    await complete(pair[1], range(300, 365))
    await until_credited(engines, range(100, 165), {"p0": 64})
    await until_credited(engines, range(300, 365), {"p1": 64})


async def test_p8_of_a_prompt_of_exactly_four_cached_blocks_three_are_promised_and_reused(
    engines: Fleet, pair: list[Replica]
) -> None:
    prompt = list(range(64))
    assert await complete(pair[0], prompt) == 0
    await until_credited(engines, [*prompt, 1], {"p0": 64})
    placement = await engines.router.route(COMPLETIONS_PATH, {"prompt": prompt}, 100, [ReplicaId("p0")])
    assert placement.decision.predicted_cached_tokens == 48
    assert await complete(pair[0], prompt) == 48
