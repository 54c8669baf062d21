"""What whohas adds, in latency at concurrency 1 and in CPU: beside a trivial Serve endpoint, and the engine alone."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice

from tests.bench import client, processes, prompts
from tests.bench.report import Benchmark, Options, Samples, Table, load_average
from tests.bench.report import quantile as q
from tests.bench.stack import Stack, instant_stack

_REQUESTS = {1_000: 120, 8_000: 40, 32_000: 12}
"""Requests a round, by words in the prompt."""
_PATH = ("HAProxy", "ingress", "trivial", "engine", "Valkey")
"""What a request passes through: collectors and Ray's own processes only show in the idle table."""
_TURNS = 10
"""Turns of a conversation before another one begins: it must not outgrow its size."""
_STREAMS, _CHUNKS, _GAP_MS = 16, 50, 30.0
_IDLE_S = 6.0
_SETTLE_S = 0.5
"""What an answer leaves to do is part of its cost: its claims end only `claim_s` (here 0.2 s) later."""
LOADING_S = 15.0
"""The ingress goes on loading its faster tokenizer for a few seconds after it is ready."""
_serial = count()


@dataclass(slots=True)
class Target:
    """Something to ask, with what was measured. `cpu` in milliseconds, idle use taken off."""

    name: str
    url: str
    bodies: Callable[[int], list[list[bytes]]]
    latency_ms: Samples = field(default_factory=Samples)
    cpu: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    requests: int = 0


def run(options: Options) -> list[Table]:
    rounds = options.times(4, 2)
    with instant_stack() as stack:
        time.sleep(LOADING_S)
        idle = processes.idle_rates(stack.roots, _IDLE_S)
        return [
            *(_short(stack, idle, words, rounds) for words in _REQUESTS),
            _streamed(stack, idle, rounds),
            _idle_table(idle),
        ]


def _idle_table(idle: Mapping[str, float]) -> Table:
    rows = [[group, 100 * rate] for group, rate in idle.items()]
    total = 100 * sum(idle.values())
    return Table("idle (taken off above)", ["processes", "% of one core"], [*rows, ["all", total]])


def _short(stack: Stack, idle: Mapping[str, float], words: int, rounds: int) -> Table:
    targets = [
        Target("engine, direct", stack.direct, lambda n: [_fresh(words, n + 1)]),
        Target("trivial endpoint", stack.trivial, lambda n: [_fresh(words, n + 1)]),
        Target("whohas, fresh prompt", stack.whohas, lambda n: [_fresh(words, n + 1)]),
        Target("whohas, new turn", stack.whohas, lambda n: _turns(words, n)),
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
            target.latency_ms.spread,
            sum(target.cpu[group] for group in _PATH) / target.requests,
            *(target.cpu[group] / target.requests for group in _PATH),
        ]
        for target in targets
    ]
    return Table(
        f"{words:,} words, 1 answer chunk, one request at a time (ms)",
        [
            *("", "p50", "p90", "p50 - trivial", "p50 - direct", "p50 by round"),
            *("CPU/request", *_PATH),
        ],
        rows,
        [f"{rounds} rounds of {_REQUESTS[words]} requests each, targets in turn; load before {load}"],
    )


def _ask(stack: Stack, idle: Mapping[str, float], target: Target, requests: int) -> None:
    """The first of each group of bodies isn't measured."""
    times: list[float] = []
    with client.Connection(target.url) as connection:
        for first, *bodies in target.bodies(requests):
            connection.post(first)
            time.sleep(_SETTLE_S)
            before = processes.read_cpu(stack.roots)
            times += [connection.post(body) for body in bodies]
            _add_cpu(stack, idle, target, before)
    target.latency_ms.add(times)
    target.requests += len(times)


def _streamed(stack: Stack, idle: Mapping[str, float], rounds: int) -> Table:
    rows: list[list[str | float]] = []
    load = load_average()
    targets = [
        [Target(name, url, lambda n: [_fresh(100, n)]) for _ in range(2)]
        for name, url in (
            ("engine, direct", stack.direct),
            ("trivial endpoint", stack.trivial),
            ("whohas", stack.whohas),
        )
    ]
    gaps: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for short, long in targets:
            for _ in range(5):
                _stream(stack, idle, short, chunks=1)
            for _ in range(2):
                gaps[long.name] += [gap for one in _stream(stack, idle, long, chunks=_CHUNKS) for gap in one.gaps_ms]
    for short, long in targets:
        per_chunk = {group: _marginal(group, short, long) for group in _PATH}
        times = [long.latency_ms.quantile(0.5), long.latency_ms.quantile(0.9), q(gaps[long.name], 0.99)]
        rows.append([long.name, *times, sum(per_chunk.values()), *per_chunk.values()])
    return Table(
        f"{_STREAMS} streams of {_CHUNKS} chunks, one every {_GAP_MS:.0f} ms (ms)",
        ["", "TTFT p50", "TTFT p90", "gap p99", "CPU/chunk", *_PATH],
        rows,
        [
            f"CPU a chunk: ({_CHUNKS} chunks - 1) / {_CHUNKS - 1}, from {rounds} rounds of {2 * _STREAMS} streams of "
            f"{_CHUNKS} chunks and {5 * _STREAMS} of 1; load before {load}"
        ],
    )


def _stream(stack: Stack, idle: Mapping[str, float], target: Target, chunks: int) -> list[client.Stream]:
    (bodies,) = target.bodies(_STREAMS)
    before = processes.read_cpu(stack.roots)
    answers = asyncio.run(client.streams(target.url, bodies, chunks, _GAP_MS))
    _add_cpu(stack, idle, target, before)
    target.latency_ms.add([one.ttft_ms for one in answers])
    target.requests += _STREAMS
    return answers


def _add_cpu(stack: Stack, idle: Mapping[str, float], target: Target, before: processes.CpuReading) -> None:
    time.sleep(_SETTLE_S)
    for group, seconds in processes.read_cpu(stack.roots).since(before, idle).items():
        target.cpu[group] += seconds * 1000


def _marginal(group: str, short: Target, long: Target) -> float:
    return (long.cpu[group] / long.requests - short.cpu[group] / short.requests) / (_CHUNKS - 1)


def _fresh(words: int, n: int) -> list[bytes]:
    return [prompts.fresh(words, ("fresh", words, next(_serial))) for _ in range(n)]


def _turns(words: int, n: int) -> list[list[bytes]]:
    """Conversations of a first request and `_TURNS` more."""
    return [
        [prompts.body(messages) for messages in islice(prompts.turns(words, ("turns", words, next(_serial))), size + 1)]
        for size in [_TURNS] * (n // _TURNS) + ([n % _TURNS] if n % _TURNS else [])
    ]


BENCHMARK = Benchmark("overhead", "latency and CPU that whohas adds to a trivial endpoint and to the engine", run)
