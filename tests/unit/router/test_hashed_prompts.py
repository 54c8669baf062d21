"""The quick way to the hashes gives what the plain way gives, for every body, or raises as it does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from router.errors import UnknownPrompt
from router.hashing import HashChain, chain, root_hash
from router.model_files import load_model_files
from router.prompt import PromptEncoder
from router.tokenizing import TextEncoder

CHAT = "/v1/chat/completions"
_FIXTURE = Path(__file__).parents[2] / "fixtures" / "request_bodies.jsonl"
BODIES = [json.loads(line) for line in _FIXTURE.read_text().splitlines()]
MODEL = "demo-model"


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(MODEL, "builtin", ("adapter-a",))


def outcome(encoder: PromptEncoder, path: str, body: dict[str, Any], quick: bool) -> Any:
    try:
        if quick:
            hashed = encoder.hashed(path, body, 16)
            return hashed.num_tokens, HashChain(b"".join(hashed.hashes)), hashed.reusable
        prompt = encoder.prompt(path, body)
    except UnknownPrompt as error:
        return error.reason
    return prompt.num_tokens, HashChain(b"".join(chain(prompt.root, prompt.token_ids, 16))), prompt.reusable


@pytest.mark.parametrize("case", BODIES, ids=lambda case: case["name"])
def test_recorded_bodies(encoder: PromptEncoder, case: dict[str, Any]) -> None:
    body = json.loads(json.dumps(case["body"]))
    for message in body.get("messages", []):
        if "content_repeat" in message:
            text, times = message.pop("content_repeat")
            message["content"] = text * times
    path = case["path"].partition("?")[0]
    for _ in range(2):  # the second time everything is remembered
        assert outcome(encoder, path, body, quick=True) == outcome(encoder, path, body, quick=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "tenant"},
        {"model": "adapter-a"},
        {"truncate_prompt_tokens": 20},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
        {"prompt_logprobs": 1},
        {"kv_transfer_params": {"prompt_token_ids": list(range(50))}},
    ],
    ids=str,
)
def test_fields_that_change_the_prompt(encoder: PromptEncoder, fields: dict[str, Any]) -> None:
    messages = [{"role": "system", "content": "Rules. " * 30}, {"role": "user", "content": "Hi"}]
    messages.append({"role": "assistant", "content": "Hello"})
    plain = {"messages": messages}
    changed = {**plain, **fields}
    outcome(encoder, CHAT, plain, quick=True)
    assert outcome(encoder, CHAT, changed, quick=True) == outcome(encoder, CHAT, changed, quick=False)
    assert outcome(encoder, CHAT, changed, quick=True) != outcome(encoder, CHAT, plain, quick=True)


def test_lone_surrogates_are_left_to_the_engine(encoder: PromptEncoder) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 100 + "\ud800"}]}
    assert outcome(encoder, CHAT, body, quick=True) == outcome(encoder, CHAT, body, quick=False) == "malformed"


def test_special_token_text_in_what_users_write_makes_no_difference(encoder: PromptEncoder) -> None:
    draw = random.Random(5)
    words = ["<|im_end|>", "<|im_start|>system\n", "<think>", "<|endoftext|>", "hello ", "\n", "é", "<tool_call>", "🙂"]
    for _ in range(300):
        turns = [("user", "assistant")[i % 2] for i in range(draw.randint(1, 7) | 1)]
        messages = [{"role": role, "content": "".join(draw.choices(words, k=draw.randint(0, 40)))} for role in turns]
        body = {"messages": messages}
        assert outcome(encoder, CHAT, body, quick=True) == outcome(encoder, CHAT, body, quick=False)


def test_the_faster_tokenizer_takes_over_only_when_proven_and_gives_the_same_ids() -> None:
    tokenizer = load_model_files("builtin").tokenizer
    quick, plain = TextEncoder(tokenizer, fast=True), TextEncoder(tokenizer, fast=False)
    quick.prover.join(240)
    assert quick.backend == "fastokens", quick.why
    draw = random.Random(6)
    words = [
        "naïve ",
        "\n\n",
        "def f():\n\t",
        "1234567",
        "日本語",
        "<|im_end|>",
        "  ",
        "don't",
        "\u200d",
        "ﬁ",
        "e\u0301",
    ]
    for _ in range(2000):
        text = "".join(draw.choices(words, k=draw.randint(0, 60)))
        assert quick.ids(text) == plain.ids(text)


def test_a_salt_is_not_in_the_hashes_in_the_clear(encoder: PromptEncoder) -> None:
    body = {"messages": [{"role": "user", "content": "x " * 50}], "cache_salt": "very-secret-salt"}
    assert b"very-secret" not in encoder.hashed(CHAT, body, 16).hashes.raw  # type: ignore[attr-defined]
    assert b"very-secret" not in root_hash(MODEL, None, "very-secret-salt")
