"""Replicas that fail, come back, or only seem to, as the front's requests see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from router.types import ReplicaId
from serve.breaker import ERRORS
from tests.wire.front_bench import PATIENCE_S, Bench, chat, scripted_front, until
from tests.wire.scripted_engine import Exchange, answer, healthy_but


async def left_out(bench: Bench) -> list[str]:
    async with bench.http.get(bench.url + "/health") as response:
        replicas: list[str] = (await response.json())["left_out"]
        return replicas


async def until_it_is(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.02)


async def fail(exchange: Exchange) -> None:
    await exchange.error(500, "fast and wrong")


async def test_p9_a_warm_replica_that_fails_fast_leaves_the_pool() -> None:
    """W0 holds the prompt and answers 500 at once, and says that it is healthy. ERRORS clients see it, no more."""
    prompt = chat("the same long prompt " * 100)
    async with scripted_front(answer, answer) as (bench, engines):
        _, _, headers = await bench.post(body=prompt)
        warm = int(headers["x-whohas-replica"][1:])
        for _ in range(3):
            assert (await bench.post(body=prompt))[2]["x-whohas-replica"] == f"W{warm}"
        asked = 0

        async def fail_fast(exchange: Exchange) -> None:
            nonlocal asked
            if exchange.target != "/health":
                await fail(exchange)
                return
            asked += 1  # once for each error; after that it would be let back on trial
            await exchange.whole(b"", 200 if asked <= ERRORS else 503)

        engines[warm].script = fail_fast
        statuses = [(await bench.post(body=prompt))[0] for _ in range(10)]
        assert statuses == [500] * ERRORS + [200] * (10 - ERRORS)
        assert await left_out(bench) == [f"W{warm}"]


async def test_p9_a_failing_replica_that_calls_itself_healthy_comes_back_one_request_at_a_time() -> None:
    async with scripted_front(healthy_but(fail), answer) as (bench, engines):
        answers = 0

        async def two_trials() -> bool:
            nonlocal answers
            answers += (await bench.post())[0] == 200
            return len(engines[0].generations) >= ERRORS + 2

        await until_it_is(two_trials)
        breaker = bench.front._dispatcher._breakers[ReplicaId("W0")]
        assert breaker.openings >= 3
        assert answers >= 1


async def test_l10_a_blip_is_forgiven_and_the_replica_is_used_again() -> None:
    async with scripted_front(answer, answer) as (bench, engines):
        await engines[0].kill()
        for _ in range(4):
            assert (await bench.post())[2]["x-whohas-replica"] == "W1"
        assert await left_out(bench) == ["W0"]
        await engines[0].start()
        seen: set[str] = set()

        async def ask() -> bool:
            seen.add((await bench.post())[2]["x-whohas-replica"])
            return "W0" in seen

        await until_it_is(ask)
        assert await left_out(bench) == []


async def test_l10_a_dead_replica_is_picked_no_more_and_forgotten_once_serve_drops_it() -> None:
    async with scripted_front(answer, answer) as (bench, engines):
        await engines[0].kill()
        for _ in range(6):
            assert (await bench.post())[0] == 200
        assert bench.metrics.retries._value.get() == 1
        bench.fleet.running = bench.fleet.running[1:]
        await until(lambda: not bench.front._dispatcher._probes)
        assert await left_out(bench) == []


async def test_when_all_are_left_out_the_next_request_is_still_tried() -> None:
    async with scripted_front(answer) as (bench, (engine,)):
        await engine.kill()
        status, body, headers = await bench.post()
        assert status == 502
        assert headers["retry-after"] == "1"
        assert json.loads(body)["error"]["message"] == "no replica could be reached"
        await engine.start()
        assert (await bench.post())[0] == 200


async def test_an_engine_that_is_going_down_is_left_and_its_error_not_shown() -> None:
    """5xx while /health isn't 200, as vLLM's API server answers after its engine core died."""

    async def down(exchange: Exchange) -> None:
        await exchange.error(500 if exchange.method == "POST" else 503, "engine dead")

    async with scripted_front(down, answer) as (bench, _):
        for _ in range(4):
            status, _, headers = await bench.post()
            assert (status, headers["x-whohas-replica"]) == (200, "W1")
        assert await left_out(bench) == ["W0"]


async def test_l11_a_404_of_count_tokens_is_passed_on_and_harms_nobody() -> None:
    async def no_count(exchange: Exchange) -> None:
        await (exchange.error(404, "Not Found") if "count_tokens" in exchange.target else answer(exchange))

    async with scripted_front(*[healthy_but(no_count)] * 2) as (bench, engines):
        for _ in range(20):
            path = "/v1/messages/count_tokens?beta=true"
            status, body, _ = await bench.post(path, {"model": "demo-model", "messages": []})
            assert (status, json.loads(body)["error"]["message"]) == (404, "Not Found")
        assert {one.target for engine in engines for one in engine.generations} == {path}
        assert await left_out(bench) == []
        assert bench.nothing_is_booked()
        assert {(await bench.post())[0] for _ in range(4)} == {200}


async def test_l9_models_are_those_of_all_that_answer() -> None:
    async def with_adapter(exchange: Exchange) -> None:
        cards = [{"id": "demo-model", "object": "model"}, {"id": "adapter-b", "object": "model"}]
        await exchange.whole(json.dumps({"object": "list", "data": cards}).encode())

    async with scripted_front(answer, with_adapter, answer) as (bench, engines):
        await engines[0].kill()
        async with bench.http.get(bench.url + "/v1/models") as response:
            assert response.status == 200
            models = await response.json()
        assert models["object"] == "list"
        assert [card["id"] for card in models["data"]] == ["demo-model", "adapter-b"]
        for one in engines[1:]:
            await one.kill()
        async with bench.http.get(bench.url + "/v1/models") as response:
            assert response.status == 502
            assert (await response.json())["error"]["type"] == "upstream_error"


@pytest.mark.parametrize(
    "answered",
    [b"", b"[]", b"nonsense", b'{"data": null}', b'{"data": [1, {"id": 2}, null]}', b'{"data": {"a": 1}}', b"\xff"],
)
async def test_l9_a_list_of_models_that_makes_no_sense_is_nobodys_error(answered: bytes) -> None:
    async def odd(exchange: Exchange) -> None:
        await exchange.whole(answered)

    async with scripted_front(odd, answer) as (bench, _), bench.http.get(bench.url + "/v1/models") as response:
        assert response.status == 200
        assert [card["id"] for card in (await response.json())["data"]] == ["demo-model"]
