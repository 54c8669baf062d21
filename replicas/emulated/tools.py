"""Tool calls on demand: a call of one of the request's tools instead of text, with the least arguments that fit.

A call is asked for by `tool_choice` ("required", or a named function), or by a user's last message that starts with
`TOOL_TRIGGER`, which a tool's name may follow: "/call get_weather". What is generated is the text that templates of
the Hermes kind (Qwen's among them) make of such a call, so the next turn finds it in the cache.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from replicas.emulated.errors import ApiError
from replicas.emulated.text import Tokenizer

TOOL_TRIGGER = "/call"

_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class AskedCall:
    """`named`: by its name in `tool_choice`, after which vLLM ends with "stop" rather than "tool_calls"."""

    name: str
    schema: Mapping[str, Any]
    named: bool = False


def asked_call(body: Mapping[str, Any]) -> AskedCall | None:
    """The call that a chat body asks for. Raises ApiError 400 for a `tool_choice` that can't be."""
    tools = _tools(body)
    choice = body.get("tool_choice")
    if choice is None or choice in ("auto", "none"):
        wanted = _triggered(body) if choice != "none" else None
        if wanted is None or not tools:
            return None
        name = wanted if wanted in tools else next(iter(tools))
        return AskedCall(name, tools[name])
    if not tools:
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice == "required":
        name, schema = next(iter(tools.items()))
        return AskedCall(name, schema)
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict):
        raise ApiError(400, 'tool_choice must be "none", "auto", "required" or name a function', "tool_choice")
    if function.get("name") not in tools:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise ApiError(400, message, "tool_choice")
    return AskedCall(function["name"], tools[function["name"]], named=True)


def _tools(body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Parameter schemas by name; what isn't a tool is left for the prompt's encoder to refuse."""
    found: dict[str, Mapping[str, Any]] = {}
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            found.setdefault(name, parameters if isinstance(parameters, dict) else {})
    return found


def _triggered(body: Mapping[str, Any]) -> str | None:
    """The word after the trigger, "" without one; None where the last message isn't a trigger."""
    last = body["messages"][-1]
    content = last.get("content") if isinstance(last, dict) and last.get("role") == "user" else None
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    words = content.split(maxsplit=2) if isinstance(content, str) else []
    if words[:1] != [TOOL_TRIGGER]:
        return None
    return words[1] if len(words) > 1 else ""


class ToolCall(Iterator[int]):
    """The ids of one call; `texts[k]` is the text of the k-th id that was taken.

    <tool_call> {"name": "...", "arguments": {...}} </tool_call>
                                  ^-- arguments --^
    """

    def __init__(self, tokenizer: Tokenizer, asked: AskedCall) -> None:
        self.id = f"chatcmpl-tool-{uuid.uuid4().hex}"
        self.name = asked.name
        self.arguments = json.dumps(least_value(asked.schema), ensure_ascii=False)
        self.texts: list[str] = []
        head = f'<tool_call>\n{{"name": {json.dumps(asked.name, ensure_ascii=False)}, "arguments": '
        self._start, self._stop = len(head), len(head) + len(self.arguments)
        ids = tokenizer.encode_text(f"{head}{self.arguments}}}\n</tool_call>")
        # A character may take several tokens: it shows with the last of them.
        cuts = [tokenizer.decode(ids[:count]).rstrip("\ufffd") for count in range(len(ids) + 1)]
        self._tokens = [(token, cuts[i + 1][len(cuts[i]) :]) for i, token in enumerate(ids)]
        self._ends = [len(cut) for cut in cuts]

    def __len__(self) -> int:
        return len(self._tokens)

    def __next__(self) -> int:
        token, text = self._tokens[len(self.texts)]
        self.texts.append(text)
        return token

    def is_named_by(self, position: int) -> bool:
        """Whether the function's name is complete after `position` tokens."""
        return self._ends[position] >= self._start

    def arguments_of(self, position: int) -> str:
        """What the `position`-th token, counted from 1, adds to the arguments."""
        return self.arguments[self._shown(position - 1) : self._shown(position)]

    def arguments_until(self, position: int) -> str:
        return self.arguments[: self._shown(position)]

    def _shown(self, position: int) -> int:
        return max(0, min(self._ends[position], self._stop) - self._start)


def least_value(schema: Any) -> Any:
    """A JSON value, as small as can be, that fits a JSON schema; patterns and formats of strings aren't looked at."""
    return _least(schema, schema, 0)


def _least(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None if depth else {}
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    if isinstance(target := schema.get("$ref"), str):
        return _least(_resolved(target, root), root, depth + 1)
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(several), list) and schema[several]:
            return _least(schema[several][0], root, depth + 1)
    kind = schema.get("type", "object" if depth == 0 or "properties" in schema else "string")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), "null")
    match kind:
        case "object":
            properties = schema.get("properties") or {}
            return {name: _least(properties.get(name, {}), root, depth + 1) for name in schema.get("required") or ()}
        case "array":
            return [_least(schema.get("items", {}), root, depth + 1)] * int(schema.get("minItems") or 0)
        case "string":
            return "x" * int(schema.get("minLength") or 0)
        case "integer" | "number":
            return _least_number(schema)
        case "boolean":
            return False
        case _:
            return None


def _least_number(schema: Mapping[str, Any]) -> float:
    """0 where it fits, else the bound that is nearest to it; a whole one wherever there is one."""
    low = schema.get("minimum", -math.inf)
    if isinstance(above := schema.get("exclusiveMinimum"), int | float) and not isinstance(above, bool):
        low = max(low, math.floor(above) + 1)
    high = schema.get("maximum", math.inf)
    if isinstance(below := schema.get("exclusiveMaximum"), int | float) and not isinstance(below, bool):
        high = min(high, math.ceil(below) - 1)
    value: float = max(low, min(0, high))
    step = schema.get("multipleOf")
    return math.ceil(value / step) * step if step and value else value


def _resolved(target: str, root: Any) -> Any:
    """What a local reference such as "#/$defs/Point" stands for."""
    found = root
    for name in target.removeprefix("#").strip("/").split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found
