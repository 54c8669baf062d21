"""The differential test itself: engines with one thing wrong have to be found out, and in few operations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from replicas.emulated.block_hashes import BlockChain, EngineBlockHash
from replicas.emulated.block_pool import BlockPool
from replicas.emulated.scheduler import EngineRequest, Scheduler
from tests.vllm.differential import run_random
from tests.vllm.subjects import EmulatedSubject


class EvictsTheMostRecentlyUsed(BlockPool):
    def allocate(self, count: int) -> list[int]:
        self._free = type(self._free).fromkeys(reversed(self._free))
        return super().allocate(count)


class EvictsHeadsBeforeTails(BlockPool):
    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks[::-1])


class ForgetsRemovals(BlockPool):
    def _evict(self, block: int) -> None:
        events, self._events = self._events, None
        super()._evict(block)
        self._events = events


class NamesNoParents(BlockPool):
    def report(self, chain: BlockChain, start: int, stop: int, *, session_id: str | None = None) -> None:
        super().report(chain, start, stop, session_id=session_id)
        if self._events:
            self._events[-1]["parent_block_hash"] = None


class HitsOneBlockLess(BlockPool):
    def find_cached(self, chain: BlockChain) -> list[int]:
        return super().find_cached(chain)[:-1]


class StoresNoSecondCopy(BlockPool):
    def _insert(self, block_hash: EngineBlockHash, block: int) -> None:
        if block_hash not in self._cached:
            super()._insert(block_hash, block)


class ResetsSilently(BlockPool):
    def reset(self) -> bool:
        events, self._events = self._events, None
        done = super().reset()
        self._events = events
        return done


class PreemptsTheOldest(Scheduler):
    def _pick_victim(self) -> EngineRequest:
        return self.running[0]


class QueuesThePreemptedLast(Scheduler):
    def _enqueue(self, request: EngineRequest, *, at_head: bool) -> None:
        super()._enqueue(request, at_head=False)


class AdmitsAfterPreempting(Scheduler):
    def _schedule_running(self, budget: int) -> tuple[int, bool]:
        return super()._schedule_running(budget)[0], False


BROKEN_POOLS = [
    EvictsTheMostRecentlyUsed,
    EvictsHeadsBeforeTails,
    ForgetsRemovals,
    NamesNoParents,
    HitsOneBlockLess,
    StoresNoSecondCopy,
    ResetsSilently,
]
BROKEN_SCHEDULERS = [PreemptsTheOldest, QueuesThePreemptedLast, AdmitsAfterPreempting]


def reproduction(broken: type[EmulatedSubject]) -> str:
    from tests.vllm.vllm_scheduler import VllmSubject

    for seed in range(10):
        try:
            run_random(seed, 1_000, VllmSubject, broken)
        except AssertionError as difference:
            return str(difference)
    pytest.fail("no difference found")


@pytest.mark.parametrize("pool", BROKEN_POOLS)
def test_a_broken_pool_is_caught_and_shown_in_few_operations(pool: type[BlockPool]) -> None:
    shown = reproduction(type("Broken", (EmulatedSubject,), {"pool_class": pool}))
    assert "operations = [" in shown
    assert shown.count("\n    ") <= 16, shown


@pytest.mark.parametrize("scheduler", BROKEN_SCHEDULERS)
def test_a_broken_scheduler_is_caught_and_shown_in_few_operations(scheduler: type[Scheduler]) -> None:
    shown = reproduction(type("Broken", (EmulatedSubject,), {"scheduler_class": scheduler}))
    assert "operations = [" in shown
    assert shown.count("\n    ") <= 40, shown
