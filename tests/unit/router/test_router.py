"""The whole decision with the in-memory map: what is asked, ranked, booked and told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from router.config import RouterConfig
from router.errors import InvalidRequest, OwnershipUnavailable, UnknownPrompt
from router.hashing import chain, pack_token_ids, root_hash
from router.ownership import Lease, ReplicaRecord, Snapshot, Write
from router.ownership.memory import MemoryOwnershipMap
from router.router import Router
from router.types import BlockHash, HashedPrompt, Load, ReplicaId

ROOT = root_hash("m")
REPLICAS = [ReplicaId(name) for name in "abcd"]


class Ids:
    """Bodies carry their token ids."""

    off_loop_bytes = 1000

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        if "ids" not in body:
            raise UnknownPrompt("media")
        if body["ids"] is None:
            raise InvalidRequest("no ids")
        hashes = chain(ROOT, pack_token_ids(body["ids"]), block_size)
        if "image" in body:
            return HashedPrompt(len(body["ids"]) + 1000, hashes, whole=False)
        return HashedPrompt(len(body["ids"]), hashes, reusable=not body.get("echo"))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class FlakyMap(MemoryOwnershipMap):
    down = False
    asked = 0

    async def look_up(self, hashes: Sequence[BlockHash]) -> Snapshot:
        self.asked += 1
        if self.down:
            raise OwnershipUnavailable("down")
        return await super().look_up(hashes)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ownership(clock: Clock) -> FlakyMap:
    return FlakyMap(clock)


async def joined(ownership: MemoryOwnershipMap, *names: str, block_size: int = 16) -> dict[str, Lease]:
    return {name: await ownership.join(name, ReplicaRecord(name, "m", block_size), 60) for name in names}


async def started(ownership: MemoryOwnershipMap, clock: Clock, name: str = "router") -> Router:
    router = Router(name, Ids(), ownership, RouterConfig(), clock, seed=1)
    await router.start()
    return router


def body(n: int, first: int = 0) -> dict[str, Any]:
    return {"ids": list(range(first, first + n))}


async def own(ownership: MemoryOwnershipMap, lease: Lease, n: int) -> None:
    await ownership.write(lease, [Write(lease.slot, added=chain(ROOT, pack_token_ids(range(n)), 16))])


async def settle() -> None:
    """Let the router tell the map what it booked."""
    for _ in range(5):
        await asyncio.sleep(0)


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


async def test_without_a_map_requests_are_spread_by_load_and_it_heals_by_itself(
    ownership: FlakyMap, clock: Clock
) -> None:
    leases = await joined(ownership, *"abcd")
    await own(ownership, leases["c"], 640)
    router = await started(ownership, clock)
    ownership.down = True
    bodies = [body(640, first=1000 * i) for i in range(1, 5)]
    placed = [await router.route("/v1/completions", one, 300, REPLICAS) for one in bodies]
    assert len({one.decision.replica_id for one in placed}) == 4
    assert all(one.decision.predicted_cached_tokens == 0 for one in placed)
    assert router.degraded == "down"
    ownership.down = False
    clock.now += 1
    again = await router.route("/v1/completions", body(640), 300, REPLICAS)
    assert again.decision.replica_id == "c"
    assert again.decision.predicted_cached_tokens == 39 * 16
    assert router.degraded == ""
    await router.close()


async def test_without_a_map_a_routers_own_placements_still_keep_a_prefix_together(
    ownership: FlakyMap, clock: Clock
) -> None:
    await joined(ownership, *"abcd")
    router = await started(ownership, clock)
    ownership.down = True
    chosen = {(await router.route("/v1/completions", body(640), 300, REPLICAS)).decision.replica_id for _ in range(4)}
    assert len(chosen) == 1
    await router.close()


async def test_a_dead_map_is_not_asked_for_every_request(ownership: FlakyMap, clock: Clock) -> None:
    await joined(ownership, *"abcd")
    router = await started(ownership, clock)
    ownership.down, ownership.asked = True, 0
    for _ in range(20):
        await router.route("/v1/completions", body(640), 300, REPLICAS)
    assert ownership.asked == 1
    await router.close()


async def test_one_late_answer_does_not_stop_the_asking_but_several_in_a_row_do(
    ownership: FlakyMap, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = await joined(ownership, *"abcd")
    await own(ownership, leases["c"], 640)
    router = await started(ownership, clock)
    await router.route("/v1/completions", body(640), 300, REPLICAS)
    late = 1

    async def look_up(hashes: Sequence[BlockHash]) -> Snapshot:
        nonlocal late
        ownership.asked += 1
        if late:
            late -= 1
            raise OwnershipUnavailable("late") from TimeoutError()
        return await MemoryOwnershipMap.look_up(ownership, hashes)

    monkeypatch.setattr(ownership, "look_up", look_up)
    first = router.decide(await router.look_up("/v1/completions", body(640), 300), REPLICAS)
    again = router.decide(await router.look_up("/v1/completions", body(640), 300), REPLICAS)
    assert "late" in first.reason
    assert again.predicted_cached_tokens == 39 * 16
    late, ownership.asked = 100, 0
    for _ in range(20):
        await router.look_up("/v1/completions", body(640), 300)
    assert ownership.asked == 3
    await router.close()


async def test_a_replica_with_another_block_size_gets_no_credit(ownership: FlakyMap, clock: Clock) -> None:
    await joined(ownership, "a", "b")
    odd = (await joined(ownership, "c", block_size=64))["c"]
    await own(ownership, odd, 640)
    router = await started(ownership, clock)
    decision = router.decide(await router.look_up("/v1/completions", body(640), 300), REPLICAS[:3])
    assert all(candidate.view.overlap_blocks == 0 for candidate in decision.candidates)
    await router.close()


async def test_a_router_whose_lease_was_taken_tells_everything_again(ownership: FlakyMap, clock: Clock) -> None:
    leases = await joined(ownership, *"abcd")
    router = await started(ownership, clock)
    placed = await router.route("/v1/completions", body(4096), 300, REPLICAS)
    await settle()
    clock.now += 1000  # every lease lapses and is swept
    await ownership.sweep(10_000)
    leases = await joined(ownership, *"abcd")
    again = await router.route("/v1/completions", body(64, first=50_000), 300, REPLICAS)
    await settle()
    await settle()
    snapshot = await ownership.look_up([])
    booked = {slot: load for record in snapshot.routers.values() for slot, load in record.loads.items()}
    assert leases[again.decision.replica_id].slot in booked
    router.release(placed)
    router.release(again)
    await router.close()


async def test_a_replica_unknown_to_the_map_can_still_be_chosen(ownership: FlakyMap, clock: Clock) -> None:
    router = await started(ownership, clock)
    placed = await router.route("/v1/completions", body(640), 300, [ReplicaId("new")])
    assert placed.decision.replica_id == "new"
    assert router.load(ReplicaId("new")) == Load(1, 0, 640)
    await router.close()


async def test_a_replica_whose_map_lies_loses_credit_and_is_named_until_it_starts_anew(
    ownership: FlakyMap, clock: Clock
) -> None:
    leases = await joined(ownership, *"abcd")
    await own(ownership, leases["c"], 4096)
    router = await started(ownership, clock)
    for _ in range(8):
        placed = await router.route("/v1/completions", body(4096), 300, REPLICAS[2:3])
        router.observe(placed, 0)
        router.release(placed)
    asked = await router.look_up("/v1/completions", body(4096), 300)
    decision = router.decide(asked, REPLICAS)
    assert "c reused far less" in decision.reason
    (lying,) = [one.view for one in decision.candidates if one.view.replica_id == "c"]
    assert lying.trust < 0.5
    assert lying.overlap_blocks < 128
    await settle()
    assert {slot for one in (await ownership.look_up([])).routers.values() for slot in one.doubted} == {
        leases["c"].slot
    }
    leases = await joined(ownership, "c")
    await own(ownership, leases["c"], 4096)
    decision = router.decide(await router.look_up("/v1/completions", body(4096), 300), REPLICAS)
    assert decision.replica_id == "c"
    assert decision.predicted_cached_tokens == 255 * 16
    await router.close()


async def test_claims_that_came_to_nothing_are_not_held_against_the_replica(ownership: FlakyMap, clock: Clock) -> None:
    await joined(ownership, *"abcd")
    router = await started(ownership, clock)
    first = await router.route("/v1/completions", body(4096), 300, REPLICAS)
    for _ in range(8):
        placed = await router.route("/v1/completions", body(4096), 300, REPLICAS)
        assert placed.decision.predicted_cached_tokens > 4000
        router.observe(placed, 0)
    assert router.trust()[first.decision.replica_id] == 1
    await router.close()
