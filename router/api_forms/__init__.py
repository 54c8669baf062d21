"""The Responses and the Messages API in terms of chat: vLLM serves both by turning them into the equivalent chat.

    /v1/responses, /v1/messages, /v1/messages/count_tokens --chat_body()--> a body of /v1/chat/completions

The chat's token ids are what the engine caches for the original. Mirrors vLLM 0.32; what isn't sure raises
`UnknownPrompt`, as in `router.prompt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router.api_forms.fields import Body
from router.api_forms.messages import from_messages
from router.api_forms.responses import from_responses
from router.errors import UnknownPrompt

RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"
FORM_PATHS = frozenset({RESPONSES_PATH, MESSAGES_PATH, COUNT_TOKENS_PATH})

Render = Callable[[Mapping[str, Any]], object]
"""A chat body -> anything that is equal where the prompts are; raises UnknownPrompt where the template refuses."""

_EFFORTS = ("low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class FormRules:
    """What of the conversion depends on the model's chat template.

    `merge_inline_system`: system messages inside a Messages conversation go to its head, as the template allows them
    nowhere else. `disabled_thinking_effort`: the reasoning effort that stands for `thinking: {"type": "disabled"}`.
    """

    merge_inline_system: bool = False
    disabled_thinking_effort: str = "none"


def find_rules(render: Render) -> FormRules:
    """The rules of one model, found by rendering tiny chats, as vLLM finds them."""
    turns = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    inline = _rendered(render, {"messages": turns, "add_generation_prompt": False})
    hi = [{"role": "user", "content": "Hi"}]
    efforts = [_rendered(render, {"messages": hi, "reasoning_effort": effort}) for effort in ("none", *_EFFORTS)]
    return FormRules(
        merge_inline_system=inline is None,
        # A template that treats "none" as some other effort, or refuses it, can't be told to stop thinking.
        disabled_thinking_effort="low" if efforts[0] is None or efforts[0] in efforts[1:] else "none",
    )


def chat_body(path: str, body: Mapping[str, Any], rules: FormRules | None = None) -> Body:
    """The equivalent body of /v1/chat/completions; `path` is one of `FORM_PATHS`. Nothing of `body` is changed.

    Raises `UnknownPrompt`: "malformed" for what the engine will refuse, "tools" for kinds of tools left to the engine.
    """
    if path == RESPONSES_PATH:
        return from_responses(body)
    if path in FORM_PATHS:
        rules = rules or FormRules()
        return from_messages(body, rules.merge_inline_system, rules.disabled_thinking_effort)
    raise UnknownPrompt("path", path[:100])


def _rendered(render: Render, body: Mapping[str, Any]) -> object | None:
    try:
        return render(body)
    except UnknownPrompt:
        return None
