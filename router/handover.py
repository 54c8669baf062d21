"""Token ids sent to the engine along with a chat, so that it neither renders nor tokenises it again.

    {"messages": [...]}  -->  {"messages": [...],"kv_transfer_params":{"prompt_token_ids":[...]}}

The field goes in as text before the last brace; all other bytes stay as the client sent them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

FIELD = "kv_transfer_params"
_SPACE = b" \t\r\n"


def takes_token_ids(body: Mapping[str, Any]) -> bool:
    """Whether the field is free: one that the client sent is its own, and a second one would replace it."""
    return FIELD not in body


def with_token_ids(raw: bytes, token_ids: bytes) -> bytes:
    """`raw`: a JSON object, of which `takes_token_ids` holds. `token_ids`: little-endian uint32; none: unchanged."""
    if not token_ids:
        return raw
    end = raw.rindex(b"}")
    comma = b"" if raw[:end].rstrip(_SPACE).endswith(b"{") else b","
    ids = msgspec.json.encode({FIELD: {"prompt_token_ids": memoryview(token_ids).cast("I").tolist()}})
    return b"%b%b%b%b" % (raw[:end], comma, ids[1:-1], raw[end:])
