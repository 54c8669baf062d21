"""The emulated engine's answers: their text, length, streams, and what of them is cached."""

from __future__ import annotations

from collections import Counter

import aiohttp
import pytest

from router.prompt import PromptEncoder
from tests.integration.emulated.process import (
    BLOCK,
    MODEL,
    Server,
    cached,
    chat,
    complete,
    post,
    stream,
)

pytestmark = pytest.mark.integration


async def test_an_answer_says_that_it_is_emulated(http: aiohttp.ClientSession, server: Server) -> None:
    answer = await chat(http, server, "Who are you?")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "This text was emulated by whohas; no model ran."
    assert choice["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33, 100])
async def test_a_repeated_prompt_hits_all_full_blocks_before_its_last_token(
    http: aiohttp.ClientSession, server: Server, num_tokens: int
) -> None:
    prompt = [5000 + num_tokens] * num_tokens
    first = await complete(http, server, prompt, max_tokens=1)
    again = await complete(http, server, prompt, max_tokens=1)
    assert first["usage"]["prompt_tokens"] == num_tokens
    assert cached(first) == 0
    assert cached(again) == (num_tokens - 1) // BLOCK * BLOCK


async def test_length_follows_max_tokens_min_tokens_and_ignore_eos(http: aiohttp.ClientSession, server: Server) -> None:
    cases = [
        ({"max_tokens": 3}, 3, "length"),
        ({"max_tokens": 500}, 13, "stop"),
        ({"max_completion_tokens": 4, "max_tokens": 9}, 4, "length"),
        ({"max_tokens": 60, "ignore_eos": True}, 60, "length"),
        ({"max_tokens": 60, "min_tokens": 40}, 40, "stop"),
        ({"max_tokens": 13}, 13, "stop"),
    ]
    for fields, length, reason in cases:
        answer = await chat(http, server, "How long?", **fields)
        assert answer["usage"]["completion_tokens"] == length
        assert answer["choices"][0]["finish_reason"] == reason


async def test_equal_prompts_get_equal_answers_and_others_do_not(http: aiohttp.ClientSession, server: Server) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True}
    one, again, other = [await chat(http, server, text, **fields) for text in ("Same", "Same", "Different")]
    texts = [answer["choices"][0]["message"]["content"] for answer in (one, again, other)]
    assert texts[0] == texts[1] != texts[2]


async def test_a_stream_has_one_event_for_each_token(
    http: aiohttp.ClientSession, server: Server, encoder: PromptEncoder
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Stream it"}],
        "max_tokens": 30,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, usage, done = await stream(http, server, "/v1/chat/completions", body)
    role, *tokens = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 30
    assert "cached_tokens" in usage["usage"]["prompt_tokens_details"]
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert [token["finish_reason"] for token in tokens] == [None] * 29 + ["length"]
    text = "".join(token["delta"]["content"] for token in tokens)
    assert len(encoder.encode_text(text)) == 30
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}
    whole = await post(http, server, "/v1/chat/completions", body)
    assert whole["choices"][0]["message"]["content"] == text


async def test_a_stream_without_include_usage_has_none(http: aiohttp.ClientSession, server: Server) -> None:
    events = await stream(http, server, "/v1/completions", {"prompt": "no usage", "max_tokens": 5})
    assert len(events) == 6
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_cut_of_an_answer_tokenises_to_what_was_generated(
    http: aiohttp.ClientSession, server: Server, encoder: PromptEncoder, path: str
) -> None:
    body = {"max_tokens": 200, "ignore_eos": True}
    if path == "/v1/completions":
        events = await stream(http, server, path, {**body, "prompt": "Cut me"})
        pieces = [event["choices"][0]["text"] for event in events[:-1]]
    else:
        events = await stream(http, server, path, {**body, "messages": [{"role": "user", "content": "Cut me"}]})
        pieces = [event["choices"][0]["delta"]["content"] for event in events[1:-1]]
    ids = encoder.encode_text("".join(pieces))
    assert len(ids) == len(pieces) == 200
    for cut in range(1, 200):
        assert encoder.encode_text("".join(pieces[:cut])) == ids[:cut]


@pytest.mark.parametrize("length", [3, 13, 21, 64, 65])
async def test_the_next_turn_hits_the_blocks_of_the_answer(
    http: aiohttp.ClientSession, server: Server, length: int
) -> None:
    messages = [{"role": "user", "content": f"Turn one of the chat about {length} things"}]
    body = {"messages": messages, "max_tokens": length, "ignore_eos": True}
    first = await post(http, server, "/v1/chat/completions", body)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then? " * 20}]
    second = await post(http, server, "/v1/chat/completions", {"messages": messages})
    # The last generated token was never fed back, so its key and value aren't cached.
    assert cached(second) == (first["usage"]["total_tokens"] - 1) // BLOCK * BLOCK


async def test_batches_n_and_echo_number_their_choices(http: aiohttp.ClientSession, server: Server) -> None:
    answer = await complete(http, server, ["first one", "second one"], n=2, echo=True, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [
        f"{prompt} This text was" for prompt in ("first one", "first one", "second one", "second one")
    ]
    assert answer["usage"]["completion_tokens"] == 12
    ids = await complete(http, server, [[1, 2, 3], [4, 5]], max_tokens=2)
    assert (len(ids["choices"]), ids["usage"]["prompt_tokens"]) == (2, 5)
    echoed = await complete(http, server, "only this", echo=True, max_tokens=0)
    assert (echoed["choices"][0]["text"], echoed["usage"]["completion_tokens"]) == ("only this", 0)
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 4}
    events = await stream(http, server, "/v1/completions", body)
    assert Counter(event["choices"][0]["index"] for event in events[:-1]) == {0: 4, 1: 4, 2: 4, 3: 4}


async def test_salts_and_adapters_share_no_blocks(http: aiohttp.ClientSession, server: Server) -> None:
    prompt = [6000] * 50
    await complete(http, server, prompt)
    for fields in ({"cache_salt": "s"}, {"model": "ada"}):
        first = await complete(http, server, prompt, **fields)
        again = await complete(http, server, prompt, **fields)
        assert (cached(first), cached(again)) == (0, 48)
