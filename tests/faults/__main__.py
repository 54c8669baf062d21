"""Seeded random faults against a fleet: `make faults`, or `python -m tests.faults --seeds 100-120 --seconds 20`."""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.invariants import INVARIANTS, Broken
from tests.faults.live import survive as survive_live
from tests.faults.run import survive
from tests.faults.soak import soak
from tests.integration.live import whohas_up


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seeds", default="1-12", help="one, or a range.  [default: 1-12]")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each schedule.  [default: 10]")
    parser.add_argument("--faults", type=int, default=15, help="in each schedule.  [default: 15]")
    parser.add_argument(
        "--soak", type=float, default=60.0, help="seconds of churn; 0: none.  [default: 60, an engine's hour]"
    )
    parser.add_argument("--live", type=int, default=1, help="schedules against the whole application.  [default: 1]")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    broken = checked = 0
    for seed in range(int(first), int(last or first) + 1):
        print(f"schedule {seed}", flush=True)
        began = time.monotonic()
        try:
            told = asyncio.run(survive(seed, options.seconds, options.faults, tell=lambda line: print(f"  {line}")))
        except Broken as error:
            broken += 1
            print(f"  BROKEN: {error}", flush=True)
            continue
        checked += len(INVARIANTS)
        faults.update(fault.name for fault in told.faults)
        outcomes.update(told.outcomes)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(
            f"  survived {len(told.faults)} faults; {sum(told.outcomes.values())} requests, {told.degraded} of them by"
            f" load alone; all invariants hold {told.repaired_s:.1f} s after the last fault"
            f" ({time.monotonic() - began:.0f} s, {memory} MiB at most)",
            flush=True,
        )
    if options.soak:
        broken += _soak(options.soak)
    for seed in range(options.live):
        broken += _live(seed)
    print(f"faults survived: {sum(faults.values())} ({_list(faults)})")
    print(f"requests: {_list(outcomes)}")
    print(f"invariants checked: {checked} ({', '.join(one.__name__.replace('_', ' ') for one in INVARIANTS)})")
    print(f"schedules broken: {broken}")
    return 1 if broken else 0


def _soak(seconds: float) -> int:
    """1 where it broke."""
    try:
        told = asyncio.run(soak(seconds))
    except Broken as error:
        print(f"soak BROKEN: {error}")
        return 1
    (rss, rss_then), (redis, redis_then) = told.rss_mib, told.redis_mib
    print(
        f"soak: {told.simulated_s / 60:.0f} simulated minutes, {told.requests} requests, {told.incarnations}"
        f" incarnations ended; second and last quarter: this process {rss:.1f} and {rss_then:.1f} MiB,"
        f" Redis {redis:.2f} and {redis_then:.2f} MiB"
    )
    return 0


def _live(seed: int) -> int:
    """1 where it broke."""
    try:
        with tempfile.TemporaryDirectory() as folder, whohas_up(Path(folder)) as running:
            told = asyncio.run(survive_live(running, seed, seconds=30.0))
    except Broken as error:
        print(f"whole application, schedule {seed}, BROKEN: {error}")
        return 1
    print(f"whole application, schedule {seed}: {', then '.join(told.faults)}; streamed chats: {_list(told.outcomes)}")
    return 0


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
