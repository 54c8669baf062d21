"""Recorded traces as calls: every block of the trace becomes its own run of token ids."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.sim.simulated_fleet import Call

DATA = Path(__file__).parents[2].parent / "shared" / "data"
TAU = DATA / "tau_airline_blk16_trace.jsonl.gz"
MOONCAKE = DATA / "mooncake_conversation_trace.jsonl.gz"


def tau(speed: float) -> list[Call]:
    """Agent sessions, 16 tokens a block. A turn's answer is what the session's next prompt goes on with."""
    rows = _rows(TAU)
    following = {row["parent_chat_id"]: row for row in rows}
    calls = []
    for row in rows:
        tokens = _tokens(row, 16)
        later = following.get(row["chat_id"])
        output = _tokens(later, 16)[len(tokens) :][: row["output_length"]] if later else ()
        calls.append(Call(row["timestamp"] / speed, tokens, output, max(1, row["output_length"])))
    return calls


def mooncake(
    minutes: float, tick_s: float = 3.0, keep: Callable[[list[int]], bool] = lambda hash_ids: True
) -> list[Call]:
    """Conversations, 512 tokens a block. The trace's clock ticks every 3 s: what came in one tick is spread over it.
    `keep` looks at a request's blocks."""
    rows = [row for row in _rows(MOONCAKE) if row["timestamp"] < minutes * 60_000 and keep(row["hash_ids"])]
    by_tick: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_tick.setdefault(row["timestamp"], []).append(row)
    return [
        Call(time / 1000 + tick_s * i / len(group), _tokens(row, 512), (), max(1, row["output_length"]))
        for time, group in by_tick.items()
        for i, row in enumerate(group)
    ]


def infinite_cache_hit_rate(calls: Sequence[Call], block_size: int) -> float:
    """Share of prompt tokens that one cache of any size would have held, full blocks, each call after the other."""
    seen: set[tuple[int, ...]] = set()
    hit = total = 0
    for call in sorted(calls, key=lambda one: one.at):
        total += len(call.token_ids)
        path: tuple[int, ...] = ()
        going = True
        limit = (len(call.token_ids) - 1) // block_size
        for block in range(len(call.token_ids) // block_size):
            path = (hash((path, tuple(call.token_ids[block * block_size : (block + 1) * block_size]))),)
            going = going and path in seen and block < limit
            hit += block_size if going else 0
            seen.add(path)
    return hit / total


def _tokens(row: dict[str, Any], block_size: int) -> list[int]:
    """`hash_ids[i]` stands for block i and all before it, so equal ids are equal prefixes."""
    ids = [block * block_size + i for block in row["hash_ids"] for i in range(block_size)]
    return ids[: row["input_length"]]


def _rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]
