"""Recorded agent sessions through the whole system, turn by turn: where they go, and what they find there."""

from __future__ import annotations

import pytest

from serve.loadgen.measure import run_loop
from serve.loadgen.processes import whohas_up
from serve.loadgen.stats import Summary, summarize
from serve.loadgen.types import Session
from tests.bench import tau_sessions

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (tau_sessions.SESSIONS.exists() and tau_sessions.TIMES.exists()),
        reason="the recorded sessions are not here: ../shared/data/tau_airline_*.jsonl.gz beside the repository",
    ),
]

COUNT = 20
SPEED = 8.0
EARLIER = 8.0
"""Sessions start so much closer together than recorded: they then run side by side."""


def replayed(policy: str, conversations: list[Session]) -> Summary:
    # What is decided, on machines of any speed: no look-up may be cut short.
    with whohas_up(tau_sessions.app(policy, SPEED, look_up_timeout_s=2.0)) as url:
        measured = run_loop(tau_sessions.replay(url, conversations, SPEED))
    assert measured.stopped is None
    assert len(measured.outcomes) == sum(len(one.turns) for one in conversations)
    found = summarize(measured.outcomes, replicas=tau_sessions.REPLICAS)
    assert found.errors == {}
    return found


def test_sessions_find_nearly_all_that_an_infinite_cache_has_and_round_robin_clearly_less() -> None:
    conversations = tau_sessions.load(COUNT, EARLIER)
    bound = tau_sessions.bound(conversations)
    found, blind = replayed("predicted_ttft", conversations), replayed("round_robin", conversations)
    assert found.hit_rate is not None
    assert blind.hit_rate is not None
    assert found.hit_rate > bound - 0.03
    assert found.hit_rate > blind.hit_rate + 0.02
    # Balance is asked for where nothing is chance: tests/sim, with all sessions.
    assert found.predictions is not None
    assert found.predictions.equal > 0.8 * found.predictions.compared
