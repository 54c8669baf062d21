"""CPU of one decision, in process: body -> prompt -> hashes -> look-up in a real Valkey -> rank -> reserve."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import islice
from typing import Any
from unittest.mock import patch

import uvloop
from redis.asyncio import Redis

import router.memo as memo_module
from router.asked import Asked
from router.config import RouterConfig
from router.hashing import chain
from router.ownership import Lease, ReplicaRecord, Write
from router.ownership.redis import RedisOwnershipMap
from router.prompt import CHAT_PATH, PromptEncoder, parse_body
from router.router import Router
from router.types import ReplicaId
from serve.embedded_valkey import EmbeddedValkey
from tests.bench import prompts
from tests.bench.report import Benchmark, Options, Table, load_average, quantile

_BLOCK = 16
_REPLICAS = 4
_SIZES = {4: 3_750, 32: 30_200, 128: 121_000}
"""Thousands of tokens -> words of chat that make about as many."""
_REPEATS = {4: 40, 32: 20, 128: 10}
_TURNS = 5
"""Turns of a chat before another one begins: it must not outgrow its size."""
_TOTAL = "all steps"
_STEPS = ("parse", "render", "tokenise", "hash", "cut, memo, the rest", "look-up, client", "rank", "reserve")
_REST = "the rest"
_TELL = "afterwards: telling the claims"
_RELEASE = "afterwards: release"
_IDLE_S, _BUSY_S = 0.1, 0.003
"""Between a decision and its end, and before the next one: claims are told then."""


class Frame:
    """One call that is being measured; `within` is what calls inside it took."""

    def __init__(self) -> None:
        self.began = time.process_time()
        self.within = 0.0


_open: ContextVar[Frame | None] = ContextVar("_open", default=None)  # follows tasks, and calls into threads


class Steps:
    """CPU time of this process (all threads) spent in each step, calls within calls not counted twice."""

    def __init__(self) -> None:
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self._now: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        parent, frame = _open.get(), Frame()
        token = _open.set(frame)
        try:
            yield
        finally:
            _open.reset(token)
            took = time.process_time() - frame.began
            self._now[name] += took - frame.within
            if parent is not None:
                parent.within += took

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.step(name):
                return call(*args, **kwargs)

        return wrapped

    def wrap_async(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.step(name):
                return await call(*args, **kwargs)

        return wrapped

    def end_round(self, tokens: int) -> None:
        """Everything since the last call belongs to one decision, about so many tokens."""
        total = sum(seconds for name, seconds in self._now.items() if name in (*_STEPS, _REST))
        for name, seconds in (*self._now.items(), (_TOTAL, total)):
            self.times[name].append(seconds * 1000)
        self.times["tokens"].append(tokens)
        self.forget()

    def forget(self) -> None:
        self._now.clear()


def run(options: Options) -> list[Table]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as Ray has it in its actors
        return runner.run(_run(options))


async def _run(options: Options) -> list[Table]:
    encoder = PromptEncoder.load(prompts.MODEL, "builtin", fast=True)
    backends = ", ".join(f"{part}: {who}" for part, who in encoder.settle(180).items())
    return [
        await _table(options, encoder, backends, "an idle router", _IDLE_S),
        await _table(options, encoder, backends, "a busy router", _BUSY_S),
        await _naive(options),
    ]


async def _naive(options: Options) -> Table:
    """What one would write first: nothing remembered, and every block asked for."""
    encoder, before = PromptEncoder.load(prompts.MODEL, "builtin"), load_average()
    repeats, medians = options.times(5, 2), []
    with EmbeddedValkey() as valkey:
        client = Redis.from_url(valkey.url)
        for words in _SIZES.values():
            times = []
            for i in range(repeats):
                raw = prompts.body(prompts.chat(words, ("naive", words, i)))
                began = time.process_time()
                prompt = encoder.prompt(CHAT_PATH, parse_body(raw))
                async with client.pipeline(transaction=False) as pipe:
                    for block_hash in chain(prompt.root, prompt.token_ids, _BLOCK):
                        pipe.smembers(block_hash)
                    await pipe.execute()
                times.append(1000 * (time.process_time() - began))
            medians.append(quantile(times, 0.5))
        await client.aclose()
    return Table(
        "the naive way: jinja2, tokenizers on the whole text, SMEMBERS of every block in a pipeline; CPU p50 in ms",
        ["", *(f"{size}K" for size in _SIZES)],
        [["all steps but ranking", *medians]],
        [f"repeated {repeats} x; load {before} {load_average()}"],
    )


async def _table(options: Options, encoder: PromptEncoder, backends: str, router: str, pause_s: float) -> Table:
    columns: dict[str, Steps] = {}
    loads = [load_average()]
    for size, words in _SIZES.items():
        repeats = options.times(_REPEATS[size], 5)
        for name, measure in ((f"{size}K cold", _cold), (f"{size}K new turn", _turns)):
            columns[name] = await measure(encoder, words, repeats, pause_s)
            loads.append(load_average())
    rows: list[list[str | float]] = []
    for step in (*_STEPS, _REST, _TOTAL, _TELL, _RELEASE):
        cells = [quantile(steps.times[step] or [0.0], 0.5) for steps in columns.values()]
        if any(cells):
            rows.append([step, *cells])
    rows.append([f"{_TOTAL}, p90", *(quantile(steps.times[_TOTAL], 0.9) for steps in columns.values())])
    rows.append(["tokens", *(int(steps.times["tokens"][-1]) for steps in columns.values())])
    return Table(
        f"one decision of {router}: CPU p50 in ms, all threads of the process",
        ["", *columns],
        rows,
        [
            f"repeated {', '.join(f'{options.times(n, 5)} x {size}K' for size, n in _REPEATS.items())}",
            f"{_REPLICAS} replicas, one holds the chat; new turn: an answer and a question of 125 words later",
            f"{2 * pause_s:g} s from one decision to the next; {backends}; load {' '.join(loads)}",
        ],
    )


async def _cold(encoder: PromptEncoder, words: int, repeats: int, pause_s: float) -> Steps:
    async with _bench(encoder, pause_s) as bench:
        for i in range(repeats + 1):
            await bench.decide(prompts.chat(words, ("cold", words, pause_s, i)), count=i > 0)
        return bench.steps


async def _turns(encoder: PromptEncoder, words: int, repeats: int, pause_s: float) -> Steps:
    async with _bench(encoder, pause_s) as bench:
        for i in range(-(-repeats // _TURNS)):
            conversation = prompts.turns(words, ("known", words, pause_s, i))
            for turn, messages in enumerate(islice(conversation, _TURNS + 1)):
                asked = await bench.decide(messages, count=turn > 0)
                await bench.own(asked)
        return bench.steps


class _Bench:
    def __init__(
        self, router: Router, ownership: RedisOwnershipMap, leases: list[Lease], steps: Steps, pause_s: float
    ) -> None:
        self.pause_s = pause_s
        self.router, self.ownership, self.leases, self.steps = router, ownership, leases, steps
        self.candidates = [ReplicaId(lease.member) for lease in leases]

    async def decide(self, messages: list[dict[str, Any]], *, count: bool) -> Asked:
        """One request from its body to the release; `count` False warms up."""
        raw, steps = prompts.body(messages), self.steps
        with steps.step(_REST):
            with steps.step("parse"):
                body = parse_body(raw)
            asked = await self.router.look_up(CHAT_PATH, body, len(raw))
            placement = self.router.place(asked, self.candidates)
        if asked.note or not asked.reusable:
            raise RuntimeError(f"nothing was looked up: {asked.note}")
        await asyncio.sleep(self.pause_s)
        with steps.step(_RELEASE):
            self.router.release(placement)
        await asyncio.sleep(self.pause_s)
        if count:
            steps.end_round(asked.num_tokens)
        steps.forget()
        return asked

    async def own(self, asked: Asked) -> None:
        """The first replica's collector tells of the prompt's blocks."""
        lease = self.leases[0]
        await self.ownership.write(lease, [Write(lease.slot, added=asked.hashes)])
        self.steps.forget()


@asynccontextmanager
async def _bench(encoder: PromptEncoder, pause_s: float) -> AsyncIterator[_Bench]:
    """A router over a map of its own, its steps wrapped."""
    steps = Steps()
    with EmbeddedValkey() as valkey:
        collectors = RedisOwnershipMap(valkey.url, "bench", timeout_s=10.0)
        ownership = RedisOwnershipMap(valkey.url, "bench", timeout_s=10.0, look_up_timeout_s=10.0)
        await collectors.connect()
        names = [f"replica{i}" for i in range(_REPLICAS)]
        leases = [await collectors.join(name, ReplicaRecord(name, prompts.MODEL, _BLOCK), 3600) for name in names]
        # A long lease: no renewal may fall into a step.
        router = Router("router", encoder, ownership, RouterConfig(lease_s=3600), time.monotonic, seed=1)
        with ExitStack() as wrapped:
            for owner, attribute, step, wrap in (
                (memo_module, "chain", "hash", steps.wrap),
                (encoder, "hashed", "cut, memo, the rest", steps.wrap),
                (encoder, "_chat_text", "render", steps.wrap),
                (encoder._memo, "_encode", "tokenise", steps.wrap),
                (ownership, "look_up", "look-up, client", steps.wrap_async),
                (router, "_decide", "rank", steps.wrap),
                (router, "place", "reserve", steps.wrap),
                (router._member, "tell", _TELL, steps.wrap_async),
            ):
                wrapped.enter_context(patch.object(owner, attribute, wrap(step, getattr(owner, attribute))))
            await router.start()
            try:
                yield _Bench(router, collectors, leases, steps, pause_s)
            finally:
                async with asyncio.timeout(5):
                    await router.close()
                await ownership.close()
                await collectors.close()


BENCHMARK = Benchmark("decision", "CPU of one decision in process, by step", run)
