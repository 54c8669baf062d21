"""Token ids for the engine: only a chat's own, only where nothing is in their way, and no other byte is touched."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.config import RouterConfig
from router.handover import with_token_ids
from router.hashing import pack_token_ids
from router.memo import PrefixMemo
from router.ownership import ReplicaRecord
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder
from router.router import Router
from router.types import ReplicaId

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "You are a support agent of Example Air. Be brief. " * 12
USER = {"role": "user", "content": LONG}


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load("m", "builtin", keep_ids=True)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": "\xc3\xa9}", "b" : [1.0, 1e2,  {}] }',
        b"{}",
        b"\xef\xbb\xbf{ \n}\r\n",
        b'  {"model":"m","messages":[{"role":"user","content":"{\\"x\\": {}}"}],"n":1,"n":2}\n\n ',
    ],
)
def test_ids_go_in_before_the_last_brace_and_every_other_byte_stays(raw: bytes) -> None:
    sent = with_token_ids(raw, pack_token_ids([5, 2**32 - 1, 0]))
    read, before = (json.loads(one.decode("utf-8-sig")) for one in (sent, raw))
    assert read == {**before, "kv_transfer_params": {"prompt_token_ids": [5, 2**32 - 1, 0]}}
    brace = raw.rindex(b"}")
    assert (sent[:brace], sent[-len(raw[brace:]) :]) == (raw[:brace], raw[brace:])


def test_without_ids_a_body_is_the_very_same() -> None:
    raw = b'{"a": 1}'
    assert with_token_ids(raw, b"") is raw


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER]}),
        (CHAT, {"messages": [USER], "cache_salt": "s", "chat_template_kwargs": {"enable_thinking": False}}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": [USER], "system": LONG, "max_tokens": 5}),
    ],
)
def test_a_text_chats_ids_are_those_of_the_whole_prompt_cold_and_remembered(
    encoder: PromptEncoder, path: str, body: dict[str, Any]
) -> None:
    for _ in range(2):
        assert encoder.hashed(path, body, 16).token_ids == encoder.prompt(path, body).token_ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG}),
        (CHAT, {"messages": [USER], "kv_transfer_params": None}),
        (CHAT, {"messages": [USER], "kv_transfer_params": {"do_remote_prefill": True}}),
        (CHAT, {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [1, 2]}}),
        (CHAT, {"messages": [USER], "truncate_prompt_tokens": 20}),
        (CHAT, {"messages": [USER], "prompt_logprobs": 0}),
    ],
)
def test_other_bodies_get_none(encoder: PromptEncoder, path: str, body: dict[str, Any]) -> None:
    assert encoder.hashed(path, body, 16).token_ids == b""


def test_nobody_gets_ids_unless_the_encoder_was_asked_for_them() -> None:
    assert PromptEncoder.load("m", "builtin").hashed(CHAT, {"messages": [USER]}, 16).token_ids == b""


def test_kept_ids_count_as_memory_and_keys_are_cryptographic() -> None:
    def ids_of(piece: str) -> bytes:
        return piece.encode("utf-32-le")

    plain, keeping = PrefixMemo(ids_of, ["<|c|>"]), PrefixMemo(ids_of, ["<|c|>"], keep_ids=True)
    for memo in (plain, keeping):
        memo.chain(b"r" * 16, "x" * 1000, 16)  # type: ignore[arg-type]
    assert keeping.bytes - plain.bytes == 4000
    assert {len(key) for key in keeping._nodes} == {32}


@pytest.fixture
async def router(encoder: PromptEncoder) -> AsyncIterator[Router]:
    ownership = MemoryOwnershipMap(lambda: 1.0)
    await ownership.join("proven", ReplicaRecord("proven", "m", 16), 60)
    await ownership.join("doubted", ReplicaRecord("doubted", "m", 16, trusted=True, doubt="other tokens"), 60)
    router = Router("router", encoder, ownership, RouterConfig(), lambda: 1.0, seed=1)
    await router.start()
    yield router
    await router.close()


@pytest.mark.parametrize(("replica", "gets"), [("proven", True), ("doubted", False), ("not in the map", False)])
async def test_only_engines_that_have_shown_the_same_ids_get_them(router: Router, replica: str, gets: bool) -> None:
    placed = await router.route(CHAT, {"messages": [USER]}, 100, [ReplicaId(replica)])
    assert bool(placed.token_ids) == gets
