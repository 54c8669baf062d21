"""A body of /v1/responses as a chat: instructions and items become messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.api_forms.fields import SAME_IN_BOTH, Body, mapping, picked, string
from router.chat_messages import malformed
from router.errors import UnknownPrompt

_SAME_HERE = (
    *("session_id", "priority", "stop", "ignore_eos", "temperature", "top_p", "seed", "metadata"),
    *("parallel_tool_calls", "include_stop_str_in_output"),
)


def from_responses(body: Mapping[str, Any]) -> Body:
    """The equivalent chat body. Raises `UnknownPrompt`."""
    items = body.get("input")
    if not isinstance(items, str | list):
        raise malformed("input must be a string or a list of items")
    chat = picked(body, (*SAME_IN_BOTH, *_SAME_HERE))
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    reasoning = mapping(body, "reasoning")
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    if body.get("truncation") not in (None, "disabled"):
        chat["truncate_prompt_tokens"] = -1
    if "message.output_text.logprobs" in (body.get("include") or []):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    if isinstance(items, list) and items and _is_partial(items[-1]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat["messages"] = _responses_messages(body.get("instructions"), items)
    return chat | _responses_tools(body)


def _responses_messages(instructions: Any, items: str | list[Any]) -> list[Body]:
    messages: list[Body] = []
    if instructions:
        messages.append({"role": "system", "content": string(instructions, "instructions")})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    history: list[Body] = []  # what follows the instructions; they are never merged into
    for item in items:
        _add_item(item, history)
    return messages + history


def _add_item(item: Any, messages: list[Body]) -> None:
    """Adds one input item, or merges it into the assistant's message that it belongs to."""
    if not isinstance(item, dict):
        raise malformed("every input item must be an object")
    kind, last = item.get("type"), messages[-1] if messages else {}
    open_turn = last if last.get("role") == "assistant" else None
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if item.get("namespace"):
            raise UnknownPrompt("tools", "namespaces of tools are left to the engine")
        if open_turn is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            open_turn["tool_calls"] = [*(open_turn.get("tool_calls") or ()), call]
    elif kind == "function_call_output":
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        _say(messages, open_turn, "reasoning", _reasoning_text(item))
    elif item.get("role") == "assistant" and (said := _assistant_text(item.get("content"))) is not None:
        _say(messages, open_turn, "content", said)
    elif "role" in item:
        messages.append(dict(item))
    elif kind in ("custom_tool_call", "custom_tool_call_output"):
        raise UnknownPrompt("tools", "custom tools are left to the engine")
    else:
        raise malformed("an input item of an unsupported type")


def _say(messages: list[Body], open_turn: Body | None, field: str, text: str) -> None:
    if open_turn is not None and open_turn.get(field) is None:
        open_turn[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _reasoning_text(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise malformed("encrypted reasoning is not supported")
    parts = item.get("content") or item.get("summary") or [{"text": ""}]
    return string(parts[0].get("text") if isinstance(parts[0], dict) else None, "text of a reasoning item")


def _assistant_text(content: Any) -> str | None:
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")  # vLLM reads the first part alone
    return content if isinstance(content, str) else None


def _is_partial(item: Any) -> bool:
    if not isinstance(item, dict) or item.get("type", "message") not in ("message", "reasoning"):
        return False
    return item.get("status") in ("in_progress", "incomplete")


def _responses_tools(body: Mapping[str, Any]) -> Body:
    tools = []
    for tool in body.get("tools") or ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in ("custom", "namespace"):
            raise UnknownPrompt("tools", f"{kind} tools are left to the engine")
        if kind == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            tools.append({"type": "function", "function": function})
    choice = body.get("tool_choice")
    if not tools:
        if choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function"):
            raise malformed("tool_choice asks for a function, but there is none among the tools")
        return {}
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return {"tools": tools} | ({} if choice is None else {"tool_choice": choice})
