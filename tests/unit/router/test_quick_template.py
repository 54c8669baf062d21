"""minijinja takes over only where it says what jinja2 says; what it can't say alike goes to jinja2, each time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from router.chat_template import ChatTemplate
from router.errors import UnknownPrompt
from router.model_files import load_model_files
from router.prompt import PromptEncoder
from router.quick_template import QuickTemplate, prove_quick
from router.template_proof import chats

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_FIXTURES = Path(__file__).parents[2] / "fixtures" / "templates"
SOURCES = {
    "qwen3": load_model_files("builtin").templates["default"],
    **{path.stem: path.read_text("utf-8") for path in sorted(_FIXTURES.glob("*.jinja"))},
}
EACH = "{% for m in messages %}"


def proven(source: str) -> tuple[QuickTemplate | None, str]:
    template = ChatTemplate(source)
    return prove_quick(template, TOKENS, template.content_format)


def plain(template: ChatTemplate, context: dict[str, Any]) -> str | None:
    try:
        return template.render_plainly(context)
    except Exception:
        return None


@pytest.mark.parametrize("name", SOURCES)
def test_an_accepted_template_says_the_same_in_chats_that_the_proof_has_not_seen(name: str) -> None:
    template = ChatTemplate(SOURCES[name])
    quick, why = proven(template.source)
    assert quick is not None, why
    rendered = 0
    for context in chats(template.source, TOKENS, template.content_format, count=300, seed=2):
        if (text := quick.render(context)) is not None:
            assert text == plain(template, context)
            rendered += 1
    assert rendered > 100


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (EACH + "{{ m.content.upper() }}{% endfor %}", "the method upper"),
        (EACH + "{{ m.content | title }}{% endfor %}", "the filter title"),
        (EACH + "{{ m.content.splitlines() | length }}{% endfor %}", "the method splitlines"),
        (EACH + "{{ m.items }}{% endfor %}", "the attribute items"),
        (EACH + "{{ m.content.__class__ }}{% endfor %}", "the attribute __class__"),
        (EACH + "{{ '%s' % m.content }}{% endfor %}", "renders only"),
        (EACH + "{{ m.role | length / 3 }}{% endfor %}", "Div"),
        (EACH + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "TemplateSyntaxError|renders only"),
        (EACH + "{% for c in m.role %}{{ c if not loop.last }}{% endfor %}{% endfor %}", "differently"),
        ("{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}x{% endcall %}", "CallBlock|isn't known"),
        ("{% include 'x' %}", "Include"),
        ("{% set _ = messages.append(1) %}x", "the method append"),
        ("{{ messages[0].content", "TemplateSyntaxError"),
    ],
)
def test_a_template_that_may_mean_something_else_is_left_to_jinja2(source: str, why: str) -> None:
    try:
        quick, reason = proven(source)
    except Exception as error:
        quick, reason = None, type(error).__name__
    assert quick is None
    assert any(one in reason for one in why.split("|"))


@pytest.mark.parametrize(
    ("value", "alike"),
    [
        *(("text", True), (True, True), (None, True), (0, True), (-(2**63), True), (0.1, True), (-3.25, True)),
        *((2**63, False), (1.0, False), (-0.0, False), (1e22, False), (1e-7, False), (float("nan"), False)),
        *(("a\x1c", False), ("\ud800", False), ({"deep": [{"er": [1e22]}]}, False), ((1,), False)),
    ],
    ids=repr,
)
def test_values_that_print_differently_are_left_to_jinja2(value: Any, alike: bool) -> None:
    quick = QuickTemplate("{{ x }}{{ x | trim if x is string }}")
    text = quick.render({"x": value})
    if alike:
        assert text == ChatTemplate("{{ x }}{{ x | trim if x is string }}").render_plainly({"x": value})
    else:
        assert text is None


@pytest.mark.parametrize("test", ["iterable", "sequence", "mapping", "string", "none", "defined", "true", "boolean"])
@pytest.mark.parametrize("value", ["", "ab", True, None, 0, 0.5, [], ["a"], {}, {"a": 1}], ids=repr)
def test_the_tests_for_types_answer_alike_or_not_at_all(test: str, value: Any) -> None:
    source = f"{{{{ x is {test} }}}}{{{{ [x] is {test} }}}}"
    assert QuickTemplate(source).render({"x": value}) in (None, ChatTemplate(source).render_plainly({"x": value}))


def test_what_minijinja_refuses_jinja2_says_or_refuses_itself() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ 'x' if y is undefined else raise_exception('no y, please') }}")
    template.quick = QuickTemplate(template.source).render
    assert template.render([{"role": "user", "content": "a"}], {}) == "ax"
    with pytest.raises(UnknownPrompt, match="no y, please"):
        template.render([{"role": "user", "content": "a"}], {"y": 1})


def test_a_variable_that_hides_a_function_is_left_to_jinja2() -> None:
    assert QuickTemplate("{{ range(2) | join }}").render({"messages": []}) == "01"
    assert QuickTemplate("{{ range(2) | join }}").render({"messages": [], "range": "x"}) is None


def test_several_threads_render_at_once() -> None:
    quick = QuickTemplate(SOURCES["qwen3"])
    messages = [{"role": "user", "content": "x" * 5000}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": list(range(500))}}}] * 20
    context = {"messages": messages, "tools": tools, "add_generation_prompt": True}
    expected, wrong = ChatTemplate(SOURCES["qwen3"]).render_plainly(context), []

    def work() -> None:
        wrong.extend(1 for _ in range(30) if quick.render(context) != expected)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_the_encoder_settles_and_says_who_does_what() -> None:
    encoder = PromptEncoder.load("m", "builtin", fast=True)
    assert encoder.settle(240) == {"tokenizer": "fastokens", "default": "minijinja"}
    assert PromptEncoder.load("m", "builtin").settle(0) == {"tokenizer": "tokenizers"}
