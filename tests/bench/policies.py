"""Traffic through the real router and emulated engines in virtual time: hit rate, TTFT, balance by policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.bench.report import Benchmark, Cell, Options, Table
from tests.sim import traces, workloads
from tests.sim.simulated_fleet import Answered, Call, Setup, SimulatedFleet, figures, simulated
from tests.sim.virtual_time import run as run_virtually

_POLICIES = ("predicted_ttft", "round_robin", "power_of_two")
_COLUMNS = ("policy", "hit rate", "TTFT mean s", "p50", "p99", "max/mean", "prefill max/mean", "goodput")

Play = Callable[[SimulatedFleet], Awaitable[list[Answered]]]


def run(options: Options) -> list[Table]:
    users = {"replicas": 8, "num_blocks": 4000, "routers": 2}
    some = workloads.chats(options.times(400, 100))
    tables = []
    for count in (96, 160):
        title = f"{count} users, 20 system prompts of 4,096 tokens, 8 A100-72B engines with 64,000 tokens of KV each"
        tables.append(_table(title, _users(count, some), 1.0, users, f"{len(some)} chats"))
    if not (traces.TAU.exists() and traces.MOONCAKE.exists()):
        return [*tables, Table("recorded traces", _COLUMNS, [], [f"skipped: {traces.DATA.name}/ has no traces"])]
    agents = {"replicas": 4, "num_blocks": 20_000, "routers": 2}
    big = {"replicas": 8, "num_blocks": 1000, "block_size": 512, "profile": "linear:10000"}
    thin = {"replicas": 8, "num_blocks": 812, "block_size": 512, "routers": 2}
    return [
        *tables,
        _replayed("agents at their own times, 4 A100-72B engines", traces.tau(1), 16, 2.0, agents),
        _replayed("agents at x16, linear:10000", traces.tau(16), 16, 2.0, agents | {"profile": "linear:10000"}),
        _replayed(
            "Mooncake conversation, one in eight, 8 A100-72B engines with 416,000 tokens of KV each",
            workloads.thinned_mooncake(count=options.times(1000, 200)),
            512,
            5.0,
            thin,
        ),
        _replayed(
            "Mooncake conversation, 10 minutes, 8 x linear:10000",
            traces.mooncake(options.times(10, 2)),
            512,
            5.0,
            big,
        ),
    ]


def _users(count: int, some: list[workloads.Chat]) -> Play:
    return lambda fleet: workloads.chat_in_turns(fleet, count, some)


def _replayed(title: str, calls: Sequence[Call], block_size: int, slo_s: float, setup: dict[str, Any]) -> Table:
    bound = traces.infinite_cache_hit_rate(calls, block_size)
    note = f"{len(calls)} requests; infinite-cache bound {bound:.2%}"
    return _table(title, lambda fleet: fleet.replay(calls), slo_s, setup, note)


def _table(title: str, play: Play, slo_s: float, setup: dict[str, Any], note: str) -> Table:
    rows = [_row(policy, play, slo_s, Setup(policy=policy, **setup)) for policy in _POLICIES]
    return Table(title, _COLUMNS, rows, [f"{note}; goodput: TTFT <= {slo_s:g} s, TPOT <= 0.15 s"])


def _row(policy: str, play: Play, slo_s: float, setup: Setup) -> list[Cell]:
    async def main() -> list[Cell]:
        fleet = await simulated(setup)
        try:
            found = figures(await play(fleet), setup.replicas, slo_s)
        finally:
            await fleet.close()
        ttft = [round(value, 3) for value in (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p99_s)]
        balance = [round(value, 2) for value in (found.max_mean_requests, found.max_mean_prefill)]
        return [policy, f"{found.hit_rate:.2%}", *ttft, *balance, f"{found.goodput:.1%}"]

    return run_virtually(main())


BENCHMARK = Benchmark("policies", "traffic in virtual time: hit rate, TTFT and balance by policy", run)
