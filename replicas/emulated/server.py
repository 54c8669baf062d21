"""One emulated engine as a process: its HTTP server and its KV-event sockets on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from replicas.emulated.app import EngineApi
from replicas.emulated.block_pool import BlockPool
from replicas.emulated.config import ServerConfig
from replicas.emulated.engine import Engine
from replicas.emulated.models import ServedModels
from replicas.emulated.publisher import EventPublisher
from replicas.emulated.scheduler import Scheduler
from replicas.emulated.step_time import load_profile
from router.prompt import PromptEncoder

# Streams that the stopped engine has ended only have to be flushed; a client that doesn't read isn't waited for.
_FLUSH_S = 2


async def serve(config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT, then returns within seconds; prints one line when it is ready.

    Raises OSError or zmq.ZMQError for an address that is taken, router.errors.ModelNotFound, and ValueError for a
    tokenizer that text can't be emulated with.
    """
    encoder = PromptEncoder.load(config.model, config.tokenizer, config.adapters)
    publisher: EventPublisher | None = None
    if config.kv_events_endpoint is not None:
        publisher = EventPublisher(
            config.kv_events_endpoint,
            config.kv_replay_endpoint,
            topic=config.kv_events_topic,
            delay_s=config.event_delay_s,
        )
    try:
        engine = _engine(config, publisher)
        api = EngineApi(
            engine,
            encoder,
            ServedModels(config.model, config.lora_modules, max_model_len=config.max_model_len),
            max_model_len=config.max_model_len,
            hash_seed=int.from_bytes(os.urandom(8), "big") if config.hash_seed is None else config.hash_seed,
            faults=config.faults,
            allow_faults=config.allow_faults,
        )
        with _listen(config.host, config.port) as listener:
            port = listener.getsockname()[1]
            server = _Server(api, engine, lambda: print(_ready(config, port, publisher), flush=True))
            await server.serve(sockets=[listener])
    finally:
        if publisher is not None:
            publisher.close()


def _engine(config: ServerConfig, publisher: EventPublisher | None) -> Engine:
    pool = BlockPool(config.num_blocks, config.block_size, events=publisher is not None)
    scheduler = Scheduler(pool, config.scheduler)
    profile = load_profile(config.profile)
    if publisher is None:
        return Engine(scheduler, profile, speed=config.speed)
    return Engine(scheduler, profile, publish=publisher.publish, speed=config.speed)


def _listen(host: str, port: int) -> socket.socket:
    # Bound here and not by uvicorn, which would end the process from within when the port is taken.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _ready(config: ServerConfig, port: int, publisher: EventPublisher | None) -> str:
    line = f"ready: {config.model} emulated at http://{config.host}:{port}"
    if publisher is not None:
        line += f", KV events at {publisher.endpoint}"
        if publisher.replay_endpoint is not None:
            line += f", replay at {publisher.replay_endpoint}"
    return line


class _Server(uvicorn.Server):
    """uvicorn that says when it listens, stops the engine before it waits for responses, and returns on a signal."""

    def __init__(self, api: EngineApi, engine: Engine, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                api.app(),
                lifespan="off",
                access_log=False,
                log_level="warning",
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )
        self._engine = engine
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again when it is done: that would kill the process before it has cleaned up.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.stop()
        await super().shutdown(sockets)
