"""When a failing replica is left out, and when it gets another chance."""

from __future__ import annotations

import random

import pytest

from serve.breaker import ERRORS, LONGEST_PAUSE_S, Breaker, IllegalEvent, Outcome


def opened() -> Breaker:
    breaker = Breaker()
    assert breaker.ended("lost")
    return breaker


def on_trial() -> Breaker:
    breaker = opened()
    breaker.probed(healthy=True)
    assert breaker.sent()
    return breaker


def test_one_failed_connection_opens_it() -> None:
    breaker = Breaker()
    assert breaker.ended("lost")
    assert not breaker.usable


def test_p9_errors_in_a_row_open_it_and_fewer_do_not() -> None:
    breaker = Breaker()
    assert [breaker.ended("error") for _ in range(ERRORS)] == [False] * (ERRORS - 1) + [True]
    assert not breaker.usable


def test_a_good_answer_starts_the_count_of_errors_anew() -> None:
    breaker = Breaker()
    for outcome in ("error", "error", "ok", "error", "error"):
        assert not breaker.ended(outcome)
    assert breaker.usable


def test_l3_what_says_nothing_about_the_replica_neither_counts_nor_resets() -> None:
    breaker = Breaker()
    for _ in range(100):
        assert not breaker.ended("neutral")
    for outcome in ("error", "neutral", "error", "neutral"):
        assert not breaker.ended(outcome)
    assert breaker.ended("error")


def test_what_was_sent_before_it_opened_changes_nothing_when_it_ends() -> None:
    breaker = opened()
    for outcome in ("ok", "error", "lost", "neutral"):
        assert not breaker.ended(outcome)
    assert breaker == opened()


def test_l10_a_healthy_probe_lets_one_request_through_and_its_good_end_closes_it() -> None:
    breaker = opened()
    breaker.probed(healthy=True)
    assert breaker.usable
    assert breaker.sent()
    assert not breaker.usable
    assert not breaker.sent()
    assert not breaker.ended("ok", trial=True)
    assert breaker == Breaker()


@pytest.mark.parametrize("outcome", ["error", "lost"])
def test_a_trial_that_fails_opens_it_again_for_longer(outcome: Outcome) -> None:
    breaker = on_trial()
    before = breaker.pause_s
    assert breaker.ended(outcome, trial=True)
    assert (breaker.state, breaker.pause_s, breaker.trial) == ("open", 2 * before, False)


def test_a_trial_that_says_nothing_makes_room_for_the_next_one() -> None:
    breaker = on_trial()
    assert not breaker.ended("neutral", trial=True)
    assert breaker.usable


def test_only_the_trial_decides_while_it_is_out() -> None:
    breaker = on_trial()
    for outcome in ("ok", "error", "lost"):
        assert not breaker.ended(outcome)
    assert breaker.state == "half_open"
    assert not breaker.usable


def test_pauses_double_up_to_a_limit_and_start_anew_once_it_is_closed() -> None:
    breaker = opened()
    pauses = []
    for _ in range(8):
        pauses.append(breaker.pause_s)
        breaker.probed(healthy=False)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses[-1] == LONGEST_PAUSE_S
    breaker.probed(healthy=True)
    breaker.ended("ok", trial=breaker.sent())
    breaker.ended("lost")
    assert breaker.pause_s == 1


def test_a_probe_of_a_replica_in_use_is_refused_and_changes_nothing() -> None:
    breaker = Breaker(errors=1)
    with pytest.raises(IllegalEvent, match="probe_ok while closed"):
        breaker.probed(healthy=True)
    assert breaker == Breaker(errors=1)


def test_whatever_happens_a_replica_that_has_recovered_is_used_again() -> None:
    for seed in range(300):
        draw, breaker = random.Random(seed), Breaker()
        for _ in range(draw.randrange(60)):
            if breaker.state == "open":
                breaker.probed(healthy=draw.random() < 0.5)
            outcome = draw.choice(["ok", "error", "lost", "neutral"])
            breaker.ended(outcome, trial=breaker.sent())  # type: ignore[arg-type]
        if breaker.state == "open":
            breaker.probed(healthy=True)
        for _ in range(2):
            breaker.ended("ok", trial=breaker.sent())
        assert breaker == Breaker()
