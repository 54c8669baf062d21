"""The emulated pool and scheduler beside vLLM's own KVCacheManager and Scheduler, on the same random operations.

Compared after every operation: running and waiting order, who was preempted, block tables, computed and known tokens of
what runs, pool usage, the free queue; after a step also scheduled tokens, KV events in order and in full, cached
tokens, and hit counters.
"""

from __future__ import annotations

import os

import pytest

from tests.vllm.differential import run_random

# For each of 20 seeds. `python -m tests.vllm` takes other numbers, and says what happened how often.
OPERATIONS = int(os.environ.get("WHOHAS_VLLM_OPERATIONS", "10000"))


@pytest.mark.parametrize("seed", range(20))
def test_no_random_history_shows_a_difference(seed: int) -> None:
    from tests.vllm.vllm_scheduler import VllmSubject

    counts = run_random(seed, OPERATIONS, VllmSubject)
    for what in ("preemptions", "hit tokens", "BlockStored", "BlockRemoved", "AllBlocksCleared", "Abort"):
        assert counts[what], f"the traffic caused no {what}, so this proves little"
