from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import count, repeat
from typing import Any

import pytest

from replicas.emulated.block_hashes import BlockChain
from replicas.emulated.block_pool import BlockPool
from replicas.emulated.scheduler import EngineRequest, Scheduler, SchedulerConfig, State
from replicas.emulated.step_time import StepWork

BLOCK = 4
names = count()


def request(tokens: Iterable[int], num_output: int = 1, **fields: Any) -> EngineRequest:
    return EngineRequest(f"r{next(names)}", BlockChain(tokens, BLOCK), num_output, repeat(99), **fields)


def scheduler(num_blocks: int = 100, **config: Any) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, BLOCK), SchedulerConfig(**config))


def run(engine: Scheduler, steps: int = 10_000) -> list[StepWork]:
    done = []
    for now in range(steps):
        work = engine.schedule(float(now))
        if work is None:
            break
        done.append(work)
        engine.finish(now + 1.0)
    return done


def check(engine: Scheduler) -> None:
    everyone = [*engine.running, *engine.waiting]
    engine.pool.check(Counter(block for one in everyone for block in one.blocks))
    assert all(one.state is State.RUNNING for one in engine.running)
    assert all(one.state is State.WAITING and not one.blocks for one in engine.waiting)
    for one in engine.running:
        assert one.num_computed <= one.chain.num_tokens
        assert len(one.blocks) >= engine.pool.blocks_for(one.num_computed)


def test_a_prompt_yields_its_first_token_with_its_last_chunk() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    one = request(range(20), num_output=3)
    engine.add(one)
    work = run(engine)
    assert [step.prefill_tokens for step in work] == [8, 8, 4, 0, 0]
    assert [step.decoding_seqs for step in work] == [0, 0, 0, 1, 1]
    assert work[1].prefill_attention == 8 * (8 + 4)
    assert [step.decode_context for step in work[3:]] == [21, 22]
    assert (one.first_token_at, one.state, one.num_generated) == (3.0, State.FINISHED, 3)


def test_running_requests_go_before_waiting_ones() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    first, second = request(range(12)), request(range(50, 62))
    engine.add(first)
    engine.add(second)
    engine.schedule(0.0)
    engine.finish(1.0)
    engine.schedule(1.0)
    assert (len(first.blocks), len(second.blocks)) == (3, 1)


def test_decoding_and_prefill_share_a_step() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    engine.add(request(range(4), num_output=5))
    engine.schedule(0.0)
    engine.finish(1.0)
    engine.add(request(range(50, 70)))
    work = engine.schedule(1.0)
    assert work is not None
    assert (work.decoding_seqs, work.prefill_tokens) == (1, 7)


def test_no_more_sequences_run_than_allowed() -> None:
    engine = scheduler(max_num_seqs=2)
    for start in (0, 100, 200):
        engine.add(request(range(start, start + 5), num_output=2))
    engine.schedule(0.0)
    assert (len(engine.running), len(engine.waiting)) == (2, 1)


def test_a_twin_in_the_same_step_hits_what_is_only_scheduled() -> None:
    engine = scheduler()
    first, twin = request(range(20)), request(range(20))
    engine.add(first)
    engine.add(twin)
    work = engine.schedule(0.0)
    assert (first.cached_tokens, twin.cached_tokens) == (0, 16)
    assert work is not None
    assert work.prefill_tokens == 24


def test_twins_in_step_with_each_other_store_the_block_they_fill_twice() -> None:
    engine = scheduler()
    twins = [request(range(6), num_output=4), request(range(6), num_output=4)]
    for twin in twins:
        engine.add(twin)
    run(engine)
    stored = [event["block_hashes"] for event in engine.pool.take_events()]
    generated_block = twins[0].chain.hashes[1]
    assert stored == [[twins[0].chain.hashes[0]], [generated_block], [generated_block]]


