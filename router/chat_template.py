"""Chat templates: the sandbox that transformers renders them in, and which form of content one wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.chat_messages import ContentFormat
from router.errors import UnknownPrompt

# Marks where the last message ends. The trailing space tells whether the template strips what it prints.
_END_MARK = "@whohas-end-of-final-message@ "


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; for the prompt it is plain text."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # declared as a mutable set, only ever read

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
FILTERS = {"tojson": _tojson}
GLOBALS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
_environment.filters.update(FILTERS)
_environment.globals.update(GLOBALS)
GLOBAL_NAMES = frozenset(_environment.globals)


def parse_template(source: str) -> nodes.Template:
    """Raises jinja2's `TemplateSyntaxError`."""
    return _environment.parse(source)


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """The `vllm serve` flags that change how an engine renders chats; they must be the same here as there.

    `chat_template` is Jinja source. Templates sent by clients run in this process, so they are left to the engine
    unless `trust_request_chat_template` (which vLLM, too, wants before it runs them).
    """

    chat_template: str = ""
    content_format: Literal["auto", "string", "openai"] = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    trust_request_chat_template: bool = False


class ChatTemplate:
    """One compiled template.

    `content_format` tells how it wants message contents, `knows_developers` whether it has a role of that name.
    `quick`, where set, gives the same text as jinja2 in less time, or None where jinja2 is to be asked.
    """

    def __init__(self, source: str) -> None:
        """Raises jinja2's `TemplateError` when the source is no template."""
        self.source = source
        self._template = _environment.from_string(source)
        self.content_format: ContentFormat = content_format(source)
        self.knows_developers = '"developer"' in source or "'developer'" in source
        self.quick: Callable[[Mapping[str, Any]], str | None] | None = None

    def render(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], *, continue_final_message: bool = False
    ) -> str:
        """The prompt text; with `continue_final_message` it stops where the last message does.

        Raises `UnknownPrompt("template")` for whatever the template raises: the engine will say it to the client.
        """
        try:
            if continue_final_message:
                return self._render_open_ended(messages, variables)
            return self._text({**variables, "messages": messages})
        except Exception as e:  # templates are foreign code: anything may come out of them
            raise UnknownPrompt("template", f"{type(e).__name__}: {e}"[:200]) from e

    def render_plainly(self, context: Mapping[str, Any]) -> str:
        """By jinja2, the reference. Raises whatever the template raises."""
        return self._template.render(context)

    def _text(self, context: Mapping[str, Any]) -> str:
        text = self.quick(context) if self.quick is not None else None
        return self._template.render(context) if text is None else text

    def _render_open_ended(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        if variables.get("add_generation_prompt"):
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        if "content" not in self.source:
            raise TemplateError("the template doesn't read content, so there is nothing to continue")
        last, text = _mark_end(messages[-1])
        rendered = self._text({**variables, "messages": [*messages[:-1], last]})
        mark = _END_MARK.rstrip()
        at = rendered.rfind(mark)
        if at < 0 or text.strip() not in rendered:
            raise TemplateError("the template alters the final message, so it can't be continued")
        return rendered[:at] if rendered.startswith(_END_MARK, at) else rendered[:at].rstrip()


def _mark_end(message: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A copy of the message with the mark after its last text, and that text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _END_MARK}, content
    for i in reversed(range(len(content))):
        text = content[i].get("text")
        if text is not None:
            marked = {**content[i], "text": text + _END_MARK}
            return {**message, "content": [*content[:i], marked, *content[i + 1 :]]}, text
    raise TemplateError("the final message has no text to continue")


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """A compiled template, kept for the next request. Raises `UnknownPrompt("template")` when it has no sense."""
    try:
        return ChatTemplate(source)
    except Exception as e:  # a syntax error, or nesting beyond what the compiler can take
        raise UnknownPrompt("template", f"{type(e).__name__}: {e}"[:200]) from e


def content_format(source: str) -> ContentFormat:
    """ "openai" where the template loops over a message's content, else "string": vLLM's "auto" rule.

    Followed are loops over `messages` and over names assigned from it through filters, tests and slices.
    """
    try:
        tree = parse_template(source)
        lists = _aliases(tree, "messages")
        loops = [(_base(loop.iter), loop.target) for loop in tree.find_all(nodes.For)]
        messages = {_name(target) for base, target in loops if isinstance(base, nodes.Name) and base.name in lists}
        return "openai" if any(_is_content(base, messages) for base, _ in loops) else "string"
    except Exception:  # what can't be analysed gets plain strings
        return "string"


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    known, todo = {name}, [name]
    while todo:
        current = todo.pop()
        for target in _assigned_from(tree, current):
            if target not in known:
                known.add(target)
                todo.append(target)
    return known


def _assigned_from(tree: nodes.Template, name: str) -> Iterator[str]:
    for assign in tree.find_all(nodes.Assign):
        base = _base(assign.node)
        if isinstance(base, nodes.Name) and base.name == name:
            yield _name(assign.target)


def _base(node: nodes.Node | None) -> nodes.Node | None:
    """The expression under any filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise TypeError("unpacked or namespaced messages are not followed")
    return target.name


def _is_content(node: nodes.Node | None, messages: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        key: Any = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return False
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name in messages
