"""What clients say about the conversation that a request belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from serve.session_hint import session_hint


@pytest.mark.parametrize("name", [b"x-session-id", b"x-claude-code-session-id", b"x-openwebui-chat-id"])
def test_each_header_tells(name: bytes) -> None:
    assert session_hint([(name, b"a")], {}) == session_hint([(b"x-session-id", b"a")], {}) != 0
    assert session_hint([(name, b"a")], {}) != session_hint([(name, b"b")], {})


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key"])
def test_each_field_tells_what_a_header_would(field: str) -> None:
    assert session_hint([], {field: "a"}) == session_hint([(b"x-session-id", b"a")], {})


def test_a_header_goes_before_the_body() -> None:
    assert session_hint([(b"x-session-id", b"a")], {"prompt_cache_key": "b"}) == session_hint([], {"session_id": "a"})


@pytest.mark.parametrize("value", [None, "", 0, 1, [], {}, True])
def test_what_is_no_name_tells_nothing(value: Any) -> None:
    assert session_hint([(b"x-session-id", b""), (b"user-agent", b"x")], {"prompt_cache_key": value}) == 0


def test_a_lone_surrogate_is_a_name_like_any_other() -> None:
    assert session_hint([], {"prompt_cache_key": "\ud800"}) != 0
