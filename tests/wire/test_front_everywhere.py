"""Calls about the engines' caches: every engine gets them, and an engine that did what was asked for takes a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from router.ownership import ReplicaRecord
from router.types import ReplicaId
from serve.running import Candidate
from tests.wire.front_bench import BLOCK, MODEL, Bench, scripted_front
from tests.wire.scripted_engine import Exchange, Script, ScriptedEngine, answer

RESET = "/reset_prefix_cache"
STEP = ("POST", "/v1/completions", {"prompt": [0], "max_tokens": 1})


def saying(body: bytes, status: int = 200, step: Script = answer) -> Script:
    """Answers so to what is about its cache."""

    async def run(exchange: Exchange) -> None:
        if exchange.target.startswith(("/reset", "/sleep", "/wake_up", "/is_sleeping")):
            await exchange.whole(body, status)
        else:
            await (step if exchange.target == "/v1/completions" else answer)(exchange)

    return run


DONE = saying(b'{"success":true}')
NO_DEV_MODE = saying(b'{"detail":"Not Found"}', 404)
HELD = saying(b'{"success":false}')
BROKEN = saying(b"{}", 500)
OLD = saying(b"")  # says nothing


def seen(engine: ScriptedEngine) -> list[tuple[str, str, Any]]:
    return [(one.method, one.target, json.loads(one.body) if one.body else None) for one in engine.exchanges]


async def call(bench: Bench, path: str, method: str = "POST") -> tuple[int, bytes, str]:
    """Status, body, and whose answer it is."""
    async with bench.http.request(method, bench.url + path) as response:
        return response.status, await response.read(), response.headers.get("x-whohas-replica", "")


async def test_e6_a_reset_reaches_every_engine_and_makes_each_of_them_step() -> None:
    async with scripted_front(DONE, DONE, DONE) as (bench, engines):
        status, body, _ = await call(bench, f"{RESET}?reset_running_requests=true")
        assert (status, body) == (200, b'{"success":true}')
        for engine in engines:
            assert seen(engine) == [("POST", f"{RESET}?reset_running_requests=true", None), STEP]
        assert bench.count(200) == 1
        assert bench.nothing_is_booked()


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        ([DONE, NO_DEV_MODE, DONE], (404, b'{"detail":"Not Found"}', "W1")),
        ([DONE, DONE, HELD], (200, b'{"success":false}', "W2")),
        ([HELD, NO_DEV_MODE, DONE], (404, b'{"detail":"Not Found"}', "W1")),
        ([NO_DEV_MODE, BROKEN, HELD], (500, b"{}", "W1")),
        ([OLD, HELD, DONE], (200, b'{"success":false}', "W1")),
        ([DONE, OLD], (200, b'{"success":true}', "W0")),
    ],
)
async def test_the_client_gets_the_worst_answer_as_it_is_and_only_who_did_it_steps(
    scripts: Sequence[Script], expected: tuple[int, bytes, str]
) -> None:
    async with scripted_front(*scripts) as (bench, engines):
        assert await call(bench, RESET) == expected
        for script, engine in zip(scripts, engines, strict=True):
            refused = script in (NO_DEV_MODE, HELD, BROKEN)
            assert seen(engine) == [("POST", RESET, None), *([] if refused else [STEP])]


async def test_an_engine_that_can_not_be_reached_is_named_and_the_others_are_told_all_the_same() -> None:
    async with scripted_front(DONE, DONE) as (bench, engines):
        await engines[0].kill()
        status, body, _ = await call(bench, RESET)
        assert status == 502
        assert "W0" in json.loads(body)["error"]["message"]
        assert seen(engines[1]) == [("POST", RESET, None), STEP]


async def test_an_engine_that_generates_no_text_is_reset_too() -> None:
    async def no_such_path(exchange: Exchange) -> None:
        await exchange.error(404)

    async def dies(exchange: Exchange) -> None:
        exchange.die()

    scripts = [saying(b'{"success":true}', step=step) for step in (no_such_path, dies)]
    async with scripted_front(*scripts) as (bench, _):
        assert (await call(bench, RESET))[:2] == (200, b'{"success":true}')


async def test_sleep_makes_nobody_step_and_waking_does() -> None:
    async with scripted_front(saying(b'{"status":"sleeping","level":1}'), saying(b"{}")) as (bench, engines):
        assert (await call(bench, "/sleep?level=1"))[0] == 200
        assert [one.target for engine in engines for one in engine.exchanges] == ["/sleep?level=1"] * 2
    async with scripted_front(
        saying(b'{"status":"awake","tags":null}'), saying(b'{"status":"sleeping","tags":["weights"]}')
    ) as (bench, engines):
        assert (await call(bench, "/wake_up"))[1:] == (b'{"status":"sleeping","tags":["weights"]}', "W1")
        assert (STEP in seen(engines[0]), STEP in seen(engines[1])) == (True, False)


@pytest.mark.parametrize("path", ["/reset_mm_cache", "/reset_encoder_cache"])
async def test_caches_that_hold_no_blocks_are_reset_everywhere_and_nobody_steps(path: str) -> None:
    async with scripted_front(OLD, NO_DEV_MODE, OLD) as (bench, engines):
        assert (await call(bench, path))[::2] == (404, "W1")
        assert [seen(engine) for engine in engines] == [[("POST", path, None)]] * 3
        engines[1].script = OLD
        assert (await call(bench, path))[:2] == (200, b"")


async def test_the_fleet_sleeps_while_any_engine_does() -> None:
    async with scripted_front(saying(b'{"is_sleeping": false}'), saying(b'{"is_sleeping": true}')) as (bench, engines):
        assert await call(bench, "/is_sleeping", "GET") == (200, b'{"is_sleeping": true}', "W1")
        engines[1].script = engines[0].script
        assert (await call(bench, "/is_sleeping", "GET"))[1] == b'{"is_sleeping": false}'
        assert {target for engine in engines for _, target, _ in seen(engine)} == {"/is_sleeping"}


async def test_a_server_of_several_ranks_is_told_once_and_each_rank_steps() -> None:
    async with scripted_front(DONE) as (bench, (engine,)):
        bench.fleet.running = [Candidate(ReplicaId(f"W{rank}"), engine.url, rank) for rank in range(2)]
        assert (await call(bench, RESET))[0] == 200
        assert [one.target for one in engine.exchanges] == [RESET, "/v1/completions", "/v1/completions"]
        assert {one.headers["x-data-parallel-rank"] for one in engine.exchanges[1:]} == {"0", "1"}


async def test_the_clients_key_goes_with_all_of_it() -> None:
    async with scripted_front(DONE) as (bench, (engine,)):
        async with bench.http.post(bench.url + RESET, headers={"authorization": "Bearer key"}) as response:
            assert response.status == 200
        assert [one.headers["authorization"] for one in engine.exchanges] == ["Bearer key"] * 2


async def test_a_replica_whose_engine_sleeps_gets_requests_only_when_all_of_them_sleep() -> None:
    async def fall_asleep(name: str) -> None:
        record = ReplicaRecord(name, MODEL, BLOCK, trusted=False, doubt="its engine is asleep", asleep=True)
        await bench.router._member._map.join(name, record, 3600.0)
        await bench.router._member.tell()  # which hears of the fleet, too
        await bench.router._member.ask(())

    async with scripted_front(answer, answer) as (bench, _):
        await fall_asleep("W0")
        assert {(await bench.post())[2]["x-whohas-replica"] for _ in range(10)} == {"W1"}
        async with bench.http.get(bench.url + "/health") as response:
            health = await response.json()
        assert (health["status"], health["doubts"]) == ("degraded", {"W0": "its engine is asleep"})
        await fall_asleep("W1")
        assert (await bench.post())[0] == 200
