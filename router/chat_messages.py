"""What vLLM makes of a chat's messages and tools before a template sees them.

Everything here mirrors the engine (vLLM 0.32-0.33: request models, message parsing; transformers: absent values), since
one byte of difference in the rendered text is one prefix not found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from router.errors import UnknownPrompt

ContentFormat = Literal["string", "openai"]
"""How a template wants `content`: one string, or OpenAI's list of parts."""

_TEXT_FIELD = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Claude Code's first system line. It differs from request to request, so the engine drops it.
_VOLATILE_LINE = "x-anthropic-billing-header"
_MEDIA = ("image", "audio", "video", "input_image", "input_audio", "file")


@dataclass(frozen=True, slots=True)
class Media:
    """A content part that isn't text, as templates see it; never in a client's body."""

    kind: str


def malformed(detail: str) -> UnknownPrompt:
    """The error for bodies that the engine will refuse, or that only it can judge."""
    return UnknownPrompt("malformed", detail)


def conversation(messages: Any, content_format: ContentFormat) -> list[dict[str, Any]]:
    """The messages as the template gets them. Raises `UnknownPrompt` ("malformed", "multimodal", "prompt_embeds")."""
    if not isinstance(messages, list) or not messages:
        raise malformed("messages must be a list with at least one message")
    plain = content_format == "string"
    return [_plain(m) if plain and _is_plain(m) else _message(m, content_format) for m in messages]


def _is_plain(message: Any) -> bool:
    """Nothing but a role and a text: nearly all messages of a long chat are, and `_message` gives the same for them."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(content := message.get("content")) is str
        and type(message.get("role")) is str
        and not content.startswith(_VOLATILE_LINE)
    )


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": message["content"]}


def as_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that know no developer role: its messages become one system message, with all that were one."""
    renamed = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in renamed if message["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    texts = [text for message in system if (text := _text(message["content"]))]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _message(message: Any, content_format: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise malformed("every message must be an object with a role")
    out: dict[str, Any] = {"role": role, "content": _content(_steady(message, role), role, content_format)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            out["tool_calls"] = _tool_calls(calls)
        _add_reasoning(out, message)
    elif role == "tool" and message.get("tool_call_id") is not None:
        out["tool_call_id"] = message["tool_call_id"]
    elif role == "developer" and message.get("tools") is not None:
        out["tools"] = message["tools"]
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            out[key] = message[key]
    return out


def _steady(message: Mapping[str, Any], role: str) -> Any:
    """The content without the line that changes with each request."""
    content = message.get("content")
    if role != "system":
        return content
    if isinstance(content, str):
        return _after_volatile_line(content) or ""
    if not isinstance(content, list):
        return content
    kept = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        rest = _after_volatile_line(text) if isinstance(text, str) else text
        if rest == text:
            kept.append(part)
        elif rest is not None:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _after_volatile_line(text: str) -> str | None:
    """None where nothing is left."""
    return text if not text.startswith(_VOLATILE_LINE) else text.partition("\n")[2] or None


def _add_reasoning(out: dict[str, Any], message: Mapping[str, Any]) -> None:
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        out.update(reasoning=reasoning, reasoning_content=reasoning, thinking=reasoning)


def _content(content: Any, role: str, content_format: ContentFormat) -> str | list[dict[str, str]]:
    if isinstance(content, str) and (content_format == "string" or role == "tool"):
        return content
    if content is None:
        content = []
    elif isinstance(content, str):
        content = [content]
    elif not isinstance(content, list):
        raise malformed("content must be a string or a list of parts")
    parts = [part for raw in content if (part := _part(raw)) is not None]
    # Tool results are flattened for every template, unless they refer to tools.
    if content_format == "string" or (role == "tool" and all(p["type"] == "text" for p in parts)):
        texts = [p.get("text", p.get("name", "")) for p in parts]
        # Empty parts leave no line of their own, save where the parts were wrapped before they were joined.
        return "\n".join(t for t in texts if t or content_format == "openai")
    return parts


def _part(part: Any) -> dict[str, str] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Media):
        return {"type": part.kind}
    if not isinstance(part, dict):
        raise malformed("a content part must be a string or an object")
    kind = part.get("type")
    if kind == "prompt_embeds" or (kind is None and "prompt_embeds" in part):
        raise UnknownPrompt("prompt_embeds")
    if media_kind(part):
        raise UnknownPrompt("multimodal")
    if kind == "tool_reference":
        return {"type": "tool_reference", "name": _string(part.get("name"), "name of a tool reference")}
    field = _TEXT_FIELD.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise malformed("a content part of an unknown type")
    if part.get(field) is None and kind in ("text", "refusal"):
        return None
    return {"type": "text", "text": _string(part.get(field), f"{field} of a content part")}


def media_kind(part: Any) -> str:
    """What a content part is: image, audio, video or file; empty for text."""
    if not isinstance(part, Mapping):
        return ""
    kind = part.get("type")
    names = part if kind is None or part.get("uuid") is not None else (kind,)
    found = (name for name in names if isinstance(name, str) and name.startswith(_MEDIA))
    return next(found, "").removeprefix("input_").partition("_")[0]


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise malformed("tool_calls must be a list")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    """Keys in the order of OpenAI's types, `arguments` before `name`: some templates print the whole object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise malformed("a tool call must be an object of type function")
    out: dict[str, Any] = {} if call.get("id") is None else {"id": call["id"]}
    name = _string(function.get("name"), "name of a called function")
    out["function"] = {"arguments": _arguments(function.get("arguments")), "name": name}
    out["type"] = "function"
    return out


def _arguments(arguments: Any) -> dict[str, Any]:
    """Templates want a mapping. History that isn't one becomes {} rather than spoiling every later turn."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
        except (ValueError, RecursionError) as e:
            raise malformed(f"tool call arguments: {type(e).__name__}") from e
    return arguments if isinstance(arguments, dict) else {}


def tool_dicts(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as vLLM's request model dumps them: known fields in its order, absent ones null, unknown ones gone."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise malformed("tools must be a list with at least one tool")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise malformed("a tool must be an object of type function")
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise malformed("a tool's description must be a string and its parameters an object")
    dumped: dict[str, Any] = {
        "name": _string(function.get("name"), "name of a tool"),
        "description": description,
        "parameters": parameters,
    }
    deferred, own = tool.get("defer_loading"), function.get("defer_loading")
    optional = {"strict": function.get("strict"), "defer_loading": deferred if own is None else own}
    dumped |= {key: value for key, value in optional.items() if value is not None}
    out = {"type": "function", "function": dumped}
    return out if deferred is None else out | {"defer_loading": deferred}


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise malformed(f"the {what} must be a string")
    return value
