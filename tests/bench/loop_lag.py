"""How late the event loop runs while very long prompts arrive: one router, in process, with a real Valkey."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import uvloop

from router.config import RouterConfig
from router.ownership import ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from router.prompt import CHAT_PATH, PromptEncoder, parse_body
from router.router import Router
from router.types import ReplicaId
from serve.embedded_valkey import EmbeddedValkey
from tests.bench import prompts
from tests.bench.report import Benchmark, Options, Table, load_average, quantile

_LONG_WORDS, _SHORT_WORDS = 121_000, 200
_AT_ONCE = 8
_SHORT_RATE = 50
_TICK_S = 0.005
_AFTER_S = 0.5
"""How long after the last long request was placed lag still counts: claims are told and withdrawn then."""
_PAUSE_S = 0.5
_REPLICAS = 4
_COLUMNS = ("", "lag p50", "p99", "max", "short requests p50", "p99", "long p50", "max")
_serial = count()


class Figures:
    """Seconds, of one phase."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.short: list[float] = []
        self.long: list[float] = []

    def row(self, name: str) -> list[str | float]:
        cells = [(self.lags, 0.5), (self.lags, 0.99), (self.lags, 1.0), (self.short, 0.5), (self.short, 0.99)]
        cells += [(self.long, 0.5), (self.long, 1.0)]
        return [name, *(1000 * quantile(values, q) if values else "" for values, q in cells)]


def run(options: Options) -> list[Table]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as Ray has it in its actors
        return runner.run(_run(options.times(10, 3)))


async def _run(bursts: int) -> list[Table]:
    before = load_average()
    quick, plain = (PromptEncoder.load(prompts.MODEL, "builtin", fast=fast) for fast in (True, False))
    backends = quick.settle(180)
    rows = []
    async with _router(quick) as router:
        rows.append((await _phase(router, bursts, lambda: iter(()))).row("short requests alone"))
        rows.append((await _phase(router, bursts, _strangers)).row(f"{_AT_ONCE} x 128K, never seen"))
        chats = [prompts.turns(_LONG_WORDS, ("lag", i)) for i in range(_AT_ONCE)]
        rows.append((await _phase(router, bursts, lambda: map(next, chats))).row(f"{_AT_ONCE} x 128K, a turn later"))
    async with _router(plain) as router:
        slow = await _phase(router, max(1, bursts // 3), _strangers)
        rows.append(slow.row(f"{_AT_ONCE} x 128K, never seen, without the faster parts"))
    return [
        Table(
            "event loop's lag in ms",
            _COLUMNS,
            rows,
            [
                f"{_SHORT_RATE} requests/s of {_SHORT_WORDS} words all the time; the long ones at once, {bursts} times",
                f"lag: how late a timer of 5 ms comes, from their arrival until {_AFTER_S} s after they were placed",
                "requests: from the body's bytes to the placement",
                f"{', '.join(f'{part}: {who}' for part, who in backends.items())}; load {before} {load_average()}",
            ],
        )
    ]


def _strangers() -> Iterator[list[dict[str, Any]]]:
    return iter([prompts.chat(_LONG_WORDS, ("stranger", next(_serial))) for _ in range(_AT_ONCE)])


async def _phase(router: Router, bursts: int, chats: Any) -> Figures:
    figures = Figures()

    async def watch() -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            figures.lags.append(max(0.0, time.perf_counter() - due))

    async def ask(raw: bytes, times: list[float]) -> None:
        began = time.perf_counter()
        asked = await router.look_up(CHAT_PATH, parse_body(raw), len(raw))
        placement = router.place(asked, [ReplicaId(f"replica{i}") for i in range(_REPLICAS)])
        times.append(time.perf_counter() - began)
        router.first_token(placement)
        router.release(placement)

    async def trickle(group: asyncio.TaskGroup) -> None:
        while True:
            group.create_task(ask(prompts.fresh(_SHORT_WORDS, next(_serial)), figures.short))
            await asyncio.sleep(1 / _SHORT_RATE)

    for _ in range(bursts):
        long = [prompts.body(messages) for messages in chats()]  # made before the clock runs
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(trickle(group)), group.create_task(watch())]
            await asyncio.gather(*(group.create_task(ask(raw, figures.long)) for raw in long))
            await asyncio.sleep(_AFTER_S)
            for task in running:
                task.cancel()
        await asyncio.sleep(_PAUSE_S)
    return figures


@asynccontextmanager
async def _router(encoder: PromptEncoder) -> AsyncIterator[Router]:
    with EmbeddedValkey() as valkey:
        ownership = RedisOwnershipMap(valkey.url, "lag", timeout_s=10.0)
        await ownership.connect()
        for name in (f"replica{i}" for i in range(_REPLICAS)):
            await ownership.join(name, ReplicaRecord(name, prompts.MODEL, 16), 3600)
        router = Router("router", encoder, ownership, RouterConfig(), time.monotonic, seed=1)
        await router.start()
        try:
            yield router
        finally:
            async with asyncio.timeout(20):
                await router.close()
            await ownership.close()


BENCHMARK = Benchmark("loop_lag", "how late the event loop runs while 128K-token prompts arrive", run)
