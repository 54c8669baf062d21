"""Faults of the emulated engine as a client meets them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from replicas.emulated.faults import EXIT_CODE, FAULT_HEADER
from tests.integration.emulated.process import (
    MODEL,
    Server,
    complete,
    metric,
    running,
    tokenizer_folder,
    wait_until_idle,
)

pytestmark = pytest.mark.integration

COMPLETIONS = "/v1/completions"
STREAM = {"prompt": "x", "stream": True, "max_tokens": 10}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--speed", "100", "--allow-faults") as one:
        yield one


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


def asked(**faults: Any) -> dict[str, str]:
    return {FAULT_HEADER: json.dumps(faults)}


async def read_into(got: list[bytes], http: aiohttp.ClientSession, server: Server) -> None:
    async with http.post(server.url + COMPLETIONS, json=STREAM) as response:
        assert response.status == 200
        async for piece in response.content.iter_any():
            got.append(piece)  # noqa: PERF401 (what came before the connection broke is to be kept)


async def test_a_request_can_ask_to_be_refused(http: aiohttp.ClientSession, server: Server) -> None:
    async with http.post(server.url + COMPLETIONS, json=STREAM, headers=asked(status=503)) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["code"], answer["error"]["type"]) == (503, 503, "ServiceUnavailableError")


async def test_without_permission_the_header_is_ignored(http: aiohttp.ClientSession) -> None:
    with running("--speed", "100") as one:
        async with http.post(one.url + COMPLETIONS, json=STREAM, headers=asked(status=503)) as response:
            assert response.status == 200


async def test_a_stalled_stream_ends_with_its_client(http: aiohttp.ClientSession, server: Server) -> None:
    body = {**STREAM, "max_tokens": 20_000, "ignore_eos": True}
    headers = asked(stall_after_chunk=2)
    async with http.post(server.url + COMPLETIONS, json=body, headers=headers) as response:
        for _ in range(2):
            await response.content.readuntil(b"\n\n")
        rest = asyncio.create_task(response.content.readany())
        await asyncio.sleep(0.2)
        assert not rest.done()
        rest.cancel()
        response.close()
    await wait_until_idle(http, server)


async def test_a_stream_can_end_with_an_error_event(http: aiohttp.ClientSession, server: Server) -> None:
    async with http.post(server.url + COMPLETIONS, json=STREAM, headers=asked(error_after_chunk=3)) as response:
        events = (await response.text()).strip().split("\n\n")
    assert response.status == 200
    assert len(events) == 4
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == 500
    await wait_until_idle(http, server)


async def test_a_stream_in_single_bytes_is_the_same_stream(http: aiohttp.ClientSession, server: Server) -> None:
    async with http.post(server.url + COMPLETIONS, json=STREAM, headers=asked(byte_per_write=True)) as response:
        pieces = [piece async for piece, _ in response.content.iter_chunks()]
    assert len(pieces) > 1000
    events = b"".join(pieces).decode().strip().split("\n\n")
    assert (len(events), events[-1]) == (11, "data: [DONE]")


async def test_json_is_compressed_for_those_who_take_it(http: aiohttp.ClientSession, server: Server) -> None:
    headers = {**asked(gzip=True), "accept-encoding": "gzip"}
    async with http.post(server.url + COMPLETIONS, json={"prompt": "x"}, headers=headers) as response:
        raw = await response.read()
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["content-length"] == str(len(raw))
    assert raw.startswith(b"\x1f\x8b")


async def test_the_first_byte_can_be_late(http: aiohttp.ClientSession, server: Server) -> None:
    late = asyncio.create_task(http.post(server.url + COMPLETIONS, json=STREAM, headers=asked(first_byte_delay_s=60)))
    await complete(http, server, "others are served meanwhile")
    assert not late.done()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    await wait_until_idle(http, server)


@pytest.mark.parametrize("faults", [{"die_before_headers": True}, {"die_after_chunk": 0}, {"die_after_chunk": 2}])
async def test_an_engine_can_die(http: aiohttp.ClientSession, faults: dict[str, Any]) -> None:
    with running("--speed", "100", "--faults", json.dumps(faults)) as one:
        got: list[bytes] = []
        with pytest.raises(aiohttp.ClientError):
            await read_into(got, http, one)
        assert b"".join(got).count(b"\n\n") == faults.get("die_after_chunk", 0)
        assert await asyncio.to_thread(one.process.wait) == EXIT_CODE


async def test_faults_by_flag_hit_the_share_that_was_asked_for(http: aiohttp.ClientSession) -> None:
    with running("--speed", "100", "--faults", '{"status": 500, "rate": 0.5, "slow_start_s": 3600}') as one:
        statuses = []
        for _ in range(6):
            async with http.post(one.url + COMPLETIONS, json={"prompt": "x"}) as response:
                statuses.append(response.status)
        assert statuses == [200, 500] * 3
        async with http.get(one.url + "/health") as response:
            assert response.status == 503
        assert await metric(http, one, "request_success_total") == 3


def test_faults_that_make_no_sense_are_named() -> None:
    command = [sys.executable, "-m", "replicas.emulated", "--model", MODEL, "--tokenizer", tokenizer_folder()]
    bad = subprocess.run([*command, "--faults", '{"rate": 2}'], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "rate must be within 0..1" in bad.stderr
