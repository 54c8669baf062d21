"""Chats of which the router can't tell the ids: an engine is asked, and without its answer in time load decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.chat_template import RenderOptions
from router.config import RouterConfig
from router.engine_tokenize import tokenize_body
from router.errors import UnknownPrompt
from router.ownership import ReplicaRecord
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder
from router.router import Router
from serve.engine_prompts import EnginePrompts
from serve.upstream import Upstream
from tests.wire.front_bench import BLOCK, CHAT, MODEL, PATIENCE_S, chat
from tests.wire.scripted_engine import Exchange, Script, scripted

IDS = list(range(100, 100 + 5 * BLOCK + 1))
UNKNOWN = UnknownPrompt("template")


@contextlib.asynccontextmanager
async def asking(script: Script, timeout_s: float = PATIENCE_S) -> AsyncIterator[tuple[Router, PromptEncoder]]:
    """A router whose model has a template that it can't render, in front of one engine."""
    options = RenderOptions(chat_template="{{ raise_exception('only the engine can') }}")
    encoder = PromptEncoder.load(MODEL, "builtin", options=options)
    async with scripted(script) as engines:
        ownership = MemoryOwnershipMap(time.monotonic)
        await ownership.join("W0", ReplicaRecord("W0", MODEL, BLOCK, engines[0].url), 3600.0)
        upstream = Upstream(PATIENCE_S)
        prompts = EnginePrompts(encoder, upstream, timeout_s)
        router = Router("router", encoder, ownership, RouterConfig(), time.monotonic, seed=1, engines=prompts)
        await router.start()
        try:
            yield router, encoder
        finally:
            await router.close()
            await upstream.close()


async def test_what_only_an_engine_can_tell_is_asked_of_one_and_hashed() -> None:
    asked: list[tuple[str, Any]] = []

    async def tokenize(exchange: Exchange) -> None:
        asked.append((exchange.target, exchange.json))
        await exchange.whole(json.dumps({"count": len(IDS), "max_model_len": 4096, "tokens": IDS}).encode())

    async with asking(tokenize) as (router, encoder):
        found = await router.look_up(CHAT, chat("Hello", temperature=0), 100)
        assert (found.num_tokens, found.reusable, found.note) == (len(IDS), 5, "")
        assert list(found.hashes) == list(encoder.hashed("/v1/completions", {"prompt": IDS}, BLOCK).hashes)
        assert asked == [("/tokenize", chat("Hello"))]
        assert router.counters["told_by_an_engine"] == 1


@pytest.mark.parametrize(
    "answer", [b"[]", b"{}", b'{"tokens": [-1]}', b'{"tokens": ["a"]}', b'{"tokens": [4294967296]}', b"x"]
)
@pytest.mark.parametrize("status", [200, 404])
async def test_an_answer_that_is_none_means_by_load(answer: bytes, status: int) -> None:
    async def other(exchange: Exchange) -> None:
        await exchange.whole(answer, status)

    async with asking(other) as (router, _):
        found = await router.look_up(CHAT, chat(), 100)
        assert found.note.startswith("no token ids: template")
        assert router.counters["told_by_an_engine"] == 0


async def test_an_engine_that_is_late_is_not_waited_for_and_not_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.engine_prompts._QUIET_S", 3600.0)
    asked, never = 0, asyncio.Event()

    async def hang(exchange: Exchange) -> None:
        nonlocal asked
        asked += 1
        await never.wait()

    async with asking(hang, timeout_s=0.2) as (router, _):
        for _ in range(5):
            assert (await router.look_up(CHAT, chat(), 100)).note.startswith("no token ids: template")
        assert asked <= 1  # 0 where the time was over before the engine had read the request


@pytest.mark.parametrize(
    ("fields", "error", "model_type"),
    [
        ({}, UnknownPrompt("malformed"), ""),
        ({}, UnknownPrompt("multimodal"), ""),
        ({}, UnknownPrompt("model"), ""),
        ({}, UNKNOWN, "gpt_oss"),
        ({"reasoning_effort": "low"}, UNKNOWN, ""),
        ({"documents": [{"text": "x"}]}, UNKNOWN, ""),
        ({"truncate_prompt_tokens": 5}, UNKNOWN, ""),
        ({"tools": [{}], "tool_choice": "none"}, UNKNOWN, ""),
    ],
)
def test_nobody_is_asked_what_would_be_answered_for_another_prompt(
    fields: dict[str, Any], error: UnknownPrompt, model_type: str
) -> None:
    assert tokenize_body(chat(**fields), error, model_type) is None
    assert tokenize_body(chat(temperature=1, stream=True), UNKNOWN, "deepseek_v32") is not None
