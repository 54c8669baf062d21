"""Bodies made to hurt: they neither grow the memo, nor hold up the loop, nor break anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from typing import Any

import pytest

from router.config import RouterConfig
from router.errors import InvalidRequest, UnknownPrompt
from router.memo import PrefixMemo
from router.ownership import ReplicaRecord
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder, parse_body
from router.router import Router

CHAT = "/v1/chat/completions"
MIB = 2**20


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    encoder = PromptEncoder.load("m", "builtin", fast=True)
    encoder.settle(240)
    return encoder


def chat(*contents: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


def ids_of(piece: str) -> bytes:
    return piece.encode("utf-32-le")


@pytest.mark.parametrize(("letters", "count"), [(64, 8_000), (2_000, 1_500)], ids=["small pieces", "large pieces"])
def test_distinct_prefixes_without_end_take_what_the_memo_may_have_and_no_more(letters: int, count: int) -> None:
    memo = PrefixMemo(ids_of, ["<|cut|>"], max_bytes=MIB)
    root = b"r" * 16

    def ask(number: int) -> None:
        memo.chain(root, f"{number:08}{'x' * letters}<|cut|>{number}{'y' * letters}", 16)  # type: ignore[arg-type]

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(count):
        ask(number)
        assert memo.bytes <= MIB
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(memo) < count
    assert held < 1.5 * MIB  # what is counted is what is there


def test_one_piece_larger_than_the_memo_is_answered_and_not_kept() -> None:
    memo = PrefixMemo(ids_of, ["<|cut|>"], max_bytes=10_000)
    text = "z" * 200_000
    assert memo.chain(b"r" * 16, text, 16)[0] == 200_000  # type: ignore[arg-type]
    assert (len(memo), memo.bytes) == (0, 0)


async def test_a_message_of_ten_megabytes_leaves_the_loop_free_and_is_hashed(encoder: PromptEncoder) -> None:
    ownership = MemoryOwnershipMap(lambda: 1.0)
    await ownership.join("a", ReplicaRecord("a", "m", 16), 60)
    router = Router("router", encoder, ownership, RouterConfig(), lambda: 1.0, seed=1)
    await router.start()
    raw = json.dumps(chat("a line of text, and then another one. " * (10 * MIB // 38))).encode()
    asking = asyncio.create_task(router.look_up(CHAT, parse_body(raw), len(raw)))
    turns = 0
    while not asking.done():
        turns += 1
        await asyncio.sleep(0)
    assert (await asking).num_tokens > 2_000_000
    assert turns > 3  # on the loop it would have been one
    await router.close()


def test_special_tokens_by_the_hundred_thousand_make_few_pieces(encoder: PromptEncoder) -> None:
    body = chat("<|im_start|><|im_end|>" * 50_000)
    assert encoder.hashed(CHAT, body, 16).num_tokens == encoder.prompt(CHAT, body).num_tokens > 100_000


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_without_end_is_refused(opening: str) -> None:
    closing = "]" if opening == "[" else "1}"
    with pytest.raises(InvalidRequest):
        parse_body((f'{{"messages": {opening * 100_000}{closing * 100_000}}}').encode())


def test_nesting_in_arguments_and_schemas_is_left_to_the_engine_or_rendered(encoder: PromptEncoder) -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    calls = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    schema = {**chat("x"), "tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]}
    for body in (calls, schema):
        with contextlib.suppress(UnknownPrompt):
            assert encoder.hashed(CHAT, body, 16).num_tokens > 0


@pytest.mark.parametrize("where", ["content", "part", "arguments", "tool", "reasoning"])
def test_lone_surrogates_anywhere_are_left_to_the_engine(encoder: PromptEncoder, where: str) -> None:
    bad = "x\ud800y"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": bad})}}
    bodies: dict[str, dict[str, Any]] = {
        "content": chat("fine", bad),
        "part": chat([{"type": "text", "text": bad}]),
        "arguments": {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]},
        "tool": {**chat("x"), "tools": [{"type": "function", "function": {"name": bad}}]},
        "reasoning": {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "reasoning": bad}]},
    }
    for _ in range(2):
        with pytest.raises(UnknownPrompt):
            encoder.hashed(CHAT, bodies[where], 16)
