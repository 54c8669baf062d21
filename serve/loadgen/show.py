"""Figures as text."""

from __future__ import annotations

from collections.abc import Sequence

from serve.loadgen.measure import Measured
from serve.loadgen.stats import Goals, Summary


def summary_text(summary: Summary, measured: Measured, factor: float, goals: Goals) -> str:
    """The report of one run; figures that nothing told are left out."""
    unfinished = f", {summary.unfinished} unfinished" if summary.unfinished else ""
    rows: list[tuple[str, str]] = [
        ("requests", f"{summary.answered} answered of {summary.requests}{unfinished} in {summary.span_s:.1f} s"),
        ("TTFT", _spread(summary.ttft_p50_s, summary.ttft_p90_s, summary.ttft_p99_s, summary.ttft_mean_s)),
        ("ITL", _join(("p50", _ms(summary.itl_p50_s)), ("p99", _ms(summary.itl_p99_s)))),
        ("TPOT", _join(("p50", _ms(summary.tpot_p50_s)), ("mean", _ms(summary.tpot_mean_s)))),
        ("tokens/s", _rates(summary)),
        ("hit rate", _percent(summary.hit_rate)),
        ("goodput", _goodput(summary, goals)),
        ("replicas", _replicas(summary)),
        ("predicted", _predicted(summary)),
    ]
    rows += [("error", f"{count} x {kind}") for kind, count in summary.errors.items()]
    lines = [f"{name:<11}{text}" for name, text in rows if text]
    return "\n".join([*lines, *notes(summary, measured, factor)])


def notes(summary: Summary, measured: Measured, factor: float) -> list[str]:
    """What a reader needs to believe the figures."""
    found = []
    if factor != 1:
        found.append(
            f"times are engine seconds: {factor:g} x those of the wall; HTTP and routing count {factor:g} times"
        )
    if summary.outside_engine_p50_s is not None and summary.outside_engine_p99_s is not None:
        p50, p99 = (value / factor * 1000 for value in (summary.outside_engine_p50_s, summary.outside_engine_p99_s))
        found.append(
            f"TTFT outside the emulated engine (HTTP, routing, emulator lag): p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        )
    if measured.client_lag_p99_s is not None:
        found.append(f"the load generator itself was late by {measured.client_lag_p99_s * 1000:.1f} ms at p99")
    if measured.stopped:
        found.append(f"stopped early: {measured.stopped}")
    return [f"  * {text}" for text in found]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Columns of text, the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (columns, *rows)
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([title, rule, lines[0], rule, *lines[1:], *(f"  * {note}" for note in notes)])


def _spread(p50: float | None, p90: float | None, p99: float | None, mean: float | None) -> str:
    return _join(("p50", _s(p50)), ("p90", _s(p90)), ("p99", _s(p99)), ("mean", _s(mean)))


def _rates(summary: Summary) -> str:
    prompt, output, total = summary.prompt_tokens_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s
    if prompt is None or output is None or total is None:
        return ""
    return f"{total:,.0f} = {prompt:,.0f} prompt + {output:,.0f} output"


def _goodput(summary: Summary, goals: Goals) -> str:
    if summary.goodput is None:
        return ""
    return f"{_percent(summary.goodput)} with TTFT <= {goals.ttft_s:g} s and TPOT <= {goals.tpot_s * 1000:g} ms"


def _replicas(summary: Summary) -> str:
    if summary.max_mean_requests is None:
        return ""
    counts = "  ".join(f"{name} {count}" for name, count in summary.replicas.items())
    return f"{counts}  (max/mean {summary.max_mean_requests:.2f})"


def _predicted(summary: Summary) -> str:
    found = summary.predictions
    if found is None:
        return ""
    return (
        f"{found.predicted_tokens:,} cached tokens, {found.reported_tokens:,} reported; "
        f"{found.equal} of {found.compared} exact, {found.too_high} too high, {found.too_low} too low"
    )


def _join(*pairs: tuple[str, str]) -> str:
    return "   ".join(f"{name} {text}" for name, text in pairs if text)


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.1f} ms"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
