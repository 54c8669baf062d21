"""However a request ends: nothing stays booked, no byte is repeated, and the client is told in its own words."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import pytest

from tests.wire.front_bench import CHAT, Bench, chat, front_over, scripted_front, until
from tests.wire.scripted_engine import (
    DONE,
    Exchange,
    ScriptedEngine,
    answer,
    event,
    for_ever,
    healthy_but,
    usage,
)

STREAM = chat(stream=True)


async def hang_after_two(exchange: Exchange) -> None:
    await exchange.stream(event("one"), event("two"))
    await for_ever(exchange)


async def all_but_the_end(exchange: Exchange) -> None:
    """Everything is there but the last chunk of the framing."""
    await exchange.stream(event("one"), event("two"), usage(0), DONE)
    await for_ever(exchange)


async def leave(bench: Bench, stage: str) -> None:
    """One client that goes away at this stage of its request."""
    async with bench.http.post(bench.url + CHAT, json=STREAM) as response:
        if stage == "mid-stream":
            for _ in range(2):
                await response.content.readuntil(b"\n\n")
        else:
            await response.content.readuntil(DONE)
        response.close()


async def leave_before_headers(bench: Bench, engine: ScriptedEngine | None) -> None:
    """One client that goes away once its request is at the engine; or, without one, at the front."""

    def arrived() -> float:
        return len(engine.generations) if engine is not None else bench.in_flight + bench.count("gone")

    body, before = json.dumps(STREAM).encode(), arrived()
    port = urlsplit(bench.url).port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: arrived() > before)
    writer.transport.abort()


@pytest.mark.parametrize(
    ("stage", "script"), [("mid-stream", hang_after_two), ("at the last byte", all_but_the_end)], ids=str
)
async def test_l1_a_hundred_clients_that_leave_free_everything(
    stage: str, script: Callable[[Exchange], Awaitable[None]]
) -> None:
    async with scripted_front(healthy_but(script)) as (bench, (engine,)):
        for _ in range(5):
            await asyncio.gather(*(leave(bench, stage) for _ in range(20)))
        await bench.until_free()
        await until(lambda: engine.running == 0 and engine.aborted == 100)
        assert len(engine.generations) == 100


async def test_l1_a_hundred_clients_that_leave_before_the_headers_free_everything() -> None:
    async with scripted_front(healthy_but(for_ever)) as (bench, (engine,)):
        for _ in range(100):
            await leave_before_headers(bench, engine)
        await bench.until_free()
        await until(lambda: engine.running == 0 and engine.aborted == 100)
        assert bench.count("gone") == 100


async def test_l1_clients_that_leave_while_no_replica_is_there_free_everything() -> None:
    async with front_over([]) as bench:
        for _ in range(100):
            await leave_before_headers(bench, None)
        await bench.until_free()
        await until(lambda: bench.count("gone") == 100)


async def test_l2_cancels_at_any_moment_leave_room_for_the_next_request() -> None:
    """500 clients leave 0 to 5 ms after they asked; the engine takes one request at a time."""
    room = asyncio.Semaphore(1)

    async def one_at_a_time(exchange: Exchange) -> None:
        async with room:
            await answer(exchange)

    moments = random.Random(7)

    async def short(bench: Bench) -> None:
        asked = asyncio.create_task(bench.post(body=STREAM))
        await asyncio.sleep(moments.uniform(0, 0.005))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async with scripted_front(healthy_but(one_at_a_time)) as (bench, (engine,)):
        for _ in range(20):
            await asyncio.gather(*(short(bench) for _ in range(25)))
        status, body, _ = await bench.post(body=STREAM)
        assert status == 200
        assert body.endswith(DONE)
        await bench.until_free()
        await until(lambda: engine.running == 0)


async def test_l3_twenty_400s_leave_every_replica_in_use() -> None:
    async def too_long(exchange: Exchange) -> None:
        await (exchange.error(400, "too long") if len(exchange.body) > 1000 else answer(exchange))

    async with scripted_front(*[healthy_but(too_long)] * 2) as (bench, _):
        for _ in range(20):
            status, body, _ = await bench.post(body=chat("word " * 1000))
            assert (status, json.loads(body)["error"]["message"]) == (400, "too long")
        replicas = {(await bench.post())[2]["x-whohas-replica"] for _ in range(4)}
        assert replicas == {"W0", "W1"}
        async with bench.http.get(bench.url + "/health") as response:
            assert (await response.json())["left_out"] == []


async def test_l4_a_hung_replica_holds_up_nobody_else() -> None:
    async with scripted_front(healthy_but(for_ever), answer) as (bench, engines):
        hung = [asyncio.create_task(bench.post(body=chat(f"{i} words " * 2000))) for i in range(2)]
        await until(lambda: engines[0].running == 1 and any(one.done() for one in hung))
        for _ in range(20):  # the one that waits is load, and so the others go elsewhere
            status, _, headers = await bench.post()
            assert (status, headers["x-whohas-replica"]) == (200, "W1")
            async with bench.http.get(bench.url + "/health") as response:
                assert response.status == 200
        for one in hung:
            one.cancel()
        await asyncio.gather(*hung, return_exceptions=True)
        await bench.until_free()


async def test_l5_a_stream_that_falls_silent_ends_with_an_error_event() -> None:
    async with scripted_front(healthy_but(hang_after_two), idle_timeout_s=2.0) as (bench, (engine,)):
        status, body, _ = await bench.post(body=STREAM)
        assert status == 200
        assert body.startswith(event("one") + event("two"))
        assert_ended_by_an_error(body.removeprefix(event("one") + event("two")))
        await bench.until_free()
        await until(lambda: engine.aborted == 1)


async def test_an_answer_that_takes_too_long_in_all_ends_too() -> None:
    async def drip(exchange: Exchange) -> None:
        await exchange.stream()
        while True:
            await exchange.chunk(event("more"))
            await asyncio.sleep(0.05)

    async with scripted_front(healthy_but(drip), total_timeout_s=2.0) as (bench, (engine,)):
        status, body, _ = await bench.post(body=STREAM)
        assert status == 200
        assert_ended_by_an_error(body.rpartition(event("more"))[2])
        await bench.until_free()
        engine.script = for_ever
        status, body, _ = await bench.post()
        assert status == 504
        assert json.loads(body)["error"]["type"] == "upstream_error"
        await bench.until_free()


async def test_l6_a_replica_that_is_gone_costs_a_second_try_and_no_error() -> None:
    async with scripted_front(answer, answer) as (bench, engines):
        await engines[0].kill()
        for _ in range(8):
            status, _, headers = await bench.post()
            assert (status, headers["x-whohas-replica"]) == (200, "W1")
        assert bench.metrics.retries._value.get() == 1  # from the first failed connect on it is left out
        await bench.until_free()


async def test_l6_several_replicas_that_are_gone_at_once_lose_no_request() -> None:
    async with scripted_front(*[answer] * 4) as (bench, engines):
        for one in engines[:3]:
            await one.kill()
        for _ in range(4):
            status, _, headers = await bench.post()
            assert (status, headers["x-whohas-replica"]) == (200, "W3")


@pytest.mark.parametrize("resend", [True, False])
async def test_l6_what_an_engine_took_and_failed_is_sent_once_more_if_that_is_wanted(resend: bool) -> None:
    async def die(exchange: Exchange) -> None:
        exchange.die()

    async with scripted_front(*[healthy_but(die)] * 3, resend=resend) as (bench, engines):
        status, body, _ = await bench.post(body=STREAM)
        assert status == 502
        assert "before it answered" in json.loads(body)["error"]["message"]
        assert sum(len(one.generations) for one in engines) == 1 + resend
        await bench.until_free()


@pytest.mark.parametrize("headers_first", [True, False])
async def test_l6_an_engine_that_dies_before_its_first_byte_is_replaced(headers_first: bool) -> None:
    async def die(exchange: Exchange) -> None:
        if headers_first:
            await exchange.stream()
        exchange.die()

    async with scripted_front(healthy_but(die), answer) as (bench, engines):
        answers = [await bench.post(body=STREAM) for _ in range(2)]
        assert [(status, headers["x-whohas-replica"]) for status, _, headers in answers] == [(200, "W1")] * 2
        assert len(engines[0].generations) >= 1
        assert len(engines[1].generations) == 2


async def test_l8_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_and_repeats_nothing() -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.stream(event("one"), event("two"), event("three"))
        exchange.die()

    async with scripted_front(healthy_but(die), answer) as (bench, _):
        bench.fleet.running.reverse()
        replies = [await bench.post(body=STREAM) for _ in range(2)]
        broken = next(body for _, body, headers in replies if headers["x-whohas-replica"] == "W0")
        sent = event("one") + event("two") + event("three")
        assert broken.startswith(sent)
        assert_ended_by_an_error(broken.removeprefix(sent))
        assert bench.count("broken") == 1
        await bench.until_free()


async def test_an_answer_of_promised_length_that_breaks_off_is_cut() -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.head(content_type="application/json", content_length="1000")
        await exchange.write(b'{"id":')
        await asyncio.sleep(0.1)
        exchange.die()

    async with scripted_front(healthy_but(die)) as (bench, _):
        with pytest.raises(Exception, match=r"payload|closed|disconnected"):
            await bench.post()
        await bench.until_free()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 501])
async def test_l7_an_engines_error_keeps_status_and_body(stream: bool, status: int) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.error(status, f"no {status}")

    async with scripted_front(healthy_but(refuse), healthy_but(refuse)) as (bench, engines):
        got, body, headers = await bench.post(body=chat(stream=stream))
        assert got == status
        assert json.loads(body) == {"error": {"message": f"no {status}", "code": status}}
        assert headers["content-type"] == "application/json"
        assert sum(len(one.generations) for one in engines) == 1


async def test_a_busy_replica_is_no_broken_one() -> None:
    """503 from a healthy engine: another one is asked, once, and the busy one stays in use."""

    async def busy(exchange: Exchange) -> None:
        await exchange.error(503, "busy")

    async with scripted_front(healthy_but(busy), answer) as (bench, engines):
        for _ in range(6):
            status, _, headers = await bench.post()
            assert (status, headers["x-whohas-replica"]) == (200, "W1")
        assert len(engines[0].generations) >= 2
        engines[1].script = healthy_but(busy)
        status, body, _ = await bench.post()
        assert (status, json.loads(body)["error"]["message"]) == (503, "busy")
        async with bench.http.get(bench.url + "/health") as response:
            assert (await response.json())["left_out"] == []


async def test_a_clean_up_that_fails_still_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy_body(exchange: Exchange) -> None:
        await exchange.stream(event("one"))
        await for_ever(exchange)

    def broken(*_: object) -> None:
        raise RuntimeError("a fault that was asked for")

    async with scripted_front(healthy_but(busy_body)) as (bench, _):
        with monkeypatch.context() as patch:
            patch.setattr("serve.connection.Response.close", broken)
            async with bench.http.post(bench.url + CHAT, json=STREAM) as response:
                await response.content.readuntil(b"\n\n")
                response.close()
            await bench.until_free()


def assert_ended_by_an_error(rest: bytes) -> None:
    assert rest.endswith(b"\n\n" + DONE)
    (data,) = [line for line in rest.removesuffix(DONE).split(b"\n\n") if line]
    error = json.loads(data.removeprefix(b"data: "))["error"]
    assert error["code"] == 502
    assert error["message"]
