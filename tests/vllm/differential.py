"""Runs two engines on the same operations and stops at the first thing in which they differ."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.vllm.operations import Abort, Add, Begin, End, Operation, Reset, Setup, Traffic, random_setup
from tests.vllm.shrinking import Difference, shrink
from tests.vllm.subjects import EmulatedSubject, Event, Subject

MakeSubject = Callable[[Setup], Subject]


class Hashes:
    """Which hash of one engine is which of the other. They are different numbers, but must name the same blocks."""

    def __init__(self) -> None:
        self._to_reference: dict[int, int] = {}
        self._to_emulated: dict[int, int] = {}

    def same(self, emulated: Event, reference: Event) -> bool:
        """Whether the two events differ at most in the numbers that the engines gave to blocks."""
        return (
            _without_hashes(emulated) == _without_hashes(reference)
            and len(_hashes(emulated)) == len(_hashes(reference))
            and all(map(self._pair, _hashes(emulated), _hashes(reference)))
        )

    def _pair(self, emulated: int | None, reference: int | None) -> bool:
        if emulated is None or reference is None:
            return emulated is reference
        return (
            self._to_reference.setdefault(emulated, reference) == reference
            and self._to_emulated.setdefault(reference, emulated) == emulated
        )


class Comparison:
    """Both engines, one operation at a time. Operations that make no sense any more (shrinking) do nothing.

    An engine that raises is a difference, too.
    """

    FREE_QUEUE_BELOW = 100
    """Pools with more blocks have their free queues compared now and then only."""

    def __init__(self, setup: Setup, emulated: Subject, reference: Subject) -> None:
        self._setup = setup
        self._emulated, self._reference = emulated, reference
        self._small = setup.num_blocks < self.FREE_QUEUE_BELOW
        self._hashes = Hashes()
        self._in_step = False
        self._unfinished: dict[str, None] = {}
        self._seen: set[str] = set()
        self.scheduled_tokens = 0
        self.counts: dict[str, int] = {}

    @property
    def unfinished(self) -> list[str]:
        return list(self._unfinished)

    def apply(self, operation: Operation) -> None:
        try:
            self._apply(operation)
        except Difference:
            raise
        except Exception as error:
            raise Difference(f"an engine raised {error!r}", "see above", "see above") from error

    def _apply(self, operation: Operation) -> None:
        kind = type(operation).__name__
        self.counts[kind] = self.counts.get(kind, 0) + 1
        match operation:
            case Add(name=name) if name not in self._seen and self._setup.fits(operation):
                self._seen.add(name)
                self._unfinished[name] = None
                self._emulated.add(operation)
                self._reference.add(operation)
            case Abort(name=name) if name in self._unfinished:
                self._emulated.abort(name)
                self._reference.abort(name)
            case Reset(preempt_running=preempt):
                _same("the reset's answer", self._emulated.reset(preempt), self._reference.reset(preempt))
            case Begin() if not self._in_step:
                self._in_step = True
                scheduled = self._emulated.begin()
                _same("scheduled tokens", scheduled, self._reference.begin())
                self.scheduled_tokens += sum(count for _, count in scheduled)
            case End() if self._in_step:
                self._in_step = False
                self._events(self._emulated.end(), self._reference.end())
            case _:
                return
        self._states()

    def _events(self, emulated: Sequence[Event], reference: Sequence[Event]) -> None:
        for index, (one, other) in enumerate(zip(emulated, reference, strict=False)):
            if not self._hashes.same(one, other):
                raise Difference(f"event {index} of the step", one, other)
            self.counts[one["type"]] = self.counts.get(one["type"], 0) + 1
        if len(emulated) != len(reference):
            raise Difference("events of the step", emulated, reference)

    def _states(self) -> None:
        emulated = self._emulated.state(in_step=self._in_step)
        reference = self._reference.state(in_step=self._in_step)
        for what, value in emulated.items():
            _same(what, value, reference[what])
        if self._small or self.counts.get("End", 0) % 64 == 0:
            _same("free queue", self._emulated.free_queue(), self._reference.free_queue())
        known = {*emulated["running"], *emulated["waiting"]}
        self._unfinished = {name: None for name in self._unfinished if name in known}
        self.counts["preemptions"] = emulated["preemptions in all"]
        if emulated["hits"] is not None:
            self.counts["queried tokens"], self.counts["hit tokens"] = emulated["hits"]


def replay(setup: Setup, operations: Iterable[Operation], emulated: MakeSubject, reference: MakeSubject) -> Comparison:
    """Raises Difference, with the operations up to it."""
    comparison = Comparison(setup, emulated(setup), reference(setup))
    done: list[Operation] = []
    try:
        for operation in operations:
            done.append(operation)
            comparison.apply(operation)
    except Difference as difference:
        difference.operations = done
        raise
    return comparison


def run_random(
    seed: int, num_operations: int, reference: MakeSubject, emulated: MakeSubject = EmulatedSubject
) -> dict[str, int]:
    """`num_operations` random ones, on a fresh pair of engines with another set-up after every 500.

    A step's end isn't counted. Returns what happened how often. Raises AssertionError with a minimal reproduction.
    """
    rng = random.Random(seed)
    totals: dict[str, int] = {}
    left = num_operations
    while left > 0:
        count = min(left, 500)
        left -= count
        setup = random_setup(rng)
        comparison = Comparison(setup, emulated(setup), reference(setup))
        done: list[Operation] = []
        try:
            for operation in _operations(Traffic(setup, rng), comparison, count):
                done.append(operation)
                comparison.apply(operation)
        except Difference as difference:
            difference.operations = done
            smallest = shrink(setup, difference, lambda *history: replay(*history, emulated, reference))
            raise AssertionError(smallest.as_python()) from difference
        for what, number in comparison.counts.items():
            totals[what] = totals.get(what, 0) + number
    return totals


def _operations(traffic: Traffic, comparison: Comparison, count: int) -> Iterable[Operation]:
    while count > 0:
        operation = traffic.next(comparison.unfinished)
        count -= not isinstance(operation, End)
        yield operation


def _same(what: str, emulated: Any, reference: Any) -> None:
    if emulated != reference:
        raise Difference(what, emulated, reference)


def _hashes(event: Event) -> list[int | None]:
    return [*event.get("block_hashes", ()), event.get("parent_block_hash")]


def _without_hashes(event: Event) -> Event:
    return {key: value for key, value in event.items() if key not in ("block_hashes", "parent_block_hash")}
