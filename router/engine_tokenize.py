"""Chats of which an engine's own /tokenize tells the ids where the router can't: vLLM renders there as for an answer.

It takes fewer fields. A chat with one that it doesn't know, and that may change the prompt, has no body here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from router.errors import UnknownPrompt

_TAKEN = (
    *("model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs", "tools"),
)
_NOT_TAKEN = ("reasoning_effort", "documents", "truncate_prompt_tokens", "kv_transfer_params")
_HARMONY = "gpt_oss"  # rendered by other code for answers than for /tokenize


def tokenize_body(body: Mapping[str, Any], error: UnknownPrompt, model_type: str) -> bytes | None:
    """The body for POST /tokenize that gives this chat's ids; None where its answer could be another one.

    `error`: why the router can't tell them. What an engine would refuse, or has media in it, isn't asked for.
    """
    if error.reason not in ("template", "failed") or model_type == _HARMONY:
        return None
    if any(body.get(field) is not None for field in _NOT_TAKEN) or body.get("tool_choice") == "none":
        return None
    return msgspec.json.encode({field: body[field] for field in _TAKEN if body.get(field) is not None})
