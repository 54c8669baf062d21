"""Request bodies of every kind as token ids, through the router's own encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from router.api_forms import FORM_PATHS, FormRules, chat_body, find_rules
from router.prompt import CHAT_PATH, PromptEncoder

# Tokenising more than this would hold up everybody's tokens; for less, a thread costs more than the work.
_INLINE_BODY_BYTES = 16_384


class Prompts:
    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._rules: FormRules | None = None

    def as_chat(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The path and the body of the equivalent chat; chats and completions as they are. Raises UnknownPrompt."""
        if path not in FORM_PATHS:
            return path, body
        if self._rules is None:
            self._rules = find_rules(lambda chat: self._encoder.token_ids(CHAT_PATH, chat))
        return CHAT_PATH, chat_body(path, body, self._rules)

    async def token_ids(self, path: str, body: Mapping[str, Any], size: int) -> list[list[int]]:
        """Ids of every prompt in a body of `size` bytes. Raises UnknownPrompt."""
        if size <= _INLINE_BODY_BYTES:
            return self._encoder.token_ids(path, body)
        return await asyncio.to_thread(self._encoder.token_ids, path, body)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(ids)
