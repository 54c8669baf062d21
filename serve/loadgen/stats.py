"""Figures over outcomes. Seconds are the engine's; see `Clock`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from serve.loadgen.types import UNFINISHED, Outcome


@dataclass(frozen=True, slots=True)
class Goals:
    """What counts as a good answer: its first token, and the mean time of those after it, in seconds."""

    ttft_s: float = 2.0
    tpot_s: float = 0.15


@dataclass(frozen=True, slots=True)
class Predictions:
    """Cached tokens as the router predicted and the engine reported them, over answers that tell both."""

    compared: int
    equal: int
    too_high: int
    too_low: int
    predicted_tokens: int
    reported_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. None where nothing tells it.

    `hit_rate`: cached over prompt tokens. `max_mean_requests`: answers of the busiest replica over the mean of all.
    Rates are over `span_s`, from the first request to the last answer. TTFT counts whatever began to be answered.
    `engine_ttft_*_s`: what an emulated engine says its own time to first token was; `outside_engine_*_s`: what the
    client saw beyond that. `goodput`: share of the requests that ended which met both goals.
    """

    requests: int
    answered: int
    unfinished: int
    errors: dict[str, int]
    span_s: float
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    tpot_mean_s: float | None
    tpot_p50_s: float | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    hit_rate: float | None
    goodput: float | None
    replicas: dict[str, int]
    max_mean_requests: float | None
    predictions: Predictions | None
    engine_ttft_p50_s: float | None
    engine_ttft_p90_s: float | None
    engine_ttft_p99_s: float | None
    outside_engine_p50_s: float | None
    outside_engine_p99_s: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    outcomes: Sequence[Outcome],
    goals: Goals | None = None,
    *,
    replicas: int | None = None,
    window: tuple[float, float] | None = None,
) -> Summary:
    """`replicas`: how many there are, where some may have answered nothing; otherwise those that were seen.

    `window`, in seconds: only requests that began in it count, and tokens that came in it.
    """
    start, end = window or _span(outcomes)
    counted = [one for one in outcomes if window is None or start <= one.started_s <= end]
    answered = [one for one in counted if one.ok]
    ended = [one for one in counted if one.error != UNFINISHED]
    errors = Counter(one.error for one in ended if one.error is not None)
    begun = [one for one in counted if one.error in (None, UNFINISHED)]
    ttfts = [one.ttft_s for one in begun if one.ttft_s is not None]
    gaps = np.concatenate([np.frombuffer(one.gaps_s) for one in answered]) if answered else np.empty(0)
    tpots = [one.tpot_s for one in answered if one.tpot_s is not None]
    nominal = [one.engine_ttft_s for one in begun if one.engine_ttft_s is not None]
    outside = [one.ttft_s - one.engine_ttft_s for one in begun if one.ttft_s and one.engine_ttft_s is not None]
    by_replica = Counter(one.replica for one in answered if one.replica is not None)
    prompt_rate, output_rate = token_rates(outcomes, start, end)
    rates = None if prompt_rate is None or output_rate is None else prompt_rate + output_rate
    return Summary(
        requests=len(counted),
        answered=len(answered),
        unfinished=len(counted) - len(ended),
        errors=dict(errors.most_common()),
        span_s=end - start,
        ttft_mean_s=_mean(ttfts),
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p90_s=quantile(ttfts, 0.9),
        ttft_p99_s=quantile(ttfts, 0.99),
        itl_p50_s=quantile(gaps, 0.5),
        itl_p99_s=quantile(gaps, 0.99),
        tpot_mean_s=_mean(tpots),
        tpot_p50_s=quantile(tpots, 0.5),
        prompt_tokens_per_s=prompt_rate,
        output_tokens_per_s=output_rate,
        total_tokens_per_s=rates,
        hit_rate=hit_rate(answered),
        goodput=goodput(ended, goals or Goals()),
        replicas=dict(sorted(by_replica.items())),
        max_mean_requests=max_over_mean(by_replica.values(), replicas),
        predictions=_predictions(answered),
        engine_ttft_p50_s=quantile(nominal, 0.5),
        engine_ttft_p90_s=quantile(nominal, 0.9),
        engine_ttft_p99_s=quantile(nominal, 0.99),
        outside_engine_p50_s=quantile(outside, 0.5),
        outside_engine_p99_s=quantile(outside, 0.99),
    )


def quantile(values: Iterable[float], q: float) -> float | None:
    """Linear between the two nearest values, as numpy has it; None for none."""
    found = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    return float(np.quantile(found, q)) if found.size else None


def hit_rate(outcomes: Iterable[Outcome]) -> float | None:
    """Cached over prompt tokens, of the answers that tell both."""
    known = [(one.cached_tokens, one.prompt_tokens) for one in outcomes if one.cached_tokens is not None]
    prompt = sum(tokens or 0 for _, tokens in known)
    return sum(cached for cached, _ in known) / prompt if prompt else None


def goodput(ended: Sequence[Outcome], goals: Goals) -> float | None:
    """Share of all requests that were answered within both goals; one that failed missed them."""
    good = sum(
        one.ok
        and one.ttft_s is not None
        and one.ttft_s <= goals.ttft_s
        and (one.tpot_s is None or one.tpot_s <= goals.tpot_s)
        for one in ended
    )
    return good / len(ended) if ended else None


def max_over_mean(counts: Iterable[int], replicas: int | None = None) -> float | None:
    """1 for perfect balance; replicas without a count have 0 if `replicas` says that there are more."""
    found = list(counts)
    if not sum(found):
        return None
    return max(found) * max(replicas or 0, len(found)) / sum(found)


def token_rates(outcomes: Iterable[Outcome], start: float, end: float) -> tuple[float | None, float | None]:
    """(prompt, output) tokens a second from `start` to `end`, of requests that were broken off, too.

    A prompt counts when its first token came; an answer's tokens are spread evenly from the first to the last.
    """
    if end <= start:
        return None, None
    prompt = output = 0.0
    for one in outcomes:
        last = one.last_s
        if one.first_s is None or last is None:
            continue
        tokens = one.output_tokens or one.pieces
        prompt += (one.prompt_tokens or 0) * (start <= one.first_s < end)
        inside = max(0.0, min(end, last) - max(start, one.first_s))
        whole = last - one.first_s
        output += tokens * inside / whole if whole > 0 else tokens * (start <= one.first_s <= end)
    return prompt / (end - start), output / (end - start)


def _predictions(answered: Iterable[Outcome]) -> Predictions | None:
    pairs = [
        (one.predicted, one.cached_tokens)
        for one in answered
        if one.predicted is not None and one.cached_tokens is not None
    ]
    if not pairs:
        return None
    return Predictions(
        compared=len(pairs),
        equal=sum(predicted == reported for predicted, reported in pairs),
        too_high=sum(predicted > reported for predicted, reported in pairs),
        too_low=sum(predicted < reported for predicted, reported in pairs),
        predicted_tokens=sum(predicted for predicted, _ in pairs),
        reported_tokens=sum(reported for _, reported in pairs),
    )


def _span(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    if not outcomes:
        return 0.0, 0.0
    return min(one.started_s for one in outcomes), max(one.ended_s for one in outcomes)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
