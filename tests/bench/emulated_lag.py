"""How far behind do emulated engines fall when eight of them share one core, at ten times the speed of the real thing?

A step that ends late by the wall clock delays what clients see: this is what such a process can be trusted with. On a
machine that others use, most lateness is theirs. So each load runs twice: by the wall clock, and on a loop whose clock
counts the CPU time of this process and skips what it would wait, as if it had a core to itself.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import selectors
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from replicas.emulated.fleet import Fleet, Served
from tests.bench.report import Benchmark, Options, Table, quantile

_TRACE = Path(__file__).parents[2] / "../shared/data/tau_airline_blk16_trace.jsonl.gz"
_REPLICAS = 8
_SPEED = 10.0
_BLOCK = 16
# Sessions start so many times as often as in the trace, which alone would leave eight replicas idle.
_CROWDS = (1, 4, 8)


class _CpuTimeSelector(selectors.SelectSelector):
    """Waits for nothing but remembers how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.skipped_s += max(0.0, timeout or 0.0)
        return super().select(0)


class _CpuTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._own_selector = _CpuTimeSelector()
        super().__init__(self._own_selector)

    def time(self) -> float:
        return time.process_time() + self._own_selector.skipped_s


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_s: float
    session: int
    ids: array[int]
    num_output: int


@dataclass(slots=True)
class _Run:
    served: list[Served]
    lags_ms: list[float]
    seconds: float
    cpu_s: float


def _run(options: Options) -> list[Table]:
    if not _TRACE.exists():
        return [Table("Lag of emulated engines", ["skipped"], [[f"no trace at {os.path.normpath(_TRACE)}"]])]
    arrivals = _arrivals(options.times(2_454, 800))
    rows = []
    loops: list[tuple[str, Callable[[], asyncio.AbstractEventLoop]]]
    loops = [("own core", _CpuTimeLoop), ("this machine", uvloop.new_event_loop)]
    for crowd in _CROWDS:
        for name, loop in loops:
            with asyncio.Runner(loop_factory=loop) as runner:
                rows.append([f"x{crowd}, {name}", *_row(runner.run(_replay(arrivals, crowd)))])
    columns = ["load", "req/s", "steps/s", "tokens/s", "CPU", "lag p50 ms", "p99 ms", "max ms", "TTFT p50 s", "hit"]
    notes = [
        f"{_REPLICAS} engines at speed {_SPEED:g} on one event loop; sessions of tau-bench agents, each on one replica",
        "load: how many times as often as in the trace sessions start",
        "req/s, steps/s, tokens/s: all engines together, by the loop's clock; TTFT in simulated seconds",
        "CPU: share of one core that this process used; lag: how late a step ended",
    ]
    return [Table("Lag of emulated engines", columns, rows, notes)]


def _arrivals(limit: int) -> list[_Arrival]:
    session_of: dict[int, int] = {}
    arrivals = []
    with gzip.open(_TRACE, "rt") as lines:
        for line, _ in zip(lines, range(limit), strict=False):
            row = json.loads(line)
            session = session_of.get(row["parent_chat_id"], row["chat_id"])
            session_of[row["chat_id"]] = session
            ids = array("I", (block * _BLOCK + i for block in row["hash_ids"] for i in range(_BLOCK)))
            del ids[row["input_length"] :]  # the last block may be a part of one
            arrivals.append(_Arrival(row["timestamp"], session, ids, max(1, row["output_length"])))
    return arrivals


async def _replay(arrivals: list[_Arrival], crowd: int) -> _Run:
    loop = asyncio.get_running_loop()
    fleet = Fleet(_REPLICAS, speed=_SPEED, block_size=_BLOCK, on_events=lambda replica, events: None)
    lags: list[float] = []
    for engine in fleet.engines:
        engine.on_step = lags.append
    cpu, origin, tasks = time.process_time(), loop.time(), []
    for arrival in arrivals:
        delay = origin + arrival.at_s / (crowd * _SPEED) - loop.time()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(fleet.serve(arrival.session % _REPLICAS, arrival.ids, arrival.num_output)))
    served = await asyncio.gather(*tasks)
    seconds, cpu_s = loop.time() - origin, time.process_time() - cpu
    fleet.stop()
    return _Run(served, [lag * 1e3 for lag in lags], seconds, cpu_s)


def _row(run: _Run) -> list[str | int | float]:
    cached, prompt = sum(one.cached_tokens for one in run.served), sum(one.prompt_tokens for one in run.served)
    return [
        len(run.served) / run.seconds,
        len(run.lags_ms) / run.seconds,
        sum(one.output_tokens for one in run.served) / run.seconds,
        f"{run.cpu_s / run.seconds:.0%}",
        quantile(run.lags_ms, 0.5),
        quantile(run.lags_ms, 0.99),
        max(run.lags_ms),
        quantile([one.ttft_s for one in run.served], 0.5),
        f"{cached / prompt:.1%}",
    ]


BENCHMARK = Benchmark("emulated_lag", "eight emulated engines on one core: how late their steps end", _run)
