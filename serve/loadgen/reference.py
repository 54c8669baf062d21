"""The reference table: published figures of one replica beside an emulated one's, then fleets behind `whohas up`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from replicas.emulated.step_time import DEFAULT_PROFILE, StepTime, load_profile
from serve.loadgen.client import Target
from serve.loadgen.clock import Clock
from serve.loadgen.drive import closed_loop
from serve.loadgen.measure import Measured, Report, measure, run_loop
from serve.loadgen.processes import MODEL, emulated_engine, whohas_up
from serve.loadgen.prompts import SharedPrompts
from serve.loadgen.stats import Summary, summarize
from serve.loadgen.types import Outcome

PUBLISHED = {
    "ttft_p50_off_s": 2.1,
    "ttft_p50_on_s": 0.9,
    "ttft_p99_off_s": 4.8,
    "ttft_p99_on_s": 1.6,
    "tokens_per_s_off": 2450.0,
    "tokens_per_s_on": 3820.0,
    "prefill_share_off": 0.42,
    "prefill_share_on": 0.18,
    "ttft_p50_8k_off_s": 6.3,
    "ttft_p50_8k_on_s": 1.2,
}
"""4 x A100-80G, Qwen2.5-72B-Instruct, 32 concurrent requests, system prompt of 4,096 (8K: 8,192) tokens, prefix caching
off and on."""

OUTSIDE_ENGINE_S = 0.6
"""What the fit of the default profile puts outside the engine; the emulated one has no such part of its own."""
POLICIES = ("round_robin", "predicted_ttft")
NUM_BLOCKS = 20_000


@dataclass(frozen=True, slots=True)
class Plan:
    """How the table is made. Times in engine seconds; `speed` of them a wall second for one replica, and
    2 * `speed` / N, at least 1, for a fleet of N, whose processes share this machine.

    A fleet runs `fleet_concurrency` requests a replica over `fleet_prefixes` system prompts of 4,096 tokens a replica:
    together they fill about half of all replicas' blocks, so that one replica can't hold them all and the fleet can.
    """

    speed: float = 10.0
    seconds: float = 300.0
    warm_up_s: float = 30.0
    concurrency: int = 32
    fleets: Sequence[int] = (4, 8)
    fleet_seconds: float = 180.0
    fleet_warm_up_s: float = 80.0
    fleet_concurrency: int = 8
    fleet_prefixes: int = 40
    fleet_output_tokens: int = 64
    seed: int = 0

    def fleet_speed(self, replicas: int) -> float:
        return max(1.0, 2 * self.speed / replicas)


@dataclass(frozen=True, slots=True)
class Figure:
    """`measured` is the engine's own figure; `compared` has `OUTSIDE_ENGINE_S` added where it is a TTFT."""

    name: str
    published: float
    measured: float | None

    @property
    def compared(self) -> float | None:
        if self.measured is None or "ttft" not in self.name:
            return self.measured
        return self.measured + OUTSIDE_ENGINE_S

    @property
    def deviation(self) -> float | None:
        """0.1 for 10 % above the published figure."""
        return None if self.compared is None else self.compared / self.published - 1


@dataclass(slots=True)
class Reference:
    """What has been measured so far. `lag` has, by run, what a client saw beyond the engines' own time (wall ms)."""

    plan: Plan
    figures: list[Figure] = field(default_factory=list)
    fleets: list[tuple[int, str, Summary]] = field(default_factory=list)
    lag: dict[str, tuple[float, float]] = field(default_factory=dict)
    stopped: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "figures": {
                one.name: {"published": one.published, "measured": one.measured, "deviation": one.deviation}
                for one in self.figures
            },
            "outside_engine_s": OUTSIDE_ENGINE_S,
            "fleets": [
                {"replicas": replicas, "policy": policy, **summary.as_json()}
                for replicas, policy, summary in self.fleets
            ],
            "outside_engine_wall_ms": {name: {"p50": p50, "p99": p99} for name, (p50, p99) in self.lag.items()},
            "stopped": self.stopped,
        }


def run_reference(plan: Plan, report: Report | None = None) -> Reference:
    """Starts and stops everything itself. Raises `NotStarted`. After a Ctrl-C what there is comes back."""
    reference = Reference(plan)
    try:
        _run_all(reference, report)
    except KeyboardInterrupt:
        reference.stopped = "interrupted"
    return reference


