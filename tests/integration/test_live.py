"""The whole system as a client sees it: HAProxy, Ray Serve, Valkey, KV events over ZMQ, four engine processes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
import uuid
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from router.ownership.redis import RedisOwnershipMap
from tests.integration.live import MODEL, WHOHAS, Answer, Live, chat_body, until

pytestmark = pytest.mark.integration

BLOCK = 16
PATIENCE_S = 60


def system_prompt(name: str | None = None) -> str:
    """About 4,000 tokens that nobody has seen, different from the first one on."""
    name = name or uuid.uuid4().hex
    return f"{name} is who you are. " + " ".join(f"Rule {i} of {name[:6]}: be kind." for i in range(330))


def test_a_second_chat_lands_on_the_first_ones_replica_with_the_promised_hit(live: Live) -> None:
    system = system_prompt()
    first, second = live.chat(system, "What is one?", max_tokens=4), live.chat(system, "And two?", max_tokens=4)
    assert first.status == second.status == 200
    assert first.cached == first.predicted == 0
    assert second.replica == first.replica
    assert second.cached == second.predicted > 3000
    until(lambda: live.owned_blocks(chat_body(system, "And three?")) * BLOCK >= second.cached)  # events have told
    third = live.chat(system, "And three?", max_tokens=4)
    assert third.replica == first.replica
    assert third.cached == third.predicted >= second.cached


def test_a_conversation_keeps_its_replica_and_its_answers_are_cached_too(live: Live) -> None:
    turns = [system_prompt(), "Tell me something long."]
    replicas = set()
    for question in ("Go on.", "Is that all?", "Thank you."):
        answer = live.chat(*turns, max_tokens=40, ignore_eos=True)
        assert answer.cached == answer.predicted
        replicas.add(answer.replica)
        turns += [answer.json["choices"][0]["message"]["content"], question]
        until_events_tell_of(live, answer, chat_body(*turns))
    assert len(replicas) == 1
    last = live.chat(*turns, max_tokens=4)
    assert last.cached == last.predicted >= (last.json["usage"]["prompt_tokens"] - 30) // 16 * 16 - 16


def until_events_tell_of(live: Live, answer: Answer, next_turn: dict[str, Any]) -> None:
    """Also of its own blocks, which nobody claims. Its last token was never fed back to the engine."""
    blocks = (answer.json["usage"]["total_tokens"] - 1) // BLOCK
    until(lambda: live.owned_blocks(next_turn) >= blocks)


def test_twenty_different_prompts_use_all_four_replicas(live: Live) -> None:
    used = Counter(live.chat(system_prompt(), "Hello", max_tokens=2).replica for _ in range(20))
    assert len(used) == 4


def test_forty_prompts_below_one_block_use_all_four_replicas(live: Live) -> None:
    body, used = {"model": MODEL, "prompt": "Hi there", "max_tokens": 1}, Counter[str]()
    for _ in range(40):
        until(lambda: not asyncio.run(booked(live)))  # as all are idle, turns decide
        used[live.request("POST", "/v1/completions", body).replica] += 1
    assert len(used) == 4
    assert max(used.values()) <= 16


async def test_p4_a_burst_with_a_new_prefix_is_computed_at_most_twice(live: Live) -> None:
    """16 requests within 50 ms share 4,096 tokens and have 64 of their own; events are half a second late."""
    seed = int(uuid.uuid4().int % 100_000)
    prefix = [(seed + i * 7) % 150_000 for i in range(4096)]

    async def one(session: aiohttp.ClientSession, i: int) -> tuple[str, int, int]:
        await asyncio.sleep(i * 0.003)
        body = {"model": MODEL, "prompt": [*prefix, *range(1000 * i, 1000 * i + 64)], "max_tokens": 2}
        async with session.post(f"{live.url}/v1/completions", json=body) as response:
            answer = await response.json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            predicted = int(response.headers["x-whohas-predicted-cached-tokens"])
            return response.headers["x-whohas-replica"], cached, predicted

    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(one(session, i) for i in range(16)))
    computed = {replica for replica, cached, _ in answers if cached < 4096}
    assert len(computed) <= 2
    assert sum(cached < 4096 for _, cached, _ in answers) <= 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", [b"nope", b"", b"[1, 2]", b'"text"', b"\xff\xfe", b"[" * 100_000], ids=repr)
def test_a_body_that_is_no_json_object_gets_a_400_in_openais_shape(live: Live, path: str, body: bytes) -> None:
    answer = live.request("POST", path, body)
    assert answer.status == 400
    assert set(answer.json["error"]) >= {"message", "type", "param", "code"}
    assert answer.json["error"]["type"] == "invalid_request_error"


def test_a_body_of_20_mb_gets_a_413_and_the_next_request_is_served(live: Live) -> None:
    answer = live.request("POST", "/v1/chat/completions", b"a" * 20_000_000)
    assert answer.status == 413
    assert "at most" in answer.json["error"]["message"]
    assert live.chat("Hello", max_tokens=1).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_gets_the_engines_own_400(live: Live, stream: bool) -> None:
    answer = live.chat("word " * 40_000, stream=stream)
    assert answer.status == 400
    assert "maximum context length" in answer.json["error"]["message"]
    assert answer.headers["content-type"] == "application/json"
    assert live.chat("Hello", max_tokens=1).status == 200


def test_an_unknown_model_gets_the_engines_404(live: Live) -> None:
    answer = live.request(
        "POST", "/v1/chat/completions", {"model": "no", "messages": [{"role": "user", "content": ""}]}
    )
    assert answer.status == 404
    assert "no" in answer.json["error"]["message"]


def test_an_unknown_path_gets_a_404_of_our_own(live: Live) -> None:
    assert live.request("GET", "/nowhere").json["error"]["type"] == "not_found_error"


def test_the_models_are_the_engines(live: Live) -> None:
    models = live.request("GET", "/v1/models").json
    assert [model["id"] for model in models["data"]] == [MODEL]


async def test_a_stream_arrives_piece_by_piece_and_byte_for_byte(live: Live) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "用中文介绍北京🙂"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 500,  # 1.7 s: enough for pieces, whoever has to wait for its turn meanwhile
        "ignore_eos": True,
    }
    url = (await fleet_urls(live))[0]
    async with aiohttp.ClientSession() as session:
        relayed = await events(session, live.url, body)
        direct = await events(session, url, body)
    assert relayed["pieces"] > 5
    assert relayed["raw"].endswith(b"data: [DONE]\n\n")
    assert [strip(one) for one in relayed["events"]] == [strip(one) for one in direct["events"]]
    assert relayed["events"][-1]["choices"] == []
    assert relayed["events"][-1]["usage"]["completion_tokens"] == 500


async def events(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        pieces = [piece async for piece in response.content.iter_any()]
    raw = b"".join(pieces)
    parsed = [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    return {"raw": raw, "pieces": len(pieces), "events": parsed}


def strip(event: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two requests."""
    return {key: value for key, value in event.items() if key not in ("id", "created", "usage")}


