"""What whohas adds: latency at concurrency 1 and CPU of every process, beside a trivial Serve endpoint and the engine."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.bench import client, processes, prompts
from tests.bench.processes import REST
from tests.bench.report import Benchmark, Options, Samples, Table, load_average
from tests.bench.report import quantile as q
from tests.bench.stack import Stack, instant_stack

_REQUESTS = {1_000: 120, 8_000: 40, 32_000: 12}
"""Requests a round, by words in the prompt."""
_GROUPS = ("HAProxy", "ingress", "trivial", "engine", "collectors", "Valkey", REST)
_STREAMS, _CHUNKS, _GAP_MS = 16, 50, 30.0
_IDLE_S = 6.0
_serial = count()


@dataclass(slots=True)
class Target:
    """Something to ask, with what was measured. `cpu` in milliseconds, idle use taken off."""

    name: str
    url: str
    bodies: Callable[[int], list[bytes]]
    latency_ms: Samples = field(default_factory=Samples)
    cpu: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    requests: int = 0


def run(options: Options) -> list[Table]:
    rounds = options.times(4, 2)
    with instant_stack() as stack:
        idle = processes.idle_rates(stack.roots, _IDLE_S)
        tables = []
        return [
            *(_short(stack, idle, words, rounds) for words in _REQUESTS),
            _streamed(stack, idle, rounds),
            _idle_table(idle),
        ]


def _idle_table(idle: Mapping[str, float]) -> Table:
    rows = [[group, 100 * idle[group]] for group in _GROUPS if group in idle]
    total = 100 * sum(idle.values())
    return Table("idle (taken off above)", ["processes", "% of one core"], [*rows, ["all", total]])


def _short(stack: Stack, idle: Mapping[str, float], words: int, rounds: int) -> Table:
    growing = prompts.turns(words, f"turns-{words}")
    targets = [
        Target("engine, direct", stack.direct, lambda n: _fresh(words, n)),
        Target("trivial endpoint", stack.trivial, lambda n: _fresh(words, n)),
        Target("whohas, fresh prompt", stack.whohas, lambda n: _fresh(words, n)),
        Target("whohas, new turn", stack.whohas, lambda n: _grow(growing, n)),
    ]
    load = load_average()
    for _ in range(rounds):
        for target in targets:
            _ask(stack, idle, target, _REQUESTS[words])
    direct, trivial = (target.latency_ms for target in targets[:2])
    rows = [
        [
            target.name,
            *(target.latency_ms.quantile(at) for at in (0.5, 0.9)),
            *(target.latency_ms.quantile(0.5) - base.quantile(0.5) for base in (trivial, direct)),
            *(target.latency_ms.quantile(0.9) - base.quantile(0.9) for base in (trivial, direct)),
            target.latency_ms.spread,
            sum(target.cpu.values()) / target.requests,
            *(target.cpu[group] / target.requests for group in _GROUPS),
        ]
        for target in targets
    ]
    return Table(
        f"{words:,} words, 1 answer chunk, one request at a time (ms)",
        [
            *("", "p50", "p90", "p50 - trivial", "p50 - direct", "p90 - trivial", "p90 - direct", "p50 by round"),
            *("CPU/request", *_GROUPS),
        ],
        rows,
        [f"{rounds} rounds of {_REQUESTS[words]} requests each, targets in turn; load before {load}"],
    )


def _ask(stack: Stack, idle: Mapping[str, float], target: Target, requests: int) -> None:
    bodies = target.bodies(requests + 2)
    with client.Connection(target.url) as connection:
        for body in bodies[:2]:
            connection.post(body)
        before = processes.read_cpu(stack.roots)
        target.latency_ms.add([connection.post(body) for body in bodies[2:]])
    _add_cpu(stack, idle, target, before)
    target.requests += requests


def _streamed(stack: Stack, idle: Mapping[str, float], rounds: int) -> Table:
    rows: list[list[str | float]] = []
    load = load_average()
    targets = [
        [Target(name, url, lambda n: _fresh(100, n)) for _ in range(2)]
        for name, url in (
            ("engine, direct", stack.direct),
            ("trivial endpoint", stack.trivial),
            ("whohas", stack.whohas),
        )
    ]
    gaps: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for short, long in targets:
            for _ in range(10):
                _stream(stack, idle, short, chunks=1)
            for _ in range(2):
                gaps[long.name] += [gap for one in _stream(stack, idle, long, chunks=_CHUNKS) for gap in one.gaps_ms]
    for short, long in targets:
        per_chunk = {group: _marginal(short.cpu[group], short, long.cpu[group], long) for group in _GROUPS}
        times = [long.latency_ms.quantile(0.5), long.latency_ms.quantile(0.9), q(gaps[long.name], 0.99)]
        rows.append([long.name, *times, sum(per_chunk.values()), *per_chunk.values()])
    return Table(
        f"{_STREAMS} streams of {_CHUNKS} chunks, one every {_GAP_MS:.0f} ms (ms)",
        ["", "TTFT p50", "TTFT p90", "gap p99", "CPU/chunk", *_GROUPS],
        rows,
        [
            f"CPU a chunk: ({_CHUNKS} chunks - 1 chunk) / {_CHUNKS - 1}, from {rounds} rounds of {2 * _STREAMS} streams "
            f"of {_CHUNKS} chunks and {10 * _STREAMS} of 1; load before {load}"
        ],
    )


def _stream(stack: Stack, idle: Mapping[str, float], target: Target, chunks: int) -> list[client.Stream]:
    bodies = target.bodies(_STREAMS)
    before = processes.read_cpu(stack.roots)
    answers = asyncio.run(client.streams(target.url, bodies, chunks, _GAP_MS))
    _add_cpu(stack, idle, target, before)
    target.latency_ms.add([one.ttft_ms for one in answers])
    target.requests += _STREAMS
    return answers


def _add_cpu(stack: Stack, idle: Mapping[str, float], target: Target, before: processes.CpuReading) -> None:
    time.sleep(0.05)  # what an answer leaves to do is part of its cost
    for group, seconds in processes.read_cpu(stack.roots).since(before, idle).items():
        target.cpu[group] += seconds * 1000


def _marginal(cpu_short: float, short: Target, cpu_long: float, long: Target) -> float:
    return (cpu_long / long.requests - cpu_short / short.requests) / (_CHUNKS - 1)


def _fresh(words: int, n: int) -> list[bytes]:
    return [prompts.fresh(words, ("fresh", words, next(_serial))) for _ in range(n)]


def _grow(conversation: Iterator[list[dict[str, Any]]], n: int) -> list[bytes]:
    return [prompts.body(next(conversation)) for _ in range(n)]


BENCHMARK = Benchmark("overhead", "latency and CPU that whohas adds to a trivial endpoint and to the engine", run)
