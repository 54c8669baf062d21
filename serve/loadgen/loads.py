"""Which load a set of options asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from serve.loadgen import files
from serve.loadgen.client import Target
from serve.loadgen.drive import closed_loop, open_loop, poisson, sessions
from serve.loadgen.prompts import SharedPrompts
from serve.loadgen.types import Call, Session, TimedCall

DEFAULT_CONCURRENCY = 32
DEFAULT_SECONDS = 60.0


class BadOptions(Exception):
    """Options that don't go together; the message is for the user."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to send, from the first of these that is given: `trace`, `sessions` (conversations, or a file of bodies),
    else `shared` prompts; and when: `rate` (for `seconds`), `concurrency`, or the times in the file."""

    trace: Path | None = None
    sessions: Path | None = None
    session_times: Path | None = None
    shared: SharedPrompts = field(default_factory=SharedPrompts)
    concurrency: int | None = None
    rate: float | None = None
    seconds: float | None = None
    think_s: float = 0.0
    trace_block: int | None = None
    stretch: float = 1.0
    max_prompt_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise BadOptions("--rate sends whatever is in flight and --concurrency waits for answers: give one of them")
        if self.trace is not None and self.sessions is not None:
            raise BadOptions("--trace and --sessions are two loads: give one of them")
        if self.session_times is not None and self.sessions is None:
            raise BadOptions("--session-times needs --sessions")


async def run_load(target: Target, model: str, options: LoadOptions) -> None:
    """Sends it all. Raises `BadFile` and `BadOptions`."""
    if options.sessions is not None and files.is_sessions(options.sessions):
        if options.rate is not None:
            raise BadOptions("--rate is for single requests; conversations start by --session-times or --concurrency")
        await sessions(target, _sessions(options, model), _session_concurrency(options))
        return
    if options.rate is not None:
        seconds = DEFAULT_SECONDS if options.seconds is None else options.seconds
        await open_loop(target, poisson(_calls(options, model), options.rate, seconds, options.seed))
        return
    timed = _timed(options, model)
    if timed is not None and options.concurrency is None:
        until = options.seconds
        await open_loop(target, (one for one in timed if until is None or one.at <= until))
        return
    concurrency = options.concurrency or DEFAULT_CONCURRENCY
    await closed_loop(target, _calls(options, model), concurrency, until_s=options.seconds)


def _timed(options: LoadOptions, model: str) -> Iterator[TimedCall] | None:
    """The requests at the times that their file has; None where it has none."""
    if options.trace is not None:
        return files.trace(
            options.trace,
            model,
            block=options.trace_block,
            stretch=options.stretch,
            max_prompt=options.max_prompt_tokens,
        )
    if options.sessions is not None and files.has_times(options.sessions):
        return files.bodies(options.sessions, model, stretch=options.stretch)
    return None


def _calls(options: LoadOptions, model: str) -> Iterator[Call]:
    timed = _timed(options, model)
    if timed is None and options.sessions is not None:
        timed = files.bodies(options.sessions, model)
    if timed is not None:
        return (one.call for one in timed)
    return options.shared.calls(model)


def _sessions(options: LoadOptions, model: str) -> list[Session]:
    assert options.sessions is not None
    conversations = files.session_bodies(options.sessions)
    if options.session_times is None:
        return files.untimed_sessions(conversations, model, think_s=options.think_s)
    found = files.timed_sessions(conversations, files.chats(options.session_times), model)
    if not found:
        raise BadOptions(
            f"{options.session_times} has no chat of as many turns as a conversation of {options.sessions}"
        )
    return [Session(one.at * options.stretch, one.turns) for one in found]


def _session_concurrency(options: LoadOptions) -> int | None:
    if options.session_times is not None:
        return options.concurrency
    return options.concurrency or DEFAULT_CONCURRENCY
