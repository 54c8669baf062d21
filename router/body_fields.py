"""Fields of a request body that change its prompt, checked as far as the prompt depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.chat_messages import conversation, malformed

_MAX_TOKEN_ID = 2**32 - 1


def said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM takes None and "auto" for "not said"."""
    return {k: v for k, v in fields.items() if v is not None and v != "auto"}


def flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise malformed(f"{key} must be true or false")
    return value


def truncation(body: Mapping[str, Any]) -> int | None:
    """Tokens to keep. -1 means the model's own maximum, which a prompt that can be served doesn't reach."""
    value = body.get("truncate_prompt_tokens")
    if value is None or value == -1:
        return None
    if not _is_int(value) or value < 0:
        raise malformed("truncate_prompt_tokens must be an integer of at least -1")
    return int(value)


def truncation_side(body: Mapping[str, Any]) -> str:
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise malformed("truncation_side must be left or right")
    return side or "left"


def given_ids(body: Mapping[str, Any]) -> list[int] | None:
    """Ids that a client (or a prefill stage) sends along with a chat: the engine then renders nothing."""
    params = body.get("kv_transfer_params")
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if not ids:
        return None
    if not _is_ids(ids):
        raise malformed("prompt_token_ids must be a list of token ids")
    conversation(body.get("messages"), "string")  # ids don't count beside images: raises for those
    return list(ids)


def prompts(prompt: Any) -> list[str | list[int]]:
    """What a completion's `prompt` holds: one text or list of ids, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt) or all(_is_ids(p) for p in prompt):
            return list(prompt)
    raise malformed("prompt must be a string, a list of token ids, or a list of either")


def is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def is_list_of_dicts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(v, dict) for v in value))


def is_reusable(body: Mapping[str, Any], *, chat: bool) -> bool:
    """False where the engine needs logits of every prompt token and so computes all of them (even for top-0)."""
    if body.get("prompt_logprobs") is not None:
        return False
    if not body.get("echo"):
        return True
    # A chat's top_logprobs default to 0, a completion's logprobs to none.
    asked = body.get("top_logprobs", 0) if chat else body.get("logprobs")
    return asked is None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(i) and 0 <= i <= _MAX_TOKEN_ID for i in value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