def test_the_last_generated_token_takes_no_slot() -> None:
    engine = scheduler()
    one = request(range(4), num_output=5)
    engine.add(one)
    run(engine)
    assert one.chain.num_tokens == 9
    assert sum(len(event["block_hashes"]) for event in engine.pool.take_events()) == 2
    again = request([0, 1, 2, 3, 99, 99, 99, 99, 99])
    engine.add(again)
    run(engine)
    assert again.cached_tokens == 8


def test_cached_tokens_are_those_of_the_first_scheduling() -> None:
    engine = scheduler(num_blocks=5)
    first, second = request(range(8), num_output=6), request(range(50, 58), num_output=6)
    engine.add(first)
    engine.add(second)
    run(engine)
    assert second.num_preemptions == 1
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert engine.stats.prefix_cache_queries == 16


def test_the_last_running_request_is_preempted_and_recomputes_from_the_head_of_the_queue() -> None:
    engine = scheduler(num_blocks=5, max_num_seqs=2)
    first, second, third = (request(range(start, start + 8), num_output=6) for start in (0, 50, 100))
    for one in (first, second, third):
        engine.add(one)
    now = 0.0
    while not engine.stats.num_preemptions:
        engine.schedule(now)
        now += 1.0
        check(engine)
        engine.finish(now)
    assert engine.waiting == [second, third]
    assert (second.num_computed, second.num_generated) == (0, 1)
    run(engine)
    assert [one.num_generated for one in (first, second, third)] == [6, 6, 6]
    check(engine)
    assert engine.pool.usage == 0.0


def test_a_request_waits_until_its_whole_prompt_fits() -> None:
    engine = scheduler(num_blocks=6, max_num_batched_tokens=4)
    first, second = request(range(12), num_output=2), request(range(50, 66))
    engine.add(first)
    engine.add(second)
    engine.schedule(0.0)
    engine.finish(1.0)
    engine.schedule(1.0)
    assert engine.waiting == [second]
    run(engine)
    assert second.state is State.FINISHED


def test_what_the_pool_could_never_hold_is_refused() -> None:
    engine = scheduler(num_blocks=2)
    engine.add(request(range(8)))
    with pytest.raises(ValueError, match="more than the pool's 2 blocks"):
        engine.add(request(range(8), num_output=2))


def test_arrivals_after_now_are_not_looked_at() -> None:
    engine = scheduler()
    engine.add(request(range(8), arrival=5.0))
    assert engine.schedule(4.0) is None
    assert engine.next_arrival() == 5.0
    assert engine.schedule(5.0) is not None


def test_abort_frees_blocks_in_every_state() -> None:
    engine = scheduler(max_num_seqs=1)
    running, waiting = request(range(8), num_output=5), request(range(50, 58))
    engine.add(running)
    engine.add(waiting)
    engine.schedule(0.0)
    assert engine.abort(waiting)
    assert engine.abort(running)
    assert not engine.abort(running)
    assert engine.finish(1.0) == []
    assert engine.schedule(1.0) is None
    assert engine.pool.usage == 0.0
    assert engine.stats.finished == {"abort": 2}
    check(engine)


def test_priority_goes_first_and_the_least_important_is_preempted() -> None:
    engine = scheduler(num_blocks=5, policy="priority", max_num_seqs=2)
    low, high = request(range(8), num_output=6, priority=9), request(range(50, 58), num_output=6, priority=1)
    later = request(range(100, 108), num_output=6, priority=5)
    for one in (low, later, high):
        engine.add(one)
    engine.schedule(0.0)
    assert engine.running == [high, later]
    run(engine)
    assert (high.num_preemptions, later.num_preemptions) == (0, 1)
    assert all(one.state is State.FINISHED for one in (low, later, high))


def test_what_came_at_the_same_time_with_the_same_priority_goes_by_name() -> None:
    engine = scheduler(policy="priority", max_num_seqs=1)
    later, earlier = request(range(8)), request(range(50, 58))
    later.request_id, earlier.request_id = "b", "a"
    engine.add(later)
    engine.add(earlier)
    assert engine.waiting == [earlier, later]


