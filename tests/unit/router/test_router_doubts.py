"""Decisions where the map is gone, late or wrong, and how they are right again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.errors import OwnershipUnavailable
from router.ownership import Snapshot
from router.ownership.memory import MemoryOwnershipMap
from router.types import BlockHash, Load, ReplicaId
from tests.unit.router.one_router import REPLICAS, Clock, FlakyMap, body, joined, own, settle, started


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
