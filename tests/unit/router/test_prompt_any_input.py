"""Whatever bytes or JSON come in, only the documented errors come out."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import InvalidRequest, UnknownPrompt
from router.prompt import PromptEncoder, parse_body
from router.types import Prompt

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load("demo-model", "builtin")


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b"1", b'"x"', b"null", b"{", b"{'a': 1}", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\xff"}',
        b'{"a": "\\ud800"}', b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 100_000, b"\x00", b"\xff\xfe{",
    ],
    ids=lambda raw: raw[:12].hex(),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_invalid(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(raw)


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_body(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TEXT = st.text(max_size=8)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "refusal", "image_url", "tool_reference"]), "text": TEXT},
    optional={"refusal": TEXT | JSON, "name": TEXT, "uuid": JSON},
)
FUNCTION = st.fixed_dictionaries({"name": TEXT, "arguments": st.sampled_from(["", "{}", '{"a": [1e5]}', "[", "NaN"])})
CALL = st.fixed_dictionaries({"id": TEXT, "type": st.just("function"), "function": FUNCTION})
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
        "content": TEXT | st.none() | st.lists(PART | TEXT, max_size=3),
    },
    optional={"tool_calls": st.lists(CALL, max_size=2), "reasoning_content": TEXT | JSON, "tools": JSON, "name": JSON},
)
TOOL = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": TEXT}, optional={"parameters": st.dictionaries(TEXT, JSON, max_size=2)}
        )
    },
    optional={"type": st.just("function"), "defer_loading": JSON},
)
VALID = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=4), "prompt": TEXT | st.lists(st.integers(0, 9), min_size=1)},
    optional={
        "model": st.just("demo-model"),
        "tools": st.lists(TOOL, min_size=1, max_size=2),
        "documents": st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=2),
        "chat_template_kwargs": st.dictionaries(TEXT | st.sampled_from(["enable_thinking", "tools", "self"]), JSON),
        "truncate_prompt_tokens": st.integers(-1, 40),
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "add_special_tokens": st.booleans(),
        "reasoning_effort": st.sampled_from(["none", "low"]),
        "cache_salt": st.text(min_size=1, max_size=4),
        "echo": st.booleans(),
    },
)
FIELDS = (
    *("messages", "prompt", "model", "tools", "documents", "chat_template_kwargs", "truncate_prompt_tokens", "echo"),
    *("continue_final_message", "add_generation_prompt", "add_special_tokens", "reasoning_effort", "cache_salt"),
    *("chat_template", "prompt_logprobs", "truncation_side", "kv_transfer_params", "prompt_embeds", "tool_choice"),
)


def broken(value: Any) -> st.SearchStrategy[Any]:
    """The value with one of its inner values replaced by any JSON."""
    if isinstance(value, dict) and value:
        return st.sampled_from(sorted(value)).flatmap(
            lambda key: st.builds(lambda inner: {**value, key: inner}, broken(value[key]))
        )
    if isinstance(value, list) and value:
        return st.integers(0, len(value) - 1).flatmap(
            lambda i: st.builds(lambda inner: [*value[:i], inner, *value[i + 1 :]], broken(value[i]))
        )
    return JSON


BODY = VALID | VALID.flatmap(broken) | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4)


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/v1/other"]), body=BODY)
def test_any_json_gives_a_prompt_or_one_of_the_two_refusals(encoder: PromptEncoder, path: str, body: Any) -> None:
    with contextlib.suppress(UnknownPrompt, InvalidRequest):
        assert isinstance(encoder.prompt(path, body), Prompt)
    with contextlib.suppress(UnknownPrompt, InvalidRequest):
        assert all(isinstance(ids, list) for ids in encoder.token_ids(path, body))


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=40) | st.text(alphabet='{}[]":,\\ud80012e-', max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_invalid(raw: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_body(raw), dict)


@pytest.mark.parametrize("deep", [True, False])
def test_hostile_nesting_within_valid_json_is_an_unknown_prompt(encoder: PromptEncoder, deep: bool) -> None:
    nested = "[" * 50_000 + "]" * 50_000 if deep else '{"a": "\\ud800"}'
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": nested}}
    with pytest.raises(UnknownPrompt):
        encoder.prompt(CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}]})
