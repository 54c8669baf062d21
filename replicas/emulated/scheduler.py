"""Continuous batching with chunked prefill over one block pool, as vLLM v1's scheduler does it.

    add() -> waiting --schedule()--> running --finish()--> finished
                ^                      |
                +----- preempted ------+        abort() ends a request in any state

A step is `schedule(now)`, then the time that its work takes, then `finish(now)`. Decisions come back as data; nothing
here waits, and `now` is in seconds of whatever clock the caller keeps. Blocks can be hit from the moment that the step
which fills them is scheduled, so a twin in the same step already shares them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from replicas.emulated.block_hashes import BlockChain
from replicas.emulated.block_pool import BlockPool
from replicas.emulated.step_time import StepWork

FinishReason = Literal["stop", "length", "abort"]


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence. The caller fills the first group; the rest is the scheduler's.

    `output` yields the ids to generate, at least `num_output` of them. `arrival` and `first_token_at` are on the
    scheduler's clock. `reuse_cache` False computes the whole prompt (as prompt log-probabilities need); `report_hits`
    re-emits BlockStored for cache hits (vLLM's `kv_cache_report_mode: full`). A lower `priority` goes first.
    """

    request_id: str
    chain: BlockChain
    num_output: int
    output: Iterator[int]
    arrival: float = 0.0
    priority: int = 0
    finish_reason: FinishReason = "length"
    session_id: str | None = None
    reuse_cache: bool = True
    report_hits: bool = False

    num_prompt: int = field(init=False)
    state: State = State.WAITING
    num_computed: int = 0
    num_generated: int = 0
    num_stored: int = 0
    num_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt = self.chain.num_tokens
        if self.num_prompt < 1 or self.num_output < 1:
            raise ValueError("a request has at least one prompt token and one token to generate")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start, in tokens unless named otherwise; `finished` counts requests by reason.

    A preempted request's second look-up is in none of them, as in vLLM.
    """

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)


class Scheduler:
    def __init__(self, pool: BlockPool, config: SchedulerConfig | None = None) -> None:
        self.pool = pool
        self.config = config or SchedulerConfig()
        self.stats = SchedulerStats()
        self.running: list[EngineRequest] = []
        self.waiting: list[EngineRequest] = []
        self._step: list[tuple[EngineRequest, int]] = []

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting, {self.pool!r}>"

    def add(self, request: EngineRequest) -> None:
        """Queues a request. Raises ValueError for one that the whole pool couldn't hold."""
        # The last generated token is never fed back, so it needs no slot.
        if self.pool.blocks_for(request.num_prompt + request.num_output - 1) > self.pool.num_blocks:
            raise ValueError(f"request {request.request_id} needs more than the pool's {self.pool.num_blocks} blocks")
        self._enqueue(request, at_head=False)

    def abort(self, request: EngineRequest) -> bool:
        """Ends a request and frees its blocks; False when it had already ended."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
        else:
            return False
        self._end(request, State.ABORTED, "abort")
        return True

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Empties the prefix cache; False while requests hold blocks, unless those are to be preempted for it."""
        if preempt_running:
            while self.running:
                self._preempt(self.running.pop())
        return self.pool.reset()

    def next_arrival(self) -> float | None:
        """Arrival of the request at the head of the queue."""
        return self.waiting[0].arrival if self.waiting else None

    def schedule(self, now: float) -> StepWork | None:
        """Starts a step; None when nothing can run. What arrives after `now` isn't looked at."""
        self._step = []
        budget, preempted = self._schedule_running(self.config.max_num_batched_tokens)
        while preempted and not self._step:
            # By priority the first in line can be its own victim; vLLM then goes round once more, too.
            budget, preempted = self._schedule_running(self.config.max_num_batched_tokens)
        if not preempted:
            self._schedule_waiting(now, budget)
        return self._work() if self._step else None

    def finish(self, now: float) -> list[EngineRequest]:
        """Ends the step that was scheduled last; the requests that got a token from it, ended ones among them."""
        step, self._step = self._step, []
        produced = []
        for request, count in step:
            if request.state is not State.RUNNING:
                continue
            request.num_computed += count
            if request.num_computed == request.chain.num_tokens:
                self._generate(request, now)
                produced.append(request)
        if any(request.state is State.FINISHED for request in produced):
            self.running = [request for request in self.running if request.state is State.RUNNING]
        return produced

    def _schedule_running(self, budget: int) -> tuple[int, bool]:
        """Chunks for what runs already, oldest first; (budget left, whether anything had to be preempted)."""
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.chain.num_tokens - request.num_computed, budget)
            needed = self.pool.blocks_for(request.num_computed + count) - len(request.blocks)
            while needed > self.pool.num_free:
                preempted = True
                victim = self._pick_victim()
                position = self.running.index(victim)
                del self.running[position]
                self._preempt(victim)
                if position < index:
                    index -= 1
                    budget += self._unschedule(victim)
                if victim is request:
                    return budget, True
            self._grant(request, count)
            budget -= count
            index += 1
        return budget, preempted

    def _schedule_waiting(self, now: float, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if request.arrival > now:
                break
            reuse = request.reuse_cache and self.config.enable_prefix_caching
            hits = self.pool.find_cached(request.chain) if reuse else []
            if request.report_hits:
                self.pool.report(request.chain, 0, len(hits), session_id=request.session_id)
            # The whole known sequence has to fit, not just its first chunk: otherwise admissions preempt each other.
            needed = self.pool.blocks_for(request.chain.num_tokens) - len(hits)
            if needed + self.pool.num_unused(hits) > self.pool.num_free:
                break
            self._admit(self.waiting.pop(0), hits)
            count = min(request.chain.num_tokens - request.num_computed, budget)
            self._grant(request, count)
            budget -= count

    def _admit(self, request: EngineRequest, hits: list[int]) -> None:
        self.pool.share(hits)
        request.blocks = hits
        request.num_stored = len(hits)
        request.num_computed = len(hits) * self.pool.block_size
        request.state = State.RUNNING
        self.running.append(request)
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
            if request.reuse_cache and self.config.enable_prefix_caching:
                self.stats.prefix_cache_queries += request.num_prompt
                self.stats.prefix_cache_hits += request.cached_tokens

    def _grant(self, request: EngineRequest, count: int) -> None:
        """Puts the request's next `count` tokens into the step, with the blocks that they need."""
        end = request.num_computed + count
        request.blocks += self.pool.allocate(self.pool.blocks_for(end) - len(request.blocks))
        full = end // self.pool.block_size if self.config.enable_prefix_caching else 0
        self.pool.store(request.chain, request.blocks, request.num_stored, full, session_id=request.session_id)
        request.num_stored = full
        self._step.append((request, count))

    def _pick_victim(self) -> EngineRequest:
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival))
        return self.running[-1]

    def _preempt(self, request: EngineRequest) -> None:
        self._free(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._enqueue(request, at_head=True)

    def _unschedule(self, victim: EngineRequest) -> int:
        for index, (request, count) in enumerate(self._step):
            if request is victim:
                del self._step[index]
                return count
        return 0

    def _enqueue(self, request: EngineRequest, *, at_head: bool) -> None:
        request.state = State.WAITING
        if self.config.policy == "priority":
            insort(self.waiting, request, key=_precedence)
        elif at_head:
            self.waiting.insert(0, request)
        else:
            self.waiting.append(request)

    def _generate(self, request: EngineRequest, now: float) -> None:
        request.chain.append(next(request.output))
        request.num_generated += 1
        self.stats.generation_tokens += 1
        if request.first_token_at is None:
            request.first_token_at = now
            self.stats.prompt_tokens += request.num_prompt
            self.stats.prompt_tokens_cached += request.cached_tokens or 0
        if request.num_generated == request.num_output:
            self._end(request, State.FINISHED, request.finish_reason)

    def _end(self, request: EngineRequest, state: State, reason: FinishReason) -> None:
        self._free(request)
        request.state = state
        self.stats.finished[reason] += 1

    def _free(self, request: EngineRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_stored = 0

    def _work(self) -> StepWork:
        prefill = decoding = context = 0
        attention = 0.0
        for request, count in self._step:
            if count == 1 and request.num_generated:
                decoding += 1
                context += request.num_computed + 1
            else:
                prefill += count
                attention += count * (request.num_computed + count / 2)
        return StepWork(prefill, decoding, attention, context)


def _precedence(request: EngineRequest) -> tuple[int, float, str]:
    return request.priority, request.arrival, request.request_id
