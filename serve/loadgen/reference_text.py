"""The reference table as text."""

from __future__ import annotations

from replicas.emulated.step_time import DEFAULT_PROFILE
from serve.loadgen.reference import NUM_BLOCKS, OUTSIDE_ENGINE_S, Figure, Reference
from serve.loadgen.show import table
from serve.loadgen.stats import Summary

_NAMES = {
    "ttft_p50": "TTFT p50, {} s",
    "ttft_p99": "TTFT p99, {} s",
    "tokens_per_s": "tokens/s, prompt + output, {}",
    "prefill_share": "prefill share of time, {}",
    "ttft_p50_8k": "TTFT p50, 8,192-token prompt, {} s",
}


def reference_text(reference: Reference) -> str:
    """Published beside measured, then the fleets, as far as they were run."""
    parts = [_figures(reference)]
    if reference.fleets:
        parts.append(_fleets(reference))
    if reference.stopped:
        parts.append(f"stopped early: {reference.stopped}")
    return "\n\n".join(parts)


def _figures(reference: Reference) -> str:
    plan = reference.plan
    rows = [
        [
            _name(one.name),
            _number(one, one.published),
            _number(one, one.measured),
            _number(one, one.compared),
            _off(one),
        ]
        for one in reference.figures
    ]
    return table(
        f"One replica, {plan.concurrency} concurrent, 4,096-token system prompt, prefix caching off / on",
        ["", "published", "engine", "compared", "deviation"],
        rows,
        [
            f"emulated engine {DEFAULT_PROFILE}, {NUM_BLOCKS:,} blocks of 16, at {plan.speed:g} x",
            "950 unshared and 670 output tokens, both +-20 %",
            f"{plan.seconds:g} s each, of which the first {plan.warm_up_s:g} s don't count; times are engine seconds",
            f"engine: the emulated engine's own TTFT; compared: with the {OUTSIDE_ENGINE_S:g} s that the profile's fit "
            "puts outside the engine",
            "prefill share: what prompt tokens cost by the step-time model, over the time",
            *_lag(reference),
        ],
    )


def _fleets(reference: Reference) -> str:
    plan = reference.plan
    rows = [[str(replicas), policy, *_fleet_cells(summary)] for replicas, policy, summary in reference.fleets]
    speeds = ", ".join(f"{plan.fleet_speed(replicas):g} x for {replicas}" for replicas in plan.fleets)
    return table(
        "N replicas behind whohas: prefix caching on",
        ["replicas", "policy", "hit rate", "TTFT p50", "p99 s", "tokens/s", "max/mean", "exact predictions"],
        rows,
        [
            f"{plan.fleet_concurrency} concurrent requests and {plan.fleet_prefixes} system prompts of 4,096 tokens a "
            f"replica; 950 unshared, {plan.fleet_output_tokens} output tokens, both +-20 %",
            f"{plan.fleet_seconds:g} s each, the first {plan.fleet_warm_up_s:g} s don't count; engines at {speeds}; "
            "TTFT is the engine's own",
        ],
    )


def _fleet_cells(summary: Summary) -> list[str]:
    found = summary.predictions
    return [
        _or_dash(summary.hit_rate, "{:.1%}"),
        _or_dash(summary.engine_ttft_p50_s, "{:.2f}"),
        _or_dash(summary.engine_ttft_p99_s, "{:.2f}"),
        _or_dash(summary.total_tokens_per_s, "{:,.0f}"),
        _or_dash(summary.max_mean_requests, "{:.2f}"),
        "-" if found is None else f"{found.equal / found.compared:.1%}",
    ]


def _lag(reference: Reference) -> list[str]:
    """What the client saw beyond the engine's own TTFT, the worst run of each kind."""
    if not reference.lag:
        return []
    p50 = max(one[0] for one in reference.lag.values())
    name, (_, p99) = max(reference.lag.items(), key=lambda item: item[1][1])
    where = "TTFT outside the engine (HTTP, routing, emulator lag), wall ms"
    return [f"{where}: p50 up to {p50:.0f}, p99 up to {p99:.0f} ({name})"]


def _name(name: str) -> str:
    plain = name.removesuffix("_s")
    state = plain.rpartition("_")[2]
    return _NAMES[plain.removesuffix(f"_{state}")].format(state).replace(f"{state} s", f"{state} (s)")


def _number(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    if "share" in figure.name:
        return f"{value:.0%}"
    return f"{value:,.0f}" if "tokens" in figure.name else f"{value:.2f}"


def _off(figure: Figure) -> str:
    return _or_dash(figure.deviation, "{:+.0%}")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
