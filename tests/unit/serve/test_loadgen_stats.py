"""Figures over outcomes, by hand."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from serve.loadgen.stats import Goals, goodput, hit_rate, max_over_mean, quantile, summarize, token_rates
from serve.loadgen.types import UNFINISHED, Outcome


def outcome(start: float = 0.0, ttft: float = 1.0, gaps: tuple[float, ...] = (0.1, 0.1), **fields: Any) -> Outcome:
    values = {"prompt_tokens": 100, "cached_tokens": 50, "output_tokens": len(gaps) + 1, "pieces": len(gaps) + 1}
    end = start + ttft + sum(gaps)
    return Outcome(start, end, start + ttft, array("d", gaps), **{**values, **fields})


def failed(error: str, start: float = 0.0) -> Outcome:
    return Outcome(start, start + 1, error=error)


def test_quantiles_are_linear_between_neighbours_and_none_of_nothing() -> None:
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert quantile([7.0], 0.99) == 7.0
    assert quantile([], 0.5) is None


def test_latencies_of_one_answer() -> None:
    one = outcome(start=2.0, ttft=0.5, gaps=(0.1, 0.3))
    assert one.ttft_s == 0.5
    assert one.last_s == pytest.approx(2.9)
    assert one.tpot_s == pytest.approx(0.2)
    assert outcome(gaps=()).tpot_s is None
    assert failed("timeout").ttft_s is None


def test_tpot_counts_tokens_and_itl_moments() -> None:
    """Five tokens that came at three moments."""
    one = outcome(gaps=(0.2, 0.2), output_tokens=5)
    assert one.tpot_s == pytest.approx(0.1)
    assert summarize([one]).itl_p50_s == pytest.approx(0.2)


def test_the_hit_rate_is_in_tokens_and_leaves_out_who_does_not_tell() -> None:
    told = [outcome(prompt_tokens=900, cached_tokens=900), outcome(prompt_tokens=100, cached_tokens=0)]
    assert hit_rate([*told, outcome(cached_tokens=None)]) == 0.9
    assert hit_rate([outcome(cached_tokens=None)]) is None


def test_goodput_needs_both_goals_and_counts_failures() -> None:
    goals = Goals(ttft_s=1.0, tpot_s=0.1)
    good, late, slow = outcome(), outcome(ttft=1.1), outcome(gaps=(0.1, 0.2))
    assert goodput([good, late, slow, failed("timeout")], goals) == 0.25
    assert goodput([outcome(gaps=())], goals) == 1.0
    assert goodput([], goals) is None


def test_balance_counts_replicas_that_answered_nothing() -> None:
    assert max_over_mean([6, 2]) == 1.5
    assert max_over_mean([6, 2], replicas=4) == 3.0
    assert max_over_mean([]) is None


def test_rates_count_what_came_within_the_window() -> None:
    one = outcome(start=0.0, ttft=10.0, gaps=(5.0, 5.0), prompt_tokens=1000, output_tokens=100)
    assert token_rates([one], 0.0, 20.0) == (50.0, 5.0)
    assert token_rates([one], 0.0, 15.0) == pytest.approx((1000 / 15, 50 / 15))
    assert token_rates([one], 12.0, 20.0) == pytest.approx((0.0, 80 / 8))
    assert token_rates([one], 5.0, 5.0) == (None, None)


def test_errors_are_counted_by_kind_and_unfinished_requests_apart() -> None:
    found = summarize([outcome(), failed("timeout"), failed("timeout"), failed("HTTP 503: x"), failed(UNFINISHED)])
    assert (found.requests, found.answered, found.unfinished) == (5, 1, 1)
    assert found.errors == {"timeout": 2, "HTTP 503: x": 1}
    assert found.goodput == 0.25


def test_an_unfinished_answer_that_began_has_a_ttft() -> None:
    found = summarize([outcome(ttft=1.0), outcome(ttft=3.0, error=UNFINISHED)])
    assert found.ttft_p50_s == 2.0
    assert found.answered == 1


def test_a_window_leaves_out_the_warm_up() -> None:
    found = summarize([outcome(start=0.0, ttft=9.0), outcome(start=10.0, ttft=1.0)], window=(5.0, 20.0))
    assert (found.requests, found.ttft_p50_s, found.span_s) == (1, 1.0, 15.0)


def test_predictions_are_compared_with_reports() -> None:
    pairs = [(48, 48), (64, 48), (0, 48), (None, 48), (48, None)]
    found = summarize([outcome(predicted=one, cached_tokens=other) for one, other in pairs]).predictions
    assert found is not None
    assert (found.compared, found.equal, found.too_high, found.too_low) == (3, 1, 1, 1)
    assert (found.predicted_tokens, found.reported_tokens) == (112, 144)


def test_what_lies_outside_an_emulated_engine_is_told_apart() -> None:
    found = summarize([outcome(ttft=1.5, engine_ttft_s=1.0)])
    assert found.engine_ttft_p50_s == 1.0
    assert found.outside_engine_p50_s == 0.5
    assert summarize([outcome()]).outside_engine_p50_s is None


def test_nothing_at_all_has_no_figures() -> None:
    found = summarize([])
    assert found.answered == 0
    assert found.ttft_p50_s is found.hit_rate is found.max_mean_requests is found.total_tokens_per_s is None
    assert found.replicas == {}
