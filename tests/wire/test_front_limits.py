"""What the front refuses, what it never tells, and where it answers itself."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.wire.front_bench import CHAT, chat, scripted_front, until
from tests.wire.scripted_engine import Exchange, answer, for_ever, healthy_but


async def test_bodies_and_heads_above_the_limits_are_refused_and_the_next_request_is_served() -> None:
    async with scripted_front(answer, max_body_bytes=10_000, max_header_bytes=2_000) as (bench, (engine,)):
        status, body, _ = await bench.post(body=chat("x" * 20_000))
        assert (status, json.loads(body)["error"]["type"]) == (413, "invalid_request_error")
        status, body, _ = await bench.post(headers={"x-long": "x" * 3_000})
        assert (status, json.loads(body)["error"]["code"]) == (431, 431)
        assert engine.generations == []
        assert (await bench.post())[0] == 200


async def test_a_body_that_does_not_come_is_not_waited_for_for_ever() -> None:
    async with scripted_front(answer, idle_timeout_s=0.3) as (bench, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(bench.url).port)
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % CHAT.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"messages":' * 20_000,
        b'{"messages": [{"role": "user", "content": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    ],
    ids=["arrays", "objects", "content", "tools"],
)
async def test_deep_nesting_is_refused_or_left_to_the_engine(body: bytes) -> None:
    async with scripted_front(answer) as (bench, _):
        status, raw, _ = await bench.post(body=body)
        assert status in (200, 400)
        assert status == 200 or json.loads(raw)["error"]["type"] == "invalid_request_error"


async def test_no_prompt_and_no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Through good answers, refusals, failures and bodies that make no sense."""
    caplog.set_level(logging.DEBUG)
    secret = "sEcReT"

    async def die(exchange: Exchange) -> None:
        exchange.die()

    body = chat(f"{secret} prompt", cache_salt=f"{secret}salt", prompt_cache_key=f"{secret}key", user=secret)
    headers = {"authorization": f"Bearer {secret}", "x-api-key": secret, "x-session-id": secret}
    bodies: list[Any] = [
        body,
        {**body, "stream": True},
        {**body, "messages": secret},
        {**body, "cache_salt": {"a": secret}},
        f'{{"messages": "{secret}'.encode(),
        secret.encode(),
    ]
    async with scripted_front(answer, answer) as (bench, engines):
        for script in (answer, die):
            for engine in engines:
                engine.script = healthy_but(script)
            for one in bodies:
                await bench.post(body=one, headers=headers)
                await bench.post(f"/v1/completions?key={secret}", body=one, headers=headers)
        await engines[1].kill()
        for one in bodies:
            await bench.post(body=one, headers=headers)
        engines[0].script = for_ever
        task = asyncio.create_task(bench.post(body=body, headers=headers))
        await until(lambda: engines[0].running)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with bench.http.get(bench.url + "/metrics") as response:
            assert secret not in await response.text()
    assert caplog.records
    for record in caplog.records:
        assert secret not in record.getMessage()
        assert secret not in str(record.exc_info or "")


async def test_h8_a_body_without_a_model_is_for_the_only_one() -> None:
    async with scripted_front(answer) as (bench, (engine,)):
        for body in ({"messages": chat()["messages"]}, chat() | {"model": None}, chat() | {"model": ""}):
            assert (await bench.post(body=body))[0] == 200
            assert engine.generations[-1].json == body


async def test_what_is_no_path_of_ours_or_the_engines_is_a_404() -> None:
    async with scripted_front(answer) as (bench, (engine,)):
        async with bench.http.get(bench.url + "/nowhere") as response:
            assert response.status == 404
            assert (await response.json())["error"]["type"] == "not_found_error"
        assert engine.exchanges == []


async def test_our_own_errors_on_the_messages_path_have_anthropics_shape_too() -> None:
    async with scripted_front(answer) as (bench, _):
        _, body, _ = await bench.post("/v1/messages", b"nonsense")
        assert json.loads(body)["type"] == "error"
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
