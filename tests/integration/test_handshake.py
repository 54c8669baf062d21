"""The handshake against real engine processes: all in order, and each thing that can differ."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replicas.collector import Collector
from replicas.config import EngineConfig
from replicas.engine import make_engine
from replicas.engine_api import post, read_facts
from replicas.events import KVEventBatch, decode_batch
from replicas.handshake import Engine, Finding, shake_hands
from replicas.replica import Replica
from router.model_files import _find_folder
from router.ownership import ReplicaRecord
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder
from router.types import BlockHash, Prompt

pytestmark = pytest.mark.integration
MODEL = "m"
DEADLINE_S = 60.0
CONFIG = EngineConfig(model=MODEL, tokenizer="builtin", speed=100.0, num_blocks=3000)


class OnceHeard:
    """A collector's `holds` and `counters` for canaries whose blocks never match: it answers when events of the canary
    have come, however late that is, so that one look is enough (`_EVENTS_S` 0)."""

    def __init__(self, collector: Collector) -> None:
        self._collector, self._before = collector, 0

    async def counters(self) -> dict[str, int]:
        stats = self._collector.stats()
        self._before = stats.get("batches", 0)
        return stats

    async def holds(self, hashes: Sequence[BlockHash]) -> bool:
        async with asyncio.timeout(DEADLINE_S):
            while self._collector.counters["batches"] == self._before:
                await asyncio.sleep(0.01)
        return await self._collector.holds(hashes)


def once_heard(under_test: Engine) -> Engine:
    told = OnceHeard(under_test.holds.__self__)  # type: ignore[union-attr]  # its collector
    return replace(under_test, holds=told.holds, counters=told.counters)


@asynccontextmanager
async def engine(config: EngineConfig = CONFIG, *, events: bool = True) -> AsyncIterator[Engine]:
    """An emulated engine with a collector of its own."""
    process = make_engine(config, "canary")
    endpoints = await process.start()
    facts = await read_facts(endpoints.url)
    assert facts.block_size is not None
    record = ReplicaRecord("canary", MODEL, facts.block_size)
    collector = Collector(
        MemoryOwnershipMap(time.monotonic), record, endpoints.events if events else None, endpoints.replay
    )
    await collector.start()
    try:
        holds = collector.holds if events else None

        async def counters() -> dict[str, int]:
            return collector.stats()

        yield Engine(endpoints.url, MODEL, facts.block_size, holds, counters)
    finally:
        await collector.close()
        await process.stop()


@pytest.fixture
def encoder() -> PromptEncoder:
    return PromptEncoder.load(MODEL, "builtin", ("adapter-a",))


AGREED = [Finding("base"), Finding("salt"), Finding("tools")]


def nonce() -> str:
    return uuid.uuid4().hex


async def test_an_engine_that_agrees_passes_for_base_salt_and_adapter(encoder: PromptEncoder) -> None:
    config = replace(CONFIG, args=("--lora-modules", "adapter-a"))
    async with engine(config) as under_test:
        findings = await shake_hands(under_test, encoder, nonce(), ["adapter-a"])
    assert findings == [Finding("base"), Finding("salt"), Finding("tools"), Finding("adapter adapter-a")]


@pytest.mark.parametrize("block_size", [32, 64])
async def test_any_block_size_agrees_as_long_as_it_is_the_engines(encoder: PromptEncoder, block_size: int) -> None:
    async with engine(replace(CONFIG, block_size=block_size)) as under_test:
        assert await shake_hands(under_test, encoder, nonce()) == AGREED


async def test_an_assumed_block_size_is_found_out(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 0)
    async with engine(replace(CONFIG, block_size=32)) as under_test:
        findings = await shake_hands(once_heard(replace(under_test, block_size=16)), encoder, nonce())
    assert [one.variant for one in findings] == ["base", "salt", "tools"]
    assert all("other blocks" in one.problem for one in findings)


def with_template(folder: Path, old: str, new: str) -> PromptEncoder:
    """The builtin model with another chat template."""
    files = _find_folder("builtin")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((files / name).read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert old in config["chat_template"]
    config["chat_template"] = config["chat_template"].replace(old, new)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return PromptEncoder.load(MODEL, str(folder))


async def test_another_chat_template_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 1.0)
    other = with_template(tmp_path, "<|im_start|>' + message.role", "<|im_start|> ' + message.role")
    async with engine() as under_test:
        findings = await shake_hands(under_test, other, nonce())
    assert len(findings) == 3
    assert all(one.problem.startswith("template: ") for one in findings)
    assert all("first difference is at token 1" in one.problem for one in findings)


async def test_a_template_that_shows_tools_otherwise_is_named(tmp_path: Path) -> None:
    other = with_template(tmp_path, "# Tools", "# My tools")
    async with engine() as under_test:
        base, salt, tools = await shake_hands(under_test, other, nonce())
    assert (base, salt) == (Finding("base"), Finding("salt"))
    assert tools.problem.startswith("template: ")


async def test_tools_that_the_template_does_not_show_are_not_asked_for(tmp_path: Path) -> None:
    other = with_template(tmp_path, "{%- if tools %}", "{%- if false %}")
    async with engine() as under_test:
        assert await shake_hands(under_test, other, nonce()) == [Finding("base"), Finding("salt")]


async def test_an_engine_that_takes_no_tools_is_not_doubted_for_it(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(url: str, body: Any, **more: Any) -> tuple[int, bytes]:
        return (400, b"{}") if "tools" in body else await post(url, body, **more)

    monkeypatch.setattr("replicas.handshake.post", refuse)
    async with engine() as under_test:
        assert await shake_hands(under_test, encoder, nonce()) == [Finding("base"), Finding("salt")]


def takes_images(monkeypatch: pytest.MonkeyPatch, cached: int, status: int = 200) -> None:
    """The emulated engine takes none; this one answers a chat with an image with so many cached tokens."""

    async def answer(url: str, body: Any, **more: Any) -> tuple[int, bytes]:
        if "image_url" in json.dumps(body):
            usage = {"prompt_tokens": 999, "prompt_tokens_details": {"cached_tokens": cached}}
            return status, json.dumps({"usage": usage}).encode()
        return await post(url, body, **more)

    monkeypatch.setattr("replicas.handshake.post", answer)


async def test_an_engine_that_caches_what_stands_before_an_image_is_relied_on_for_it(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_images(monkeypatch, cached=10_000)
    ownership = MemoryOwnershipMap(time.monotonic)
    replica = await Replica.start("r", CONFIG, ownership, encoder=encoder)
    try:
        assert (replica.record.trusted, replica.record.media, replica.record.doubt) == (True, True, "")
    finally:
        await replica.stop()


@pytest.mark.parametrize(("cached", "status", "why"), [(0, 200, "0 tokens were cached"), (0, 500, "refused")])
async def test_an_engine_that_does_not_is_trusted_with_all_but_media(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch, cached: int, status: int, why: str
) -> None:
    takes_images(monkeypatch, cached, status)
    async with engine() as under_test:
        *others, media = await shake_hands(under_test, encoder, nonce())
    assert others == AGREED
    assert (media.variant, media.doubt) == ("media", "")
    assert why in media.problem


async def test_events_in_a_format_that_nobody_can_read_are_named(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 0)
    raw = decode_batch

    def of_another_version(payload: bytes) -> KVEventBatch:
        batch = msgspec.msgpack.decode(payload)
        for event in batch[1]:
            event.pop("block_size", None)
        return raw(msgspec.msgpack.encode(batch))

    monkeypatch.setattr("replicas.subscriber.decode_batch", of_another_version)
    async with engine() as under_test:
        findings = await shake_hands(once_heard(under_test), encoder, nonce())
    assert [one.variant for one in findings] == ["base", "salt", "tools"]
    assert all(one.problem.startswith("event format: ") and "blocks_broken" in one.problem for one in findings)


async def test_a_head_that_was_cached_before_anybody_listened_is_no_reason_for_doubt(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 5.0)
    system = {"role": "system", "content": "You are a helpful assistant who answers in plain words. " * 4}

    class WithDefaultSystemPrompt:
        """All its chats begin alike, as with templates that have a system prompt of their own."""

        def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
            body["messages"][:0] = [] if body["messages"][0] == system else [system]  # type: ignore[index]
            return encoder.prompt(path, body)

        encode_text = encoder.encode_text

    process = make_engine(CONFIG, "canary")
    endpoints = await process.start()
    try:
        first = Engine(endpoints.url, MODEL, 16, None, no_counters)
        assert await shake_hands(first, WithDefaultSystemPrompt(), nonce()) == AGREED
        late = Collector(MemoryOwnershipMap(time.monotonic), ReplicaRecord("late", MODEL, 16), endpoints.events)
        await late.start()

        async def counters() -> dict[str, int]:
            return late.stats()

        second = Engine(endpoints.url, MODEL, 16, late.holds, counters)
        assert await shake_hands(second, WithDefaultSystemPrompt(), nonce()) == AGREED
        assert late.stats()["blocks_parked"] > 0
        await late.close()
    finally:
        await process.stop()


async def no_counters() -> dict[str, int]:
    return {}


async def test_events_that_are_heard_but_not_held_are_not_called_missing(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 0.1)
    heard = iter(range(100))

    async def never(hashes: object) -> bool:
        return False

    async def one_more() -> dict[str, int]:
        return {"batches": next(heard)}

    async with engine(events=False) as under_test:
        not_held = replace(under_test, holds=never, counters=one_more, or_else=", or never reach the map")
        findings = await shake_hands(not_held, encoder, nonce())
    problem = "its KV events tell of other blocks than the router computed, or never reach the map"
    assert [one.problem for one in findings] == [problem] * 3


async def test_events_missed_by_a_late_subscriber_are_asked_for_once_more(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 0.1)
    asked: list[Sequence[BlockHash]] = []

    async def all_but_the_first(hashes: Sequence[BlockHash]) -> bool:
        asked.append(hashes)
        return hashes != asked[0]

    async with engine(events=False) as under_test:
        findings = await shake_hands(replace(under_test, holds=all_but_the_first), encoder, nonce())
        assert findings == AGREED


async def test_another_tokenizer_is_named(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 1.0)

    class Shifted:
        """As many tokens, but other ones."""

        def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
            prompt = encoder.prompt(path, body)
            return replace(prompt, token_ids=prompt.token_ids[:20] + b"\x07\0\0\0" + prompt.token_ids[24:])

        def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return [one + 1 for one in encoder.encode_text(text)]

    async with engine() as under_test:
        findings = await shake_hands(under_test, Shifted(), nonce())
    assert all(one.problem.startswith("tokenizer: ") for one in findings)
    assert all("first difference is at token 5" in one.problem for one in findings)


async def test_an_engine_without_events_is_checked_by_its_own_report(encoder: PromptEncoder) -> None:
    async with engine(events=False) as under_test:
        assert await shake_hands(under_test, encoder, nonce()) == AGREED


async def test_events_that_never_come_are_named(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 1.0)

    async def never(hashes: object) -> bool:
        return False

    async with engine(events=False) as under_test:
        findings = await shake_hands(replace(under_test, holds=never), encoder, nonce())
    assert [one.variant for one in findings] == ["base"]  # the others would only wait for the same
    assert "no KV events" in findings[0].problem


async def test_a_replica_that_does_not_conform_serves_but_gets_no_credit(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ownership = MemoryOwnershipMap(time.monotonic)
    other = PromptEncoder.load("another model", "builtin")

    class OtherModel:
        """Right ids under a wrong root, as a router with another model name has them."""

        def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
            return other.prompt(path, {**body, "model": "another model"})

        def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return other.encode_text(text)

    with monkeypatch.context() as patch:
        patch.setattr("replicas.handshake._EVENTS_S", 0)
        patch.setattr("replicas.handshake.shake_hands", lambda one, *more: shake_hands(once_heard(one), *more))
        replica = await Replica.start("r", CONFIG, ownership, encoder=OtherModel())
    try:
        await replica.check_health()
        assert "other blocks" in replica.record.doubt
        assert not replica.record.trusted
        await replica.shake_hands(encoder)
        assert replica.record.doubt == ""
        assert replica.record.trusted
    finally:
        await replica.stop()
