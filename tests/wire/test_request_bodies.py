"""Every body of tests/fixtures/request_bodies.jsonl through the front, before two emulated engines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.wire.emulated_fleet import Emulated, emulated_front
from tests.wire.front_bench import Bench, encoder

FIXTURES = Path(__file__).parents[1] / "fixtures" / "request_bodies.jsonl"


def expand(value: Any) -> Any:
    """`content_repeat: [text, times]` stands for that text so many times."""
    if isinstance(value, list):
        return [expand(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "content_repeat" in value:
        text, times = value["content_repeat"]
        return {**{key: one for key, one in value.items() if key != "content_repeat"}, "content": text * times}
    return {key: expand(one) for key, one in value.items()}


REQUESTS = {one["name"]: one for one in map(json.loads, FIXTURES.read_text("utf-8").splitlines())}


@dataclass
class Case:
    """One body of the file, and the means to send it."""

    name: str
    bench: Bench
    engines: list[Emulated]

    @property
    def path(self) -> str:
        return str(REQUESTS[self.name]["path"])

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = expand(REQUESTS[self.name]["body"])
        return body

    async def send(self, **fields: Any) -> Sent:
        raw = json.dumps({**self.body, **fields}, ensure_ascii=False).encode()
        headers = {**REQUESTS[self.name]["headers"], "content-type": "application/json"}
        status, body, answered = await self.bench.post(self.path, raw, headers=headers)
        return Sent(raw, status, body, answered)

    def hashes(self, **fields: Any) -> list[bytes]:
        """The keys of a body's blocks, `fields` over it; None takes one away."""
        body = {key: value for key, value in {**self.body, **fields}.items() if value is not None}
        hashed = encoder().hashed(self.path.partition("?")[0], body, 1)
        return list(hashed.hashes)

    @property
    def upstream(self) -> list[tuple[str, bytes]]:
        return [one for engine in self.engines for one in engine.received]

    async def left_out(self) -> list[str]:
        async with self.bench.http.get(self.bench.url + "/health") as response:
            return list((await response.json())["left_out"])


