"""Chats with media: what stands before them is known, and nothing is said of what doesn't hold for certain."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from router.chat_template import RenderOptions
from router.errors import UnknownPrompt
from router.media import MEDIA_TOKENS, estimated_tokens, has_media
from router.model_files import load_model_files
from router.prompt import CHAT_PATH, PromptEncoder

B = 16
TURN = (
    "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "PARTS{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACEHOLDER = "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
TEXT = "{% if 'text' in p %}{{ p.text }}{% endif %}"
IN_ORDER = TURN.replace("PARTS", "{% for p in m.content %}" + PLACEHOLDER + TEXT + "{% endfor %}")
IMAGES_FIRST = TURN.replace(
    "PARTS", "{% for p in m.content %}" + PLACEHOLDER + "{% endfor %}{% for p in m.content %}" + TEXT + "{% endfor %}"
)
LOOP = "{% for m in messages %}"
LOOKS_AHEAD = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.content is not string %}{% for p in m.content %}"
    "{% if p.type == 'image' %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if ns.n == 0 %}<|im_start|>system\nToday is Monday.<|im_end|>\n{% endif %}" + LOOP + IN_ORDER
)
SYSTEM = {"role": "system", "content": "Answer with care, in whole sentences, and say what you can't see. " * 8}
RED, BLUE = (
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}} for name in ("cmVk", "Ymx1ZQ")
)


@lru_cache
def encoder(template: str = LOOP + IN_ORDER) -> PromptEncoder:
    return PromptEncoder("m", load_model_files("builtin"), options=RenderOptions(chat_template=template))


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize("template", [LOOP + IN_ORDER, LOOP + IMAGES_FIRST, None], ids=["parts", "images first", "own"])
def test_what_stands_before_an_image_is_hashed_as_without_one(template: str | None) -> None:
    prompts = encoder(template) if template else PromptEncoder.load("m", "builtin")
    with_image = prompts.hashed(CHAT_PATH, chat(SYSTEM, user(text("Look: "), RED, text(" what?"))), B)
    plain = prompts.hashed(CHAT_PATH, chat(SYSTEM, {"role": "user", "content": "Hello"}), B)
    assert not with_image.whole
    assert plain.whole
    assert len(with_image.hashes) >= 7
    assert list(with_image.hashes) == list(plain.hashes[: len(with_image.hashes)])
    head = prompts.prompt(CHAT_PATH, chat(SYSTEM, user(RED)))
    assert not head.whole
    assert prompts.decode(prompts.token_ids(CHAT_PATH, chat(SYSTEM))[0]).startswith(decoded(prompts, head.token_ids))
    assert decoded(prompts, head.token_ids).endswith(SYSTEM["content"] + "<|im_end|>\n")


def decoded(prompts: PromptEncoder, token_ids: bytes) -> str:
    return prompts.decode([int.from_bytes(token_ids[i : i + 4], "little") for i in range(0, len(token_ids), 4)])


def test_e14_two_images_share_what_stands_before_them_and_nothing_more() -> None:
    prompts = encoder()
    red, blue = (prompts.hashed(CHAT_PATH, chat(SYSTEM, user(one, text("What?"))), B) for one in (RED, BLUE))
    assert red.hashes == blue.hashes
    assert len(red.hashes) * B < red.num_tokens  # an engine may reuse all of them
    again = chat(SYSTEM, user(RED), {"role": "assistant", "content": "Red."}, user(text("Sure? " * 99)))
    assert prompts.hashed(CHAT_PATH, again, B).hashes == red.hashes


def test_turns_before_the_first_image_count_whole() -> None:
    prompts = encoder()
    turns = [SYSTEM, user(text("Hello " * 40)), {"role": "assistant", "content": "Hi. " * 40}]
    long = prompts.hashed(CHAT_PATH, chat(*turns, user(RED)), B)
    short = prompts.hashed(CHAT_PATH, chat(SYSTEM, user(RED)), B)
    assert len(long.hashes) > len(short.hashes) + 4
    assert list(long.hashes[: len(short.hashes)]) == list(short.hashes)


def test_salt_and_adapter_are_in_the_head_s_root() -> None:
    prompts = encoder()
    bodies = [chat(SYSTEM, user(RED)), chat(SYSTEM, user(RED), cache_salt="a"), chat(SYSTEM, user(RED), cache_salt="b")]
    assert len({prompts.hashed(CHAT_PATH, body, B).hashes[0] for body in bodies}) == 3


@pytest.mark.parametrize(
    "body",
    [
        chat(user(RED)),
        chat({"role": "system", "content": [text("Look"), RED]}, user(text("a"))),
        chat({"role": "system", "content": "A <|image_pad|> is an image. " * 9}, user(RED)),
        chat({"role": "system", "content": "An <image> is an image. " * 9}, user(RED)),
        chat(SYSTEM, user(RED), truncate_prompt_tokens=50),
        chat(SYSTEM, user(RED), kv_transfer_params={"prompt_token_ids": [1, 2]}),
    ],
    ids=["nothing before", "in the system prompt", "placeholder", "written out", "truncated", "ids"],
)
def test_what_can_t_be_told_for_certain_is_not_told(body: dict[str, Any]) -> None:
    for asked in (encoder().prompt, lambda path, body: encoder().hashed(path, body, B)):
        with pytest.raises(UnknownPrompt, match="multimodal"):
            asked(CHAT_PATH, body)


def test_images_in_messages_and_responses_have_the_head_of_the_chat_that_they_are() -> None:
    prompts = PromptEncoder.load("m", "builtin")
    system, said = SYSTEM["content"], "Yes, I can see that. " * 20
    turns = [user(text("Look at this?")), {"role": "assistant", "content": said}]
    expected = prompts.hashed(CHAT_PATH, chat(SYSTEM, *turns, user(RED)), B)
    source = {"type": "base64", "media_type": "image/png", "data": "cmVk"}
    image = {"type": "image", "source": source}
    messages = {"model": "m", "max_tokens": 1, "system": system, "messages": [*turns, user(image, text("What?"))]}
    alone = messages | {"messages": [*turns, user(image)]}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("Here: "), image]}
    by_tool = messages | {"messages": [*turns, {"role": "assistant", "content": [call]}, user(result)]}
    shown = {"type": "input_image", "image_url": "data:image/png;base64,cmVk"}
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "Look at this?"}]}]
    answered = [{"role": "assistant", "content": said}]
    responses = {
        "model": "m",
        "instructions": system,
        "input": [*asked, *answered, {"role": "user", "content": [shown]}],
    }
    for path, body in (("/v1/messages", messages), ("/v1/messages", alone), ("/v1/responses", responses)):
        told = prompts.hashed(path, body, B)
        assert (told.whole, told.hashes) == (False, expected.hashes), path
    told = prompts.hashed("/v1/messages", by_tool, B)
    assert not told.whole
    assert list(told.hashes[: len(expected.hashes)]) == list(expected.hashes)


def test_a_template_that_begins_otherwise_where_there_are_images_is_found_out() -> None:
    prompts = encoder(LOOKS_AHEAD)
    assert prompts.hashed(CHAT_PATH, chat(SYSTEM), B).whole
    with pytest.raises(UnknownPrompt, match="does not keep"):
        prompts.hashed(CHAT_PATH, chat(SYSTEM, user(RED)), B)


def test_without_a_proven_cut_nothing_is_told() -> None:
    files = load_model_files("builtin")
    prompts = PromptEncoder("m", replace(files), options=RenderOptions(chat_template=LOOP + IN_ORDER))
    prompts._memo = None
    with pytest.raises(UnknownPrompt, match="multimodal"):
        prompts.hashed(CHAT_PATH, chat(SYSTEM, user(RED)), B)


@pytest.mark.parametrize("asked", ["prompt", "hashed"])
def test_text_that_is_no_unicode_and_bodies_that_are_too_deep_are_not_told(asked: str) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    broken = {"role": "system", "content": SYSTEM["content"] + "\ud800"}
    for body in (chat(broken, user(RED)), chat({"role": "user", "content": [text("a"), deep]}, user(RED))):
        with pytest.raises(UnknownPrompt):
            getattr(encoder(), asked)(CHAT_PATH, body, *([B] if asked == "hashed" else []))
    assert estimated_tokens(deep) == 0


def test_an_image_in_base64_is_not_taken_for_its_length_in_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2_000_000}}
    body = chat(SYSTEM, user(image, text("What is this?")))
    assert MEDIA_TOKENS < estimated_tokens(body) < MEDIA_TOKENS + 1000
    assert encoder().hashed(CHAT_PATH, body, B).num_tokens < MEDIA_TOKENS + 1000
    assert estimated_tokens(json.loads(json.dumps(body))) == estimated_tokens(body)


@pytest.mark.parametrize(
    ("part", "media"),
    [
        ({"type": "image_url", "image_url": {"url": "http://h/a.png"}}, True),
        ({"type": "image_url", "image_url": None, "uuid": "known"}, True),
        ({"image_url": "http://h/a.png"}, True),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, True),
        ({"type": "video_url", "video_url": {"url": "http://h/a.mp4"}}, True),
        (text("image_url"), False),
        ("image_url", False),
        (7, False),
    ],
)
def test_media_are_told_from_text(part: Any, media: bool) -> None:
    assert has_media([{"role": "user", "content": "a"}, user(text("b"), part)]) is media


@pytest.mark.parametrize("messages", [None, "a", [], [1], [{"role": "user"}], [{"content": {"type": "image"}}]])
def test_what_is_no_list_of_messages_has_no_media(messages: Any) -> None:
    assert not has_media(messages)