async def fleet_urls(live: Live) -> list[str]:
    ownership = RedisOwnershipMap(live.redis, MODEL, timeout_s=30.0, look_up_timeout_s=30.0)
    try:
        return [record.url for record in (await ownership.look_up([])).replicas.values()]
    finally:
        await ownership.close()


async def running_requests(session: aiohttp.ClientSession, urls: list[str]) -> float:
    total = 0.0
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting")):
                    total += float(line.rpartition(" ")[2])
    return total


async def booked(live: Live) -> list[Any]:
    ownership = RedisOwnershipMap(live.redis, MODEL, timeout_s=30.0, look_up_timeout_s=30.0)
    try:
        return [dict(record.loads) for record in (await ownership.look_up([])).routers.values() if record.loads]
    finally:
        await ownership.close()


@pytest.mark.parametrize("chunks", [0, 3])
async def test_a_client_that_leaves_frees_the_engine_and_its_booking(live: Live, chunks: int) -> None:
    urls = await fleet_urls(live)
    body = {"model": MODEL, "prompt": system_prompt(), "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{live.url}/v1/completions", json=body) as response:
            for _ in range(chunks):
                await response.content.readline()
            response.close()
        async with asyncio.timeout(PATIENCE_S):
            while await running_requests(session, urls) or await booked(live):
                await asyncio.sleep(0.05)


