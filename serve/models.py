"""`/v1/models` of the whole fleet: what any healthy replica serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from serve.asgi import Headers
from serve.running import Candidate
from serve.upstream import Upstream, UpstreamFailed

MODELS_PATH = "/v1/models"


async def merged_models(
    upstream: Upstream, candidates: Sequence[Candidate], headers: Headers, timeout_s: float
) -> list[dict[str, Any]] | None:
    """The cards of all models, each once, from all replicas that answer in time; None when nobody does."""
    lists = await asyncio.gather(*(_models(upstream, one.url, headers, timeout_s) for one in candidates))
    known: dict[str, dict[str, Any]] = {}
    for cards in lists:
        for card in cards or ():
            known.setdefault(card["id"], card)
    return list(known.values()) if any(cards is not None for cards in lists) else None


async def _models(upstream: Upstream, url: str, headers: Headers, timeout_s: float) -> list[dict[str, Any]] | None:
    try:
        async with (
            asyncio.timeout(timeout_s),
            upstream.request(url, "GET", MODELS_PATH.encode(), headers) as response,
        ):
            raw = b""
            while chunk := await response.read():
                raw += chunk
            if response.status != 200:
                return None
            cards = list(msgspec.json.decode(raw)["data"])
    except (UpstreamFailed, TimeoutError, msgspec.MsgspecError, KeyError, TypeError):
        return None
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
