from __future__ import annotations

import json
from typing import Any

import pytest

from replicas.emulated.errors import ApiError
from replicas.emulated.tools import TOOL_TRIGGER, AskedCall, ToolCall, asked_call, least_value
from router.prompt import PromptEncoder

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
]


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load("any", "builtin")


def asked(content: Any = "hi", **fields: Any) -> AskedCall | None:
    return asked_call({"messages": [{"role": "user", "content": content}], "tools": TOOLS, **fields})


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_required_call_is_of_the_first_tool_and_a_named_one_of_that() -> None:
    assert asked(tool_choice="required") == AskedCall("now", {})
    assert asked(tool_choice=named("weather")) == AskedCall("weather", WEATHER, named=True)


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_trigger_asks_for_a_call_too(choice: str | None) -> None:
    assert asked(TOOL_TRIGGER, tool_choice=choice) == AskedCall("now", {})
    assert asked(f"{TOOL_TRIGGER} weather please", tool_choice=choice) == AskedCall("weather", WEATHER)
    assert asked([{"type": "text", "text": f"{TOOL_TRIGGER} weather"}]) == AskedCall("weather", WEATHER)


def test_without_a_trigger_or_tools_there_is_text() -> None:
    assert asked() is None
    assert asked("/callback", tool_choice="auto") is None
    assert asked(TOOL_TRIGGER, tool_choice="none") is None
    assert asked(TOOL_TRIGGER, tools=None) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "tools": None},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": named("unheard of")},
        {"tool_choice": "sometimes"},
        {"tool_choice": {"type": "function"}},
    ],
)
def test_a_choice_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        asked(**fields)
    assert (error.value.status, error.value.param) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, {}),
        (WEATHER, {"city": ""}),
        ({"type": "string", "minLength": 3}, "xxx"),
        ({"enum": ["c", "f"]}, "c"),
        ({"const": 7}, 7),
        ({"type": "integer", "minimum": 3}, 3),
        ({"type": "integer", "maximum": -2}, -2),
        ({"type": "number", "exclusiveMinimum": 0}, 1),
        ({"type": "integer", "exclusiveMaximum": 0}, -1),
        ({"type": "integer", "minimum": 7, "multipleOf": 5}, 10),
        ({"type": "boolean"}, False),
        ({"type": "null"}, None),
        ({"type": ["null", "string"]}, ""),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [0, 0]),
        ({"type": "array"}, []),
        ({"anyOf": [{"type": "boolean"}, {"type": "string"}]}, False),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "object", "required": ["x"]}}}, {"x": ""}),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"$ref": "#/$defs/p"}}}, None),
    ],
)
def test_arguments_are_the_least_that_fits(schema: Any, value: Any) -> None:
    assert least_value(schema) == value


def test_a_call_is_told_piece_by_piece(encoder: PromptEncoder) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["北京🙂"]}}, "required": ["city"]}
    call = ToolCall(encoder, AskedCall("weather", schema))
    ids = [next(call) for _ in range(len(call))]
    pieces = [call.arguments_of(position) for position in range(1, len(call) + 1)]
    assert json.loads("".join(pieces)) == {"city": "北京🙂"}
    assert "\ufffd" not in "".join(pieces)
    begun = [call.is_named_by(position) for position in range(len(call) + 1)]
    assert begun == sorted(begun)
    assert not any(piece for piece, told in zip(pieces, begun[1:], strict=True) if not told)
    assert call.arguments_until(len(call)) == call.arguments
    assert "".join(call.texts) == encoder.decode(ids)


def test_the_next_turn_begins_with_the_ids_of_the_call(encoder: PromptEncoder) -> None:
    call = ToolCall(encoder, AskedCall("weather", WEATHER))
    ids = [next(call) for _ in range(len(call))]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    (before,) = encoder.token_ids("/v1/chat/completions", body)
    function = {"name": call.name, "arguments": call.arguments}
    body["messages"].append(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        }
    )
    (after,) = encoder.token_ids("/v1/chat/completions", {**body, "add_generation_prompt": False})
    assert "".join(call.texts) in encoder.decode(after)
    assert set(ids) <= set(after[len(before) - 4 :])