async def test_a_client_that_leaves_before_the_headers_frees_everything(live: Live) -> None:
    urls = await fleet_urls(live)
    body = json.dumps({"model": MODEL, "prompt": system_prompt(), "max_tokens": 20_000, "ignore_eos": True}).encode()
    host = urlsplit(live.url)
    with socket.create_connection((host.hostname, host.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
            while not await running_requests(session, urls):
                await asyncio.sleep(0.02)
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
        while await running_requests(session, urls) or await booked(live):
            await asyncio.sleep(0.05)


def test_responses_and_messages_share_the_blocks_of_the_equivalent_chat(live: Live) -> None:
    system = system_prompt()
    chat = live.chat(system, "What now?", max_tokens=2)
    turn = [{"role": "user", "content": "What now?"}]
    messages = {"model": MODEL, "system": system, "messages": turn, "max_tokens": 2}
    answer = live.request("POST", "/v1/messages", messages)
    assert answer.status == 200
    assert answer.replica == chat.replica
    assert answer.json["usage"]["cache_read_input_tokens"] == answer.predicted > 3000
    responses = {"model": MODEL, "instructions": system, "input": "What now?", "max_output_tokens": 16}
    answer = live.request("POST", "/v1/responses", responses)
    assert answer.status == 200
    assert answer.replica == chat.replica
    assert answer.json["usage"]["input_tokens_details"]["cached_tokens"] == answer.predicted > 3000


def test_explain_says_where_a_request_would_go_and_why_and_sends_nothing(live: Live) -> None:
    system = system_prompt()
    answered = live.chat(system, "One?", max_tokens=2)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Two?"}]
    explained = live.request("POST", "/explain", {"model": MODEL, "messages": messages}).json
    assert explained["replica"] == answered.replica
    assert explained["predicted_cached_tokens"] > 3000
    assert explained["prompt_tokens"] > explained["predicted_cached_tokens"]
    assert len(explained["candidates"]) == 4
    assert explained["candidates"][0]["replica"] == answered.replica
    assert set(explained["candidates"][0]) >= {"replica", "overlap_blocks", "cost_s", "terms"}
    assert "blocks held" in explained["reason"]


def test_the_commands_explain_and_map_find_the_running_system(live: Live, tmp_path: Any) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Who has my blocks?"}]}))
    told = command("explain", str(body), "--url", live.url)
    assert "prompt tokens should be cached there" in told
    assert json.loads(command("explain", str(body), "--url", live.url, "--json"))["prompt_tokens"] > 5
    shown = command("map", "--redis", live.redis)
    assert f"{MODEL}: 4 replicas, 2 routers" in shown
    assert "held" in command("map", "--redis", live.redis, "--fleet", MODEL, "--check")
    rows = json.loads(command("map", "--redis", live.redis, "--json"))[MODEL]["replicas"]
    assert len(rows) == 4
    assert all(row["lease_s"] > 0 and row["block_size"] == 16 and row["trusted"] for row in rows)


def command(*args: str) -> str:
    return subprocess.run([WHOHAS, *args], check=True, capture_output=True, text=True, timeout=60).stdout


def test_health_says_ready_and_not_degraded(live: Live) -> None:
    well = {
        "status": "ok",
        "ready": True,
        "degraded": "",
        "replicas": 4,
        "replicas_in_map": 4,
        "left_out": [],
        "doubts": {},
    }

    def healthy() -> bool:  # a look-up may just have been late
        answer = live.request("GET", "/health")
        return answer.status == 200 and answer.json == well

    until(healthy)


def test_metrics_add_up_over_both_ingress_processes_and_never_go_back(live: Live) -> None:
    def answered() -> dict[str, float]:
        text = live.request("GET", "/metrics").body.decode()
        rows = [line for line in text.splitlines() if line.startswith("whohas_requests_total{") and '"200"' in line]
        return {row.split('ingress="')[1].split('"')[0]: float(row.rpartition(" ")[2]) for row in rows}

    seen = dict[str, float]()

    def both() -> bool:  # a process that Redis is late for tells of itself alone
        seen.update(answered())
        return len(seen) == 2

    until(both)
    before = sum(seen.values())
    for _ in range(6):
        assert live.chat("Hello", max_tokens=1).status == 200
    end = time.monotonic() + PATIENCE_S
    while sum(seen.values()) < before + 6:
        assert time.monotonic() < end, seen
        now = answered()
        assert all(now.get(name, count) >= count for name, count in seen.items())
        seen |= now
        time.sleep(0.1)
    assert len(seen) == 2
