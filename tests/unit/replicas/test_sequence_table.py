"""The state machine of an event stream, as a table: every state with every input.

starting    nothing taken yet; the past is being asked for
following   everything up to `seq` is taken
replaying   what is missing, or the past, is being replayed; live messages are held
verifying   in a quiet time or after a reconnect: is the last message taken still the publisher's?
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replicas.sequence import AskReplay, Deliver, Lost, Restarted, SequenceTracker, Step


def message(seq: int, engine: str = "first") -> bytes:
    return f"{engine} {seq}".encode()


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


def state_of(tracker: SequenceTracker) -> str:
    if not tracker.replaying:
        return "following"
    if tracker.seq < 0:
        return "starting"
    return "replaying" if tracker.in_doubt else "verifying"


STATES = {make.__name__: make for make in (starting, following, replaying, verifying)}
INPUTS: dict[str, Callable[[SequenceTracker], list[Step]]] = {
    "live, next": lambda t: t.live(6 if t.seq == 2 and t.replaying and t.in_doubt else 3, message(3)),
    "live, again": lambda t: t.live(2, message(2)),
    "live, gap": lambda t: t.live(8, message(8)),
    "live, back": lambda t: t.live(0, message(0, "second")),
    "replayed, last taken": lambda t: t.replayed(2, message(2)),
    "replayed, last taken differs": lambda t: t.replayed(2, message(2, "second")),
    "replayed, next": lambda t: t.replayed(3, message(3)),
    "replayed, later": lambda t: t.replayed(4, message(4)),
    "replay ended": lambda t: t.replay_ended(),
    "replay silent": lambda t: t.replay_timed_out(),
    "probe": lambda t: t.probe(),
    "reconnected": lambda t: t.reconnected(),
}
# What is to be done, and the state afterwards. D: deliver, A: ask from there (! by a new socket), R: restart, L: loss.
TABLE = {
    #                                 starting           following           replaying          verifying
    "live, next":                   ("- starting",       "D3 following",     "- replaying",     "- verifying"),
    "live, again":                  ("- starting",       "- following",      "R A0! starting",  "- verifying"),
    "live, gap":                    ("- starting",       "A3 replaying",     "- replaying",     "- verifying"),
    "live, back":                   ("- starting",       "R A0! starting",   "R A0! starting",  "R A0! starting"),
    "replayed, last taken":         ("D2 replaying",     "- following",      "- replaying",     "- verifying"),
    "replayed, last taken differs": ("D2 replaying",     "- following",      "- replaying",     "R A0! starting"),
    "replayed, next":               ("D3 replaying",     "- following",      "D3 replaying",    "D3 verifying"),
    "replayed, later":              ("D4 replaying",     "- following",      "L D4 replaying",  "L D4 replaying"),
    "replay ended":                 ("- following",      "- following",      "A3 replaying",    "R A0! starting"),
    "replay silent":                ("A0! starting",     "- following",      "A3! replaying",   "A2! verifying"),
    "probe":                        ("- starting",       "A2 verifying",     "- replaying",     "- verifying"),
    "reconnected":                  ("- starting",       "A2 verifying",     "- replaying",     "- verifying"),
}  # fmt: skip


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
    assert state_of(tracker) == state
    steps = INPUTS[what](tracker)
    told = " ".join([*map(short, steps)] or ["-"])
    assert f"{told} {state_of(tracker)}" == TABLE[what][list(STATES).index(state)]


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(INPUTS)
    assert all(len(row) == len(STATES) for row in TABLE.values())
