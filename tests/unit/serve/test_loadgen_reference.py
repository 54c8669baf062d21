"""The pure parts of the reference table, and figures as text."""

from __future__ import annotations

from array import array

import pytest

from replicas.emulated.step_time import StepTime
from serve.loadgen.measure import Measured
from serve.loadgen.reference import OUTSIDE_ENGINE_S, PUBLISHED, Figure, Plan, Reference, prefill_share
from serve.loadgen.reference_text import reference_text
from serve.loadgen.show import summary_text, table
from serve.loadgen.stats import Goals, summarize
from serve.loadgen.types import UNFINISHED, Outcome


def outcome(start: float, first: float, **fields: object) -> Outcome:
    one = Outcome(start, first + 1, first, array("d", [0.5, 0.5]), 3, 1000, 400, 3)
    for name, value in fields.items():
        setattr(one, name, value)
    return one


def test_a_ttft_is_compared_with_what_lies_outside_the_engine_added() -> None:
    figure = Figure("ttft_p50_off_s", 2.0, 1.2)
    assert figure.compared == pytest.approx(1.2 + OUTSIDE_ENGINE_S)
    assert figure.deviation == pytest.approx((1.2 + OUTSIDE_ENGINE_S) / 2.0 - 1)
    assert Figure("tokens_per_s_off", 2000.0, 2200.0).deviation == pytest.approx(0.1)
    assert Figure("ttft_p99_on_s", 1.6, None).deviation is None


def test_the_prefill_share_prices_what_was_not_cached() -> None:
    step = StepTime(a=0.0, b=1e-3, c=0.0, d=1e-6, e=0.0)
    cost = 600e-3 + (1000**2 - 400**2) / 2 * 1e-6
    answers = [outcome(10.0, 11.0), outcome(12.0, 13.0), outcome(13.0, 14.0, error=UNFINISHED)]
    assert prefill_share(answers, (10.0, 20.0), step) == pytest.approx(3 * cost / 10)
    assert prefill_share(answers, (50.0, 60.0), step) is None


def test_a_fleet_of_many_runs_slower_and_never_slower_than_the_wall() -> None:
    plan = Plan(speed=10.0)
    assert [plan.fleet_speed(count) for count in (4, 8, 100)] == [5.0, 2.5, 1.0]


def test_the_table_shows_what_there_is_of_it() -> None:
    reference = Reference(
        Plan(), [Figure(name, value, None) for name, value in PUBLISHED.items()], stopped="interrupted"
    )
    text = reference_text(reference)
    assert "TTFT p50, 8,192-token prompt, off (s)" in text
    assert "stopped early: interrupted" in text
    reference.figures = [Figure(name, value, value) for name, value in PUBLISHED.items()]
    reference.fleets = [(4, "round_robin", summarize([outcome(0.0, 1.0, replica="a", predicted=400)]))]
    reference.lag = {"4 replicas": (1.0, 2.0)}
    text = reference_text(reference)
    assert "+0%" in text  # tokens/s and share; a TTFT has the outside part on top
    assert "+29%" in text
    assert "40.0%" in text
    assert reference.as_json()["fleets"][0]["hit_rate"] == 0.4


def test_a_report_leaves_out_what_nobody_told() -> None:
    outcomes = [outcome(0.0, 1.0, cached_tokens=None), Outcome(0.0, 1.0, error="timeout")]
    text = summary_text(summarize(outcomes), Measured(outcomes, 1.0, 0.001, "time limit"), 2.0, Goals())
    assert "1 answered of 2" in text
    assert "1 x timeout" in text
    assert "hit rate" not in text
    assert "replicas" not in text
    assert "stopped early: time limit" in text
    assert "2 x those of the wall" in text


def test_columns_of_a_table_line_up() -> None:
    assert table("t", ["", "n"], [["a", "10"], ["long", "7"]], ["why"]).splitlines() == [
        "t",
        "--------",
        "       n",
        "--------",
        "a     10",
        "long   7",
        "  * why",
    ]
