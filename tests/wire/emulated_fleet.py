"""Emulated engines in this process, each on a port of its own, with all that passed through them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from replicas.emulated.app import EngineApi
from replicas.emulated.block_pool import BlockPool
from replicas.emulated.engine import Engine
from replicas.emulated.models import ServedModels
from replicas.emulated.scheduler import Scheduler, SchedulerConfig
from replicas.emulated.step_time import load_profile
from tests.wire.front_bench import BLOCK, MODEL, Bench, encoder, front_over, served

MAX_MODEL_LEN = 8192


@dataclass
class Emulated:
    """`received`: (path and query, body) of every POST. `sent`: the bodies of the answers, in the order of their
    ends."""

    url: str = ""
    received: list[tuple[str, bytes]] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)


def _recorded(app: Any, into: Emulated) -> Any:
    async def recorder(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        body, answer = b"", b""

        async def receive_on() -> Any:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            if message["type"] == "http.request" and not message.get("more_body"):
                query = scope["query_string"].decode()
                into.received.append((scope["path"] + (f"?{query}" if query else ""), body))
            return message

        async def send_on(message: Any) -> None:
            nonlocal answer
            answer += message.get("body", b"")
            await send(message)

        try:
            await app(scope, receive_on, send_on)
        finally:
            into.sent.append(answer)

    return recorder


def _engine() -> Engine:
    pool = BlockPool(4000, BLOCK, events=False)
    return Engine(Scheduler(pool, SchedulerConfig(256, 2048, "fcfs", True)), load_profile("linear:1000000"), speed=100)


@contextlib.asynccontextmanager
async def emulated_front(num: int = 2, **limits: Any) -> AsyncIterator[tuple[Bench, list[Emulated]]]:
    """A front before so many emulated engines, which know one adapter, `adapter-a`."""
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for seed in range(num):
            engine, record = _engine(), Emulated()
            models = ServedModels(MODEL, ("adapter-a",), max_model_len=MAX_MODEL_LEN)
            api = EngineApi(engine, encoder(), models, max_model_len=MAX_MODEL_LEN, hash_seed=seed)
            record.url = await stack.enter_async_context(served(_recorded(api.app(), record)))
            stack.callback(engine.stop)
            engines.append(record)
        bench = await stack.enter_async_context(front_over([one.url for one in engines], **limits))
        yield bench, engines
