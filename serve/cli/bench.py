"""`whohas bench`: load a live endpoint, make the reference table, or fit an engine's step times."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any

import click

from serve.cli import state
from serve.loadgen.client import Target, Unreachable
from serve.loadgen.clock import Clock
from serve.loadgen.files import BadFile
from serve.loadgen.fit import Fit, fit
from serve.loadgen.loads import BadOptions, LoadOptions, run_load
from serve.loadgen.measure import Measured, measure, run_loop, stderr_report
from serve.loadgen.probe import ProbeFailed, ProbePlan, probe
from serve.loadgen.processes import NotStarted
from serve.loadgen.prompts import SharedPrompts
from serve.loadgen.reference import Plan, run_reference
from serve.loadgen.reference_text import reference_text
from serve.loadgen.show import summary_text, table
from serve.loadgen.stats import Goals, Summary, summarize

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_POSITIVE = click.FloatRange(0, min_open=True)
_INTERRUPTED = 130
_COLUMNS = ("", "measured ms", "model ms", "residual")
_LOAD_NAMES = (
    *("trace", "sessions", "session_times", "concurrency", "rate", "seconds"),
    *("trace_block", "stretch", "max_prompt_tokens", "seed"),
)


@click.command()
@click.option("--url", help="Base URL of the endpoint.  [default: the running `whohas up`, or http://127.0.0.1:8000]")
@click.option("--model", help="Served model name.  [default: the first that the endpoint lists]")
@click.option("--api-key", help="Sent as a bearer token.")
@click.option("--concurrency", type=click.IntRange(1), help="Closed loop: so many clients.  [default: 32]")
@click.option("--requests", type=click.IntRange(1), help="At most so many requests.  [default: 200 in a closed loop]")
@click.option("--rate", type=_POSITIVE, help="Open loop: requests a second, Poisson.")
@click.option("--seconds", type=_POSITIVE, help="Stop sending after so long.  [default: 60 in an open loop]")
@click.option("--shared-tokens", type=click.IntRange(0), default=4096, show_default=True, help="Of each shared prompt.")
@click.option("--shared-prompts", type=click.IntRange(1), default=1, show_default=True, help="How many there are.")
@click.option(
    "--unshared-tokens", type=click.IntRange(1), default=950, show_default=True, help="Prompt tokens after it."
)
@click.option("--output-tokens", type=click.IntRange(1), default=670, show_default=True, help="Tokens of each answer.")
@click.option(
    "--spread", type=click.FloatRange(0), default=0.0, help="Standard deviation of both lengths over the mean."
)
@click.option("--sessions", type=_FILE, help="JSONL of conversations, played turn by turn, or of request bodies.")
@click.option("--session-times", type=_FILE, help="Bailian trace: when the conversations start and pause.")
@click.option(
    "--think", type=click.FloatRange(0), default=0.0, help="Seconds before each turn, without --session-times."
)
@click.option("--trace", type=_FILE, help="Mooncake or Bailian trace, at its own times.")
@click.option("--trace-block", type=click.IntRange(1), help="Tokens a hash id.  [default: 512; 16 with chat_id]")
@click.option("--stretch", type=_POSITIVE, default=1.0, show_default=True, help="Multiplies the times of a file.")
@click.option("--max-prompt-tokens", type=click.IntRange(1), help="Cut the prompts of a trace to so many.")
@click.option("--seed", type=click.IntRange(0), help="The same one sends the same prompts.  [default: a new one]")
@click.option("--time-factor", type=_POSITIVE, default=1.0, show_default=True, help="Engine seconds a wall second.")
@click.option("--timeout", type=_POSITIVE, default=600.0, show_default=True, help="Of each request, in wall seconds.")
@click.option("--max-seconds", type=_POSITIVE, default=3600.0, show_default=True, help="Of the run, in wall seconds.")
@click.option("--replicas", type=click.IntRange(1), help="How many there are.  [default: as many as answered]")
@click.option("--slo-ttft", type=_POSITIVE, default=2.0, show_default=True, help="Seconds, for goodput.")
@click.option("--slo-tpot", type=_POSITIVE, default=0.15, show_default=True, help="Seconds a token, for goodput.")
@click.option("--reference", is_flag=True, help="Start emulated engines, and print the reference table.")
@click.option("--fleets", default="4,8", show_default=True, help="With --reference: fleet sizes, or nothing.")
@click.option("--speed", type=_POSITIVE, default=10.0, show_default=True, help="With --reference: of one engine.")
@click.option("--fit", "fitting", is_flag=True, help="Fit the step times of the engine at --url, which must be idle.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="With --fit, where known.  [default: what fits]")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="With --fit: write the profile there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(as_json: bool, reference: bool, fitting: bool, **options: Any) -> None:
    """Load a live OpenAI endpoint, whohas or a bare vLLM, and report latency, throughput and cache hits.

    All times are engine seconds: --time-factor F says that the engines run F times faster than the wall clock
    (emulated engines at --speed F). Ctrl-C prints what there is. Ends with 1 when nothing was answered.
    """
    if options["seed"] is None:  # else a second run would find the prompts of the first one cached
        options["seed"] = secrets.randbelow(2**31)
    try:
        if reference and fitting:
            raise BadOptions("--reference and --fit are two things: give one of them")
        if reference:
            sys.exit(_reference(options, as_json))
        options["url"] = options["url"] or state.read().get("url", state.DEFAULT_URL)
        sys.exit(_fit(options, as_json) if fitting else _load(options, as_json))
    except (BadOptions, BadFile, Unreachable, ProbeFailed, NotStarted, OSError) as error:
        click.echo(f"whohas: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _load(options: dict[str, Any], as_json: bool) -> int:
    load, goals = _load_options(options), Goals(options["slo_ttft"], options["slo_tpot"])
    measured = run_loop(_measure(options, load))
    summary = summarize(measured.outcomes, goals, replicas=options["replicas"])
    if as_json:
        click.echo(json.dumps(_as_json(summary, measured, options), indent=2))
    else:
        click.echo(summary_text(summary, measured, options["time_factor"], goals))
    if not summary.answered:
        return 1
    return _INTERRUPTED if measured.stopped == "interrupted" else 0


def _load_options(options: dict[str, Any]) -> LoadOptions:
    shared = SharedPrompts(
        options["shared_tokens"],
        options["unshared_tokens"],
        options["output_tokens"],
        options["shared_prompts"],
        options["spread"],
        options["seed"],
    )
    return LoadOptions(shared=shared, think_s=options["think"], **{name: options[name] for name in _LOAD_NAMES})


async def _measure(options: dict[str, Any], load: LoadOptions) -> Measured:
    endless = load.trace is None and load.sessions is None and load.rate is None and load.seconds is None
    limit = options["requests"] or (200 if endless else None)
    async with _target(options, limit) as target:
        model = options["model"] or await target.model()
        work = run_load(target, model, load)
        return await measure(target, work, max_wall_s=options["max_seconds"], report=stderr_report())


def _target(options: dict[str, Any], limit: int | None = None) -> Target:
    clock = Clock(options["time_factor"])
    return Target(options["url"], clock, timeout_s=options["timeout"], limit=limit, api_key=options["api_key"])


def _as_json(summary: Summary, measured: Measured, options: dict[str, Any]) -> dict[str, Any]:
    return {
        **summary.as_json(),
        "time_factor": options["time_factor"],
        "seed": options["seed"],
        "wall_s": measured.wall_s,
        "client_lag_p99_wall_s": measured.client_lag_p99_s,
        "stopped": measured.stopped,
    }


def _reference(options: dict[str, Any], as_json: bool) -> int:
    try:
        fleets = [int(size) for size in options["fleets"].split(",") if size.strip()]
    except ValueError:
        raise BadOptions(f"--fleets takes numbers of replicas, as in 4,8, not {options['fleets']!r}") from None
    plan = Plan(speed=options["speed"], fleets=fleets, seed=options["seed"])
    found = run_reference(plan, stderr_report())
    click.echo(json.dumps(found.as_json(), indent=2) if as_json else reference_text(found))
    return _INTERRUPTED if found.stopped else 0


def _fit(options: dict[str, Any], as_json: bool) -> int:
    found = run_loop(_probe_and_fit(options))
    if options["output"] is not None:
        options["output"].write_text(json.dumps(found.profile, indent=2) + "\n")
    if as_json:
        residuals = [
            {"what": one.what, "measured_s": one.measured_s, "model_s": one.model_s, "relative": one.relative}
            for one in found.residuals
        ]
        shown = {"profile": found.profile, "front_s": found.front_s, "max_num_batched_tokens": found.chunk}
        click.echo(json.dumps({**shown, "rms": found.rms, "residuals": residuals}, indent=2))
    else:
        click.echo(_fit_text(found, options["output"]))
    return 0


async def _probe_and_fit(options: dict[str, Any]) -> Fit:
    async with _target(options) as target:
        report = stderr_report()
        model = options["model"] or await target.model()
        plan = ProbePlan().within(await target.max_model_len())
        try:
            prefills, decodes = await probe(target, model, plan, report)
        finally:
            report("")
    try:
        return fit(prefills, decodes, chunk=options["max_num_batched_tokens"])
    except ValueError as error:
        raise ProbeFailed(str(error)) from error


def _fit_text(found: Fit, output: Path | None) -> str:
    rows = [
        [one.what, f"{one.measured_s * 1000:,.1f}", f"{one.model_s * 1000:,.1f}", f"{one.relative:+.1%}"]
        for one in found.residuals
    ]
    step = "   ".join(f"{name} = {value:.4g}" for name, value in found.profile.items())
    notes = [
        f"step times in seconds: {step}",
        f"{found.front_s * 1000:.1f} ms of each TTFT lie outside the engine; a step takes {found.chunk:,} tokens",
        f"root mean square of the residuals: {found.rms:.1%}",
    ]
    notes += [f"the profile is in {output}: --profile {output}"] if output else ["--output FILE.json keeps the profile"]
    return table("Step times: a + b*prefill + c*decoding + d*attention + e*context", _COLUMNS, rows, notes)
