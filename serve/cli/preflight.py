"""What can be known to be wrong before anything is started, each in one line that says what to do."""

from __future__ import annotations

import asyncio
import os
import socket
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from replicas.config import EngineConfig
from replicas.engine import NO_VLLM, make_engine, vllm_device, vllm_is_there
from replicas.vllm_command import installed_version
from router.errors import ModelNotFound, OwnershipUnavailable
from router.ownership.redis import RedisOwnershipMap
from router.prompt import PromptEncoder
from serve.config import DEFAULT_REDIS, AppConfig

DEMO_MODEL = "whohas-demo"


class Problem(Exception):
    """Nothing was started, or it was stopped again; the message is all that the user needs."""


def config_from_options(options: dict[str, Any]) -> AppConfig:
    """The application that the command line describes. Raises `Problem`."""
    endpoints = tuple(url.strip().rstrip("/") for url in (options["endpoints"] or "").split(",") if url.strip())
    if endpoints and options["engine"]:
        raise Problem("--engine starts engines and --endpoints uses running ones: give one of them")
    kind = "external" if endpoints else options["engine"] or "emulated"
    model = options["model"] or (DEMO_MODEL if kind == "emulated" else None)
    if model is None:
        raise Problem(f"which model? --model is needed with {'--endpoints' if endpoints else f'--engine {kind}'}")
    tokenizer = options["tokenizer"] or ("builtin" if kind == "emulated" and not options["model"] else "")
    replicas = len(endpoints) or options["replicas"] or (4 if kind == "emulated" else 1)
    engine: dict[str, Any] = {"kind": kind, "endpoints": endpoints, **engine_options(options)}
    if kind == "vllm":
        engine["cpus"] = cores_each(replicas)
    args = {
        "model": model,
        "tokenizer": tokenizer,
        "engine": engine,
        "redis": options["redis"] or DEFAULT_REDIS,
        "replicas": replicas,
    }
    return _validated(args, "the command line")


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """What the command line says about each engine."""
    given = {name: options[name] for name in ("profile", "block_size", "max_model_len", "tensor_parallel_size")}
    return {name: value for name, value in {**given, "args": options["engine_arg"]}.items() if value}


def cores_each(replicas: int) -> int | None:
    """Cores for each of so many engines on this machine's CPU; None where the user's environment decides."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) // replicas or None


def config_from_file(path: str, options: dict[str, Any]) -> tuple[AppConfig, int | None]:
    """The first application of a Serve config file, and its HTTP port. Raises `Problem`."""
    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
        (application, *more) = document["applications"]
        args, port = dict(application["args"]), (document.get("http_options") or {}).get("port")
    except (OSError, yaml.YAMLError) as error:
        raise Problem(f"{path} can't be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise Problem(f"{path} is no Serve config file: it needs applications: [{{args: {{...}}}}]") from error
    if more:
        raise Problem(f"{path} has {len(more) + 1} applications; `whohas up` serves one, `serve deploy` any number")
    given = {name: options[name] for name in ("model", "tokenizer", "replicas", "redis") if options[name]}
    config = _validated({**args, **given}, path)
    over = engine_options(options) | ({"kind": options["engine"]} if options["engine"] else {})
    if "args" in over:
        over["args"] = (*config.engine.args, *over["args"])
    try:
        engine = replace(config.engine, **over)
    except ValueError as error:
        raise Problem(f"the command line: {error}") from error
    return config.model_copy(update={"engine": engine}), port


def check(config: AppConfig, port: int, *, own_redis: bool) -> None:
    """Port, Redis, models and endpoints. Raises `Problem` for the first that is not in order."""
    _check_port(port)
    if not own_redis:
        _check_redis(config)
    for one in config.all_models:
        _check_model(one)


def _check_model(config: AppConfig) -> None:
    for url in config.engine.endpoints:
        _check_endpoint(url)
    if config.engine.kind == "vllm":
        _check_vllm(config)
    try:
        PromptEncoder.load(config.model, config.tokenizer_source, config.adapters)
    except ModelNotFound as error:
        raise Problem(str(error)) from error


def _validated(args: dict[str, Any], where: str) -> AppConfig:
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "args"
        raise Problem(f"{where}: {field}: {first['msg']}") from error


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            raise Problem(f"port {port} can't be used ({error.strerror}): give another one with --port") from error


def _check_redis(config: AppConfig) -> None:
    async def connect() -> None:
        ownership = RedisOwnershipMap(config.redis, config.fleet_name)
        try:
            await ownership.connect()
        finally:
            await ownership.close()

    try:
        asyncio.run(connect())
    except OwnershipUnavailable as error:
        raise Problem(f"{error}; or leave --redis out to have one started") from error


def _check_vllm(config: AppConfig) -> None:
    try:
        make_engine(config.engine_config, "check")
    except ValueError as error:
        raise Problem(str(error)) from error
    if problem := vllm_problem(config.engine):
        raise Problem(problem)


def vllm_problem(engine: EngineConfig) -> str:
    """Why this machine can't run it; empty where it can."""
    if not vllm_is_there(engine):
        return NO_VLLM
    version = installed_version() or ""
    if vllm_device(engine) == "cpu":
        return ""
    if "cpu" in version and not engine.command:
        return (
            f"device is cuda, but the vLLM {version} that is installed computes on the CPU: pip install 'whohas[vllm]'"
        )
    gpus, needed = num_gpus(), engine.tensor_parallel_size
    if gpus is not None and gpus < needed:
        return (
            f"each replica needs {needed} GPU{'s' * (needed > 1)} (tensor_parallel_size), and this machine has {gpus}; "
            "without a GPU: `make install-vllm` installs vLLM's CPU build"
        )
    return ""


def num_gpus() -> int | None:
    """NVIDIA GPUs that this process may use; None where they can't be counted (other makes)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1", "NoDevFiles")])
    if Path("/dev/kfd").exists():
        return None
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _check_endpoint(url: str) -> None:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            pass
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise Problem(f"no vLLM server answers at {url}/health ({error}): start it, or mend --endpoints") from error
