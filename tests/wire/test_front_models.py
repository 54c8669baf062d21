"""Several models behind one front, each with a fleet of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp

from serve.by_model import ByModel
from serve.config import IngressSection
from tests.wire.front_bench import CHAT, Bench, as_ray_serve_does, chat, front_over, served
from tests.wire.scripted_engine import Exchange, ScriptedEngine, answer, scripted


async def other(exchange: Exchange) -> None:
    if exchange.target == "/v1/models":
        await exchange.whole(b'{"object":"list","data":[{"id":"other-model","object":"model"}]}')
    else:
        await answer(exchange)


@contextlib.asynccontextmanager
async def two_models() -> AsyncIterator[tuple[str, Bench, Bench, list[ScriptedEngine], aiohttp.ClientSession]]:
    """`demo-model` with `adapter-a`, and `other-model`; the URL, and what is behind each."""
    async with (
        scripted(answer, other) as engines,
        front_over([engines[0].url]) as demo,
        front_over([engines[1].url], no_replica_timeout_s=0.3) as second,
    ):
        fronts = {"demo-model": demo.front, "adapter-a": demo.front, "other-model": second.front}
        app = ByModel(fronts, demo.metrics, demo.front._exposition, IngressSection(max_body_bytes=100_000))
        async with served(as_ray_serve_does(app)) as url:
            yield url, demo, second, engines, demo.http


async def test_a_request_goes_to_the_fleet_of_the_model_or_adapter_that_it_names() -> None:
    async with two_models() as (url, _, _, engines, http):
        for model, asked in (("demo-model", 0), ("adapter-a", 0), ("other-model", 1), (None, 0), ("", 0)):
            before = len(engines[asked].generations)
            async with http.post(url + CHAT, json=chat() | {"model": model}) as response:
                assert response.status == 200
            assert len(engines[asked].generations) == before + 1
        assert engines[1].generations[0].json["messages"] == chat()["messages"]


async def test_an_unknown_model_is_a_404_in_openais_shape_that_no_engine_sees() -> None:
    async with two_models() as (url, demo, _, engines, http):
        async with http.post(url + CHAT, json=chat() | {"model": "nope"}) as response:
            assert response.status == 404
            error = (await response.json())["error"]
        assert error == {
            "message": "The model `nope` does not exist.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
        async with http.get(f"{url}/v1/models/nope") as response:
            assert response.status == 404
        assert not any(one.exchanges for one in engines)
        assert demo.count(404) == 2


async def test_bodies_that_name_nothing_get_what_one_model_alone_would_say() -> None:
    async with two_models() as (url, _, _, engines, http):
        async with http.post(url + CHAT, data=b"nonsense") as response:
            assert response.status == 400
        async with http.post(url + CHAT, data=b"x" * 200_000) as response:
            assert response.status == 413
        async with http.post(f"{url}/v1/audio/transcriptions", data=b"--x\r\n") as response:
            assert response.status == 200
        assert len(engines[0].generations) == 1


async def test_models_health_and_metrics_are_those_of_all() -> None:
    async with two_models() as (url, _, second, _, http):
        async with http.get(f"{url}/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["demo-model", "other-model"]
        async with http.get(f"{url}/health") as response:
            health = await response.json()
            assert (response.status, health["status"]) == (200, "ok")
            assert list(health["models"]) == ["demo-model", "other-model"]
        async with http.get(f"{url}/metrics") as response:
            assert "whohas_replicas 2.0" in await response.text()
        second.fleet.running = []
        async with http.get(f"{url}/health") as response:
            health = await response.json()
            assert (response.status, health["status"]) == (503, "unready")
            assert health["models"]["demo-model"]["status"] == "ok"
        async with http.get(f"{url}/v1/models") as response:
            assert [card["id"] for card in (await response.json())["data"]] == ["demo-model"]
        async with http.post(url + CHAT, json=chat() | {"model": "other-model"}) as response:
            assert response.status == 503
            assert json.loads(await response.read())["error"]["type"] == "service_unavailable"


async def test_a_reset_goes_to_the_engines_of_all_models_or_of_the_one_that_the_query_names() -> None:
    async with two_models() as (url, _, second, engines, http):

        def told() -> list[list[str]]:
            targets = [[one.target for one in engine.exchanges] for engine in engines]
            for engine in engines:
                engine.exchanges.clear()
            return targets

        async with http.post(f"{url}/reset_prefix_cache") as response:
            assert response.status == 200
        assert told() == [["/reset_prefix_cache", "/v1/completions"]] * 2
        async with http.post(f"{url}/reset_prefix_cache?model=other-model") as response:
            assert response.status == 200
        assert told() == [[], ["/reset_prefix_cache?model=other-model", "/v1/completions"]]
        async with http.post(f"{url}/sleep?model=nope") as response:
            assert response.status == 404
        second.fleet.running = []
        async with http.get(f"{url}/is_sleeping") as response:
            assert (response.status, response.headers["retry-after"]) == (503, "5")
