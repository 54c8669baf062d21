"""Whatever a client sends: the front itself never answers with a 5xx, and goes on serving.

Bodies come from vLLM's own OpenAPI document (tests/fixtures/vllm/openapi.json; made by tests/vllm/openapi.py), and from
nowhere at all. Examples are the same in every run.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.wire.emulated_fleet import emulated_front
from tests.wire.front_bench import MODEL, PATIENCE_S, chat, scripted_front
from tests.wire.scripted_engine import answer

DOCUMENT = json.loads((Path(__file__).parents[1] / "fixtures" / "vllm" / "openapi.json").read_text())
SAME = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ELSEWHERE = ("/v1/chat/completions/batch", "/v1/systemone", "/generative_scoring", "/kv_event_sources")
"""What the emulated engine doesn't have, or the front doesn't pass on: 404 whatever is sent."""
OPERATIONS = [
    (path, method.upper())
    for path, one in DOCUMENT["paths"].items()
    for method in one
    if method in ("get", "post") and path not in ELSEWHERE
]


@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda value: str(value).strip("/"))
async def test_requests_after_vllms_own_openapi_document_give_no_5xx(path: str, method: str) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    operation = schema[path][method]

    async with emulated_front() as (bench, _):

        @settings(SAME, max_examples=25)
        @given(operation.as_strategy())
        def ask(case: Any) -> None:
            if isinstance(case.body, dict):  # let it get as far as it can: an unknown model is refused at once
                case.body["model"] = MODEL
            answered = case.call(base_url=bench.url, timeout=PATIENCE_S)
            assert answered.status_code < 500, answered.text

        await asyncio.to_thread(ask)
        assert (await bench.post())[0] == 200
        await bench.until_free()


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    *("model", "messages", "prompt", "input", "system", "tools", "tool_choice", "stream", "max_tokens", "n", "stop"),
    *("cache_salt", "chat_template_kwargs", "chat_template", "documents", "reasoning_effort", "truncate_prompt_tokens"),
    *("add_generation_prompt", "continue_final_message", "prompt_cache_key", "session_id", "echo", "logprobs"),
)
ALMOST = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5).map(lambda fields: {**chat(), **fields})
NAMES = st.from_regex(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,20}", fullmatch=True)
VALUES = st.from_regex(rb"[\x21-\x7e\x80-\xff]{0,40}", fullmatch=True)


@pytest.mark.parametrize("path", [*GENERATING, "/v1/messages/count_tokens", "/tokenize", "/explain"])
async def test_bodies_that_are_almost_right_give_no_5xx(path: str) -> None:
    async with scripted_front(answer) as (bench, _):
        http = requests.Session()

        @settings(SAME, max_examples=60)
        @given(ALMOST)
        def ask(body: Any) -> None:
            raw = json.dumps(body).encode()
            answered = http.post(bench.url + path, data=raw, timeout=PATIENCE_S)
            assert answered.status_code < 500, (raw, answered.text)

        await asyncio.to_thread(ask)
        http.close()
        assert (await bench.post())[0] == 200
        await bench.until_free()


async def test_bodies_that_are_nothing_at_all_and_odd_headers_give_no_5xx() -> None:
    async with scripted_front(answer) as (bench, _):

        async def exchange(body: bytes, headers: list[tuple[bytes, bytes]], path: str) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2]))
            lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
            head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n"
            writer.write(head % (path.encode(), lines, len(body)) + body)
            status = await reader.readline()
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            return status

        loop = asyncio.get_running_loop()
        reserved = (b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade", b"host")

        @settings(SAME, max_examples=150)
        @given(
            st.binary(max_size=60) | ALMOST.map(lambda body: json.dumps(body).encode()),
            st.lists(st.tuples(NAMES, VALUES), max_size=6),
            st.sampled_from([*GENERATING, "/v1/%ff%00", "/v1/models"]),
        )
        def ask(body: bytes, headers: list[tuple[bytes, bytes]], path: str) -> None:
            kept = [pair for pair in headers if pair[0].lower() not in reserved]
            status = asyncio.run_coroutine_threadsafe(exchange(body, kept, path), loop).result(PATIENCE_S)
            assert status.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), (status, body, kept)

        await asyncio.to_thread(ask)
        assert (await bench.post())[0] == 200
        await bench.until_free()
