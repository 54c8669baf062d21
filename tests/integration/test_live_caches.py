"""What empties the engines' caches, asked of the whole system."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.live import MODEL, PATIENCE_S, Answer, Live, until

pytestmark = pytest.mark.integration


def body() -> dict[str, object]:
    """A prompt of about 3,000 tokens that nobody has seen."""
    return {"model": MODEL, "prompt": f"{uuid.uuid4().hex} is who you are. " * 100, "max_tokens": 1}


def reset(live: Live) -> None:
    """Engines refuse as long as somebody's blocks are in use, such as those of an earlier test."""
    until(lambda: live.request("POST", "/reset_prefix_cache").json == {"success": True})


def test_e6_after_a_reset_of_idle_engines_nobody_is_credited_with_what_is_gone(live: Live) -> None:
    prompts = [body() for _ in range(8)]  # more than there are replicas
    assert len({live.request("POST", "/v1/completions", one).replica for one in prompts}) > 1
    until(lambda: all(live.owned_blocks(one) > 0 for one in prompts))
    reset(live)
    until(lambda: not any(live.owned_blocks(one) for one in prompts))
    again = live.request("POST", "/v1/completions", prompts[0])
    assert (again.status, again.cached) == (200, 0)


@contextmanager
def asleep(live: Live) -> Iterator[None]:
    assert live.request("POST", "/sleep").json == {"status": "sleeping", "level": 1}
    try:
        yield
    finally:
        woken = live.request("POST", "/wake_up")
        # Both ingress processes, whichever of them answers.
        until(lambda: all(live.request("GET", "/health").json["status"] == "ok" for _ in range(20)))
    assert woken.json == {"status": "awake", "tags": None}


def test_e6_a_fleet_that_sleeps_holds_nothing_and_answers_what_came_meanwhile_when_it_wakes(live: Live) -> None:
    prompt, answers = body(), list[Answer]()
    live.request("POST", "/v1/completions", prompt)
    until(lambda: live.owned_blocks(prompt) > 0)
    meanwhile = threading.Thread(target=lambda: answers.append(live.request("POST", "/v1/completions", prompt)))
    with asleep(live):
        assert live.request("GET", "/is_sleeping").json == {"is_sleeping": True}
        until(lambda: len(live.request("GET", "/health").json["doubts"]) == 4)
        until(lambda: live.owned_blocks(prompt) == 0)
        meanwhile.start()
    meanwhile.join(PATIENCE_S)
    assert [(one.status, one.cached) for one in answers] == [(200, 0)]
    assert live.request("GET", "/is_sleeping").json == {"is_sleeping": False}
