"""Conversations: what their clients name is a tie-break, and what they have in common shows."""

from __future__ import annotations

import json

from tests.wire.front_bench import Bench, chat, scripted_front
from tests.wire.scripted_engine import answer


async def explained(bench: Bench, **headers: str) -> str:
    _, body, _ = await bench.post("/explain", headers=headers)
    return str(json.loads(body)["replica"])


async def test_a_session_keeps_its_replica_where_costs_are_equal() -> None:
    async with scripted_front(*[answer] * 4) as (bench, _):
        for name in ("x-session-id", "X-Claude-Code-Session-Id", "X-OpenWebUI-Chat-Id"):
            assert len({await explained(bench, **{name: "one"}) for _ in range(5)}) == 1
        homes = {
            f"s{i}": (await bench.post(headers={"x-session-id": f"s{i}"}))[2]["x-whohas-replica"] for i in range(40)
        }
        assert set(homes.values()) == {"W0", "W1", "W2", "W3"}
        bench.fleet.running = bench.fleet.running[1:]
        for name, home in homes.items():
            if home != "W0":  # who keeps its replica keeps its place
                assert (await bench.post(body={**chat(), "prompt_cache_key": name}))[2]["x-whohas-replica"] == home


async def test_a_session_never_goes_before_what_is_held() -> None:
    async with scripted_front(*[answer] * 4) as (bench, _):
        prompt = chat("the same long prompt " * 100)
        holder = (await bench.post(body=prompt))[2]["x-whohas-replica"]
        for i in range(12):
            _, _, headers = await bench.post(body=prompt, headers={"x-session-id": f"s{i}"})
            assert headers["x-whohas-replica"] == holder


async def test_h4_metrics_tell_prompts_that_part_at_their_head_from_those_that_share_it() -> None:
    async with scripted_front(*[answer] * 4) as (bench, _):
        manual = "the same long manual " * 400
        for i in range(6):
            await bench.post(body=chat(f"request {i} of this minute. {manual}"))
        assert shared(bench, at_most=64) == 6
        for i in range(6):
            await bench.post(body=chat(f"{manual} request {i} of this minute."))
        assert (shared(bench, at_most=64), shared(bench, at_most=1024)) == (7, 7)  # nobody had the first one
        await bench.post(body=chat("short"))
        assert shared(bench, at_most=65536) == 12


def shared(bench: Bench, at_most: int) -> int:
    """How many long prompts had so many leading tokens, or fewer, in common with what replicas had."""
    found = bench.metrics.registry.get_sample_value(
        "whohas_long_prompt_shared_tokens_bucket", {"le": str(float(at_most))}
    )
    return int(found or 0)
