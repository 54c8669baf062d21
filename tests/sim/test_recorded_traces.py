"""The default policy on recorded traffic, in virtual time; each figure is the one that peers lose."""

from __future__ import annotations

import pytest

from tests.sim import traces
from tests.sim.simulated_fleet import Call, Figures, Setup, figures, simulated
from tests.sim.virtual_time import run

pytestmark = pytest.mark.skipif(
    not (traces.TAU.exists() and traces.MOONCAKE.exists()),
    reason="the recorded traces are not here: ../shared/data/{tau_airline_blk16,mooncake_conversation}_trace.jsonl.gz",
)


def replayed(calls: list[Call], setup: Setup) -> Figures:
    async def main() -> Figures:
        fleet = await simulated(setup)
        try:
            return figures(await fleet.replay(calls), setup.replicas)
        finally:
            await fleet.close()

    return run(main())


def test_p10_agents_whose_preamble_is_over_half_of_the_prompt_do_not_gather() -> None:
    found = replayed(traces.tau(16), Setup(profile="linear:10000"))
    assert found.max_mean_requests <= 1.5
    assert found.hit_rate >= 0.93
    assert found.ttft_mean_s <= 0.5


def test_p1_agents_at_light_load_use_all_replicas_and_lose_no_hits() -> None:
    calls = traces.tau(1)
    found = replayed(calls, Setup(routers=2))
    assert found.max_mean_requests <= 1.5
    assert found.hit_rate >= traces.infinite_cache_hit_rate(calls, 16) - 0.01


def test_p1_a_hot_first_block_does_not_gather_conversations() -> None:
    calls = traces.mooncake(10)
    setup = {"replicas": 8, "num_blocks": 1000, "block_size": 512, "profile": "linear:10000"}
    found = replayed(calls, Setup(**setup))  # type: ignore[arg-type]
    blind = replayed(calls, Setup(**setup, policy="round_robin"))  # type: ignore[arg-type]
    assert found.max_mean_requests <= 1.3
    assert found.hit_rate >= 0.85 * 0.169  # of what a hash of two blocks gets, with its imbalance
    assert found.ttft_p50_s <= 0.8 * blind.ttft_p50_s
    assert found.ttft_mean_s <= 0.6 * blind.ttft_mean_s
    assert found.ttft_p99_s <= 0.7 * blind.ttft_p99_s
