"""Bodies of the Responses and the Messages API as chats. What is expected here is what vLLM 0.32 made of the same."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest

from router.api_forms import COUNT_TOKENS_PATH, MESSAGES_PATH, RESPONSES_PATH, FormRules, chat_body, find_rules
from router.errors import UnknownPrompt
from router.prompt import CHAT_PATH, PromptEncoder

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def messages_of(path: str, body: dict[str, Any], rules: FormRules | None = None) -> Any:
    before = deepcopy(body)
    chat = chat_body(path, body, rules)
    assert body == before
    return chat["messages"]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [user("hi")]),
        ([user("hi")], [user("hi")]),
        (
            [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}],
            [assistant(tool_calls=[CALL])],
        ),
        (
            [{"type": "function_call_output", "call_id": "c1", "output": "18 C"}],
            [{"role": "tool", "content": "18 C", "tool_call_id": "c1"}],
        ),
        (
            [assistant(type="message", content=[{"type": "output_text", "text": "one"}, {"text": "two"}])],
            [assistant(content="one")],
        ),
    ],
)
def test_response_items_become_messages(items: Any, messages: Any) -> None:
    assert messages_of(RESPONSES_PATH, {"input": items}) == messages
    system = {"role": "system", "content": "Be brief."}
    assert messages_of(RESPONSES_PATH, {"input": items, "instructions": "Be brief."}) == [system, *messages]


def test_reasoning_calls_and_text_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        call,
        call,
        assistant(content="done"),
        assistant(content="and more"),
    ]
    assert messages_of(RESPONSES_PATH, {"input": items}) == [
        assistant(reasoning="hm", tool_calls=[CALL, CALL], content="done"),
        assistant(content="and more"),
    ]


def test_a_turn_that_was_cut_short_is_continued() -> None:
    begun = assistant(type="message", status="incomplete", content=[{"type": "output_text", "text": "Once"}])
    chat = chat_body(RESPONSES_PATH, {"input": [user("a tale"), begun]})
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)


def test_response_fields_get_their_chat_names() -> None:
    body = {
        "model": "m",
        "input": "x",
        "stream": True,
        "max_output_tokens": 5,
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search_preview"}],
        "tool_choice": {"type": "function", "name": "f"},
        "store": True,
    }
    assert chat_body(RESPONSES_PATH, body) == {
        "model": "m",
        "stream": True,
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "messages": [user("x")],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }


def test_the_volatile_first_block_of_a_system_prompt_is_left_out() -> None:
    blocks = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1;", "You ", "are.")]
    body = {"system": blocks, "messages": [user("hi")]}
    assert messages_of(MESSAGES_PATH, body) == [{"role": "system", "content": "You are."}, user("hi")]
    assert messages_of(MESSAGES_PATH, {"system": blocks[:1], "messages": [user("hi")]}) == [user("hi")]


def test_a_system_prompt_in_one_string_is_taken_as_it_is() -> None:
    body = {"system": "x-anthropic-billing-header: cch=1;", "messages": [user("hi")]}
    assert messages_of(MESSAGES_PATH, body)[0]["content"] == "x-anthropic-billing-header: cch=1;"


def test_blocks_become_text_reasoning_calls_and_tool_messages() -> None:
    turns = [
        user([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]),
        assistant(
            content=[
                {"type": "thinking", "thinking": "hm"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ]
        ),
        user(
            [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}] * 2},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "tool_reference", "tool_name": "g"}]},
                {"type": "text", "text": "go on"},
            ]
        ),
        user([]),
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert messages_of(MESSAGES_PATH, {"messages": turns}) == [
        user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        assistant(reasoning="hm", tool_calls=[call], content="calling"),
        {"role": "tool", "tool_call_id": "t1", "content": "r\nr"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "tool", "tool_call_id": "t2", "content": [{"type": "tool_reference", "name": "g"}]},
        user("go on"),
    ]


def test_inline_system_messages_stay_or_go_to_the_head_as_the_template_wants() -> None:
    body = {"system": "One.", "messages": [user("a"), {"role": "system", "content": "Two."}, user("b")]}
    inline = messages_of(MESSAGES_PATH, body)
    assert [one["role"] for one in inline] == ["system", "user", "system", "user"]
    merged = messages_of(MESSAGES_PATH, body, FormRules(merge_inline_system=True))
    assert merged == [{"role": "system", "content": "One.Two."}, user("a"), user("b")]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "low"),
    ],
)
def test_thinking_becomes_a_reasoning_effort(fields: dict[str, Any], effort: str | None) -> None:
    rules = FormRules(disabled_thinking_effort="low")
    for path in (MESSAGES_PATH, COUNT_TOKENS_PATH):
        assert chat_body(path, {"messages": [user("x")], **fields}, rules).get("reasoning_effort") == effort


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tools_of_messages_become_functions(choice: Any, expected: Any) -> None:
    body = {"messages": [user("x")], "tools": [{"name": "f", "input_schema": {"a": 1}}], "tool_choice": choice}
    chat = chat_body(MESSAGES_PATH, body)
    assert chat["tool_choice"] == expected
    assert chat["tools"][0]["function"]["parameters"] == {"a": 1, "type": "object"}


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (RESPONSES_PATH, {}, "malformed"),
        (RESPONSES_PATH, {"input": [1]}, "malformed"),
        (RESPONSES_PATH, {"input": [{"type": "mystery"}]}, "malformed"),
        (RESPONSES_PATH, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "malformed"),
        (RESPONSES_PATH, {"input": [{"type": "reasoning", "content": [1]}]}, "malformed"),
        (RESPONSES_PATH, {"input": "x", "instructions": 1}, "malformed"),
        (RESPONSES_PATH, {"input": "x", "reasoning": "low"}, "malformed"),
        (RESPONSES_PATH, {"input": "x", "tool_choice": "required", "tools": [{"type": "web_search"}]}, "malformed"),
        (RESPONSES_PATH, {"input": "x", "tools": [{"type": "custom", "name": "f"}]}, "tools"),
        (RESPONSES_PATH, {"input": [{"type": "custom_tool_call", "name": "f"}]}, "tools"),
        (MESSAGES_PATH, {}, "malformed"),
        (MESSAGES_PATH, {"messages": ["x"]}, "malformed"),
        (MESSAGES_PATH, {"messages": [{"role": "tool", "content": "x"}]}, "malformed"),
        (MESSAGES_PATH, {"messages": [user(None)]}, "malformed"),
        (MESSAGES_PATH, {"messages": [user([{"type": "mystery"}])]}, "malformed"),
        (MESSAGES_PATH, {"messages": [user("x")], "system": 1}, "malformed"),
        (MESSAGES_PATH, {"messages": [user("x")], "tools": [{"name": "f"}]}, "malformed"),
        (MESSAGES_PATH, {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]}, "tools"),
        ("/v1/other", {}, "path"),
    ],
)
def test_what_cannot_be_told_is_unknown(path: str, body: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownPrompt) as error:
        chat_body(path, body)
    assert error.value.reason == reason


def test_rules_are_found_by_rendering() -> None:
    encoder = PromptEncoder.load("any", "builtin")
    # Qwen3's template takes system messages anywhere, and can be told not to think.
    assert find_rules(lambda chat: encoder.token_ids(CHAT_PATH, chat)) == FormRules(False, "none")

    def strict_and_deaf(chat: Mapping[str, Any]) -> str:
        roles = [one["role"] for one in chat["messages"]]
        if "system" in roles[1:]:
            raise UnknownPrompt("template")
        return str(roles)

    assert find_rules(strict_and_deaf) == FormRules(True, "low")


def test_ids_are_those_of_the_equivalent_chat() -> None:
    encoder = PromptEncoder.load("any", "builtin")
    chat = {"messages": [{"role": "system", "content": "Be brief."}, user("hi")]}
    forms: dict[str, dict[str, Any]] = {
        RESPONSES_PATH: {"instructions": "Be brief.", "input": [user([{"type": "input_text", "text": "hi"}])]},
        MESSAGES_PATH: {"system": [{"type": "text", "text": "Be brief."}], "messages": [user("hi")]},
    }
    expected = encoder.token_ids(CHAT_PATH, chat)
    for path, body in forms.items():
        assert encoder.token_ids(CHAT_PATH, chat_body(path, body)) == expected
