from router.policies import Request
from router.policies.predicted_ttft import PredictedTTFT
from router.types import Load, ReplicaId, ReplicaView

POLICY = PredictedTTFT(prefill_tokens_per_s=1000)


def best(num_tokens: int, *views: ReplicaView, turn: int = 0) -> str:
    return POLICY.rank(Request(num_tokens, 16, turn=turn), views)[0].view.replica_id


def view(name: str, blocks: int = 0, waiting: int = 0, decoding: int = 0, tokens: int = 0) -> ReplicaView:
    return ReplicaView(ReplicaId(name), blocks, blocks, Load(waiting, decoding, tokens))


def test_the_holder_of_the_prefix_is_preferred() -> None:
    assert best(4096, view("cold"), view("warm", blocks=250)) == "warm"


def test_a_hot_prefix_spreads_once_waiting_costs_more_than_recomputing() -> None:
    assert best(1024, view("cold"), view("warm", blocks=63, waiting=1, tokens=900)) == "warm"
    assert best(1024, view("cold"), view("warm", blocks=63, waiting=1, tokens=1400)) == "cold"


def test_a_long_prefill_avoids_the_replica_where_many_decode() -> None:
    assert best(4000, view("busy", decoding=30), view("idle")) == "idle"


def test_a_few_shared_tokens_do_not_gather_cold_prompts_on_one_replica() -> None:
    replicas = [view("warm", blocks=1), view("b"), view("c"), view("d")]
    assert {best(4000, *replicas, turn=turn) for turn in range(8)} == {"warm", "b", "c", "d"}


def test_the_terms_say_what_the_cost_is_made_of() -> None:
    (ranked,) = POLICY.rank(Request(1600, 16), [view("a", blocks=50, waiting=1, decoding=2, tokens=500)])
    assert ranked.terms == {"wait": 0.5, "prefill": 0.8, "others": 0.2 * 0.8 * 4, "decode": 0.004}


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
