"""The emulated engine when a request can't be served, a client leaves, or the process ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.integration.emulated.process import (
    MODEL,
    Server,
    complete,
    error,
    metric,
    running,
    tokenizer_folder,
    wait_for,
    wait_until_idle,
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Server]:
    """One sequence at a time, at the pace of the real thing: 30 tokens, or 3,500 prompt tokens, a second."""
    with running("--max-num-seqs", "1", "--num-blocks", "4096") as one:
        yield one


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_a_400(http: aiohttp.ClientSession, server: Server, stream: bool) -> None:
    status, what = await error(http, server, "/v1/completions", {"prompt": [1] * 2048, "stream": stream})
    assert status == 400
    assert "maximum context length is 2048 tokens" in what["message"]
    assert what["type"] == "BadRequestError"
    body = {"prompt": [1] * 2000, "max_tokens": 49, "stream": stream}
    status, what = await error(http, server, "/v1/completions", body)
    assert (status, what["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{not json", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", b"", 400),
        ("/v1/chat/completions", {}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 0}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}, 400),
        ("/v1/completions", {"model": MODEL}, 400),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [-1]}, 400),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, 400),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/tokenize", {}, 400),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
    ],
)
async def test_errors_have_vllms_shape(
    http: aiohttp.ClientSession, server: Server, path: str, body: Any, status: int
) -> None:
    got, what = await error(http, server, path, body)
    assert got == status
    assert set(what) == {"message", "type", "param", "code"}


async def test_a_client_that_leaves_a_stream_frees_its_blocks(http: aiohttp.ClientSession, slow_server: Server) -> None:
    body = {"prompt": [7000] * 40, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    async with http.post(slow_server.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        assert await metric(http, slow_server, "kv_cache_usage_perc") > 0
        response.close()
    await wait_until_idle(http, slow_server)


@pytest.mark.parametrize("streaming", [False, True])
async def test_clients_that_leave_before_any_answer_are_aborted_running_and_queued(
    http: aiohttp.ClientSession, slow_server: Server, streaming: bool
) -> None:
    aborted = await metric(http, slow_server, "request_success_total")
    # A prompt of its own, and a long answer: the second one waits for as long as it takes to see that.
    body = {"prompt": [7100 + streaming] * 20_000, "max_tokens": 10_000, "ignore_eos": True, "stream": streaming}
    tasks = [asyncio.create_task(complete(http, slow_server, **body)) for _ in range(2)]
    await wait_for(http, slow_server, "num_requests_waiting", 1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await wait_until_idle(http, slow_server)
    assert await metric(http, slow_server, "request_success_total") == aborted + 2


async def test_sigterm_ends_streams_without_a_done_and_the_process_with_0(http: aiohttp.ClientSession) -> None:
    with running() as server:
        body = {"prompt": [1] * 30, "max_tokens": 32_000, "ignore_eos": True, "stream": True}
        async with http.post(server.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            long = {"prompt": [2] * 30_000, "max_tokens": 2_000, "ignore_eos": True}
            queued = asyncio.create_task(error(http, server, "/v1/completions", long))
            await wait_for(http, server, "num_requests_running", 2.0)
            server.process.terminate()
            rest = await response.text()
        status, _ = await queued
        assert "[DONE]" not in rest
        assert json.loads(rest.rstrip().rpartition("data: ")[2])["error"]["code"] == 500
        assert status == 500
        assert await asyncio.to_thread(server.process.wait) == 0


def test_bad_flags_and_taken_ports_are_named() -> None:
    command = [sys.executable, "-m", "replicas.emulated", "--model", MODEL, "--tokenizer", tokenizer_folder()]
    flags = [*command, "--num-blocks", "4"]
    bad = subprocess.run(flags, capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "raise num_blocks or lower max_model_len" in bad.stderr
    with running() as server:
        flags = [*command, "--port", server.url.rpartition(":")[2]]
        taken = subprocess.run(flags, capture_output=True, text=True, check=False)
    assert taken.returncode == 1
    assert "in use" in taken.stderr
