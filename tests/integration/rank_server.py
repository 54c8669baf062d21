"""A server with two data-parallel ranks, as vLLM has them: one URL, two engines with a cache and an event stream each.

A request goes to the rank that its `X-data-parallel-rank` names, or else to the next one in turn.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from uuid import uuid4

import aiohttp
from aiohttp import web

from replicas.config import EngineConfig
from replicas.engine import EngineEndpoints, emulated_argv, rank_endpoint
from replicas.ports import reserve_port
from replicas.process import EngineProcess

HOST = "127.0.0.1"


@asynccontextmanager
async def two_ranks(config: EngineConfig) -> AsyncIterator[EngineEndpoints]:
    """The URL, and the ZMQ endpoints of rank 0."""
    name = f"whohas-test-{uuid4().hex}"
    events, replay = f"ipc://@{name}-events", f"ipc://@{name}-replay"
    engines: list[EngineProcess] = []
    urls: list[str] = []
    try:
        for rank in range(2):
            with reserve_port(HOST) as reserved:
                port = reserved.getsockname()[1]
                urls.append(f"http://{HOST}:{port}")
                at = EngineEndpoints(urls[-1], rank_endpoint(events, rank), rank_endpoint(replay, rank))
                engines.append(EngineProcess(f"rank{rank}", emulated_argv(config, HOST, port, at)))
                await engines[-1].start()
                await engines[-1].wait_ready(urls[-1], 60.0)
        async with _front(urls) as url:
            yield EngineEndpoints(url, events, replay)
    finally:
        for engine in engines:
            await engine.stop()


@asynccontextmanager
async def _front(urls: list[str]) -> AsyncIterator[str]:
    turns = cycle(range(len(urls)))

    async def relay(request: web.Request) -> web.Response:
        told = request.headers.get("X-data-parallel-rank")
        rank = next(turns) if told is None else int(told)
        body = await request.read()
        kind = {"content-type": request.content_type}
        async with client.request(request.method, urls[rank] + request.path, data=body, headers=kind) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    async def metrics(_: web.Request) -> web.Response:
        texts = []
        for rank, url in enumerate(urls):
            async with client.get(f"{url}/metrics") as answer:
                texts.append((await answer.text()).replace('engine="0"', f'engine="{rank}"'))
        return web.Response(text="\n".join(texts))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.route("*", "/{path:.*}", relay)])
    runner = web.AppRunner(app)
    # An engine closes what was idle for a while, perhaps just when the next request goes out there.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
        await runner.setup()
        try:
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()
