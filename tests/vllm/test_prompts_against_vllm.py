"""Prompts: whenever the router's encoder answers ids, vLLM's own renderer gives the same ids, or refuses the body."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.prompt import PromptEncoder
from tests.vllm.many_bodies import outcome, recorded
from tests.vllm.tokenizer_files import qwen3

if TYPE_CHECKING:
    from tests.vllm.vllm_renderer import VllmRenderer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UNANSWERABLE = {"empty_messages", "image_part", "continue_and_add_both"}
EXAMPLES = int(os.environ.get("WHOHAS_VLLM_EXAMPLES", "400"))

PIECES = [
    *(
        "Hello",
        " world",
        "1234567",
        " 3.14",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "don't",
        "I'LL",
        "é",
        "e\u0301",
        "日本語",
        "한국",
        "مرحبا",
    ),
    *(
        "x-anthropic-billing-header: cch=1;",
        "🙂",
        "👩‍👩‍👧",
        "\u200b",
        "\u00a0",
        "\r\n",
        "<b>&amp;'\"</b>",
        "{{ x }}",
        "{% raw %}",
        "\\n",
        "\x00",
        "ﬁ",
        "Ǆ",
    ),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "<tool_response>",
        "</tool_response>",
    ),
]
texts = (
    st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8)
    .map("".join)
    .filter(lambda text: text.encode("utf-8", "replace").decode() == text)
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9**20) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
parts = (
    texts
    | st.fixed_dictionaries({"type": st.just("text"), "text": texts})
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "refusal", "input_text", "output_text", "thinking"])},
        optional={"text": texts | st.none(), "refusal": texts, "thinking": texts, "cache_control": st.just({})},
    )
)
contents = texts | st.lists(parts, max_size=3) | st.none()
arguments = st.dictionaries(texts, values, max_size=3).map(json.dumps) | st.sampled_from(
    ["", "{", "[1]", "null", '"x"']
)
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": texts, "arguments": arguments})},
    optional={"id": texts, "type": st.just("function")},
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "user", "developer", "custom"]), "content": contents},
    optional={"name": texts},
)
answers = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        "content": contents,
        "tool_calls": st.lists(calls, max_size=2) | st.none(),
        "reasoning": texts | st.none(),
        "reasoning_content": texts | st.none(),
        "refusal": st.none() | texts,
        "name": texts,
    },
)
results = st.fixed_dictionaries(
    {"role": st.just("tool"), "content": contents}, optional={"tool_call_id": texts, "name": texts}
)
tools = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": texts},
            optional={
                "description": texts | st.none(),
                "parameters": st.dictionaries(texts, values, max_size=3) | st.none(),
                "strict": st.booleans() | st.none(),
                "unknown": values,
            },
        ),
    },
    optional={"unknown": values, "defer_loading": st.booleans()},
)
kwargs = st.dictionaries(
    st.sampled_from(["enable_thinking", "add_generation_prompt", "x", "tools"]), values, max_size=2
)
sound_parts = st.fixed_dictionaries({"type": st.just("text"), "text": texts})
sound_contents = texts | st.lists(sound_parts, max_size=3)
sound_calls = st.fixed_dictionaries(
    {
        "id": texts,
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": texts, "arguments": st.dictionaries(texts, values, max_size=3).map(json.dumps)}
        ),
    }
)
sound_messages = (
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "user", "developer"]), "content": sound_contents})
    | st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": sound_contents},
        optional={"tool_calls": st.lists(sound_calls, min_size=1, max_size=2), "reasoning": texts},
    )
    | st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": texts, "content": sound_contents})
)
sound_tools = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": texts}, optional={"description": texts, "parameters": st.dictionaries(texts, values, max_size=3)}
        ),
    }
)
settings_of_chats = {
    "tool_choice": st.sampled_from(["auto", "none", None]),
    "add_generation_prompt": st.booleans(),
    "add_special_tokens": st.booleans(),
    "chat_template_kwargs": kwargs | st.fixed_dictionaries({"enable_thinking": st.booleans()}) | st.none(),
    "reasoning_effort": st.sampled_from(["none", "low", "medium", "high", None]),
    "documents": st.lists(st.dictionaries(texts, texts, max_size=2), max_size=2) | st.none(),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 3, 20, 30_000, None]),
    "truncation_side": st.sampled_from(["left", "right", None]),
}
# Odd ones are often refused, in all the ways there are; that the ids of sound ones are compared isn't left to chance.
odd_chats = st.fixed_dictionaries(
    {"messages": st.lists(messages | answers | results, min_size=1, max_size=5)},
    optional={
        **settings_of_chats,
        "tools": st.lists(tools, max_size=2) | st.none(),
        "continue_final_message": st.booleans(),
    },
)
sound_chats = st.fixed_dictionaries(
    {"messages": st.lists(sound_messages, min_size=1, max_size=5)},
    optional={**settings_of_chats, "tools": st.lists(sound_tools, min_size=1, max_size=2)},
)
ids = st.lists(st.integers(0, 151_000), min_size=1, max_size=9)
completions = st.fixed_dictionaries(
    {"prompt": texts | ids | st.lists(texts, max_size=3) | st.lists(ids, max_size=3)},
    optional={
        "add_special_tokens": st.booleans(),
        "truncate_prompt_tokens": st.sampled_from([-1, 1, 3, 20, 30_000, None]),
        "truncation_side": st.sampled_from(["left", "right", None]),
        "echo": st.booleans(),
    },
)


def expectations() -> list[Any]:
    return [
        pytest.param(path, body, "refused" if name in UNANSWERABLE else "equal", id=name)
        for name, path, body in recorded()
    ]


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load("demo-model", "builtin", adapters=["adapter-a"])


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory, vllm_is_there: None) -> Iterator[VllmRenderer]:
    from tests.vllm.vllm_renderer import VllmRenderer

    renderer = VllmRenderer(qwen3(tmp_path_factory.mktemp("model")))
    yield renderer
    renderer.close()


@pytest.mark.parametrize(("path", "body", "expected"), expectations())
def test_a_recorded_body_has_vllms_ids(
    encoder: PromptEncoder, renderer: VllmRenderer, path: str, body: dict[str, Any], expected: str
) -> None:
    assert outcome(encoder, renderer, path, body).startswith(expected)


@pytest.mark.parametrize(
    ("path", "bodies"), [(CHAT, odd_chats | sound_chats), (COMPLETIONS, completions)], ids=["chat", "completion"]
)
def test_any_body_has_vllms_ids(
    encoder: PromptEncoder, renderer: VllmRenderer, path: str, bodies: st.SearchStrategy[dict[str, Any]]
) -> None:
    outcomes = Counter[str]()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=bodies)
    def check(body: dict[str, Any]) -> None:
        outcomes[outcome(encoder, renderer, path, body).partition(":")[0]] += 1

    check()
    assert outcomes["equal"] > EXAMPLES / 4, outcomes
