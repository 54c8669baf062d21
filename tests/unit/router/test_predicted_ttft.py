import pytest

from router.policies import Request
from router.policies.predicted_ttft import PredictedTTFT
from router.types import Load, ReplicaId, ReplicaView

POLICY = PredictedTTFT(prefill_tokens_per_s=1000)


def best(
    num_tokens: int, *views: ReplicaView, turn: int = 0, burst_key: int | None = None, shared_blocks: int = 0
) -> str:
    request = Request(num_tokens, 16, turn=turn, burst_key=burst_key, shared_blocks=shared_blocks)
    return POLICY.rank(request, views)[0].view.replica_id


def view(name: str, blocks: int = 0, waiting: int = 0, decoding: int = 0, tokens: int = 0) -> ReplicaView:
    return ReplicaView(ReplicaId(name), blocks, blocks, Load(waiting, decoding, tokens))


def test_the_holder_of_the_prefix_is_preferred() -> None:
    assert best(4096, view("cold"), view("warm", blocks=250)) == "warm"


def test_a_hot_prefix_spreads_once_waiting_costs_more_than_recomputing() -> None:
    assert best(1024, view("cold"), view("warm", blocks=63, waiting=1, tokens=900)) == "warm"
    assert best(1024, view("cold"), view("warm", blocks=63, waiting=1, tokens=1600)) == "cold"


def test_a_long_prefill_avoids_the_replica_where_many_decode() -> None:
    assert best(4000, view("busy", decoding=30), view("idle")) == "idle"


def test_a_few_shared_tokens_do_not_gather_cold_prompts_on_one_replica() -> None:
    replicas = [view("warm", blocks=1), view("b"), view("c"), view("d")]
    assert {best(4000, *replicas, turn=turn) for turn in range(8)} == {"warm", "b", "c", "d"}


def test_the_terms_say_what_the_cost_is_made_of() -> None:
    (ranked,) = POLICY.rank(Request(1600, 16), [view("a", blocks=50, waiting=1, decoding=2, tokens=500)])
    assert ranked.terms == {"wait": 0.5, "prefill": 0.8, "others": pytest.approx(0.8), "decode": 0.004}


def test_a_burst_with_a_new_prefix_stays_together_and_spills_only_when_that_is_slower() -> None:
    """16 requests share 4,096 tokens that nobody holds; each has 64 of its own."""
    booked = {name: [0, 0, 0] for name in "abcd"}  # waiting, uncached tokens, blocks on their way
    for turn in range(16):
        views = [view(name, blocks=n[2], waiting=n[0], tokens=n[1]) for name, n in booked.items()]
        chosen = booked[best(4160, *views, turn=turn)]
        chosen[0] += 1
        chosen[1] += 4160 - 16 * chosen[2]
        chosen[2] = 256
    assert sum(n[2] > 0 for n in booked.values()) <= 2


def test_what_overflows_from_a_burst_goes_to_one_replica_whichever_router_sends_it() -> None:
    views = [view("full", blocks=256, waiting=40, tokens=20_000), view("b"), view("c"), view("d")]
    assert len({best(4160, *views, turn=turn, burst_key=7) for turn in range(8)}) == 1
    assert len({best(4160, *views, turn=0, burst_key=key) for key in range(8)}) == 3


def test_a_shared_prefix_comes_to_an_idle_replica_once_all_its_holders_are_busy() -> None:
    busy, also_busy, idle = view("a", blocks=256, decoding=3), view("b", blocks=256, decoding=1), view("c")
    assert best(4300, busy, also_busy, idle, shared_blocks=256) == "c"
    assert best(4300, busy, view("b", blocks=256), idle, shared_blocks=256) == "b"
    assert best(4300, busy, also_busy, view("c", decoding=1), shared_blocks=256) == "b"


def test_a_chat_whose_own_history_is_held_stays_though_others_idle() -> None:
    assert best(9000, view("a", blocks=550, decoding=5), view("b", blocks=256), view("c"), shared_blocks=0) == "a"


def test_an_idle_replica_pays_for_all_but_the_shared_prefix() -> None:
    ranked = POLICY.rank(Request(2000, 16, shared_blocks=100), [view("a", blocks=100, decoding=1), view("idle")])
    terms = next(one.terms for one in ranked if one.view.replica_id == "idle")
    assert terms["prefill"] == 2.0
    assert terms["spread"] == -1.4 * 1.6
    assert abs(sum(terms.values()) - 1.4 * 0.4) < 1e-9
