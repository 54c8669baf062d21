"""The default policy with real routers, map, collectors' block sets and engines, in virtual time: nothing is chance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.sim.simulated_fleet import Answered, Call, Setup, SimulatedFleet, figures, simulated
from tests.sim.virtual_time import run

SYSTEM = 4096


def played(setup: Setup, play: Callable[[SimulatedFleet], Awaitable[list[Answered]]]) -> list[Answered]:
    async def main() -> list[Answered]:
        fleet = await simulated(setup)
        try:
            return await play(fleet)
        finally:
            await fleet.close()

    return run(main())


def tokens(name: str, count: int) -> list[int]:
    return random.Random(name).choices(range(1000, 150_000), k=count)


def sessions(count: int, turns: int, every_s: float, seed: int = 1) -> list[Call]:
    """Sessions that share a system prompt; 100 to 300 tokens asked and 50 to 150 answered a turn, 5 to 15 s apart."""
    rng = random.Random(seed)
    calls = []
    for session in range(count):
        text, at = tokens("system", SYSTEM), every_s * session * rng.uniform(0.8, 1.2)
        for turn in range(turns):
            text = text + tokens(f"{session}.{turn}.asked", rng.randint(100, 300))
            answer = tokens(f"{session}.{turn}.answered", rng.randint(50, 150))
            calls.append(Call(at, text, answer, len(answer)))
            text = text + answer
            at += rng.uniform(5, 15)
    return sorted(calls, key=lambda call: call.at)


def burst(count: int, tail: int = 64) -> list[Call]:
    """Requests 3 ms apart that share a prefix of 4,096 tokens which nobody has seen."""
    return [Call(0.003 * i, tokens("burst", SYSTEM) + tokens(f"tail {i}", tail), (), 2) for i in range(count)]


@pytest.mark.parametrize("turns", [(0,), (0, 0), (0, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("map_delay_s", [0.0005, 0.004, 0.012, 0.03])
def test_p4_a_burst_with_a_new_prefix_is_computed_at_most_twice(turns: tuple[int, ...], map_delay_s: float) -> None:
    """However late routers hear of each other, and whether their turns are at the same replica or at different ones."""

    async def play(fleet: SimulatedFleet) -> list[Answered]:
        for router, turn in zip(fleet.routers, turns, strict=True):
            router._turn = turn
        return await fleet.replay(burst(16))

    answers = played(Setup(routers=len(turns), map_delay_s=map_delay_s, event_delay_s=0.5), play)
    computed = [one.replica for one in answers if one.served.cached_tokens < SYSTEM]
    assert len(computed) <= 2


@pytest.mark.parametrize("routers", [1, 2])
def test_p4_a_burst_that_overloads_its_replica_spills(routers: int) -> None:
    setup = Setup(routers=routers, event_delay_s=0.5)
    answers = played(setup, lambda fleet: fleet.replay(burst(48, tail=512)))
    assert len({one.replica for one in answers}) == 4
    assert sum(one.served.cached_tokens < SYSTEM for one in answers) == 4


def test_p2_the_turns_of_a_session_stay_together_though_all_start_alike() -> None:
    calls = sessions(2, turns=10, every_s=3.0)
    answers = played(Setup(), lambda fleet: fleet.replay(calls))
    reused = [one for one in answers if one.served.prompt_tokens - one.served.cached_tokens > 600]
    assert len(reused) <= 3  # the system prompt at one or two replicas, and hardly anything else


def test_p6_a_cold_replica_gets_its_share_beside_warm_ones_under_load() -> None:
    setup = Setup(replicas=3, replicas_known_at_first=2)
    calls = sessions(120, turns=12, every_s=1.5)
    added_at = 60.0
    first, later = [c for c in calls if c.at < added_at], [c for c in calls if c.at >= added_at]

    async def play(fleet: SimulatedFleet) -> list[Answered]:
        await fleet.replay(first)
        fleet.serving = [0, 1, 2]
        return await fleet.replay([Call(c.at - added_at, c.token_ids, c.output, c.num_output) for c in later])

    answers = played(setup, play)
    assert any(one.replica == 2 for one in answers if one.call.at < 5.0)
    share = Counter(one.replica for one in answers if one.call.at < 120.0)
    assert share[2] >= sum(share.values()) / 3 / 2


@pytest.mark.parametrize("seed", range(3))
def test_every_replica_gets_its_share_of_sessions_at_light_load_and_hits_stay(seed: int) -> None:
    calls = sessions(60, turns=10, every_s=2.5, seed=seed)
    answers = played(Setup(routers=2), lambda fleet: fleet.replay(calls))
    found = figures(answers, 4)
    assert found.max_mean_requests <= 1.5
    recomputed = sum(one.served.prompt_tokens - one.served.cached_tokens for one in answers)
    assert recomputed <= 1.1 * _least(calls) + 4 * SYSTEM


def _least(calls: Sequence[Call]) -> int:
    """Tokens that nobody has asked or answered before, the system prompt left out, and the tail of a block each."""
    return sum(300 + 16 for _ in calls)
