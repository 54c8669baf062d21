"""Step-time parameters from measured latencies, by least squares.

    TTFT of n tokens alone   = front + ceil(n / chunk) * a + b * n + d * n^2 / 2
    time between tokens of k = a + c * k + e * context

`chunk` is the engine's token budget of a step, `context` the sum of the k sequences' lengths, `front` what the request
spends outside the engine. Rows are weighted by their inverse, so that relative errors count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from replicas.emulated.step_time import StepTime

CHUNKS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Token budgets of a step that are tried where it isn't told."""

_COLUMNS = ("a", "b", "c", "d", "e", "front")


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt of `tokens`, none of them cached, on an engine that did nothing else: its TTFT."""

    tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Decode:
    """`seqs` sequences decoding together, of `context` tokens in all on average: seconds from one token to the next."""

    seqs: int
    context: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Residual:
    """How far the model is from one measurement; `relative` 0.1 is 10 % too long."""

    what: str
    measured_s: float
    model_s: float

    @property
    def relative(self) -> float:
        return self.model_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Fit:
    """`front_s` is the part of a TTFT that no step explains, `chunk` the token budget of a step that fits best."""

    step: StepTime
    front_s: float
    chunk: int
    residuals: Sequence[Residual]

    @property
    def profile(self) -> dict[str, float]:
        """What `--profile FILE` takes."""
        return asdict(self.step)

    @property
    def rms(self) -> float:
        """Root mean square of the relative residuals."""
        return math.sqrt(sum(one.relative**2 for one in self.residuals) / len(self.residuals))


def fit(prefills: Sequence[Prefill], decodes: Sequence[Decode], *, chunk: int | None = None) -> Fit:
    """The parameters, none below 0, that come closest. Raises ValueError for too few different measurements."""
    if len({one.tokens for one in prefills}) < 2 or len({one.seqs for one in decodes}) < 2:
        raise ValueError("at least two prompt lengths and two numbers of sequences must have been measured")
    candidates = [_fit(prefills, decodes, size) for size in ((chunk,) if chunk else CHUNKS)]
    return min(candidates, key=lambda one: one.rms)


def _fit(prefills: Sequence[Prefill], decodes: Sequence[Decode], chunk: int) -> Fit:
    rows = [[-(-one.tokens // chunk), one.tokens, 0.0, one.tokens**2 / 2, 0.0, 1.0] for one in prefills]
    rows += [[1.0, 0.0, one.seqs, 0.0, one.context, 0.0] for one in decodes]
    measured = np.array([one.ttft_s for one in prefills] + [one.itl_s for one in decodes])
    matrix = np.array(rows)
    found = _not_negative(matrix / measured[:, None], np.ones(len(measured)))
    values = dict(zip(_COLUMNS, found.tolist(), strict=True))
    names = [f"TTFT of {one.tokens} tokens" for one in prefills]
    names += [f"ITL of {one.seqs} sequences, {one.context:.0f} tokens of context" for one in decodes]
    residuals = [Residual(*one) for one in zip(names, measured.tolist(), (matrix @ found).tolist(), strict=True)]
    front = values.pop("front")
    return Fit(StepTime(**values), front, chunk, residuals)


def _not_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with all parameters >= 0: the most negative one is left out until none is."""
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    kept = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while kept:
        part = np.linalg.lstsq(matrix[:, kept] / scale[kept], wanted, rcond=None)[0]
        worst = int(np.argmin(part))
        if part[worst] >= 0:
            found[kept] = part / scale[kept]
            break
        del kept[worst]
    return found
