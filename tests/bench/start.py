"""How long `whohas up` takes until it is ready and has answered a first chat, with bytecode in place."""

from __future__ import annotations

import json
import time

from tests.bench import processes, stack
from tests.bench.client import CHAT, Connection
from tests.bench.report import Benchmark, Options, Table, load_average
from tests.bench.report import quantile as q

_BODY = json.dumps(
    {"model": "whohas-demo", "messages": [{"role": "user", "content": "Who has my blocks?"}], "max_tokens": 1}
).encode()


def run(options: Options) -> list[Table]:
    rows = []
    for number in range(options.times(4, 2)):
        began = time.monotonic()
        load = load_average()
        with stack.running() as up:
            ready = time.monotonic() - began
            with Connection(up.url + CHAT) as connection:
                connection.post(_BODY)
            answered = time.monotonic() - began
            cpu_s = sum(seconds for _, seconds in processes.read_cpu([up.pid]).by_pid.values())
            phases, asked_to_stop = up.phases, time.monotonic()
        stopped = time.monotonic() - asked_to_stop
        serve = next(at for at, what in phases if "Serve" in what)
        name = "1 (may compile bytecode)" if number == 0 else str(number + 1)
        rows.append([name, serve, phases[-1][0] - serve, ready, answered, cpu_s, stopped, load])
    warm = [float(row[4]) for row in rows[1:]]
    return [
        Table(
            "whohas up: seconds until ready, 4 emulated replicas, 2 ingresses",
            [
                "run",
                "Valkey + Ray",
                "Serve + app",
                "ready",
                "first answer",
                "CPU s until then",
                "Ctrl-C to exit",
                "load before",
            ],
            rows,
            [
                f"first answer of the later runs: median {q(warm, 0.5):.1f} s, {min(warm):.1f}..{max(warm):.1f}",
                "CPU of processes that had ended by then isn't counted",
            ],
        )
    ]


BENCHMARK = Benchmark("start", "time of `whohas up` until ready and until the first answer", run)
