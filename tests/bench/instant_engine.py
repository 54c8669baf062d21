"""A stand-in engine that answers at once, for measuring all that is not the engine.

The emulated engine tokenises every prompt as a real one does, which takes longer than the routing that we look for.
Run by the replica in place of the emulated engine (`engine.command`), with that one's command line.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import uvicorn
import uvloop

from replicas.emulated.publisher import EventPublisher


def _answers() -> ModuleType:
    # By its path: this file is run as a script from anywhere, where the package `tests` isn't importable.
    spec = importlib.util.spec_from_file_location("answers", Path(__file__).with_name("answers.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _app(block_size: int) -> Any:
    answers = _answers()
    running = 0

    def metrics() -> bytes:
        return b"".join(
            (
                b'vllm:cache_config_info{block_size="%d",num_gpu_blocks="1000000"} 1.0\n' % block_size,
                b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n" % running,
            )
        )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running
        if scope["method"] == "POST":
            running += 1
            try:
                await answers.answer(scope, receive, send)
            finally:
                running -= 1
        elif scope["path"] == "/metrics":
            await answers.send_whole(send, metrics(), b"text/plain")
        else:
            known = {"/v1/models": b'{"data":[{"id":"bench"}]}'}
            await answers.send_whole(send, known.get(scope["path"], b""), b"text/plain")

    return app


async def _serve(given: argparse.Namespace) -> None:
    publisher = EventPublisher(given.kv_events_endpoint, given.kv_replay_endpoint)
    config = uvicorn.Config(
        _app(given.block_size),
        host=given.host,
        port=given.port,
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    try:
        await uvicorn.Server(config).serve()
    finally:
        publisher.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-events-endpoint", required=True)
    parser.add_argument("--kv-replay-endpoint")
    given, _ = parser.parse_known_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(given))


if __name__ == "__main__":
    main()
