"""What one engine measures of itself, in simulated seconds: at speed 1 those of the clock.

Counting is paid for with every token of every engine in a process, so it is a bisection and an addition; all that a
reader may want is worked out when it is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from replicas.emulated.scheduler import EngineRequest, SchedulerStats, State
from replicas.emulated.step_time import StepTime, StepWork

WINDOW_S = 10.0
"""Rates are those of the last so many simulated seconds."""

_SAMPLE_S = 1.0
# vLLM's own, so that dashboards made for it fit.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_TOKENS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Histogram:
    """Counts of values by upper bound, inclusive."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' cumulative buckets: (upper bound, how many values aren't above it)."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts, initial=None), strict=True))


class Tracked:
    """When a running request got its last token; the engine keeps one for each."""

    __slots__ = ("last_token_at",)

    def __init__(self) -> None:
        self.last_token_at = 0.0


class EngineFigures:
    """One engine's histograms, times and rates. `lag_s` alone is in seconds of the wall clock."""

    def __init__(self, stats: SchedulerStats, step_time: StepTime) -> None:
        self._stats = stats
        self._step_time = step_time
        self.ttft_s = Histogram(_FIRST_TOKEN_S)
        self.itl_s = Histogram(_TOKEN_S)
        self.tpot_s = Histogram(_TOKEN_S)
        self.e2e_s = Histogram(_REQUEST_S)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.prompt_tokens = Histogram(_REQUEST_TOKENS)
        self.generation_tokens = Histogram(_REQUEST_TOKENS)
        self.lag_s = Histogram(_LAG_S)
        self.busy_s = 0.0
        self.prefill_s = 0.0
        self._samples: deque[tuple[float, float, float, float, float]] = deque([(0.0, 0.0, 0.0, 0.0, 0.0)])

    def step_ended(self, now: float, work: StepWork, seconds: float, lag_s: float) -> None:
        """`now`: when the step ended; `lag_s`: how much later than due this process came to end it."""
        if now - seconds - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append(self._sample(now - seconds))  # it was idle until then
        self.busy_s += seconds
        if work.prefill_tokens:
            decode = StepWork(decoding_seqs=work.decoding_seqs, decode_context=work.decode_context)
            # What the step would have taken without its prefill; with nothing to decode there'd have been none.
            self.prefill_s += seconds - (self._step_time.seconds(decode) if work.decoding_seqs else 0.0)
        self.step_tokens.observe(work.prefill_tokens + work.decoding_seqs)
        self.lag_s.observe(lag_s)
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append(self._sample(now))
            self._forget(now)

    def token_generated(self, request: EngineRequest, tracked: Tracked, now: float) -> None:
        count = request.num_generated
        if count == 1:
            self.ttft_s.observe(now - request.arrival)
            self.prompt_tokens.observe(request.num_prompt)
        else:
            self.itl_s.observe(now - tracked.last_token_at)
        tracked.last_token_at = now
        if request.state is State.FINISHED:
            self.e2e_s.observe(now - request.arrival)
            self.generation_tokens.observe(count)
            if count > 1 and request.first_token_at is not None:
                self.tpot_s.observe((now - request.first_token_at) / (count - 1))

    def rates(self, now: float) -> dict[str, float]:
        """Over the last `WINDOW_S`: prompt tokens/s (cached ones too), output tokens/s, shares of time, 0..1.

        `busy_share` is of all time, `prefill_share` of the busy time.
        """
        self._forget(now)
        newest = self._sample(now)
        before, after = self._samples[0], self._samples[1] if len(self._samples) > 1 else newest
        gap = after[0] - before[0]
        share = max(0.0, now - WINDOW_S - before[0]) / gap if gap > 0 else 0.0
        oldest = [a + share * (b - a) for a, b in zip(before, after, strict=True)]
        span, prompt, output, busy, prefill = (a - b for a, b in zip(newest, oldest, strict=True))
        span = max(span, 1e-9)
        return {
            "prompt_tokens_per_second": prompt / span,
            "output_tokens_per_second": output / span,
            "busy_share": min(1.0, busy / span),
            "prefill_share": prefill / busy if busy else 0.0,
        }

    def _sample(self, now: float) -> tuple[float, float, float, float, float]:
        stats = self._stats
        return now, stats.prompt_tokens, stats.generation_tokens, self.busy_s, self.prefill_s

    def _forget(self, now: float) -> None:
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