@dataclass
class Sent:
    raw: bytes
    status: int
    body: bytes
    headers: Any

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def predicted(self) -> int:
        return int(self.headers["x-whohas-predicted-cached-tokens"])

    @property
    def cached(self) -> int:
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def replica(self) -> str:
        return str(self.headers["x-whohas-replica"])

    @property
    def events(self) -> list[Any]:
        assert self.status == 200
        assert self.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: {")]
        return [json.loads(line[6:]) for line in lines]


Check = Callable[[Case], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(*names: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_body_gets_what_is_expected(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with emulated_front() as (bench, engines):
        await CHECKS[name](Case(name, bench, engines))
        await bench.until_free()
        for _, body in (one for engine in engines for one in engine.received):
            assert json.loads(body)
    assert "tenant-a-secret" not in caplog.text


def test_there_is_an_expectation_for_every_body() -> None:
    assert CHECKS.keys() == REQUESTS.keys()


@check("openai_sdk_plain", "tool_round_null_content", "assistant_without_content_key", "json_schema", "session_hints")
async def served_unchanged(case: Case) -> None:
    sent = await case.send()
    assert sent.status == 200
    assert case.upstream == [(case.path, sent.raw)]
    assert sent.body in case.engines[int(sent.replica[1:])].sent


@check("vllm_bench_chat_parts")
async def streamed_with_usage(case: Case) -> None:
    sent = await case.send()
    assert sent.events[-1]["choices"] == []
    assert sent.events[-1]["usage"]["completion_tokens"] == 8
    assert sent.body.endswith(b"data: [DONE]\n\n")
    assert sent.headers["x-request-id"] == "bench-0"


@check("string_twin_of_previous")
async def same_key_as_parts(case: Case) -> None:
    parts = Case("vllm_bench_chat_parts", case.bench, case.engines)
    assert (await case.send()).status == 200
    assert case.hashes() == parts.hashes()


@check("vllm_bench_completion")
async def null_logprobs(case: Case) -> None:
    sent = await case.send()
    assert sent.events[-1]["usage"]["completion_tokens"] == 8


@check("completion_token_ids")
async def ids_as_they_are(case: Case) -> None:
    sent = await case.send()
    assert sent.json["usage"]["prompt_tokens"] == len(case.body["prompt"]) == len(case.hashes())


@check("completion_batch_text", "completion_batch_ids")
async def batches_spread(case: Case) -> None:
    replicas = set()
    for _ in range(8):
        sent = await case.send()
        assert sent.status == 200
        assert len(sent.json["choices"]) == 2
        replicas.add(sent.replica)
    assert replicas == {"W0", "W1"}


@check("completion_echo")
async def h12_nothing_promised(case: Case) -> None:
    for _ in range(2):
        sent = await case.send(prompt="abc " * 200)
        assert sent.status == 200
        assert sent.predicted == 0


@check("n_2_stream")
async def one_request_for_two_answers(case: Case) -> None:
    sent = await case.send()
    assert {choice["index"] for event in sent.events for choice in event["choices"]} == {0, 1}
    assert len(case.upstream) == 1


@check("empty_messages")
async def refused_in_openais_shape(case: Case) -> None:
    for _ in range(4):
        sent = await case.send()
        assert 400 <= sent.status < 500
        assert set(sent.json["error"]) >= {"message", "type", "param", "code"}
    assert await case.left_out() == []


@check("empty_string_content")
async def short_but_fine(case: Case) -> None:
    assert (await case.send()).status == 200


@check("short_system_prompt")
async def p3_spread(case: Case) -> None:
    one_by_one = [(await case.send()).replica for _ in range(20)]
    at_once = [sent.replica for sent in await asyncio.gather(*(case.send() for _ in range(20)))]
    for replicas in (one_by_one, at_once):
        assert set(replicas) == {"W0", "W1"}
        assert 5 <= replicas.count("W0") <= 15


@check("image_part")
async def e14_images_forwarded_and_never_one_prefix(case: Case) -> None:
    for image in ("data:image/png;base64,AAAA", "data:image/png;base64,BBBB"):
        messages = case.body["messages"]
        messages[0]["content"][0]["image_url"]["url"] = image
        sent = await case.send(messages=messages)
        assert (case.path, sent.raw) in case.upstream
        assert sent.status < 500
        assert sent.predicted == 0


@check("cache_salt")
async def e13_salts_apart(case: Case) -> None:
    messages = [{"role": "user", "content": "A sentence of some length. " * 40}]
    first, again = [await case.send(messages=messages) for _ in range(2)]
    assert first.predicted == first.cached == 0
    assert again.predicted == again.cached > 0
    for fields in ({"cache_salt": "tenant-b"}, {"cache_salt": None}):
        other = await case.send(messages=messages, **fields)
        assert other.predicted == other.cached == 0


@check("lora_model")
async def e12_adapters_apart(case: Case) -> None:
    messages = [{"role": "user", "content": "A sentence of some length. " * 40}]
    base = await case.send(messages=messages, model="demo-model")
    first, again = [await case.send(messages=messages) for _ in range(2)]
    assert base.predicted == first.predicted == first.cached == 0
    assert again.predicted == again.cached > 0


@check("unknown_model")
async def not_found_once(case: Case) -> None:
    sent = await case.send()
    assert sent.status == 404
    assert "nope" in sent.json["error"]["message"]
    assert len(case.upstream) == 1
    assert await case.left_out() == []


@check("model_omitted")
async def h8_the_only_model(case: Case) -> None:
    assert (await case.send()).status == 200


@check("thinking_off")
async def h11_kwargs_count(case: Case) -> None:
    assert (await case.send()).status == 200
    assert case.hashes() != case.hashes(chat_template_kwargs=None)


@check("reasoning_effort_none")
async def h11_effort_counts(case: Case) -> None:
    assert (await case.send()).status == 200
    assert case.hashes() != case.hashes(reasoning_effort=None)
    assert case.hashes() == case.hashes(reasoning_effort=None, chat_template_kwargs={"enable_thinking": False})


@check("continue_final_message")
async def h11_the_prompt_ends_in_the_answer(case: Case) -> None:
    sent = await case.send()
    assert sent.status == 200
    assert sent.json["usage"]["prompt_tokens"] == len(case.hashes())
    longer = case.hashes(messages=[*case.body["messages"][:1], {"role": "assistant", "content": "Autumn leaves"}])
    assert longer[: len(case.hashes())] == case.hashes()


@check("continue_and_add_both")
async def the_engine_refuses(case: Case) -> None:
    sent = await case.send()
    assert sent.status == 400
    assert sent.body in [body for engine in case.engines for body in engine.sent]


@check("logprobs_top5")
async def logprobs_survive(case: Case) -> None:
    sent = await case.send()
    assert [len(one["top_logprobs"]) for one in sent.json["choices"][0]["logprobs"]["content"]] == [5, 5]
    assert sent.body in case.engines[int(sent.replica[1:])].sent


@check("too_long", "stream_error_before_first_token")
async def l7_the_engines_400(case: Case) -> None:
    sent = await case.send()
    assert sent.status == 400
    assert sent.headers["content-type"] == "application/json"
    assert "maximum context length" in sent.json["error"]["message"]
    shorter = [{"role": "user", "content": "word " * 9000}]
    for i in range(20):
        assert (await case.send(messages=shorter, stream=bool(i % 2))).status == 400
    assert await case.left_out() == []
    assert (await case.send(messages=[{"role": "user", "content": "Hello"}])).status == 200


@check("cjk_stream")
async def h6_bytes_as_the_engine_sent_them(case: Case) -> None:
    sent = await case.send()
    assert sent.body == case.engines[int(sent.replica[1:])].sent[-1]
    assert "\ufffd" not in sent.body.decode()
    assert len(sent.events) > 5


@check("openwebui")
async def unknown_headers_are_fine(case: Case) -> None:
    first, again = [await case.send() for _ in range(2)]
    assert first.events[-1]["usage"]["completion_tokens"] > 0
    assert first.replica == again.replica


@check("codex_responses")
async def responses_pass(case: Case) -> None:
    first, again = [await case.send() for _ in range(2)]
    assert first.events[-1]["type"] == "response.completed"
    assert first.replica == again.replica
    assert (case.path, first.raw) in case.upstream


@check("claude_code_messages")
async def h4_messages_pass_with_their_volatile_line(case: Case) -> None:
    first, again = [await case.send() for _ in range(2)]
    assert first.events[-1]["type"] == "message_stop"
    assert again.predicted > first.predicted == 0
    assert case.path.endswith("?beta=true")
    assert case.upstream[0] == (case.path, first.raw)
    system = case.body["system"]
    system[0]["text"] = system[0]["text"].replace("36ee5", "00000")
    volatile = await case.send(system=system, stream=False)
    assert volatile.json["usage"]["cache_read_input_tokens"] == volatile.predicted
    assert (case.path, volatile.raw) in case.upstream


@check("claude_count_tokens")
async def l11_counting_is_no_load(case: Case) -> None:
    sent = await case.send()
    assert sent.status == 200
    assert sent.json["input_tokens"] > 0
    assert case.bench.metrics.prompt_tokens._value.get() == 0
