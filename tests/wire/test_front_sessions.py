"""A conversation whose client names it: a tie-break, and no more."""

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
