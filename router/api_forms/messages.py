"""A body of /v1/messages or of its count_tokens as a chat: system prompt and blocks become messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from router.api_forms.fields import SAME_IN_BOTH, Body, mapping, picked, string
from router.chat_messages import malformed
from router.errors import UnknownPrompt

# Claude Code's first system block, new with every request: vLLM leaves it out of the prompt.
_VOLATILE = "x-anthropic-billing-header"
# Where an image stands is all that is asked of it (see `router.media`).
_IMAGE: Body = {"type": "image_url", "image_url": {"url": ""}}


def from_messages(body: Mapping[str, Any], merge_inline_system: bool, disabled_thinking_effort: str) -> Body:
    """The equivalent chat body; the last two as in `FormRules`. Raises `UnknownPrompt`."""
    turns = body.get("messages")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise malformed("messages must be a list of objects")
    chat = picked(body, (*SAME_IN_BOTH, "max_tokens", "temperature", "top_p", "top_k"))
    if body.get("max_tokens") is not None:
        chat["max_completion_tokens"] = body["max_tokens"]
    if body.get("stop_sequences") is not None:
        chat["stop"] = body["stop_sequences"]
    effort = mapping(body, "output_config").get("effort")
    if mapping(body, "thinking").get("type") == "disabled":
        effort = disabled_thinking_effort
    if effort is not None:
        chat["reasoning_effort"] = effort
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chat["messages"] = _messages(body.get("system"), turns, merge_inline_system)
    return chat | _messages_tools(body)


def _messages(system: Any, turns: list[Body], merge_inline_system: bool) -> list[Body]:
    inline = [turn for turn in turns if turn.get("role") == "system"]
    # A system prompt that is one string is taken as it is, volatile or not.
    leading = [system] if isinstance(system, str) and system else _system_texts(system)
    if merge_inline_system:
        leading += [text for turn in inline for text in _system_texts(turn.get("content"))]
    messages: list[Body] = [{"role": "system", "content": "".join(leading)}] if leading else []
    for turn in turns:
        role, content = turn.get("role"), turn.get("content")
        if role == "system":
            if not merge_inline_system and (texts := _system_texts(content)):
                messages.append({"role": "system", "content": "".join(texts)})
        elif role not in ("user", "assistant"):
            raise malformed("a message's role must be user, assistant or system")
        elif isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            message = _from_blocks(role, _blocks(content), messages)
            if role == "assistant" or "content" in message:
                messages.append(message)
    return messages


def _system_texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        texts = [content] if content else []
    else:
        blocks = _blocks(content)
        if any(block.get("type") in ("tool_addition", "tool_removal") for block in blocks):
            raise UnknownPrompt("tools", "changes of the tools are left to the engine")
        texts = [string(b["text"], "text of a block") for b in blocks if b.get("type") == "text" and b.get("text")]
    return [text for text in texts if not text.startswith(_VOLATILE)]


def _blocks(content: Any) -> list[Body]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise malformed("content must be a string or a list of blocks")
    return content


def _from_blocks(role: str, blocks: Iterable[Body], before: list[Body]) -> Body:
    """One message of the blocks. Tool results are messages of their own, added to those `before` it."""
    parts: list[Body] = []
    calls: list[Body] = []
    reasoning: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append(_IMAGE)
        elif kind == "thinking":
            if block.get("thinking") is not None:
                reasoning.append(string(block["thinking"], "text of a thinking block"))
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            before += _tool_results(block)
        elif kind == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise malformed("a content block of an unknown type")
    message: Body = {"role": role}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 and parts[0] is not _IMAGE else parts
    return message


def _tool_results(block: Mapping[str, Any]) -> list[Body]:
    content = block.get("content")
    call = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    if content is None or isinstance(content, str):
        return [{**call, "content": content or ""}]
    parts = _blocks(content)
    texts = [string(part.get("text", ""), "text of a tool result") for part in parts if part.get("type") == "text"]
    results: list[Body] = [{**call, "content": "\n".join(texts)}]
    if images := [_IMAGE for part in parts if part.get("type") == "image"]:
        results.append({"role": "user", "content": images})
    named = [(p.get("tool_name") or p.get("name")) for p in parts if p.get("type") == "tool_reference"]
    references = [{"type": "tool_reference", "name": name} for name in named if name]
    return [*results, {**call, "content": references}] if references else results


def _messages_tools(body: Mapping[str, Any]) -> Body:
    tools = [_messages_tool(tool) for tool in body.get("tools") or ()]
    if not tools:
        return {}
    choice = mapping(body, "tool_choice")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    chosen = {"any": "required", "none": "none", "tool": named}.get(choice.get("type", ""), "auto")
    return {"tools": tools, "tool_choice": chosen}


def _messages_tool(tool: Any) -> Body:
    if not isinstance(tool, dict) or not isinstance(schema := tool.get("input_schema"), dict):
        raise malformed("a tool must be an object with an input_schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}
