"""Responses and Messages: the chat that the router makes of a body is the one that vLLM makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.api_forms import MESSAGES_PATH, RESPONSES_PATH, FormRules, chat_body
from router.chat_messages import tool_dicts

SCHEMA = {"type": "object", "properties": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


MESSAGES: list[dict[str, Any]] = [
    {"system": "x-anthropic-billing-header: a", "messages": [user("hi")]},
    {"system": [text("x-anthropic-billing-header: a"), text("A"), text("B")], "messages": [user("hi")]},
    {"messages": [user([text("hi"), text(""), text("there")])]},
    {
        "messages": [
            user("q"),
            assistant(
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                text("ok"),
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": [2]}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ),
            user([{**RESULT, "content": [text("r1"), text("r2")]}, {**RESULT, "content": "x"}, text("go on")]),
        ],
        "tools": [
            {"name": "f", "description": "d", "input_schema": {"properties": {}}},
            {"name": "g", "input_schema": SCHEMA, "strict": True},
        ],
        "tool_choice": {"type": "tool", "name": "g"},
        "stop_sequences": ["a"],
    },
    {
        "messages": [
            user("q"),
            {"role": "system", "content": "inline"},
            {"role": "system", "content": [text("x-anthropic-billing-header")]},
            user([]),
            assistant(),
            assistant({"type": "redacted_thinking", "data": "x"}),
        ],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high"},
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "any"},
    },
    {
        "messages": [
            user([RESULT]),
            user([{**RESULT, "content": [{"type": "tool_reference", "tool_name": "z"}]}]),
            assistant({**RESULT, "content": "res"}),
        ],
        "output_config": {"effort": "max"},
        "chat_template_kwargs": {"k": 1},
    },
]

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}
RESPONSES: list[dict[str, Any]] = [
    {"input": "hi", "instructions": "I"},
    {
        "input": [{"type": "message", **user([{"type": "input_text", "text": "ls"}])}],
        "tools": [
            {"type": "function", "name": "shell", "description": "d", "parameters": SCHEMA, "strict": False},
            {"type": "web_search_preview"},
        ],
    },
    {
        "instructions": "I",
        "input": [
            user("a"),
            {**THOUGHT, "content": [{"type": "reasoning_text", "text": "hm"}]},
            CALL,
            {**CALL, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "o1"},
            {
                "type": "message",
                **assistant({"type": "output_text", "text": "1"}, {"type": "output_text", "text": "2"}),
            },
            {"role": "assistant", "content": "three"},
            {"role": "developer", "content": "dev"},
            user([{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]),
        ],
    },
    {
        "input": [
            user("a"),
            {"type": "message", "status": "incomplete", **assistant({"type": "output_text", "text": "begun"})},
        ]
    },
    {"input": [THOUGHT, {"role": "assistant", "content": "t"}, THOUGHT, user("")]},
    {"input": [CALL, {"role": "assistant", "content": "after"}], "reasoning": {"effort": "low"}},
]


def plain(messages: Any) -> Any:
    """Messages as JSON, with the arguments of calls in text."""
    listed = json.loads(json.dumps([dict(message) for message in messages], default=list))
    for message in listed:
        for call in message.get("tool_calls") or ():
            if not isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return listed


@pytest.mark.parametrize("body", MESSAGES)
@pytest.mark.parametrize("merge", [False, True])
def test_messages_become_the_same_chat(body: dict[str, Any], merge: bool) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    body = {"model": "m", "max_tokens": 5, **body}
    request = AnthropicMessagesRequest(**json.loads(json.dumps(body)))
    theirs = AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=merge)
    ours = chat_body(MESSAGES_PATH, body, FormRules(merge_inline_system=merge))
    assert plain(ours["messages"]) == plain(theirs.messages)
    assert tool_dicts(ours.get("tools")) == ([tool.model_dump() for tool in theirs.tools] if theirs.tools else None)
    assert ours.get("reasoning_effort") == theirs.reasoning_effort


@pytest.mark.parametrize("body", RESPONSES)
def test_responses_become_the_same_chat(body: dict[str, Any]) -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import (
        construct_input_messages,
        construct_tool_dicts,
        should_continue_final_message,
    )

    request = ResponsesRequest(**json.loads(json.dumps({"model": "m", **body})))
    theirs = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    ours = chat_body(RESPONSES_PATH, body)
    assert plain(ours["messages"]) == plain(theirs)
    assert tool_dicts(ours.get("tools")) == construct_tool_dicts(request.tools, request.tool_choice)
    assert ours.get("continue_final_message", False) == should_continue_final_message(request.input)
