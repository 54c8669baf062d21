"""Generated prompts, arrivals, and the bound on hits."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import islice, pairwise

import pytest

from router.prompt import PromptEncoder
from serve.loadgen.bound import infinite_cache_hit_rate
from serve.loadgen.clock import Clock
from serve.loadgen.drive import poisson
from serve.loadgen.prompts import SharedPrompts, completion, token_ids
from serve.loadgen.types import Call
from tests.sim.virtual_time import run


def prompts(workload: SharedPrompts, count: int) -> list[list[int]]:
    return [json.loads(call.body)["prompt"] for call in islice(workload.calls("m"), count)]


def test_ids_depend_on_their_seed_alone() -> None:
    assert token_ids((1, 2), 50) == token_ids((1, 2), 50)
    assert token_ids((1, 2), 50) != token_ids((2, 1), 50)
    assert token_ids((1, 2), 500)[:50] != token_ids((1, 3), 50)
    assert all(1000 <= one < 31000 for one in token_ids((3,), 1000))


def test_requests_begin_with_one_of_the_shared_prompts_and_differ_after_it() -> None:
    found = prompts(SharedPrompts(shared_tokens=64, unshared_tokens=32, output_tokens=5, prefixes=3), 60)
    assert {len(prompt) for prompt in found} == {96}
    assert len({tuple(prompt[:64]) for prompt in found}) == 3
    assert len({tuple(prompt[64:]) for prompt in found}) == 60


def test_lengths_spread_about_their_means() -> None:
    workload = SharedPrompts(shared_tokens=0, unshared_tokens=100, output_tokens=50, spread=0.2)
    found = list(islice(workload.calls("m"), 400))
    outputs = [json.loads(call.body)["max_tokens"] for call in found]
    lengths = [call.prompt_tokens or 0 for call in found]
    assert sum(lengths) / 400 == pytest.approx(100, rel=0.05)
    assert sum(outputs) / 400 == pytest.approx(50, rel=0.05)
    assert len(set(lengths)) > 30


def test_the_same_seed_sends_the_same_requests() -> None:
    assert prompts(SharedPrompts(seed=4), 2) == prompts(SharedPrompts(seed=4), 2)
    assert prompts(SharedPrompts(seed=4), 2) != prompts(SharedPrompts(seed=5), 2)


@pytest.mark.parametrize("fields", [{"unshared_tokens": 0}, {"output_tokens": 0}, {"prefixes": 0}])
def test_a_request_without_tokens_of_its_own_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        SharedPrompts(**fields)


def calls(count: int) -> list[Call]:
    return [Call("/v1/completions", b"{}")] * count


def test_poisson_arrivals_keep_rate_order_and_end() -> None:
    found = [one.at for one in poisson(calls(5000), rate=10.0, seconds=100.0, seed=1)]
    assert found == sorted(found)
    assert found[-1] < 100.0
    assert len(found) == pytest.approx(1000, rel=0.1)
    gaps = [later - earlier for earlier, later in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)  # as of an exponential distribution


def test_poisson_arrivals_are_seeded_and_end_with_their_calls() -> None:
    assert list(poisson(calls(9), 1.0, 99.0, seed=3)) == list(poisson(calls(9), 1.0, 99.0, seed=3))
    assert len(list(poisson(calls(9), 100.0, 1e9))) == 9
    with pytest.raises(ValueError, match="above 0"):
        list(poisson(calls(1), 0.0, 1.0))


async def test_a_clock_runs_faster_than_the_wall() -> None:
    before = time.perf_counter()
    clock = Clock(100.0)
    await clock.sleep_until(5.0)
    assert 5.0 <= clock.now() <= 100.0 * (time.perf_counter() - before)
    with pytest.raises(ValueError, match="above 0"):
        Clock(0.0)


def test_a_sleep_is_shorter_on_the_wall() -> None:
    async def sleep() -> float:
        await Clock(100.0).sleep(5.0)
        return asyncio.get_running_loop().time()

    assert run(sleep()) == pytest.approx(0.05)


def test_the_bound_counts_leading_blocks_seen_before_and_leaves_the_last_token() -> None:
    encoder = PromptEncoder.load("m", "builtin")
    first = list(range(1000, 1064))
    other = [9, *first[1:]]
    sent = [completion("m", prompt, 1) for prompt in (first, first, first[:40], other)]
    # 64 new; 48 of 64, as the last token is computed anew; 32 of 40; nothing behind a first block that differs.
    assert infinite_cache_hit_rate(sent, encoder, 16) == pytest.approx((48 + 32) / (64 + 64 + 40 + 64))
    assert infinite_cache_hit_rate([], encoder, 16) == 0.0
