"""What is sent, and what came of it. Times are engine seconds since the start of the run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
UNFINISHED = "unfinished"
"""The error of a request that was still running when the run ended; counted apart from real errors."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: a JSON body for a POST to `path`. `prompt_tokens` where they are known beforehand."""

    path: str
    body: bytes
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call that is due at `at` seconds."""

    at: float
    call: Call


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that is due `think_s` after the answer to the one before."""

    think_s: float
    call: Call


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one conversation, each sent once the one before has been answered; the first no sooner than `at`."""

    at: float
    turns: Sequence[Turn]


@dataclass(slots=True)
class Outcome:
    """One request as the client saw it.

    `first_s`: when the first piece of the answer came, None when none did. `gaps_s`: seconds between moments at which
    pieces came. `pieces` counts the events that carried content. `cached_tokens` and `predicted` are None where the
    server doesn't tell; `engine_ttft_s` only emulated engines tell. `error` is a short kind, None when all went well.
    """

    started_s: float
    ended_s: float = 0.0
    first_s: float | None = None
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    pieces: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    replica: str | None = None
    predicted: int | None = None
    engine_ttft_s: float | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def last_s(self) -> float | None:
        """When the last piece of the answer came."""
        return None if self.first_s is None else self.first_s + sum(self.gaps_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first one; None for answers of a single token."""
        if self.first_s is None or self.last_s is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)
