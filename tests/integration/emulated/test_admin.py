"""The emulated engine's other endpoints: health, models, adapters, tokens, sleep, cache, metrics."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import pytest

from router.prompt import PromptEncoder
from tests.integration.emulated.process import (
    MODEL,
    Server,
    cached,
    complete,
    error,
    metric,
    post,
    running,
    wait_for,
)

pytestmark = pytest.mark.integration


async def test_the_small_endpoints_answer_as_vllms(
    http: aiohttp.ClientSession, server: Server, encoder: PromptEncoder
) -> None:
    for path in ("/health", "/ping", "/version"):
        async with http.get(server.url + path) as response:
            assert response.status == 200
    async with http.get(server.url + "/v1/models") as response:
        base, adapter = (await response.json())["data"]
    assert (base["id"], base["object"], base["root"], base["max_model_len"]) == (MODEL, "model", MODEL, 2048)
    assert (adapter["id"], adapter["parent"]) == ("ada", MODEL)
    tokens = await post(http, server, "/tokenize", {"prompt": "Hello there"})
    assert tokens == {"count": 2, "max_model_len": 2048, "tokens": encoder.encode_text("Hello there")}
    assert await post(http, server, "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "Hello there"}
    messages = [{"role": "user", "content": "Hello"}]
    rendered = await post(http, server, "/tokenize", {"messages": messages})
    assert rendered["tokens"] == encoder.token_ids("/v1/chat/completions", {"messages": messages})[0]


async def test_metrics_count_tokens(http: aiohttp.ClientSession, server: Server) -> None:
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total")
    before = [await metric(http, server, name) for name in names]
    for _ in range(2):
        await complete(http, server, [6100] * 40, max_tokens=3)
    after = [await metric(http, server, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [80, 32, 6]
    async with http.get(server.url + "/metrics") as response:
        text = await response.text()
    assert re.search(r'vllm:cache_config_info\{.*block_size="16".*num_gpu_blocks="2001".*\} 1', text)


async def test_histograms_and_rates_are_told(http: aiohttp.ClientSession, server: Server) -> None:
    names = (
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
    )
    before = [await metric(http, server, name) for name in names]
    await complete(http, server, [6200] * 40, max_tokens=5)
    after = [await metric(http, server, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 4, 1]
    async with http.get(server.url + "/metrics") as response:
        text = await response.text()
    for name in (
        "prompt_tokens_per_second",
        "output_tokens_per_second",
        "prefill_share",
        "busy_share",
        "kv_usage",
        "busy_seconds_total",
        "prefill_seconds_total",
    ):
        assert f"whohas_emulated_{name}{{" in text


async def test_request_ids_come_back(http: aiohttp.ClientSession, server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    async with http.post(server.url + "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["x-request-id"] == "mine"
        assert (await response.json())["id"] == "cmpl-mine"
    async with http.get(server.url + "/nowhere") as response:
        assert response.status == 404
        assert len(response.headers["x-request-id"]) == 32


async def test_load_counts_what_is_being_answered(http: aiohttp.ClientSession, server: Server) -> None:
    async def load() -> Any:
        async with http.get(server.url + "/load") as response:
            return await response.json()

    async def until_load_is(count: int) -> None:
        while await load() != {"server_load": count}:
            await asyncio.sleep(0.02)

    await until_load_is(0)
    await post(http, server, "/sleep?level=0", {})  # what comes now is in hand until it wakes, or its client leaves
    try:
        answered, left = (asyncio.create_task(complete(http, server, "x")) for _ in range(2))
        await until_load_is(2)
        left.cancel()
        await until_load_is(1)
    finally:
        await post(http, server, "/wake_up", {})
    await answered
    await until_load_is(0)


async def test_adapters_can_be_loaded_and_unloaded(http: aiohttp.ClientSession, server: Server) -> None:
    prompt = [6300] * 40
    await complete(http, server, prompt)
    body = {"lora_name": "late", "lora_path": "/adapters/late"}
    async with http.post(server.url + "/v1/load_lora_adapter", json=body) as response:
        assert (response.status, "added" in await response.text()) == (200, True)
    assert (await error(http, server, "/v1/load_lora_adapter", body))[0] == 400
    first = await complete(http, server, prompt, model="late")
    again = await complete(http, server, prompt, model="late")
    assert (first["model"], cached(first), cached(again)) == ("late", 0, 32)
    async with http.post(server.url + "/v1/unload_lora_adapter", json=body) as response:
        assert response.status == 200
    assert (await error(http, server, "/v1/completions", {"prompt": prompt, "model": "late"}))[0] == 404


async def test_an_engine_sleeps_and_wakes_with_an_empty_cache(http: aiohttp.ClientSession) -> None:
    async def is_sleeping(one: Server) -> Any:
        async with http.get(one.url + "/is_sleeping") as response:
            return (await response.json())["is_sleeping"]

    with running("--speed", "100") as one:
        await complete(http, one, [6400] * 40)
        assert await post(http, one, "/sleep?level=1", {}) == {"status": "sleeping", "level": 1}
        assert await is_sleeping(one)
        waiting = asyncio.create_task(complete(http, one, [6400] * 40))
        await wait_for(http, one, "num_requests_waiting", 1.0)
        assert await post(http, one, "/wake_up", {}) == {"status": "awake", "tags": None}
        assert cached(await waiting) == 0
        assert not await is_sleeping(one)
        assert (await error(http, one, "/sleep?level=7", {}))[0] == 400


async def test_a_generative_model_has_no_embeddings(http: aiohttp.ClientSession, server: Server) -> None:
    assert (await error(http, server, "/v1/embeddings", {"input": "x"}))[0] == 404