def test_a_victim_that_was_scheduled_already_leaves_the_step() -> None:
    engine = scheduler(num_blocks=4, policy="priority")
    low, high = request(range(5), num_output=8, priority=9), request(range(50, 58), num_output=3, priority=1)
    engine.add(low)
    engine.schedule(0.0)
    engine.finish(1.0)
    engine.add(high)
    engine.schedule(1.0)
    engine.finish(2.0)
    assert engine.running == [low, high]
    assert engine.schedule(2.0) == StepWork(decoding_seqs=1, decode_context=9)
    assert engine.waiting == [low]
    assert engine.finish(3.0) == [high]
    run(engine)
    assert (low.num_generated, high.num_generated) == (8, 3)
    check(engine)


def test_a_step_that_preempts_admits_nobody() -> None:
    engine = scheduler(num_blocks=6, policy="priority", max_num_seqs=2)
    first, victim = request(range(8), num_output=5, priority=1), request(range(50, 66), priority=9, num_output=5)
    engine.add(first)
    engine.add(victim)
    engine.schedule(0.0)
    engine.finish(1.0)
    engine.add(request(range(100, 104), priority=5))
    engine.schedule(1.0)
    assert victim.num_preemptions == 1
    assert engine.running == [first]
    engine.finish(2.0)
    engine.schedule(2.0)
    assert len(engine.running) == 2


def test_without_cache_reuse_everything_is_computed_and_no_query_counted() -> None:
    engine = scheduler()
    engine.add(request(range(8)))
    run(engine)
    again = request(range(8), reuse_cache=False)
    engine.add(again)
    (work,) = run(engine)
    assert (again.cached_tokens, work.prefill_tokens, engine.stats.prefix_cache_queries) == (0, 8, 8)


def test_reported_hits_are_stored_events_without_a_copy() -> None:
    engine = scheduler()
    engine.add(request(range(9)))
    run(engine)
    engine.pool.take_events()
    again = request(range(9), report_hits=True, session_id="s1")
    engine.add(again)
    run(engine)
    (event,) = engine.pool.take_events()
    assert (event["block_hashes"], event["session_id"]) == (again.chain.hashes[:2], "s1")


def test_a_reset_can_preempt_what_runs() -> None:
    engine = scheduler()
    one = request(range(8), num_output=3)
    engine.add(one)
    engine.schedule(0.0)
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(preempt_running=True)
    assert engine.finish(1.0) == []
    run(engine)
    assert one.num_generated == 3


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_with_aborts_keeps_the_books_and_serves_everyone(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    engine = scheduler(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=16, policy=policy)
    everyone: list[EngineRequest] = []
    counts = Counter[int]()
    now = 0.0
    while len(everyone) < 150 or engine.running or engine.waiting:
        if len(everyone) < 150 and rng.random() < 0.6:
            prompt = [rng.randrange(2)] * rng.randrange(1, 30) + [rng.randrange(9)]
            one = request(prompt, num_output=rng.randrange(1, 30), arrival=now, priority=rng.randrange(3))
            engine.add(one)
            everyone.append(one)
        if rng.random() < 0.1:
            engine.abort(rng.choice(everyone)) if everyone else None
        engine.schedule(now)
        now += 1.0
        engine.finish(now)
        check(engine)
        for event in engine.pool.take_events():
            counts.update(dict.fromkeys(event["block_hashes"], 1 if event["type"] == "BlockStored" else -1))
        assert {h for h, copies in counts.items() if copies} == set(engine.pool.cached_hashes)
    for one in everyone:
        assert one.state in (State.FINISHED, State.ABORTED)
        assert one.state is State.ABORTED or one.num_generated == one.num_output
    assert sum(engine.stats.finished.values()) == len(everyone)
    assert engine.stats.num_preemptions > 0
