"""Asks an engine for the token ids of a chat that the router can't tell, within a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from router.engine_tokenize import tokenize_body
from router.errors import UnknownPrompt
from router.prompt import CHAT_PATH, TOKENIZE_PATH, PromptEncoder
from router.types import HashedPrompt
from serve.connection import UpstreamFailed
from serve.upstream import Upstream

_HEADERS = [(b"content-type", b"application/json")]
_QUIET_S = 10.0
"""How long nobody is asked after an engine was late: it has more to do than telling ids."""


class EnginePrompts:
    def __init__(self, encoder: PromptEncoder, upstream: Upstream, timeout_s: float = 1.0) -> None:
        self._encoder = encoder
        self._upstream = upstream
        self._timeout_s = timeout_s
        self._quiet_until = float("-inf")

    async def hashed(
        self, url: str, path: str, body: Mapping[str, Any], block_size: int, error: UnknownPrompt
    ) -> HashedPrompt | None:
        """What the router could not tell because of `error`; None where the engine at `url` can't either."""
        if path != CHAT_PATH or time.monotonic() < self._quiet_until:
            return None
        asked = tokenize_body(body, error, self._encoder.files.model_type)
        if asked is None:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                ids = await self._ids(url, asked)
            if ids is None:
                return None
            return await asyncio.to_thread(self._encoder.hashed_ids, path, body, ids, block_size)
        except TimeoutError:
            self._quiet_until = time.monotonic() + _QUIET_S
        except (UpstreamFailed, UnknownPrompt, msgspec.MsgspecError, KeyError, TypeError):
            pass
        return None

    async def _ids(self, url: str, asked: bytes) -> list[int] | None:
        raw = bytearray()
        async with self._upstream.request(url, "POST", TOKENIZE_PATH.encode(), _HEADERS, asked) as response:
            while chunk := await response.read():
                raw += chunk
        return msgspec.json.decode(raw, type=_Answer).tokens if response.status == 200 else None


class _Answer(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]
