"""Which replicas are left out for a while because they fail, and when they get another chance.

    closed     used as any other
    open       left out; its /health is asked after a pause that doubles from one opening to the next
    half_open  /health was fine: one request at a time, until one of them goes well

What only says something about the request (a 4xx, also a 503: busy, not broken; a client that left) changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half_open"]
Outcome = Literal["ok", "error", "lost", "neutral"]
"""How a request to a replica ended: well; with an error of the replica's own (5xx); unreachable or broken off; or in
a way that says nothing about the replica."""
Event = Outcome | Literal["probe_ok", "probe_failed"]

ERRORS = 3
"""So many 5xx in a row, with no good answer between them, open the breaker. A failed connection does so at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

_TRANSITIONS: Mapping[tuple[State, Event], State] = {
    ("closed", "ok"): "closed",
    ("closed", "error"): "closed",  # until there are ERRORS of them
    ("closed", "lost"): "open",
    ("open", "ok"): "open",  # these were sent before it opened, and their ends come late
    ("open", "error"): "open",
    ("open", "lost"): "open",
    ("open", "probe_ok"): "half_open",
    ("open", "probe_failed"): "open",
    ("half_open", "ok"): "closed",
    ("half_open", "error"): "open",
    ("half_open", "lost"): "open",
    ("closed", "neutral"): "closed",
    ("open", "neutral"): "open",
    ("half_open", "neutral"): "half_open",
}


class IllegalEvent(Exception):
    """Nobody probes a replica that is in use."""


@dataclass(slots=True)
class Breaker:
    """One replica's. Pure: no clock; whoever drives it waits `pause_s` before each probe.

    `errors`: 5xx in a row. `openings`: how often it opened, or stayed open after a probe, since it was last closed.
    `trial`: a request is out that decides whether it is closed again.
    """

    state: State = "closed"
    errors: int = 0
    openings: int = 0
    trial: bool = False

    @property
    def usable(self) -> bool:
        return self.state == "closed" or (self.state == "half_open" and not self.trial)

    @property
    def pause_s(self) -> float:
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.openings - 1, 16)))

    def sent(self) -> bool:
        """A request goes there now. True: it is the trial, and its end must be told as such."""
        if self.state != "half_open" or self.trial:
            return False
        self.trial = True
        return True

    def ended(self, outcome: Outcome, *, trial: bool = False) -> bool:
        """A request has ended. True: this opened the breaker."""
        if self.state == "half_open" and not trial:
            return False  # sent earlier, or although it was left out: the trial decides
        self.trial = self.trial and not trial
        return self._step(outcome)

    def probed(self, *, healthy: bool) -> None:
        """/health has answered. Raises `IllegalEvent` unless it is open."""
        self._step("probe_ok" if healthy else "probe_failed")

    def _step(self, event: Event) -> bool:
        before = self.state
        try:
            after = _TRANSITIONS[before, event]
        except KeyError:
            raise IllegalEvent(f"{event} while {before}") from None
        if before == "closed":
            self.errors = 0 if event == "ok" else self.errors + (event == "error")
            if self.errors >= ERRORS:
                after = "open"
        if after == "open" and (before != "open" or event == "probe_failed"):
            self.openings += 1
            self.errors = 0
        elif after == "closed" and before != "closed":
            self.openings = 0
        self.state = after
        return after == "open" and before != "open"
