"""Where the ingress's CPU goes, by py-spy's samples: for short requests and for streams."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.bench import client, processes, prompts
from tests.bench.overhead import LOADING_S
from tests.bench.report import Benchmark, Options, Table, load_average
from tests.bench.stack import Stack, instant_stack

_RATE = 250
_TOP = 28
_FRAME = re.compile(r"^(?P<function>.*) \((?P<file>[^()]*?):\d+\)$")
_serial = count()


@dataclass(frozen=True, slots=True)
class Profile:
    """Samples by function and module: `own` while it ran itself, `total` while it or what it called ran."""

    samples: int
    own: Counter[str]
    own_by_module: Counter[str]
    total: Counter[str]


def run(options: Options) -> list[Table]:
    seconds = options.times(25, 8)
    with instant_stack(with_trivial=False) as stack:
        time.sleep(LOADING_S)
        return [
            table
            for what, chunks, load in (
                ("requests of 1,000 words, 1 chunk, 2 at a time", 0, _short_requests),
                ("16 streams of 50 chunks, one every 30 ms", 50, _paced_streams),
            )
            for table in _profile(stack, what, seconds, chunks, load)
        ]


Load = Callable[[str, float], Awaitable[int]]
"""Ask the URL for so many seconds; how many requests were answered."""


def _profile(stack: Stack, what: str, seconds: int, chunks: int, load: Load) -> list[Table]:
    asyncio.run(load(stack.whohas, 2.0))
    before_load = load_average()
    pid = stack.ingress_pid
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stacks"
        command = [str(Path(sys.executable).with_name("py-spy")), "record", "-p", str(pid), "-d", str(seconds)]
        # Only threads that hold the interpreter lock: waiting ones would count as busy, as far as py-spy can tell.
        command += ["-r", str(_RATE), "-f", "raw", "-F", "--gil", "-o", str(out)]
        # The CPU a request comes from a run without py-spy: it stops the process for every sample.
        before = processes.read_cpu([pid])
        answered = asyncio.run(load(stack.whohas, seconds / 2))
        cpu_ms = 1000 * sum(processes.read_cpu([pid]).since(before).values()) / answered
        spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            asyncio.run(load(stack.whohas, seconds + 1.0))
            _, errors = spy.communicate(timeout=60)
        finally:
            spy.kill()
        if spy.returncode:
            raise RuntimeError(f"py-spy failed: {errors[-2000:]}")
        profile = _aggregate(out.read_text().splitlines())
    notes = [
        f"{profile.samples} samples in {seconds} s; the ingress took {cpu_ms:.2f} ms a request in a run without py-spy "
        f"(its idle work included); ms = share of that; load before {before_load}"
    ]
    unit = chunks or 1
    name = "ms/chunk" if chunks else "ms/request"
    return [
        _table(f"{what}: by module, own time", profile.own_by_module, profile.samples, cpu_ms / unit, name, 16, []),
        _table(f"{what}: by function, own time", profile.own, profile.samples, cpu_ms / unit, name, _TOP, []),
        _table(f"{what}: with callees", profile.total, profile.samples, cpu_ms / unit, name, 2 * _TOP, notes),
    ]


def _table(
    title: str, counted: Counter[str], samples: int, cpu_ms: float, name: str, top: int, notes: list[str]
) -> Table:
    rows = [[what, 100 * n / samples, cpu_ms * n / samples] for what, n in counted.most_common(top)]
    return Table(title, ["", "%", name], rows, notes)


def _aggregate(lines: Iterable[str]) -> Profile:
    profile = Profile(0, Counter(), Counter(), Counter())
    samples = 0
    for line in lines:
        stack, _, number = line.rpartition(" ")
        n = int(number)
        frames = [_name(frame) for frame in stack.split(";")]
        samples += n
        profile.own[" ".join(frames[-1])] += n
        profile.own_by_module[frames[-1][0]] += n
        for frame in {" ".join(frame) for frame in frames}:
            profile.total[frame] += n
    return Profile(samples, profile.own, profile.own_by_module, profile.total)


def _name(frame: str) -> tuple[str, str]:
    """Module (its path from the last folder that packages lie in) and function."""
    found = _FRAME.match(frame)
    if not found:
        return frame, ""
    return found["file"].removesuffix(".py"), found["function"]


async def _short_requests(url: str, seconds: float) -> int:
    end = time.monotonic() + seconds

    def ask() -> int:
        answered = 0
        with client.Connection(url) as connection:
            while time.monotonic() < end:
                connection.post(prompts.fresh(1000, ("profile", next(_serial))))
                answered += 1
        return answered

    return sum(await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(2))))


async def _paced_streams(url: str, seconds: float) -> int:
    end = time.monotonic() + seconds
    answered = 0
    while time.monotonic() < end:
        bodies = [prompts.fresh(100, ("profile", next(_serial))) for _ in range(16)]
        answered += len(await client.streams(url, bodies, 50, 30.0))
    return answered


BENCHMARK = Benchmark("profile", "where the ingress's CPU goes (py-spy)", run)
