"""Ids sent along with a chat: vLLM uses them in place of its own rendering, and makes the same prompt of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from router.engine_tokenize import tokenize_body
from router.errors import UnknownPrompt
from router.handover import with_token_ids
from router.prompt import CHAT_PATH, PromptEncoder
from tests.vllm.many_bodies import agents, recorded
from tests.vllm.tokenizer_files import qwen3

if TYPE_CHECKING:
    from tests.vllm.vllm_renderer import VllmRenderer


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load("demo-model", "builtin", ["adapter-a"], keep_ids=True)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory, vllm_is_there: None) -> Iterator[VllmRenderer]:
    from tests.vllm.vllm_renderer import VllmRenderer

    renderer = VllmRenderer(qwen3(tmp_path_factory.mktemp("model")))
    yield renderer
    renderer.close()


def handed_over(encoder: PromptEncoder, body: dict[str, Any]) -> dict[str, Any]:
    raw = with_token_ids(json.dumps(body).encode(), encoder.hashed(CHAT_PATH, body, 16).token_ids)
    return dict(json.loads(raw))


def test_vllm_makes_the_same_prompt_with_and_without_them(encoder: PromptEncoder, renderer: VllmRenderer) -> None:
    wanted = ("openai_sdk_plain", "vllm_bench_chat_parts", "tool_round_null_content", "thinking_off", "lora_model")
    bodies = [body for name, path, body in recorded() if path == CHAT_PATH and name in wanted]
    assert len(bodies) == len(wanted)
    for body in (*bodies, *agents(5)):
        assert "kv_transfer_params" in (sent := handed_over(encoder, body))
        assert renderer.token_ids(CHAT_PATH, sent) == renderer.token_ids(CHAT_PATH, body)


def test_tokenize_tells_the_ids_of_every_chat_that_it_is_asked_about(renderer: VllmRenderer) -> None:
    """What engines are asked for chats that the router can't tell."""
    from tests.vllm.vllm_renderer import Refused

    unknown, told = UnknownPrompt("template"), 0
    for body in (*(body for _, path, body in recorded() if path == CHAT_PATH), *agents(5)):
        asked = tokenize_body(body, unknown, "llama")
        with contextlib.suppress(Refused):
            expected = renderer.token_ids(CHAT_PATH, body)
            if asked is not None:
                assert renderer.token_ids("/tokenize", json.loads(asked)) == expected
                told += 1
    assert told > 10


def test_it_is_the_ids_that_vllm_uses(encoder: PromptEncoder, renderer: VllmRenderer) -> None:
    def chat(text: str) -> dict[str, Any]:
        return {"model": "demo-model", "messages": [{"role": "user", "content": text}]}

    other = {**chat("Something else"), "kv_transfer_params": handed_over(encoder, chat("Hello"))["kv_transfer_params"]}
    assert renderer.token_ids(CHAT_PATH, other) == encoder.token_ids(CHAT_PATH, chat("Hello"))
