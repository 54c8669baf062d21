"""Chats with images, audio or video: what of them can be told without the model's own processor.

How many tokens an image becomes, and under which name the engine caches it, is known to the model's processor alone.
What the template renders *before* the first message with media does not depend on it:

    <system prompt> <turns without media> | <header of the first message with media> ... <image> ...
    '------------- the head -------------'

vLLM tokenises the rendered text as a whole and then puts each item's tokens in place of its placeholder, so the head's
ids are the prompt's first ids. Every engine must have shown that it does so before anything is promised: some models
put images in front of everything (see `replicas.handshake`).
Source: vllm/multimodal/processing/processor.py, vllm/renderers/chat_utils.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.chat_messages import Media, malformed, media_kind
from router.errors import UnknownPrompt

MEDIA_TOKENS = 1024
"""What an image or the like is taken for, where only load is at stake: between a thumbnail's 64 and a page's 4,096."""
_BYTES_A_TOKEN = 4
_MARK = "\ue000media\ue000"
# Placeholders that some models have beside their special tokens: written out in a text, they'd be taken for one.
_WRITTEN_OUT = ("<image>", "<video>", "<audio>", "<|image_", "<|audio_", "<|video_")


def has_media(messages: Any) -> bool:
    """Does any message have a part that isn't text?"""
    return _first(messages) is not None


def estimated_tokens(value: Any) -> int:
    """About how many prompt tokens the texts and media in a piece of a body are."""
    tokens, todo = 0, [value]
    while todo:  # a body may be nested more deeply than calls may be
        one = todo.pop()
        if isinstance(one, str):
            tokens += MEDIA_TOKENS if one.startswith("data:") else len(one) // _BYTES_A_TOKEN
        elif isinstance(one, Mapping):
            if media_kind(one):
                tokens += MEDIA_TOKENS
            else:
                todo += one.values()
        elif isinstance(one, list):
            todo += one
        else:
            tokens += isinstance(one, int)
    return tokens


class Heads:
    """`render`: chat body to text. `last_cut`: where a text may be cut, at or before a position; see `router.cuts`.
    `special`: texts of the tokenizer's special tokens."""

    def __init__(
        self,
        render: Callable[[Mapping[str, Any]], str],
        last_cut: Callable[[str, int], int],
        special: Sequence[str],
    ) -> None:
        self._render, self._last_cut = render, last_cut
        self._placeholders = re.compile("|".join(map(re.escape, (*special, *_WRITTEN_OUT))))

    def head(self, body: Mapping[str, Any]) -> tuple[str, int]:
        """The text before the first message with media, and about how many tokens follow it.

        Raises `UnknownPrompt` ("multimodal", or whatever `render` raises) where that can't be told.
        """
        messages = body["messages"]
        first = _first(messages)
        assert first is not None
        if messages[first].get("role") in ("system", "developer"):
            raise UnknownPrompt("multimodal", "media in a system prompt")
        try:
            before = json.dumps([messages[:first], body.get("tools")], ensure_ascii=False)
        except RecursionError as e:
            raise malformed("nested too deeply") from e
        if self._placeholders.search(before):
            raise UnknownPrompt("multimodal", "a special token written out before it")
        passed = [_passed(message) for message in messages]
        marked = [*passed[:first], {**passed[first], "content": _MARK}, *passed[first + 1 :]]
        text, without = self._render({**body, "messages": passed}), self._render({**body, "messages": marked})
        at = without.find(_MARK)
        # A template may look ahead: some leave out the system prompt where there are images.
        if at < 0 or text[:at] != without[:at]:
            raise UnknownPrompt("multimodal", "the template does not keep what stands before it")
        end = self._last_cut(text, at)
        if not end:
            raise UnknownPrompt("multimodal", "nothing stands before it")
        return text[:end], estimated_tokens(messages[first:]) + 1


def _first(messages: Any) -> int | None:
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(media_kind(part) for part in content):
            return i
    return None


def _passed(message: Any) -> Any:
    """The message with its media as templates see them."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [Media(kind) if (kind := media_kind(part)) else part for part in content]}
