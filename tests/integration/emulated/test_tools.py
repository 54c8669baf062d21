"""The emulated engine's tool calls, log-probabilities, token ids and stop strings."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from router.prompt import PromptEncoder
from tests.integration.emulated.process import (
    Server,
    cached,
    chat,
    complete,
    post,
    stream,
)

pytestmark = pytest.mark.integration

PARAMETERS = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1}}, "required": ["days"]}
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("content", "choice", "called", "reason"),
    [
        ("hi", "required", ("forecast", {"days": 1}), "tool_calls"),
        # As with vLLM (and OpenAI) a call that was named isn't the model's reason to stop.
        ("hi", NOW, ("now", {}), "stop"),
        ("/call", "auto", ("forecast", {"days": 1}), "tool_calls"),
        ("/call now", None, ("now", {}), "tool_calls"),
    ],
)
async def test_a_call_is_answered_whole_and_streamed(
    http: aiohttp.ClientSession, server: Server, content: str, choice: Any, called: tuple[str, Any], reason: str
) -> None:
    body = {"messages": [{"role": "user", "content": content}], "tools": TOOLS}
    if choice is not None:
        body["tool_choice"] = choice
    (answer,) = (await post(http, server, "/v1/chat/completions", body))["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == called
    assert answer["finish_reason"] == reason
    *chunks, done = await stream(http, server, "/v1/chat/completions", body)
    assert done == "[DONE]"
    told = [one for chunk in chunks for one in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert (told[0]["function"]["name"], told[0]["type"], told[0]["index"]) == (called[0], "function", 0)
    assert json.loads("".join(one["function"]["arguments"] for one in told)) == called[1]
    assert all("id" not in one for one in told[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == reason


async def test_a_call_is_cut_by_max_tokens(http: aiohttp.ClientSession, server: Server) -> None:
    answer = await chat(http, server, "cut", tools=TOOLS, tool_choice="required", max_tokens=14)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments
    assert '{"days": 1}'.startswith(arguments)


async def test_the_turn_after_a_call_hits_its_blocks(http: aiohttp.ClientSession, server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": "a tool round"}]
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required"}
    first = await post(http, server, "/v1/chat/completions", body)
    message = {**first["choices"][0]["message"], "content": None}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny " * 20}
    messages += [message, result]
    second = await post(http, server, "/v1/chat/completions", {"messages": messages, "tools": TOOLS})
    assert cached(second) >= (first["usage"]["total_tokens"] - 1) // 16 * 16


async def test_a_stop_string_ends_an_answer(http: aiohttp.ClientSession, server: Server) -> None:
    for stop in ("emulated by", ["never", "emulated by"]):
        answer = await chat(http, server, "stop", stop=stop)
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == "This text was "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "emulated by")
    kept = await complete(http, server, "stop", stop=["was"], include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == " This text was"
    body = {"prompt": "stop", "stop": ["emulated by"]}
    *chunks, _ = await stream(http, server, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " This text was "
    assert chunks[-1]["choices"][0]["stop_reason"] == "emulated by"


async def test_log_probabilities_come_with_every_token_of_a_chat(http: aiohttp.ClientSession, server: Server) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 4}
    answer = await chat(http, server, "likely", **fields)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == answer["choices"][0]["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
    body = {"messages": [{"role": "user", "content": "likely"}], **fields}
    chunks = await stream(http, server, "/v1/chat/completions", body)
    streamed = [one for chunk in chunks[1:-1] for one in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == entries


async def test_log_probabilities_of_an_echo_begin_with_none(http: aiohttp.ClientSession, server: Server) -> None:
    answer = await complete(http, server, "one two", echo=True, logprobs=1, max_tokens=2)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [choice["text"][at:][:3] for at in logprobs["text_offset"]] == [token[:3] for token in logprobs["tokens"]]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert {len(logprobs[key]) for key in logprobs} == {4}
    prompt = await complete(http, server, "one two", prompt_logprobs=1, max_tokens=1)
    first, second = prompt["choices"][0]["prompt_logprobs"]
    assert first is None
    assert {entry["rank"] for entry in second.values()} == {1, 2}


async def test_token_ids_are_returned_on_request(
    http: aiohttp.ClientSession, server: Server, encoder: PromptEncoder
) -> None:
    body = {"messages": [{"role": "user", "content": "ids"}], "return_token_ids": True, "max_tokens": 3}
    (prompt,) = encoder.token_ids("/v1/chat/completions", body)
    answer = await post(http, server, "/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert (answer["prompt_token_ids"], choice["token_ids"]) == (prompt, encoder.encode_text("This text was"))
    chunks = await stream(http, server, "/v1/chat/completions", body)
    assert chunks[0]["prompt_token_ids"] == prompt
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[1:-1]] == [[one] for one in choice["token_ids"]]
    completed = (await complete(http, server, "ids", return_token_ids=True, max_tokens=2))["choices"][0]
    assert completed["prompt_token_ids"] == encoder.encode_text("ids")
    assert encoder.decode(completed["token_ids"]) == completed["text"]


async def test_a_request_for_several_answers_gets_different_ones(http: aiohttp.ClientSession, server: Server) -> None:
    answer = await chat(http, server, "several", n=3, max_tokens=30, ignore_eos=True)
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 90


async def test_a_tool_round_with_null_content_is_accepted(http: aiohttp.ClientSession, server: Server) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    for content in ({"content": None}, {}):
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "ok"}]},
        ]
        answer = await post(http, server, "/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        assert answer["choices"][0]["finish_reason"] == "stop"
