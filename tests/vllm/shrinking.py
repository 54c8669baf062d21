"""From a long random history that shows a difference to a short one that shows one, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tests.vllm.operations import Add, Operation, Setup


class Difference(AssertionError):
    """`operations` lead to it, the last one shows it."""

    def __init__(self, what: str, emulated: Any, reference: Any) -> None:
        super().__init__(f"{what}: {emulated!r} emulated, {reference!r} in vLLM")
        self.operations: list[Operation] = []


Replay = Callable[[Setup, list[Operation]], object]
"""Raises Difference, with the operations up to it."""


def shrink(setup: Setup, difference: Difference, replay: Replay, tries: int = 2_000) -> Smallest:
    """Tries smaller pools, then fewer operations, then plainer requests, as long as any difference remains."""
    smallest = Smallest(setup, difference, replay, tries)
    before = None
    while before != (smallest.setup, len(smallest.operations)) and smallest.tries > 0:
        before = smallest.setup, len(smallest.operations)
        _smaller_setup(smallest)
        _fewer_operations(smallest)
        _plainer_requests(smallest)
    return smallest


@dataclass(slots=True)
class Smallest:
    """The smallest history so far."""

    setup: Setup
    difference: Difference
    replay: Replay
    tries: int
    operations: list[Operation] = field(init=False)

    def __post_init__(self) -> None:
        self.operations = self.difference.operations

    def attempt(self, setup: Setup, operations: list[Operation]) -> bool:
        """Takes a candidate over when it shows a difference."""
        if self.tries == 0:
            return False
        self.tries -= 1
        try:
            self.replay(setup, operations)
        except Difference as found:
            self.setup, self.operations, self.difference = setup, found.operations, found
            return True
        return False

    def as_python(self) -> str:
        lines = "\n".join(f"    {_brief(operation)}," for operation in self.operations)
        return f"{self.difference}\nsetup = {self.setup!r}\noperations = [\n{lines}\n]"


def _smaller_setup(smallest: Smallest) -> None:
    for name in ("num_blocks", "max_num_seqs"):
        for value in range(1, getattr(smallest.setup, name)):
            if smallest.attempt(replace(smallest.setup, **{name: value}), smallest.operations):
                break


def _fewer_operations(smallest: Smallest) -> None:
    size = len(smallest.operations) // 2
    while size:
        start, shrunk = 0, False
        while start < len(smallest.operations):
            operations = smallest.operations
            if smallest.attempt(smallest.setup, operations[:start] + operations[start + size :]):
                shrunk = True
            else:
                start += size
        size = size if shrunk and smallest.tries else size // 2


def _plainer_requests(smallest: Smallest) -> None:
    index = 0
    while index < len(smallest.operations):
        operations = smallest.operations
        changed = any(
            smallest.attempt(smallest.setup, [*operations[:index], plainer, *operations[index + 1 :]])
            for plainer in _plainer(operations[index])
        )
        index += not changed


def _plainer(operation: Operation) -> Iterable[Operation]:
    """The same request with less to it, in one respect each."""
    if not isinstance(operation, Add):
        return
    plainest = Add(operation.name, operation.prompt, operation.output)
    for one in fields(Add):
        if getattr(operation, one.name) != getattr(plainest, one.name):
            yield replace(operation, **{one.name: getattr(plainest, one.name)})
    for part in ("output", "prompt"):
        ids = getattr(operation, part)
        for length in (1, len(ids) // 2, len(ids) - 1):
            if 0 < length < len(ids):
                yield replace(operation, **{part: ids[:length]})


def _brief(operation: Operation) -> str:
    """Its repr without the fields that have their default."""
    shown = [
        f"{one.name}={value!r}" for one in fields(operation) if (value := getattr(operation, one.name)) != one.default
    ]
    return f"{type(operation).__name__}({', '.join(shown)})"
