"""Fields of a request body, checked as far as a conversion needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from router.chat_messages import malformed

Body = dict[str, Any]

SAME_IN_BOTH = ("model", "stream", "cache_salt", "kv_transfer_params", "vllm_xargs", "chat_template_kwargs")
"""Fields that mean in the Responses and the Messages API what they mean in chat."""


def picked(body: Mapping[str, Any], keys: Iterable[str]) -> Body:
    return {key: body[key] for key in keys if body.get(key) is not None}


def mapping(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = body.get(key)
    if not isinstance(value, dict | None):
        raise malformed(f"{key} must be an object")
    return value or {}


def string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise malformed(f"the {what} must be a string")
    return value
