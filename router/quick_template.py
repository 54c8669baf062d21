"""minijinja in place of jinja2, for chat templates with which both give the same text.

    rule    the template uses only what means the same in both        from its syntax tree
    proof   some hundred chats, made of the template's own words      once, at start
    guard   numbers and white space that the two treat differently    for each request

Whatever doesn't pass, or raises, is rendered by jinja2, the reference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from minijinja import Environment

from router.chat_messages import ContentFormat
from router.chat_template import FILTERS, GLOBAL_NAMES, GLOBALS, ChatTemplate, parse_template
from router.template_proof import chats

_FILTERS = {
    *("tojson", "trim", "length", "count", "first", "last", "list", "join", "default", "d", "string", "items"),
    *("replace", "reverse", "selectattr", "rejectattr", "map"),
}
_TESTS = {
    *("defined", "undefined", "none", "string", "mapping", "boolean", "true", "false", "number", "integer", "iterable"),
    *("sequence", "equalto", "eq", "ne", "in", "odd", "even"),
}
_PYTHONS_TESTS = {
    "iterable": lambda value: _is_a(value, "__iter__"),
    "sequence": lambda value: _is_a(value, "__len__", "__getitem__"),
}
_METHODS = {
    *("strip", "lstrip", "rstrip", "split", "rsplit", "startswith", "endswith", "replace", "join", "count", "find"),
    *("items", "keys", "values", "get"),
}
_FUNCTIONS = {"namespace", "range", *GLOBALS}
_REFUSED = (
    *(nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.CallBlock, nodes.FilterBlock),
    *(nodes.Div, nodes.Pow, nodes.ExprStmt),
)
# A key of this name is hidden by the method in jinja2, and the other way round in minijinja.
_METHODS_OF_DICTS = {name for name in dir(dict) if not name.startswith("_")}
_SPLIT_AT_SPACE = {"strip", "lstrip", "rstrip", "split", "rsplit", "trim"}
_SPACE_IN_PYTHON_ONLY = ("\x1c", "\x1d", "\x1e", "\x1f")
_REPLACED = "\ufffd"  # what minijinja prints for a lone surrogate, which no tokenizer takes
_MAX_INT = 2**63
_LEAST = 40
"""So many equal texts make a proof, if they are more than half of all."""


class QuickTemplate:
    """`source` in minijinja. Safe to use from several threads: each has an environment of its own, as minijinja holds a
    lock while it calls back into Python."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._trims = any(_looks_for_space(node) for node in parse_template(source).find_all(nodes.Expr))
        self._local = threading.local()

    def render(self, context: Mapping[str, Any]) -> str | None:
        """The text, or None where jinja2 must say what it is."""
        if not GLOBAL_NAMES.isdisjoint(context) or not all(map(self._prints_alike, context.values())):
            return None
        try:
            text: str = self._environment().render_template("chat", **context)
        except Exception:
            return None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's own: not to be told apart by its class
                raise
            del self._local.environment
            return None
        return None if _REPLACED in text else text

    def _environment(self) -> Environment:
        found: Environment | None = getattr(self._local, "environment", None)
        if found is None:
            found = self._local.environment = Environment(
                templates={"chat": self._source},
                filters=FILTERS,
                globals=GLOBALS,
                tests=_PYTHONS_TESTS,
                trim_blocks=True,
                lstrip_blocks=True,
                debug=False,
                auto_escape_callback=lambda name: None,
            )
        return found

    def _prints_alike(self, value: Any) -> bool:
        kind = type(value)
        if kind is str:
            return not self._trims or not any(space in value for space in _SPACE_IN_PYTHON_ONLY)
        if kind is dict or kind is list:
            values = value.values() if kind is dict else value
            if self._trims:
                return all(map(self._prints_alike, values))
            return all(type(one) is str or self._prints_alike(one) for one in values)
        if kind is int:
            return bool(-_MAX_INT <= value < _MAX_INT)
        if kind is float:
            return bool(1e-4 <= abs(value) < 1e16 and not value.is_integer())
        return value is None or kind is bool


def prove_quick(
    template: ChatTemplate, special_tokens: Mapping[str, str], content_format: ContentFormat
) -> tuple[QuickTemplate | None, str]:
    """The template in minijinja, or None and why not. Takes some tenths of a second."""
    if foreign := _foreign(parse_template(template.source)):
        return None, f"the template uses {foreign}"
    quick, rendered, refused = QuickTemplate(template.source), 0, 0
    for context in chats(template.source, special_tokens, content_format):
        if (expected := _outcome(template.render_plainly, context)) is None:
            continue  # the engine will refuse such a body: whatever minijinja makes of it, it has no prompt
        text = quick.render(context)
        # The second look is for templates that print the time.
        if text not in (None, expected, _outcome(template.render_plainly, context)):
            return None, "minijinja renders a chat differently"
        rendered, refused = rendered + (text is not None), refused + (text is None)
    if rendered < max(_LEAST, refused):
        return None, f"minijinja renders only {rendered} of {rendered + refused} chats"
    return quick, ""


def _is_a(value: Any, *methods: str) -> bool:
    """jinja2's tests, which minijinja answers differently. None may also stand for a value that isn't defined."""
    if value is None:
        raise TypeError("not to be told apart from an undefined value")
    return all(hasattr(value, method) for method in methods)


def _outcome(render: Callable[[Mapping[str, Any]], str], context: Mapping[str, Any]) -> str | None:
    try:
        return render(context)
    except Exception:  # templates are foreign code
        return None


def _foreign(tree: nodes.Template) -> str:
    """What of the template may mean something else to minijinja; empty where nothing does."""
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    return next(_foreign_parts(tree, macros, called), "")


def _foreign_parts(tree: nodes.Template, macros: set[str], called: set[int]) -> Iterator[str]:
    for node in tree.find_all(nodes.Node):
        if isinstance(node, _REFUSED):
            yield type(node).__name__
        elif isinstance(node, nodes.Filter) and node.name not in _FILTERS:
            yield f"the filter {node.name}"
        elif isinstance(node, nodes.Test) and node.name not in _TESTS:
            yield f"the test {node.name}"
        elif isinstance(node, nodes.Call):
            if isinstance(node.node, nodes.Getattr):
                if node.node.attr not in _METHODS:
                    yield f"the method {node.node.attr}"
            elif not isinstance(node.node, nodes.Name) or node.node.name not in _FUNCTIONS | macros:
                yield "a function that isn't known"
        elif isinstance(node, nodes.Getattr) and (
            node.attr.startswith("_") or (node.attr in _METHODS_OF_DICTS and id(node) not in called)
        ):
            yield f"the attribute {node.attr}"


def _looks_for_space(node: nodes.Expr) -> bool:
    """Strips or splits at white space, which is not quite the same in Python and in Rust."""
    if isinstance(node, nodes.Filter):
        return node.name in _SPLIT_AT_SPACE
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and not node.args:
        return node.node.attr in _SPLIT_AT_SPACE
    return False
