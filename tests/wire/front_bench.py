"""The front over a real socket, in this process and without Ray: uvicorn in front, any engines behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiohttp
import uvicorn

from router.config import RouterConfig
from router.ownership import ReplicaRecord
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder
from router.router import PromptSource, Router
from router.types import ReplicaId
from serve.asgi import Message, Receive, Scope, Send
from serve.config import IngressSection
from serve.dispatch import Pick
from serve.front import Front
from serve.metrics import Metrics
from serve.running import Candidate
from serve.upstream import Upstream
from tests.wire.scripted_engine import Script, ScriptedEngine, scripted

MODEL = "demo-model"
CHAT = "/v1/chat/completions"
BLOCK = 16
PATIENCE_S = 60.0
"""For what must happen at some time: far above what the slowest machine takes."""
# These tests ask what is decided by what was sent before: claims stay for as long as one of them takes.
PATIENT = RouterConfig(claim_s=600.0, lease_s=600.0)


@cache
def encoder() -> PromptEncoder:
    return PromptEncoder.load(MODEL, "builtin", ("adapter-a",))


class StaticFleet:
    """Replicas by hand. `running` may be changed at any time."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.running = [Candidate(ReplicaId(f"W{i}"), url) for i, url in enumerate(urls)]

    def candidates(self) -> Sequence[Candidate]:
        return self.running

    async def pick(self, pick: Pick) -> Candidate:
        while not self.running:
            await asyncio.sleep(0.01)
        chosen = pick.choose([one.replica_id for one in self.running])
        return next(one for one in self.running if one.replica_id == chosen)


class _Exposition:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def text(self) -> bytes:
        return self._metrics.text().encode()


def as_ray_serve_does(app: Any) -> Any:
    """What Ray Serve puts around an ingress: a request id on both ways, and a client that leaves is a cancellation."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        request_id = given[0] if given else uuid.uuid4().hex.encode()
        if not given:
            scope["headers"] = [*scope["headers"], (b"x-request-id", request_id)]
        finished = False
        messages: asyncio.Queue[Message] = asyncio.Queue()

        async def send_on(message: Message) -> None:
            nonlocal finished
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)
            finished = message["type"] == "http.response.body" and not message.get("more_body", False)

        async def fetch() -> None:
            while True:
                message = await receive()
                messages.put_nowait(message)
                if message["type"] == "http.disconnect":
                    return

        work, watch = asyncio.create_task(app(scope, messages.get, send_on)), asyncio.create_task(fetch())
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
            if work.done() or finished:
                await work
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    return wrapped


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """`app` under uvicorn on a free port, as a base URL."""
    # asyncio sends small pieces at once only where the protocol is named: not so for socket.create_server().
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        config = uvicorn.Config(
            app, lifespan="off", access_log=False, log_level="critical", timeout_graceful_shutdown=1
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@dataclass
class Bench:
    """A running front. `http` doesn't decompress, and keeps no limit on connections."""

    url: str
    front: Front
    fleet: StaticFleet
    router: Router
    upstream: Upstream
    metrics: Metrics
    http: aiohttp.ClientSession

    async def post(
        self, path: str = "/v1/chat/completions", body: Any = None, **options: Any
    ) -> tuple[int, bytes, Any]:
        """Status, body and headers of a whole answer."""
        given = {"data": body} if isinstance(body, bytes) else {"json": chat() if body is None else body}
        async with self.http.post(self.url + path, **given, **options) as response:
            return response.status, await response.read(), response.headers

    def count(self, status: object) -> float:
        """Requests answered with this status so far, by the front's own metric."""
        return float(self.metrics.requests.labels(status)._value.get())

    @property
    def in_flight(self) -> float:
        return float(self.metrics.in_flight._value.get())

    def nothing_is_booked(self) -> bool:
        loads = [self.router.load(one.replica_id) for one in self.fleet.running]
        return self.in_flight == 0 and not any(one.num_waiting or one.num_decoding for one in loads)

    async def until_free(self) -> None:
        await until(self.nothing_is_booked)


@contextlib.asynccontextmanager
async def front_over(
    urls: Sequence[str], *, router: RouterConfig | None = None, prompts: PromptSource | None = None, **limits: Any
) -> AsyncIterator[Bench]:
    """The front before engines at these URLs, known as W0, W1, ...; `limits` are fields of `IngressSection`."""
    settings, config = IngressSection(**{"connect_timeout_s": PATIENCE_S, **limits}), router or PATIENT
    ownership = MemoryOwnershipMap(time.monotonic)
    for i, url in enumerate(urls):
        await ownership.join(f"W{i}", ReplicaRecord(f"W{i}", MODEL, BLOCK, url), 3600.0)
    one = Router("router", prompts or encoder(), ownership, config, time.monotonic, seed=1)
    await one.start()
    upstream, metrics, fleet = Upstream(settings.connect_timeout_s), Metrics(), StaticFleet(urls)
    front = Front(one, fleet, upstream, metrics, _Exposition(metrics), settings)
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            served(as_ray_serve_does(front)) as url,
            aiohttp.ClientSession(connector=connector, auto_decompress=False) as http,
        ):
            yield Bench(url, front, fleet, one, upstream, metrics, http)
    finally:
        await front.close()
        await one.close()
        await upstream.close()


@contextlib.asynccontextmanager
async def scripted_front(*scripts: Script, **limits: Any) -> AsyncIterator[tuple[Bench, list[ScriptedEngine]]]:
    """A front before one scripted engine a script."""
    async with scripted(*scripts) as engines, front_over([one.url for one in engines], **limits) as bench:
        yield bench, engines


def chat(content: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)
