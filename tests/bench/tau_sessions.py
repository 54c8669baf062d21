"""Two hundred recorded agent sessions through the whole path: hits beside the infinite-cache bound, and balance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from router.prompt import PromptEncoder
from serve.loadgen.bound import infinite_cache_hit_rate
from serve.loadgen.client import Target
from serve.loadgen.clock import Clock
from serve.loadgen.drive import sessions
from serve.loadgen.files import chats, session_bodies, timed_sessions
from serve.loadgen.measure import Measured, measure, run_loop, stderr_report
from serve.loadgen.processes import MODEL, whohas_up
from serve.loadgen.stats import Summary, summarize
from serve.loadgen.types import Session
from tests.bench.report import Benchmark, Cell, Options, Table

DATA = Path(__file__).parents[2].parent / "shared" / "data"
SESSIONS, TIMES = DATA / "tau_airline_sessions.jsonl.gz", DATA / "tau_airline_blk16_trace.jsonl.gz"
REPLICAS, NUM_BLOCKS, BLOCK_SIZE = 4, 20_000, 16
SPEED = 5.0
"""Engine seconds a wall second: more, and two cores fall behind in tokenising."""
_POLICIES = ("predicted_ttft", "round_robin")
_COLUMNS = (
    "policy",
    "answered",
    "hit rate",
    "below bound",
    "TTFT p50 s",
    "p90",
    "p99",
    "max/mean",
    "exact",
    "too high",
)


def load(count: int | None = None, earlier: float = 1.0) -> list[Session]:
    """The first `count` sessions of the trace; its starts come `earlier` times as fast."""
    found = timed_sessions(session_bodies(SESSIONS), chats(TIMES), MODEL)
    return [Session(one.at / earlier, one.turns) for one in found[:count]]


def bound(conversations: list[Session]) -> float:
    calls = [turn.call for session in conversations for turn in session.turns]
    return infinite_cache_hit_rate(calls, PromptEncoder.load(MODEL, "builtin"), BLOCK_SIZE)


def app(policy: str, speed: float, **router: Any) -> dict[str, Any]:
    """Settings of the application under test; `router`: others than the defaults."""
    return {
        "engine": {"kind": "emulated", "num_blocks": NUM_BLOCKS, "speed": speed},
        "replicas": REPLICAS,
        "router": {"policy": policy, **router},
        "drain_s": 1.0,
    }


async def replay(url: str, conversations: list[Session], speed: float) -> Measured:
    async with Target(url, Clock(speed)) as target:
        return await measure(target, sessions(target, conversations), max_wall_s=900.0, report=stderr_report())


def run(options: Options) -> list[Table]:
    title = f"tau-airline sessions at their own times, {REPLICAS} replicas x {NUM_BLOCKS:,} blocks of {BLOCK_SIZE}"
    if not SESSIONS.exists() or not TIMES.exists():
        return [Table(title, _COLUMNS, [], [f"skipped: {SESSIONS.name} and {TIMES.name} are not in {DATA.name}/"])]
    conversations = load(options.times(200, 40))
    most = bound(conversations)
    rows, notes = [], []
    for policy in _POLICIES:
        with whohas_up(app(policy, SPEED)) as url:
            measured = run_loop(replay(url, conversations, SPEED))
        summary = summarize(measured.outcomes, replicas=REPLICAS)
        rows.append(_row(policy, summary, most))
        notes.append(_note(policy, summary, measured))
    turns = sum(len(one.turns) for one in conversations)
    about = f"{len(conversations)} sessions, {turns} requests; infinite-cache bound {most:.2%} from our own token ids"
    speed = f"engines {SPEED:g} x faster than the wall; TTFT is the engines' own, in their seconds"
    return [Table(title, _COLUMNS, rows, [about, speed, *notes])]


def _row(policy: str, summary: Summary, most: float) -> list[Cell]:
    found, hit = summary.predictions, summary.hit_rate or 0.0
    ttft = [_cell(summary.engine_ttft_p50_s), _cell(summary.engine_ttft_p90_s), _cell(summary.engine_ttft_p99_s)]
    exact, high = (found.equal / found.compared, found.too_high / found.compared) if found else (0.0, 0.0)
    below = f"{(most - hit) * 100:.2f} points"
    balance = _cell(summary.max_mean_requests)
    return [policy, summary.answered, f"{hit:.2%}", below, *ttft, balance, f"{exact:.1%}", f"{high:.1%}"]


def _note(policy: str, summary: Summary, measured: Measured) -> str:
    p50, p99 = ((value or 0.0) / SPEED * 1000 for value in (summary.outside_engine_p50_s, summary.outside_engine_p99_s))
    errors = ", ".join(f"{count} x {kind}" for kind, count in summary.errors.items()) or "no errors"
    counts = " ".join(map(str, summary.replicas.values()))
    outside = f"outside the engine p50 {p50:.0f} ms, p99 {p99:.0f} ms of the wall clock"
    return f"{policy}: {counts} requests by replica; {errors}; {measured.wall_s:.0f} s; {outside}"


def _cell(value: float | None) -> Cell:
    return "-" if value is None else round(value, 3)


BENCHMARK = Benchmark("tau", "recorded agent sessions, turn by turn: hit rate, balance and TTFT by policy", run)
