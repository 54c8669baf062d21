"""Every policy: all candidates, each once, deterministic, nobody starved while all are equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policies import NAMES, Policy, Request, load_policy
from router.types import Load, ReplicaId, ReplicaView


@pytest.fixture(params=sorted(NAMES), scope="module")
def policy(request: pytest.FixtureRequest) -> Policy:
    return load_policy(request.param)


loads = st.builds(Load, *(st.integers(0, 10**6) for _ in range(3)))
fleets = st.lists(st.tuples(st.integers(0, 64), loads), min_size=1, max_size=8).map(
    lambda rows: [ReplicaView(ReplicaId(f"r{i}"), blocks, blocks, load) for i, (blocks, load) in enumerate(rows)]
)
requests = st.builds(
    Request,
    st.integers(0, 1030),
    st.just(16),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 10**6),
    burst_key=st.none() | st.integers(0, 2**32 - 1),
    shared_blocks=st.integers(0, 70),
)


@settings(deadline=None)
@given(request=requests, views=fleets)
def test_every_candidate_is_ranked_once_and_costs_are_finite(
    policy: Policy, request: Request, views: list[ReplicaView]
) -> None:
    ranked = policy.rank(request, views)
    assert sorted(one.view.replica_id for one in ranked) == sorted(view.replica_id for view in views)
    assert all(0 <= one.cost_s < float("inf") for one in ranked)
    assert all(abs(sum(one.terms.values()) - one.cost_s) < 1e-6 * (1 + one.cost_s) for one in ranked)
    assert policy.rank(request, views) == ranked


def test_equal_idle_replicas_all_get_their_turn(policy: Policy) -> None:
    views = [ReplicaView(ReplicaId(f"r{i}")) for i in range(4)]
    request = Request(10, 16)
    chosen = {
        policy.rank(replace(request, turn=turn, draw=(turn * 0.37) % 1), views)[0].view.replica_id for turn in range(40)
    }
    assert len(chosen) == 4


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"predicted_ttft.*package\.module:Class"):
        load_policy("fastest")
    with pytest.raises(ValueError, match="can't be loaded"):
        load_policy("router.nowhere:Policy")
    with pytest.raises(ValueError, match="no rank"):
        load_policy("collections:Counter")
