"""Recorded agent sessions through both engines, in simulated time: shared system prompts, turns, tool calls."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicas.emulated.step_time import DEFAULT_PROFILE, PROFILES, StepWork
from tests.vllm.differential import Comparison
from tests.vllm.operations import Add, Begin, End, Setup
from tests.vllm.subjects import EmulatedSubject

TRACE = Path(__file__).parents[3] / "shared" / "data" / "tau_airline_blk16_trace.jsonl.gz"
BLOCK = 16
# Room for fewer sessions than run at busy times: blocks get evicted and requests preempted.
SETUP = Setup(block_size=BLOCK, num_blocks=1_500, max_num_seqs=32, max_num_batched_tokens=2_048)
REQUESTS = int(os.environ.get("WHOHAS_VLLM_REQUESTS", "300"))


def recorded(limit: int) -> list[dict[str, Any]]:
    if not TRACE.exists():
        pytest.skip(f"no recorded sessions: {TRACE.name} belongs into ../shared/data beside the repository")
    with gzip.open(TRACE, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(limit), lines, strict=False)]
    return sorted(rows, key=lambda row: row["timestamp"])


def token_ids(row: dict[str, Any]) -> list[int]:
    """Ids of our own making: equal where the trace says that blocks are equal."""
    ids = [block * BLOCK + place for block in row["hash_ids"] for place in range(BLOCK)]
    return ids[: row["input_length"]]


def requests(rows: list[dict[str, Any]]) -> Iterator[tuple[float, Add]]:
    """What a request generates is what its session's next request has there, where the trace shows one."""
    following = {row["parent_chat_id"]: row for row in rows if row["parent_chat_id"] >= 0}
    for row in rows:
        start, length = row["input_length"], max(1, row["output_length"])
        output: list[int] = []
        if row["chat_id"] in following:
            output = token_ids(following[row["chat_id"]])[start : start + length]
        output += [1] * (length - len(output))
        name = f"chat{row['chat_id']}"
        yield row["timestamp"], Add(name, tuple(token_ids(row)), tuple(output), arrival=row["timestamp"])


@pytest.mark.parametrize("speed_up", [1.0, 8.0])
def test_recorded_sessions_show_no_difference(speed_up: float) -> None:
    from tests.vllm.vllm_scheduler import VllmSubject

    step_time = PROFILES[DEFAULT_PROFILE]
    comparison = Comparison(SETUP, EmulatedSubject(SETUP), VllmSubject(SETUP))
    arriving = [(when / speed_up, add) for when, add in requests(recorded(REQUESTS))]
    arriving.reverse()
    clock = 0.0
    while arriving or comparison.unfinished:
        if not comparison.unfinished:
            clock = max(clock, arriving[-1][0])
        while arriving and arriving[-1][0] <= clock:
            comparison.apply(arriving.pop()[1])
        before = comparison.scheduled_tokens
        comparison.apply(Begin())
        comparison.apply(End())
        clock += step_time.seconds(StepWork(prefill_tokens=comparison.scheduled_tokens - before))
    counts = comparison.counts
    assert counts["hit tokens"] > counts["queried tokens"] / 2
    assert counts["BlockRemoved"]
    assert counts["preemptions"]