def _run_all(reference: Reference, report: Report | None) -> None:
    measured: dict[str, float | None] = {}
    for shared, caching in ((4096, False), (4096, True), (8192, False), (8192, True)):
        measured |= _one_replica(reference, shared, caching, report)
        reference.figures = [Figure(name, PUBLISHED[name], measured.get(name)) for name in PUBLISHED]
        if reference.stopped:
            return
    for replicas, policy in product(reference.plan.fleets, POLICIES):
        _fleet(reference, replicas, policy, report)
        if reference.stopped:
            return


def _one_replica(reference: Reference, shared: int, caching: bool, report: Report | None) -> dict[str, float | None]:
    plan, state = reference.plan, "on" if caching else "off"
    name = f"{shared}-token prompt, caching {state}"
    flags = ["--speed", str(plan.speed), "--num-blocks", str(NUM_BLOCKS)]
    flags.append("--enable-prefix-caching" if caching else "--no-enable-prefix-caching")
    _say(report, f"starting: {name}")
    with emulated_engine(*flags) as url:
        workload = SharedPrompts(shared, spread=0.2, seed=plan.seed)
        run = run_loop(_run(url, workload, plan.speed, plan.concurrency, plan.seconds, report))
    summary = _note(reference, name, run, plan.speed, plan.warm_up_s, plan.seconds)
    if shared != 4096:
        return {f"ttft_p50_8k_{state}_s": summary.engine_ttft_p50_s}
    window = (plan.warm_up_s, plan.seconds)
    return {
        f"ttft_p50_{state}_s": summary.engine_ttft_p50_s,
        f"ttft_p99_{state}_s": summary.engine_ttft_p99_s,
        f"tokens_per_s_{state}": summary.total_tokens_per_s,
        f"prefill_share_{state}": prefill_share(run.outcomes, window, load_profile(DEFAULT_PROFILE)),
    }


def _fleet(reference: Reference, replicas: int, policy: str, report: Report | None) -> None:
    plan = reference.plan
    speed = plan.fleet_speed(replicas)
    args = {
        "engine": {"kind": "emulated", "num_blocks": NUM_BLOCKS, "speed": speed},
        "replicas": replicas,
        # Look-ups have 20 ms; where engines, routers and load share a few cores, that would cut many of them short.
        "router": {"policy": policy, "look_up_timeout_s": 2.0},
        "drain_s": 1.0,
    }
    name = f"{replicas} replicas, {policy}"
    _say(report, f"starting: {name}")
    with whohas_up(args) as url:
        workload = SharedPrompts(
            prefixes=plan.fleet_prefixes * replicas, output_tokens=plan.fleet_output_tokens, spread=0.2, seed=plan.seed
        )
        concurrency = plan.fleet_concurrency * replicas
        run = run_loop(_run(url, workload, speed, concurrency, plan.fleet_seconds, report))
    summary = _note(reference, name, run, speed, plan.fleet_warm_up_s, plan.fleet_seconds, replicas)
    reference.fleets.append((replicas, policy, summary))


async def _run(
    url: str, workload: SharedPrompts, speed: float, concurrency: int, seconds: float, report: Report | None
) -> Measured:
    async with Target(url, Clock(speed)) as target:
        load = closed_loop(target, workload.calls(MODEL), concurrency, ramp_s=1.0, until_s=seconds)
        return await measure(target, load, report=report)


def _note(
    reference: Reference,
    name: str,
    run: Measured,
    speed: float,
    warm_up_s: float,
    seconds: float,
    replicas: int | None = None,
) -> Summary:
    summary = summarize(run.outcomes, replicas=replicas, window=(warm_up_s, seconds))
    if summary.outside_engine_p50_s is not None and summary.outside_engine_p99_s is not None:
        reference.lag[name] = (summary.outside_engine_p50_s / speed * 1000, summary.outside_engine_p99_s / speed * 1000)
    reference.stopped = run.stopped
    return summary


def prefill_share(outcomes: Sequence[Outcome], window: tuple[float, float], step: StepTime) -> float | None:
    """Share of the window that one busy engine spent on prompt tokens, by its own step-time model.

    Requests that were broken off are taken to be like the answered ones: they tell nothing of their hits.
    """
    start, end = window
    costs = [
        step.b * (tokens - cached) + step.d * (tokens**2 - cached**2) / 2
        for one in outcomes
        if one.ok and (tokens := one.prompt_tokens) is not None and (cached := one.cached_tokens) is not None
        and start <= one.started_s <= end
    ]  # fmt: skip
    prefilled = sum(one.first_s is not None and start <= one.first_s < end for one in outcomes)
    return sum(costs) / len(costs) * prefilled / (end - start) if costs else None


def _say(report: Report | None, text: str) -> None:
    if report is not None:
        report("")
        report(text)
