"""Chats to try a renderer with: made of the very words, keys and variables that a template looks for.

Deterministic. Realistic conversations and wild ones, with values that renderers tend to print differently.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import meta, nodes

from router.chat_messages import ContentFormat, conversation, tool_dicts
from router.chat_template import GLOBAL_NAMES, parse_template

_TEXTS = (
    *("", " ", "\n", "\n\n", "\t", "  x", "a", "Z_9", "é", "e\u0301", "中文", "🙂", "\u00a0", "\u2028", "\x85", "\r\n"),
    *("\x0b", "\u200b", "\ufeff", "<b>&amp;'\"</b>", "{{ x }}", "{% if %}", "\\n", "\x00", "ß", "don't", "{}", "[1]"),
    *("</s>", "true", "None", "%s", "#", "1"),
)
_SCALARS = (True, False, None, 0, 1, -7, 2**40, 0.1, -3.25)
_KEYS = ("type", "description", "properties", "required", "items", "enum", "default", "a", "b", "keys", "get", "x y")
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_ROLES = ("system", "user", "assistant", "tool", "developer")
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
_MOST_LETTERS = 60


def chats(
    source: str, special_tokens: Mapping[str, str], content_format: ContentFormat, *, count: int = 400, seed: int = 13
) -> Iterator[dict[str, Any]]:
    """Contexts as a template gets them: messages and variables. `source` is the template's."""
    for body in bodies(source, count=count, seed=seed):
        messages = conversation(body.pop("messages"), content_format)
        variables = {"documents": None, **body.pop("chat_template_kwargs"), **body}
        yield {**special_tokens, **variables, "tools": tool_dicts(body.get("tools")), "messages": messages}


def bodies(source: str, *, count: int, seed: int, words: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The same as bodies of requests. `words`: what texts are to be made of besides the template's own."""
    draw = _Draw(random.Random(seed), parse_template(source), words)
    for _ in range(count):
        yield {"messages": draw.messages(), **draw.fields()}


class _Draw:
    """Values at random, from what the template mentions."""

    def __init__(self, rng: random.Random, tree: nodes.Template, words: Sequence[str]) -> None:
        self._rng = rng
        constants = [str(node.value) for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        printed = [node.data.strip() for node in tree.find_all(nodes.TemplateData)]
        self._words = sorted({word for word in (*constants, *printed, *words) if 0 < len(word) <= _MOST_LETTERS})
        attributes = [node.attr for node in tree.find_all(nodes.Getattr)]
        self._keys = [*_KEYS, *sorted({key for key in (*constants, *attributes) if key.isidentifier()})]
        self._variables = sorted(meta.find_undeclared_variables(tree) - _GIVEN - GLOBAL_NAMES)

    def _often(self, share: float) -> bool:
        return self._rng.random() < share

    def text(self, most: int = 6) -> str:
        draw = self._rng
        words: Sequence[str] = self._words or _TEXTS
        return "".join(draw.choice(words if self._often(0.3) else _TEXTS) for _ in range(draw.randint(0, most)))

    def value(self, depth: int = 2) -> Any:
        draw = self._rng
        if depth and self._often(0.3):
            return {draw.choice(self._keys): self.value(depth - 1) for _ in range(draw.randint(0, 3))}
        if depth and self._often(0.2):
            return [self.value(depth - 1) for _ in range(draw.randint(0, 3))]
        return draw.choice(_SCALARS) if self._often(0.5) else self.text(2)

    def messages(self) -> list[dict[str, Any]]:
        if self._often(0.3):
            return [self._message(self._rng.choice(_ROLES)) for _ in range(self._rng.randint(1, 6))]
        found = [self._message("system")] if self._often(0.5) else []
        for _ in range(self._rng.randint(1, 4)):
            found.append(self._message("user"))
            for _ in range(self._rng.randint(0, 2) if self._often(0.5) else 0):
                found.append(self._message("assistant", calls=True))
                found += [self._message("tool") for _ in range(self._rng.randint(1, 2))]
            found.append(self._message("assistant"))
        return found[:-1] if self._often(0.7) else found

    def _message(self, role: str, *, calls: bool = False) -> dict[str, Any]:
        message: dict[str, Any] = {"role": role, "content": self._content()}
        if role == "assistant" and (calls or self._often(0.1)):
            message["tool_calls"] = [self._call() for _ in range(self._rng.randint(1, 3))]
            if self._often(0.5):
                message["content"] = None
        if role == "assistant" and self._often(0.2):
            message["reasoning"] = self.text()
        if role == "tool" and self._often(0.7):
            message["tool_call_id"] = self.text(2)
        if self._often(0.1):
            message["name"] = self.text(2)
        return message

    def _content(self) -> Any:
        if self._often(0.85):
            return self.text()
        return [{"type": "text", "text": self.text()} for _ in range(self._rng.randint(0, 3))]

    def _call(self) -> dict[str, Any]:
        arguments = {self._rng.choice(self._keys): self.value() for _ in range(self._rng.randint(0, 4))}
        function = {"name": self.text(2), "arguments": json.dumps(arguments)}
        return {"type": "function", "function": function, **({"id": self.text(2)} if self._often(0.95) else {})}

    def _tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.text(2)}
        if self._often(0.8):
            function["description"] = self.text(3)
        if self._often(0.9):
            function["parameters"] = self._schema() if self._often(0.7) else {"type": "object", "x": self.value()}
        return {"type": "function", "function": function}

    def _schema(self, depth: int = 2) -> dict[str, Any]:
        draw = self._rng
        found: dict[str, Any] = {"type": draw.choice(_TYPES) if self._often(0.8) else draw.sample(_TYPES, 2)}
        if self._often(0.6):
            found["description"] = self.text(3)
        if depth and self._often(0.7):
            names = [draw.choice(self._keys) for _ in range(draw.randint(0, 3))]
            found["properties"] = {name: self._schema(depth - 1) for name in names}
            found["required"] = names[:1]
        if depth and self._often(0.3):
            found["items"] = self._schema(depth - 1)
        if self._often(0.3):
            found["enum"] = [self.value(0) for _ in range(draw.randint(0, 3))]
        for _ in range(draw.randint(0, 2)):
            found[draw.choice(self._keys)] = self.value(1)
        if self._often(0.1):  # nothing keeps clients from sending nonsense
            found[draw.choice(list(found))] = self.value(1)
        return found

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {"add_generation_prompt": self._often(0.7)}
        if self._often(0.4):
            found["tools"] = [self._tool() for _ in range(self._rng.randint(1, 3))]
        if self._often(0.1):
            found["documents"] = [{"title": self.text(2), "text": self.text(3)} for _ in range(self._rng.randint(0, 2))]
        values = (True, False, None, "", 0, 3)
        found["chat_template_kwargs"] = {
            name: self.text(2) if self._often(0.2) else self._rng.choice(values)
            for name in self._variables
            if self._often(0.4)
        }
        return found
