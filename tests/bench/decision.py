"""CPU of one decision, in process: body -> prompt -> hashes -> look-up in a real Valkey -> rank -> reserve."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import router.router as router_module
from router.config import RouterConfig
from router.ownership import Lease, ReplicaRecord, Write
from router.ownership.redis import RedisOwnershipMap
from router.prompt import CHAT_PATH, PromptEncoder, parse_body
from router.router import Asked, Router
from router.types import ReplicaId
from serve.embedded_valkey import EmbeddedValkey
from tests.bench import prompts
from tests.bench.report import Benchmark, Options, Table, load_average, quantile

_BLOCK = 16
_REPLICAS = 4
_SIZES = {4: 3_000, 32: 25_500, 128: 102_500}
"""Thousands of tokens -> words of chat that make about as many."""
_REPEATS = {4: 40, 32: 20, 128: 10}
_TOTAL = "all steps"
_STEPS = ("parse", "render", "tokenise", "prompt, the rest", "hash", "look-up, client", "rank", "reserve", "the rest")
_TELL = "afterwards: telling the claims"
_RELEASE = "afterwards: release"


class Steps:
    """CPU time of this process (all threads) spent in each step, calls within calls not counted twice."""

    def __init__(self) -> None:
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self._open: list[float] = []
        self._now: defaultdict[str, float] = defaultdict(float)

    def wrap(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = self.begin()
            try:
                return call(*args, **kwargs)
            finally:
                self.end(step, began)

        return wrapped

    def wrap_async(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = self.begin()
            try:
                return await call(*args, **kwargs)
            finally:
                self.end(step, began)

        return wrapped

    def begin(self) -> float:
        self._open.append(0.0)
        return time.process_time()

    def end(self, step: str, began: float) -> float:
        took = time.process_time() - began
        within = self._open.pop()
        self._now[step] += took - within
        if self._open:
            self._open[-1] += took
        return took

    def close_round(self) -> None:
        """Everything since the last call belongs to one decision."""
        for step, took in self._now.items():
            self.times[step].append(took * 1000)
        self._now.clear()


def run(options: Options) -> list[Table]:
    return asyncio.run(_run(options))


async def _run(options: Options) -> list[Table]:
    columns: dict[str, Steps] = {}
    loads = [load_average()]
    for size, words in _SIZES.items():
        repeats = options.times(_REPEATS[size], 4)
        for name, measure in ((f"{size}K cold", _cold), (f"{size}K new turn", _turns)):
            columns[name] = await measure(words, repeats)
            loads.append(load_average())
    rows: list[list[str | float]] = []
    for step in (*_STEPS, _TOTAL, _TELL, _RELEASE):
        cells = [quantile(steps.times[step] or [0.0], 0.5) for steps in columns.values()]
        if any(cells):
            rows.append([step, *cells])
    rows.append([f"{_TOTAL}, p90", *(quantile(steps.times[_TOTAL], 0.9) for steps in columns.values())])
    rows.append(["tokens", *(int(steps.times["tokens"][-1]) for steps in columns.values())])
    return [
        Table(
            "one decision: CPU p50 in ms, all threads of the router's process",
            ["", *columns],
            rows,
            [
                f"{', '.join(f'{options.times(n, 4)} x {size}K' for size, n in _REPEATS.items())}; {_REPLICAS} replicas, "
                "one holds the chat; new turn: the same chat, an answer and a question of 125 words later",
                f"load {' '.join(loads)}",
            ],
        )
    ]


async def _cold(words: int, repeats: int) -> Steps:
    async with _bench() as bench:
        for i in range(repeats + 1):
            await bench.decide(prompts.chat(words, ("cold", i)), count=i > 0)
        return bench.steps


async def _turns(words: int, repeats: int) -> Steps:
    async with _bench() as bench:
        conversation = prompts.turns(words, "known")
        for i in range(repeats + 2):
            asked = await bench.decide(next(conversation), count=i > 1)
            await bench.own(asked)
        return bench.steps


class _Bench:
    def __init__(self, router: Router, ownership: RedisOwnershipMap, leases: list[Lease], steps: Steps) -> None:
        self.router, self.ownership, self.leases, self.steps = router, ownership, leases, steps
        self.candidates = [ReplicaId(lease.member) for lease in leases]

    async def decide(self, messages: list[dict[str, Any]], *, count: bool) -> Asked:
        """One request from its body to the release; `count` False warms up."""
        raw, steps = prompts.body(messages), self.steps
        began = steps.begin()
        asked = await self.router.look_up(CHAT_PATH, steps.wrap("parse", parse_body)(raw), len(raw))
        placement = self.router.place(asked, self.candidates)
        total = steps.end("the rest", began)
        if asked.note or not asked.reusable:
            raise RuntimeError(f"nothing was looked up: {asked.note}")
        await asyncio.sleep(0.05)  # the teller's turn
        began = steps.begin()
        self.router.release(placement)
        steps.end(_RELEASE, began)
        await asyncio.sleep(0.01)
        if count:
            steps.times[_TOTAL].append(total * 1000)
            steps.times["tokens"].append(asked.num_tokens)
            steps.close_round()
        else:
            steps._now.clear()
        return asked

    async def own(self, asked: Asked) -> None:
        """The first replica's collector tells of the prompt's blocks."""
        lease = self.leases[0]
        await self.ownership.write(lease, [Write(lease.slot, added=asked.hashes)])
        self.steps._now.clear()


@asynccontextmanager
async def _bench() -> AsyncIterator[_Bench]:
    """A router over a map of its own, its steps wrapped. Steps that a later router no longer has are left out."""
    steps = Steps()
    with EmbeddedValkey() as valkey:
        collectors = RedisOwnershipMap(valkey.url, "bench", timeout_s=10.0)
        ownership = RedisOwnershipMap(valkey.url, "bench", timeout_s=10.0, look_up_timeout_s=10.0)
        await collectors.connect()
        names = [f"replica{i}" for i in range(_REPLICAS)]
        leases = [await collectors.join(name, ReplicaRecord(name, prompts.MODEL, _BLOCK), 3600) for name in names]
        encoder = PromptEncoder.load(prompts.MODEL, "builtin")
        # Bookings live long enough here for the claims to be told apart from their end.
        router = Router("router", encoder, ownership, RouterConfig(), time.monotonic, seed=1)
        chain = router_module.chain
        router_module.chain = steps.wrap("hash", chain)
        for owner, attribute, step, wrap in (
            (encoder, "prompt", "prompt, the rest", steps.wrap),
            (encoder, "_chat_text", "render", steps.wrap),
            (encoder, "_encode", "tokenise", steps.wrap),
            (ownership, "look_up", "look-up, client", steps.wrap_async),
            (router, "_decide", "rank", steps.wrap),
            (router, "place", "reserve", steps.wrap),
            (router, "_tell", _TELL, steps.wrap_async),
        ):
            if hasattr(owner, attribute):
                setattr(owner, attribute, wrap(step, getattr(owner, attribute)))
        await router.start()
        try:
            yield _Bench(router, collectors, leases, steps)
        finally:
            router_module.chain = chain
            await router.close()
            await ownership.close()
            await collectors.close()


BENCHMARK = Benchmark("decision", "CPU of one decision in process, by step", run)
