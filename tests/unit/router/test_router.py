"""The whole decision with the in-memory map: what is asked, ranked, booked and told."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from router.errors import InvalidRequest
from router.ownership import ReplicaRecord
from router.types import Load
from tests.unit.router.one_router import REPLICAS, Clock, FlakyMap, body, joined, own, settle, started


async def test_the_holder_is_chosen_and_the_promise_is_what_an_engine_can_reuse(
    ownership: FlakyMap, clock: Clock
) -> None:
    leases = await joined(ownership, *"abcd")
    await own(ownership, leases["c"], 128)
    router = await started(ownership, clock)
    placed = await router.route("/v1/completions", body(128), 300, REPLICAS)
    assert placed.decision.replica_id == "c"
    assert placed.decision.predicted_cached_tokens == 112  # all 8 blocks are held, the last token is computed anyway
    assert placed.decision.prompt_tokens == 128
    await router.close()


async def test_a_booking_is_seen_by_the_next_decision_before_anything_is_told(
    ownership: FlakyMap, clock: Clock
) -> None:
    await joined(ownership, *"abcd")
    router = await started(ownership, clock)
    first = await router.route("/v1/completions", body(4096), 300, REPLICAS)
    second = await router.route("/v1/completions", body(4160), 300, REPLICAS)
    assert second.decision.replica_id == first.decision.replica_id
    assert second.decision.predicted_cached_tokens == 4096
    assert router.load(first.decision.replica_id) == Load(2, 0, 4096 + 64)
    await router.close()


async def test_another_router_sees_bookings_and_claims_and_their_end(ownership: FlakyMap, clock: Clock) -> None:
    await joined(ownership, *"abcd")
    one, other = await started(ownership, clock, "one"), await started(ownership, clock, "other")
    placed = await one.route("/v1/completions", body(4096), 300, REPLICAS)
    await settle()
    asked = await other.look_up("/v1/completions", body(4160), 300)
    decision = other.decide(asked, REPLICAS)
    assert decision.replica_id == placed.decision.replica_id
    assert decision.candidates[0].view.overlap_blocks == 256
    assert decision.candidates[0].view.owned_blocks == 0
    assert decision.candidates[0].view.load == Load(1, 0, 4096)
    one.release(placed)
    await settle()
    decision = other.decide(await other.look_up("/v1/completions", body(4160), 300), REPLICAS)
    assert all(candidate.view.overlap_blocks == 0 for candidate in decision.candidates)
    assert all(candidate.view.load == Load() for candidate in decision.candidates)
    await one.close()
    await other.close()


async def test_p4_a_burst_with_a_new_prefix_is_computed_on_at_most_two_replicas(
    ownership: FlakyMap, clock: Clock
) -> None:
    await joined(ownership, *"abcd")
    routers = [await started(ownership, clock, name) for name in ("one", "other")]
    prefix = list(range(4096))

    async def ask(i: int) -> str:
        ids = prefix + list(range(10_000 + 64 * i, 10_064 + 64 * i))
        placed = await routers[i % 2].route("/v1/completions", {"ids": ids}, 300, REPLICAS)
        await settle()
        return placed.decision.replica_id

    chosen = Counter(await asyncio.gather(*(ask(i) for i in range(16))))
    assert len(chosen) <= 2
    for router in routers:
        await router.close()


async def test_p4_what_two_routers_booked_unheard_of_each_other_is_awaited_once(
    ownership: FlakyMap, clock: Clock
) -> None:
    await joined(ownership, *"abcd")
    routers = [await started(ownership, clock, name) for name in ("one", "other")]
    asked = [await router.look_up("/v1/completions", body(4097), 300) for router in routers]
    for router, one in zip(routers, asked, strict=True):  # neither has heard of the other
        router.place(one, REPLICAS[:1])
    await settle()
    for router in routers:
        decision = (await router.route("/v1/completions", body(4100), 300, REPLICAS)).decision
        assert (decision.replica_id, decision.predicted_cached_tokens) == ("a", 4096)
        assert decision.candidates[0].view.load.prefill_tokens < 4200
        await settle()
    for router in routers:
        await router.close()


async def test_p3_prompts_below_one_block_reach_every_replica_and_are_charged(
    ownership: FlakyMap, clock: Clock
) -> None:
    await joined(ownership, *"abcd")
    router = await started(ownership, clock)
    sequential = Counter()
    for _ in range(40):
        placed = await router.route("/v1/completions", body(9), 300, REPLICAS)
        assert router.load(placed.decision.replica_id) == Load(1, 0, 9)
        sequential[placed.decision.replica_id] += 1
        router.release(placed)
    assert set(sequential.values()) == {10}
    parallel = [await router.route("/v1/completions", body(9), 300, REPLICAS) for _ in range(40)]
    assert set(Counter(placed.decision.replica_id for placed in parallel).values()) == {10}
    await router.close()


async def test_a_prompt_that_cannot_be_told_is_routed_by_load(ownership: FlakyMap, clock: Clock) -> None:
    await joined(ownership, *"abcd")
    router = await started(ownership, clock)
    placed = await router.route("/v1/chat/completions", {}, 4000, REPLICAS)
    assert placed.decision.prompt_tokens == 1000  # a guess from the body's size
    assert placed.decision.predicted_cached_tokens == 0
    assert "no token ids: media" in placed.decision.reason
    assert router.counters["unknown_prompt.media"] == 1
    await router.close()


async def test_what_stands_before_an_image_counts_where_the_engine_has_shown_that_it_keeps_it(
    ownership: FlakyMap, clock: Clock
) -> None:
    leases = {}
    for name in "abcd":
        leases[name] = await ownership.join(name, ReplicaRecord(name, "m", 16, media=name in "ab"), 60)
    await own(ownership, leases["b"], 128)
    await own(ownership, leases["c"], 160)
    router = await started(ownership, clock)
    placed = await router.route("/v1/chat/completions", body(160) | {"image": 1}, 300, REPLICAS)
    assert placed.decision.replica_id == "b"
    assert placed.decision.predicted_cached_tokens == 128
    assert placed.promised == 128
    assert placed.decision.prompt_tokens == 1160
    plain = await router.route("/v1/chat/completions", body(161), 300, REPLICAS)
    assert plain.decision.replica_id == "c"
    await router.close()


async def test_where_no_engine_has_shown_it_media_are_routed_by_load_and_claim_nothing(
    ownership: FlakyMap, clock: Clock
) -> None:
    leases = await joined(ownership, *"abcd")
    await own(ownership, leases["c"], 160)
    router = await started(ownership, clock)
    placed = await router.route("/v1/chat/completions", body(160) | {"image": 1}, 300, REPLICAS)
    assert placed.decision.predicted_cached_tokens == 0
    assert "multimodal" in placed.decision.reason
    await settle()
    others = await router.look_up("/v1/completions", body(161), 300)
    assert {slot: match.overlap for slot, match in others.snapshot.matches.items()} == {leases["c"].slot: 10}
    assert router.load(placed.decision.replica_id).prefill_tokens == 1160
    await router.close()


async def test_an_invalid_request_is_the_callers_to_answer(ownership: FlakyMap, clock: Clock) -> None:
    router = await started(ownership, clock)
    with pytest.raises(InvalidRequest):
        await router.look_up("/v1/completions", {"ids": None}, 10)
    await router.close()


async def test_no_hit_is_promised_where_the_engine_recomputes_the_prompt(ownership: FlakyMap, clock: Clock) -> None:
    leases = await joined(ownership, *"abcd")
    await own(ownership, leases["c"], 640)
    router = await started(ownership, clock)
    placed = await router.route("/v1/completions", {**body(640), "echo": True}, 300, REPLICAS)
    assert placed.decision.predicted_cached_tokens == 0
    await router.close()
