"""Requests as clients send them, from the body to the replica, with a real tokenizer and template."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.asked import Placement
from router.config import RouterConfig
from router.ownership import Lease, ReplicaRecord, Write
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder
from router.router import Router
from router.types import HashedPrompt, ReplicaId

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
REPLICAS = [ReplicaId(name) for name in "abcd"]
BLOCK = 16
_FIXTURE = Path(__file__).parents[2] / "fixtures" / "request_bodies.jsonl"
BODIES = {record["name"]: record["body"] for record in map(json.loads, _FIXTURE.read_text("utf-8").splitlines())}
LONG = "You are a support agent of Example Air. Be brief. " * 12


class Failing:
    off_loop_bytes = 1000

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        raise RuntimeError("the tokenizer has gone")


@dataclass
class World:
    router: Router
    ownership: MemoryOwnershipMap
    leases: dict[str, Lease]

    async def ask(self, path: str, body: dict[str, Any]) -> Placement:
        return await self.router.route(path, body, len(json.dumps(body)), REPLICAS)

    async def hold(self, path: str, body: dict[str, Any], replica: str) -> None:
        """The replica has computed this prompt."""
        asked = await self.router.look_up(path, body, 100)
        lease = self.leases[replica]
        await self.ownership.write(lease, [Write(lease.slot, added=asked.hashes)])


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.load("demo-model", "builtin", ["adapter-a"])


@pytest.fixture
async def world(encoder: PromptEncoder) -> AsyncIterator[World]:
    ownership = MemoryOwnershipMap(lambda: 100.0)
    leases = {name: await ownership.join(name, ReplicaRecord(name, "m", BLOCK), 60) for name in "abcd"}
    router = Router("router", encoder, ownership, RouterConfig(), lambda: 100.0, seed=1)
    await router.start()
    yield World(router, ownership, leases)
    await router.close()


async def test_h1_content_in_parts_is_the_string_that_it_stands_for(world: World) -> None:
    def body(content: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}]}

    await world.hold(CHAT, body(LONG), "c")
    placed = await world.ask(CHAT, body([{"type": "text", "text": LONG}]))
    assert placed.decision.replica_id == "c"
    assert placed.decision.predicted_cached_tokens == (placed.decision.prompt_tokens - 1) // BLOCK * BLOCK
    broken = await world.ask(CHAT, body([{"type": "text", "text": 5}]))  # the engine will say what is wrong
    assert broken.decision.reason.startswith("by load alone: no token ids: malformed")


async def test_h2_prompts_of_token_ids_are_hashed_as_they_are(world: World) -> None:
    ids = list(range(1000, 1000 + 5 * BLOCK + 3))
    await world.hold(COMPLETIONS, {"prompt": ids}, "b")
    placed = await world.ask(COMPLETIONS, {"prompt": [*ids, 7, 8]})
    assert (placed.decision.replica_id, placed.decision.predicted_cached_tokens) == ("b", 5 * BLOCK)
    assert (await world.ask(COMPLETIONS, BODIES["completion_token_ids"])).decision.prompt_tokens == 19


async def test_h4_a_volatile_line_that_the_engine_drops_costs_no_hit_and_any_other_does(world: World) -> None:
    def body(line: str) -> dict[str, Any]:
        sent = json.loads(json.dumps(BODIES["claude_code_messages"]))
        sent["system"][0]["text"] = line
        return dict(sent)

    billing = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch="
    await world.hold(MESSAGES, body(f"{billing}36ee5;"), "d")
    same = (await world.ask(MESSAGES, body(f"{billing}0a1b2;"))).decision
    assert (same.replica_id, same.predicted_cached_tokens) == ("d", (same.prompt_tokens - 1) // BLOCK * BLOCK)
    await world.hold(MESSAGES, body("Now: 12:00:01."), "d")
    assert (await world.ask(MESSAGES, body("Now: 12:00:02."))).decision.predicted_cached_tokens == 0


async def test_h5_another_order_of_tools_is_another_prompt_and_nobody_reorders_it(world: World) -> None:
    def body(*names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name, "description": LONG}} for name in names]
        return {"messages": [{"role": "user", "content": LONG}], "tools": tools}

    sent = body("f", "g")
    await world.hold(CHAT, sent, "a")
    assert sent == body("f", "g")
    same, swapped = [(await world.ask(CHAT, one)).decision for one in (sent, body("g", "f"))]
    assert same.predicted_cached_tokens == (same.prompt_tokens - 1) // BLOCK * BLOCK
    assert swapped.predicted_cached_tokens < 100 < same.predicted_cached_tokens  # what comes before the tools' names


@pytest.mark.parametrize("name", ["tool_round_null_content", "assistant_without_content_key", "empty_string_content"])
async def test_h10_null_and_absent_content_have_a_prompt(world: World, name: str) -> None:
    placed = await world.ask(CHAT, BODIES[name])
    assert placed.decision.prompt_tokens > 0
    assert "by load" not in placed.decision.reason


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"truncate_prompt_tokens": 40},
        {"truncate_prompt_tokens": 40, "truncation_side": "right"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
    ids=str,
)
def test_h11_a_field_that_changes_the_prompt_changes_what_is_hashed(
    encoder: PromptEncoder, fields: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Autumn"}]
    plain, changed = [encoder.hashed(CHAT, {"messages": messages, **more}, 1) for more in ({}, fields)]
    assert list(plain.hashes) != list(changed.hashes)


async def test_h12_a_prompt_that_the_engine_computes_anew_is_promised_nothing(world: World) -> None:
    for body in (
        {"prompt": LONG},
        {"prompt": LONG, "echo": True, "logprobs": 1},
        {"prompt": LONG, "prompt_logprobs": 0},
    ):
        await world.hold(COMPLETIONS, body, "a")
    assert (await world.ask(COMPLETIONS, {"prompt": LONG})).decision.predicted_cached_tokens > 0
    for more in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 0}):
        assert (await world.ask(COMPLETIONS, {"prompt": LONG, **more})).decision.predicted_cached_tokens == 0


@pytest.mark.parametrize("name", ["completion_batch_text", "completion_batch_ids", "image_part", "unknown_model"])
async def test_p5_requests_without_token_ids_are_spread_by_load(world: World, name: str) -> None:
    path = CHAT if "messages" in BODIES[name] else COMPLETIONS
    placed = [await world.ask(path, BODIES[name]) for _ in range(40)]
    assert set(Counter(one.decision.replica_id for one in placed).values()) == {10}
    assert all("by load alone: no token ids" in one.decision.reason for one in placed)


@pytest.mark.parametrize("size", [10, 10_000])
async def test_p5_a_tokenizer_that_fails_costs_hits_and_no_request(world: World, size: int) -> None:
    router = Router("other", Failing(), world.ownership, RouterConfig(), lambda: 100.0, seed=1)
    await router.start()
    placed = [await router.route(CHAT, {}, size, REPLICAS) for _ in range(40)]
    assert set(Counter(one.decision.replica_id for one in placed).values()) == {10}
    assert router.counters["unknown_prompt.failed"] == 40
    await router.close()
