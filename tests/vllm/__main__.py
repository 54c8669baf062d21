"""The differential test at length: python -m tests.vllm --seeds 20 --operations 10000"""

from __future__ import annotations

import argparse
import logging
import time

from tests.vllm.differential import run_random
from tests.vllm.vllm_scheduler import VllmSubject


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=10_000, help="for each seed")
    arguments = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    started = time.monotonic()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        counts = run_random(seed, arguments.operations, VllmSubject)
        seconds = time.monotonic() - started
        print(f"seed {seed}, {seconds:.0f} s: no difference", ", ".join(f"{k} {v}" for k, v in counts.items()))


if __name__ == "__main__":
    main()
