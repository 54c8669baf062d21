"""What can be known to be wrong before anything is started, each in one line that says what to do."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

import yaml
from pydantic import ValidationError

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
    engine: dict[str, Any] = {"kind": kind, "endpoints": endpoints}
    if options["profile"]:
        engine["profile"] = options["profile"]
    args = {
        "model": model,
        "tokenizer": tokenizer,
        "engine": engine,
        "redis": options["redis"] or DEFAULT_REDIS,
        "replicas": len(endpoints) or options["replicas"] or (4 if kind == "emulated" else 1),
    }
    return _validated(args, "the command line")


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
    if options["engine"]:
        config = config.model_copy(update={"engine": replace(config.engine, kind=options["engine"])})
    return config, port


def check(config: AppConfig, port: int, *, own_redis: bool) -> None:
    """Port, Redis, model and endpoints. Raises `Problem` for the first that is not in order."""
    _check_port(port)
    if not own_redis:
        _check_redis(config)
    for url in config.engine.endpoints:
        _check_endpoint(url)
    try:
        PromptEncoder.load(config.model, config.tokenizer, config.adapters)
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


def _check_endpoint(url: str) -> None:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            pass
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise Problem(f"no vLLM server answers at {url}/health ({error}): start it, or mend --endpoints") from error
