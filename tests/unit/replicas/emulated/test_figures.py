from __future__ import annotations

from itertools import repeat

import pytest

from replicas.emulated.block_hashes import BlockChain
from replicas.emulated.figures import WINDOW_S, EngineFigures, Histogram, Tracked
from replicas.emulated.scheduler import EngineRequest, SchedulerStats, State
from replicas.emulated.step_time import StepTime, StepWork

TIMES = StepTime(a=0.1, b=0.001, c=0.01, d=0.0, e=0.0)


def step(figures: EngineFigures, end: float, work: StepWork) -> None:
    figures.step_ended(end, work, TIMES.seconds(work), 0.0)


def test_buckets_are_cumulative_and_their_bounds_inclusive() -> None:
    histogram = Histogram((1, 2.5))
    for value in (0, 1, 1.5, 2.5, 9):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.5", 4), ("+Inf", 5)]
    assert (histogram.count, histogram.sum) == (5, 14)


def test_prefill_is_what_a_step_would_have_been_shorter_without_it() -> None:
    figures = EngineFigures(SchedulerStats(), TIMES)
    step(figures, 1.0, StepWork(prefill_tokens=100))
    assert (figures.busy_s, figures.prefill_s) == pytest.approx((0.2, 0.2))
    step(figures, 2.0, StepWork(prefill_tokens=100, decoding_seqs=10))
    assert (figures.busy_s, figures.prefill_s) == pytest.approx((0.5, 0.3))
    step(figures, 3.0, StepWork(decoding_seqs=10))
    assert (figures.busy_s, figures.prefill_s) == pytest.approx((0.7, 0.3))


def test_rates_are_those_of_the_window() -> None:
    stats = SchedulerStats()
    figures = EngineFigures(stats, TIMES)
    for second in range(1, 31):
        stats.prompt_tokens += 400
        stats.generation_tokens += 10
        step(figures, float(second), StepWork(prefill_tokens=400))
    assert figures.rates(30.0) == pytest.approx(
        {
            "prompt_tokens_per_second": 400,
            "output_tokens_per_second": 10,
            "busy_share": 0.5,
            "prefill_share": 1.0,
        }
    )
    half = figures.rates(30.0 + WINDOW_S / 2)
    assert half["output_tokens_per_second"] == pytest.approx(5)
    assert figures.rates(1000.0)["busy_share"] == pytest.approx(0.0, abs=0.01)


def test_a_long_idle_time_does_not_thin_out_what_follows() -> None:
    stats = SchedulerStats()
    figures = EngineFigures(stats, TIMES)
    for second in range(100, 111):
        step(figures, float(second), StepWork(prefill_tokens=400))
        stats.prompt_tokens += 400
    assert figures.rates(110.0)["busy_share"] == pytest.approx(0.5, abs=0.06)


def test_latencies_are_counted_once_each() -> None:
    stats = SchedulerStats()
    figures = EngineFigures(stats, TIMES)
    request, tracked = EngineRequest("r", BlockChain(range(20), 16), 3, repeat(0), arrival=1.0), Tracked()
    for now in (2.0, 2.5, 3.5):
        request.num_generated += 1
        request.first_token_at = request.first_token_at or now
        if request.num_generated == 3:
            request.state = State.FINISHED
        figures.token_generated(request, tracked, now)
    sums = [one.sum for one in (figures.ttft_s, figures.itl_s, figures.e2e_s, figures.tpot_s)]
    assert sums == pytest.approx([1.0, 1.5, 2.5, 0.75])
    assert [one.count for one in (figures.ttft_s, figures.itl_s, figures.e2e_s, figures.tpot_s)] == [1, 2, 1, 1]
    assert (figures.prompt_tokens.sum, figures.generation_tokens.sum) == (20, 3)


def test_rates_before_anything_happened_are_zero() -> None:
    rates = EngineFigures(SchedulerStats(), TIMES).rates(0.0)
    assert set(rates.values()) == {0.0}
