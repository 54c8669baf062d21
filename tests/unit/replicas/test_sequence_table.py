"""The state machine of an event stream: what every input leads to in every state (see `replicas.sequence`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replicas.sequence import TABLE as ACTIONS
from replicas.sequence import AskReplay, Deliver, Input, Lost, Restarted, SequenceTracker, State, Step


def message(seq: int, engine: str = "first") -> bytes:
    return f"{engine} {seq}".encode()


def listening() -> SequenceTracker:
    """0..2 are taken."""
    tracker = SequenceTracker(can_replay=False)
    tracker.start()
    for seq in range(3):
        tracker.live(seq, message(seq))
    return tracker


def starting() -> SequenceTracker:
    tracker = SequenceTracker()
    tracker.start()
    return tracker


def following() -> SequenceTracker:
    """0..2 are taken."""
    tracker = starting()
    tracker.replay_ended()
    for seq in range(3):
        tracker.live(seq, message(seq))
    return tracker


def replaying() -> SequenceTracker:
    """5 is held, 3 and 4 are missing."""
    tracker = following()
    tracker.live(5, message(5))
    return tracker


def verifying() -> SequenceTracker:
    tracker = following()
    tracker.probe()
    return tracker


def verified() -> SequenceTracker:
    tracker = verifying()
    tracker.replayed(2, message(2))
    return tracker


STATES = {make.__name__: make for make in (listening, following, starting, replaying, verifying, verified)}
INPUTS: dict[str, Callable[[SequenceTracker], list[Step]]] = {
    "live, next": lambda t: t.live(6 if t.seq == 2 and t.replaying and t.in_doubt else 3, message(3)),
    "live, again": lambda t: t.live(2, message(2)),
    "live, gap": lambda t: t.live(8, message(8)),
    "live, back": lambda t: t.live(0, message(0, "second")),
    "replayed, last": lambda t: t.replayed(2, message(2)),
    "replayed, last differs": lambda t: t.replayed(2, message(2, "second")),
    "replayed, next": lambda t: t.replayed(3, message(3)),
    "replayed, later": lambda t: t.replayed(4, message(4)),
    "replay ended": lambda t: t.replay_ended(),
    "replay silent": lambda t: t.replay_timed_out(),
    "probe": lambda t: t.probe(),
    "reconnected": lambda t: t.reconnected(),
}
# What is to be done, and the state afterwards where it is another one.
# D: deliver, A: ask from there (! by a new socket), R: restart, L: loss.
TABLE = """
                       | listening | following      | starting     | replaying      | verifying      | verified
live, next             | D3        | D3             | -            | -              | -              | -
live, again            | -         | -              | -            | R A0! starting | -              | -
live, gap              | L D8      | A3 replaying   | -            | -              | -              | -
live, back             | R D0      | R A0! starting | -            | R A0! starting | R A0! starting | R A0! starting
replayed, last         | -         | -              | D2 replaying | -              | - verified     | -
replayed, last differs | -         | -              | D2 replaying | -              | R A0! starting | -
replayed, next         | -         | -              | D3 replaying | D3             | D3             | D3
replayed, later        | -         | -              | D4 replaying | L D4           | L D4 replaying | A2! verifying
replay ended           | -         | -              | - following  | A3             | R A0! starting | - following
replay silent          | -         | -              | A0!          | A3!            | A2!            | A2! verifying
probe                  | -         | A2 verifying   | -            | -              | -              | -
reconnected            | L         | A2 verifying   | -            | -              | -              | -
"""
ROWS = {
    name.strip(): [cell.strip() for cell in cells]
    for name, *cells in (row.split("|") for row in TABLE.split("\n")[1:-1])
}


def short(step: Step) -> str:
    match step:
        case Deliver(seq, _):
            return f"D{seq}"
        case AskReplay(start, fresh):
            return f"A{start}{'!' * fresh}"
        case Restarted():
            return "R"
        case Lost():
            return "L"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("what", INPUTS)
def test_every_input_in_every_state(what: str, state: str) -> None:
    tracker = STATES[state]()
    assert tracker.state.name.lower() == state
    steps = INPUTS[what](tracker)
    after = tracker.state.name.lower()
    told = " ".join([*map(short, steps)] or ["-"])
    assert told + f" {after}" * (after != state) == ROWS[what][ROWS[""].index(state)]


def test_the_tables_are_whole() -> None:
    assert list(ROWS) == ["", *INPUTS]
    assert list(STATES) == ROWS[""] == [state.name.lower() for state in State]
    assert set(ACTIONS) == {(state, what) for state in State for what in Input}
    assert all(callable(getattr(SequenceTracker, f"_{action}")) for action in ACTIONS.values())
