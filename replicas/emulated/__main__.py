"""Command line of the emulated engine: `python -m replicas.emulated --model NAME --tokenizer DIR ...`."""

from __future__ import annotations

import argparse
import asyncio
import sys

import uvloop
import zmq

from replicas.emulated.config import ServerConfig
from replicas.emulated.faults import parse_faults
from replicas.emulated.scheduler import SchedulerConfig
from replicas.emulated.server import serve
from replicas.emulated.step_time import DEFAULT_PROFILE
from router.errors import ModelNotFound


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m replicas.emulated",
        description="An emulated vLLM server: real block pool, prefix cache, scheduler, API and KV events; no model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="served model name")
    add("--tokenizer", default="", help="folder with tokenizer files; empty: the one that --model names")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--block-size", type=int, default=16, help="tokens a KV block")
    add("--num-blocks", type=int, default=20_000, help="usable blocks; vLLM's own number counts one more")
    add("--max-model-len", type=int, default=32_768, help="tokens of a prompt and its output together")
    add("--max-num-seqs", type=int, default=256, help="sequences in a step")
    add("--max-num-batched-tokens", type=int, default=2_048, help="tokens in a step")
    add("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    caching = argparse.BooleanOptionalAction
    add(
        "--enable-prefix-caching", action=caching, default=True, help="off: no block is reused, and there are no events"
    )
    add("--profile", default=DEFAULT_PROFILE, help="step times: a name, linear:TOKENS_PER_SECOND, or a JSON/YAML file")
    add("--speed", type=float, default=1.0, help="simulated seconds per second")
    add("--kv-events-endpoint", help="where to bind the PUB socket, e.g. tcp://127.0.0.1:5557; no events without it")
    add("--kv-replay-endpoint", help="where to bind the replay socket")
    add("--kv-events-topic", default="kv-events")
    add("--event-delay", type=float, default=0.0, help="seconds, of the wall clock, by which events go out late")
    add("--lora-modules", nargs="*", default=[], metavar="NAME[=PATH]", help="adapters to serve besides the model")
    add("--hash-seed", type=int, help="seed of the block hashes; a random one by default, as with vLLM")
    add(
        "--faults", default="{}", metavar="JSON", help="what shall go wrong, for tests: see replicas/emulated/faults.py"
    )
    add("--allow-faults", action="store_true", help="let requests bring faults in the header x-emulate-fault")
    return parser


def _config(arguments: list[str] | None) -> ServerConfig:
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return ServerConfig(
            model=given.model,
            tokenizer=given.tokenizer,
            host=given.host,
            port=given.port,
            block_size=given.block_size,
            num_blocks=given.num_blocks,
            max_model_len=given.max_model_len,
            scheduler=SchedulerConfig(
                given.max_num_seqs,
                given.max_num_batched_tokens,
                given.scheduling_policy,
                given.enable_prefix_caching,
            ),
            profile=given.profile,
            speed=given.speed,
            kv_events_endpoint=given.kv_events_endpoint,
            kv_replay_endpoint=given.kv_replay_endpoint,
            kv_events_topic=given.kv_events_topic,
            event_delay_s=given.event_delay,
            lora_modules=tuple(given.lora_modules),
            hash_seed=given.hash_seed,
            faults=parse_faults(given.faults),
            allow_faults=given.allow_faults,
        )
    except ValueError as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> int:
    config = _config(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    except (OSError, ValueError, ModelNotFound, zmq.ZMQError) as error:
        print(f"replicas.emulated: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
