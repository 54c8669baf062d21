"""The emulated engine's Responses and Messages API, whole and as streams."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.integration.emulated.process import MODEL, Server, cached, error, named_events, post

pytestmark = pytest.mark.integration

SYSTEM = "You are a support agent of Example Air. Be brief. " * 4
OPENING = "This text was emulated by whohas; no model ran."
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def messages(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": content}], **fields}


async def test_all_forms_of_one_chat_share_their_blocks(http: aiohttp.ClientSession, server: Server) -> None:
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "shared"}]
    chat = await post(http, server, "/v1/chat/completions", {"messages": turns})
    prompt = chat["usage"]["prompt_tokens"]
    assert cached(chat) == 0
    expected = (prompt - 1) // 16 * 16
    parts = [{"type": "input_text", "text": "shared"}]
    body = {"instructions": SYSTEM, "input": [{"type": "message", "role": "user", "content": parts}]}
    response = await post(http, server, "/v1/responses", body)
    assert response["usage"]["input_tokens"] == prompt
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == expected
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": SYSTEM}]
    usage = (await post(http, server, "/v1/messages?beta=true", messages("shared", system=system)))["usage"]
    assert usage["cache_read_input_tokens"] == expected
    assert usage["input_tokens"] + expected + usage["cache_creation_input_tokens"] == prompt
    counted = await post(http, server, "/v1/messages/count_tokens", messages("shared", system=system))
    assert counted["input_tokens"] == prompt


async def test_a_response_has_one_message(http: aiohttp.ClientSession, server: Server) -> None:
    answer = await post(http, server, "/v1/responses", {"model": MODEL, "input": "whole", "metadata": {"k": "v"}})
    (item,) = answer["output"]
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", MODEL)
    assert answer["id"].startswith("resp_")
    assert answer["metadata"] == {"k": "v"}
    assert (item["type"], item["role"], item["content"][0]["text"]) == ("message", "assistant", OPENING)
    cut = await post(http, server, "/v1/responses", {"input": "whole", "max_output_tokens": 2})
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_a_streamed_response_is_numbered_and_ends_with_the_whole(
    http: aiohttp.ClientSession, server: Server
) -> None:
    events = await named_events(http, server, "/v1/responses", {"input": "streamed", "stream": True})
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert [name for name, _ in events] == [event["type"] for _, event in events]
    kinds = [name.removeprefix("response.") for name, _ in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * 13
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event["delta"] for name, event in events if name.endswith("delta")) == OPENING
    final = events[-1][1]["response"]
    assert final["output"][0] == events[-2][1]["item"]
    assert final["usage"]["output_tokens"] == 13
    assert events[0][1]["response"]["id"] == final["id"]


async def test_a_response_may_be_a_function_call(http: aiohttp.ClientSession, server: Server) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": TOOL}]
    body = {"input": "call", "tools": tools, "tool_choice": "required"}
    (item,) = (await post(http, server, "/v1/responses", body))["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "weather", {"city": ""})
    events = await named_events(http, server, "/v1/responses", {**body, "stream": True})
    deltas = [event["delta"] for name, event in events if name == "response.function_call_arguments.delta"]
    assert "".join(deltas) == item["arguments"]
    done = [event["item"] for name, event in events if name == "response.output_item.done"]
    assert [one["arguments"] for one in done] == [item["arguments"]]
    # The next turn finds the call in the cache.
    call = {key: done[0][key] for key in ("type", "call_id", "name", "arguments")}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 C"}
    turn = {"tools": tools, "input": [{"role": "user", "content": "call"}, call, result]}
    usage = (await post(http, server, "/v1/responses", turn))["usage"]
    before = events[-1][1]["response"]["usage"]["total_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= (before - 1) // 16 * 16


async def test_a_message_is_answered_in_anthropics_form(http: aiohttp.ClientSession, server: Server) -> None:
    answer = await post(http, server, "/v1/messages", messages("whole"))
    assert answer["content"] == [{"type": "text", "text": OPENING}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "end_turn")
    assert "stop_sequence" not in answer
    cut = await post(http, server, "/v1/messages", messages("whole", max_tokens=2))
    assert cut["stop_reason"] == "max_tokens"
    stopped = await post(http, server, "/v1/messages", messages("whole", stop_sequences=["emulated"]))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "emulated")
    assert stopped["content"][0]["text"] == "This text was "


async def test_a_streamed_message_opens_and_closes_its_block(http: aiohttp.ClientSession, server: Server) -> None:
    events = await named_events(http, server, "/v1/messages", messages("streamed", stream=True))
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 13,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for name, event in events if name == "content_block_delta") == OPENING
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["usage"]["output_tokens"]) == ([], 0)
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 13


async def test_a_message_may_be_the_use_of_a_tool(http: aiohttp.ClientSession, server: Server) -> None:
    tools = [{"name": "now", "input_schema": {}}, {"name": "weather", "input_schema": TOOL}]
    body = messages("use it", tools=tools, tool_choice={"type": "tool", "name": "weather"})
    answer = await post(http, server, "/v1/messages", body)
    (block,) = answer["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": ""})
    assert answer["stop_reason"] == "tool_use"
    events = await named_events(http, server, "/v1/messages", {**body, "stream": True})
    assert events[1][1]["content_block"] == {**block, "id": events[1][1]["content_block"]["id"], "input": {}}
    partial = [event["delta"]["partial_json"] for name, event in events if name == "content_block_delta"]
    assert json.loads("".join(partial)) == {"city": ""}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/responses", {}, 400),
        ("/v1/responses", {"input": []}, 400),
        ("/v1/responses", {"input": "x", "model": "other"}, 404),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 404),
        ("/v1/responses", {"input": "x", "prompt": {"id": "p"}}, 400),
        ("/v1/responses", {"input": "x", "tool_choice": "required", "tools": []}, 400),
    ],
)
async def test_errors_of_responses_have_openais_shape(
    http: aiohttp.ClientSession, server: Server, path: str, body: Any, status: int
) -> None:
    got, what = await error(http, server, path, body)
    assert got == status
    assert set(what) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": MODEL, "max_tokens": 5}, 400),
        ({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}, 400),
        ({**messages("x"), "model": "other"}, 404),
        ({**messages("x"), "max_tokens": 5000}, 400),
        (messages([{"type": "image", "source": {}}]), 400),
    ],
)
async def test_errors_of_messages_have_anthropics_shape(
    http: aiohttp.ClientSession, server: Server, body: Any, status: int
) -> None:
    async with http.post(server.url + "/v1/messages", json=body) as response:
        answer = await response.json()
    assert response.status == status
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
