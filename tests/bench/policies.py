"""Recorded traces through the real router and emulated engines in virtual time: hit rate, TTFT, balance by policy."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.report import Benchmark, Cell, Options, Table
from tests.sim import traces
from tests.sim.simulated_fleet import Call, Setup, figures, simulated
from tests.sim.virtual_time import run as run_virtually

_POLICIES = ("predicted_ttft", "round_robin", "power_of_two")
_COLUMNS = ("policy", "hit rate", "TTFT mean s", "p50", "p99", "max/mean", "TTFT <= 2 s")


def run(options: Options) -> list[Table]:
    if not (traces.TAU.exists() and traces.MOONCAKE.exists()):
        return [Table("recorded traces", _COLUMNS, [], [f"skipped: {traces.DATA.name}/ has no traces"])]
    agents: dict[str, object] = {"replicas": 4, "num_blocks": 20_000, "routers": 2}
    conversations: dict[str, object] = {"replicas": 8, "num_blocks": 1000, "block_size": 512}
    return [
        _table("agents at their own times, 4 x A100-72B engines", traces.tau(1), 16, agents),
        _table("agents at x16, linear:10000", traces.tau(16), 16, agents | {"profile": "linear:10000"}),
        _table(
            "Mooncake conversation, 10 minutes, 8 x linear:10000",
            traces.mooncake(2 if options.quick else 10),
            512,
            conversations | {"profile": "linear:10000"},
        ),
    ]


def _table(title: str, calls: Sequence[Call], block_size: int, setup: dict[str, object]) -> Table:
    rows = [_row(policy, calls, Setup(policy=policy, **setup)) for policy in _POLICIES]  # type: ignore[arg-type]
    bound = traces.infinite_cache_hit_rate(calls, block_size)
    return Table(title, _COLUMNS, rows, [f"{len(calls)} requests; infinite-cache bound {bound:.2%}"])


def _row(policy: str, calls: Sequence[Call], setup: Setup) -> list[Cell]:
    async def main() -> list[Cell]:
        fleet = await simulated(setup)
        try:
            found = figures(await fleet.replay(calls), setup.replicas)
        finally:
            await fleet.close()
        ttft = [round(value, 3) for value in (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p99_s)]
        return [policy, f"{found.hit_rate:.2%}", *ttft, round(found.max_mean_requests, 2), f"{found.goodput:.1%}"]

    return run_virtually(main())


BENCHMARK = Benchmark("policies", "recorded traces in virtual time: hit rate, TTFT and balance by policy", run)
