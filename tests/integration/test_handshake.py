"""The handshake against real engine processes: all in order, and each thing that can differ."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicas.collector import Collector
from replicas.config import EngineConfig
from replicas.engine import make_engine
from replicas.engine_api import read_facts
from replicas.handshake import Engine, Finding, shake_hands
from replicas.replica import Replica
from router.model_files import _find_folder
from router.ownership import ReplicaRecord
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder
from router.types import Prompt

pytestmark = pytest.mark.integration
MODEL = "m"
CONFIG = EngineConfig(model=MODEL, tokenizer="builtin", speed=100.0, num_blocks=3000)


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
        yield Engine(endpoints.url, MODEL, facts.block_size, collector.holds if events else None, collector.stats)
    finally:
        await collector.close()
        await process.stop()


@pytest.fixture
def encoder() -> PromptEncoder:
    return PromptEncoder.load(MODEL, "builtin", ("adapter-a",))


def nonce() -> str:
    return uuid.uuid4().hex


async def test_an_engine_that_agrees_passes_for_base_salt_and_adapter(encoder: PromptEncoder) -> None:
    config = replace(CONFIG, args=("--lora-modules", "adapter-a"))
    async with engine(config) as under_test:
        findings = await shake_hands(under_test, encoder, nonce(), ["adapter-a"])
    assert findings == [Finding("base"), Finding("salt"), Finding("adapter adapter-a")]


@pytest.mark.parametrize("block_size", [32, 64])
async def test_any_block_size_agrees_as_long_as_it_is_the_engines(encoder: PromptEncoder, block_size: int) -> None:
    async with engine(replace(CONFIG, block_size=block_size)) as under_test:
        assert await shake_hands(under_test, encoder, nonce()) == [Finding("base"), Finding("salt")]


async def test_an_assumed_block_size_is_found_out(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 1.0)
    async with engine(replace(CONFIG, block_size=32)) as under_test:
        findings = await shake_hands(replace(under_test, block_size=16), encoder, nonce())
    assert all("other blocks" in one.problem for one in findings)


async def test_another_chat_template_is_named(tmp_path: Path) -> None:
    files = _find_folder("builtin")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace(
        "<|im_start|>' + message.role", "<|im_start|> ' + message.role"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    other = PromptEncoder.load(MODEL, str(tmp_path))
    async with engine() as under_test:
        findings = await shake_hands(under_test, other, nonce())
    assert all(one.problem.startswith("template: ") for one in findings)
    assert all("first difference is at token 1" in one.problem for one in findings)


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
        assert await shake_hands(under_test, encoder, nonce()) == [Finding("base"), Finding("salt")]


async def test_events_that_never_come_are_named(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 1.0)

    async def never(hashes: object) -> bool:
        return False

    async with engine(events=False) as under_test:
        findings = await shake_hands(replace(under_test, holds=never), encoder, nonce())
    assert all("no KV events" in one.problem for one in findings)


async def test_a_replica_that_does_not_conform_serves_but_gets_no_credit(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 0.5)
    ownership = MemoryOwnershipMap(time.monotonic)
    other = PromptEncoder.load("another model", "builtin")

    class OtherModel:
        """Right ids under a wrong root, as a router with another model name has them."""

        def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
            return other.prompt(path, {**body, "model": "another model"})

        def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return other.encode_text(text)

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
