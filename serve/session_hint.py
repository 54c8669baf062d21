"""Which conversation a request belongs to, as far as its client tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"x-openwebui-chat-id")
_FIELDS = ("session_id", "prompt_cache_key")


def session_hint(headers: Iterable[tuple[bytes, bytes]], body: Mapping[str, Any]) -> int:
    """A number that stands for the conversation; 0 where nothing tells. Headers go before fields of the body."""
    found = {name: value for name, value in headers if name in _HEADERS}
    for name in _HEADERS:
        if value := found.get(name):
            return xxhash.xxh3_64_intdigest(value)
    for field in _FIELDS:
        named = body.get(field)
        if isinstance(named, str) and named:
            return xxhash.xxh3_64_intdigest(named.encode("utf-8", "replace"))
    return 0
