"""`python -m tests.bench [NAME...]`: run the benchmarks, all of them by default."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from pathlib import Path

from tests.bench import (
    cpu_profile,
    decision,
    emulated_lag,
    loop_lag,
    overhead,
    ownership,
    policies,
    real_vllm,
    start,
    streams,
    tau_sessions,
)
from tests.bench.report import Options, Table, load_average, machine

_MODULES = (
    start,
    overhead,
    streams,
    decision,
    loop_lag,
    ownership,
    emulated_lag,
    policies,
    tau_sessions,
    real_vllm,
    cpu_profile,
)
_ALL = {one.name: one for one in (module.BENCHMARK for module in _MODULES)}


def main() -> None:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    about = machine()
    print(", ".join(f"{name} {value}" if name != "versions" else value for name, value in about.items()), "\n")
    results = {}
    for name in given.names or _ALL:
        results[name] = _run(name, Options(quick=given.quick))
        if given.json:
            given.json.write_text(json.dumps({"machine": about, "benchmarks": results}, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    listing = "\n".join(f"  {one.name:<12} {one.what}" for one in _ALL.values())
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=f"{__doc__}\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: noisy, for trying a change")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in _ALL]:
        parser.error(f"unknown benchmark {unknown[0]!r}; there are {', '.join(_ALL)}")
    return given


def _run(name: str, options: Options) -> dict[str, object]:
    before, began = load_average(), time.monotonic()
    tables = _ALL[name].run(options)
    noise = f"load average {before} before, {load_average()} after; {time.monotonic() - began:.0f} s"
    for table in tables:
        print(table)
    print(f"{name}: {noise}\n", flush=True)
    return {"noise": noise, "tables": [_as_json(table) for table in tables]}


def _as_json(table: Table) -> dict[str, object]:
    return dataclasses.asdict(table)


if __name__ == "__main__":
    main()
