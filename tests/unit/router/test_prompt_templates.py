"""Which form of content a template wants, and what the sandbox offers it."""

from __future__ import annotations

import pytest

from router.chat_messages import conversation
from router.chat_template import ChatTemplate, content_format
from router.errors import UnknownPrompt

PARTS = "{% for p in m['content'] %}{{ p.text }};{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}" + PARTS + "{% endfor %}", "openai"),
        ("{% for m in messages[1:] %}{% for p in m.content | list %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% set rest = messages[1:] %}{% set more = rest | list %}{% for m in more %}" + PARTS + "{% endfor %}",
            "openai",
        ),
        ("{% set a = messages %}{% set b = a %}{% set a = b %}{% for m in b %}{{ m }}{% endfor %}", "string"),
        ("{% for m in others %}" + PARTS + "{% endfor %}", "string"),
        ("{% for k, m in messages %}" + PARTS + "{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m.parts %}{{ p }}{% endfor %}{% endfor %}", "string"),
        (
            "{% for m in messages %}{% if m.content is string %}x{% else %}" + PARTS + "{% endif %}{% endfor %}",
            "openai",
        ),
        ("{% not jinja", "string"),
    ],
)
def test_content_format_is_read_from_the_templates_loops(source: str, expected: str) -> None:
    assert content_format(source) == expected


def test_a_template_that_loops_over_parts_gets_parts() -> None:
    template = ChatTemplate("{% for m in messages %}" + PARTS + "{% endfor %}")
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": ""}, "b"]}]
    assert template.render(conversation(messages, template.content_format), {}) == "a;;b;"
    tool = [{"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert conversation(tool, "openai")[0]["content"] == "a\nb"
    reference = [{"role": "tool", "content": [{"type": "tool_reference", "name": "f"}]}]
    assert conversation(reference, "openai")[0]["content"] == [{"type": "tool_reference", "name": "f"}]


def test_a_printed_call_has_arguments_before_name() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function | tojson }}")
    call = {"index": 0, "type": "function", "id": "c", "function": {"name": "f", "arguments": '{"a": "<é>"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert template.render(conversation(messages, "string"), {}) == '{"arguments": {"a": "<é>"}, "name": "f"}'


def test_the_sandbox_has_what_transformers_offers_templates() -> None:
    render = ChatTemplate(
        "{% generation %}{% set x = 1 %}said{% endgeneration %}{{ x is defined }}\n"
        "  {% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ {'b': '<', 'a': 1} | tojson(indent=1, sort_keys=true) }}"
    ).render
    assert render([{"role": "user", "content": ""}], {}) == 'saidFalse\n014{\n "a": 1,\n "b": "<"\n}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_whatever_a_template_raises_is_an_unknown_prompt(source: str) -> None:
    with pytest.raises(UnknownPrompt, match="template"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}], {})


def test_a_template_that_strips_content_is_continued_without_its_trailing_space() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}")
    messages = [{"role": "assistant", "content": "Autumn "}]
    assert template.render(messages, {}, continue_final_message=True) == "<Autumn"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    looping = ChatTemplate("{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}")
    assert looping.render(parts, {}, continue_final_message=True) == "a"


def test_what_cannot_be_continued_is_an_unknown_prompt() -> None:
    hides = ChatTemplate("{% for m in messages %}{{ m.content | length }}{% endfor %}")
    for template, content in [(hides, "Autumn"), (ChatTemplate("nothing"), "x"), (hides, [{"type": "image"}])]:
        with pytest.raises(UnknownPrompt):
            template.render([{"role": "assistant", "content": content}], {}, continue_final_message=True)
