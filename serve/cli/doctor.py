"""`whohas doctor`: is everything in order on this machine, and in the fleet that is running?"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import click

from replicas.engine import vllm_device
from replicas.vllm_command import TESTED, installed_version
from router.errors import ModelNotFound, OwnershipUnavailable, RouterError
from router.ownership.client import safe_url, server_info
from router.ownership.redis import RedisOwnershipMap, fleets
from router.prompt import CHAT_PATH, PromptEncoder
from serve.cli import engine_check, fleet_check, state
from serve.cli.preflight import Problem, config_from_file, config_from_options, num_gpus, vllm_problem
from serve.config import DEFAULT_REDIS, AppConfig

_TESTED = {"ray": ("2.60",), "vllm": TESTED, "redis": (), "valkey": ("9.1",)}
_NEEDED = {"redis": (7, 0), "valkey": (7, 2)}
_OPTIONS = ("engine", "model", "tokenizer", "replicas", "redis", "profile", "block_size", "max_model_len")
_NO_OPTIONS = dict.fromkeys((*_OPTIONS, "tensor_parallel_size", "engine_arg"))


@dataclass(frozen=True, slots=True)
class Check:
    """One line. "note": nothing is wrong, but it should be known."""

    name: str
    status: Literal["ok", "note", "wrong"]
    text: str


@click.command()
@click.argument("config", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--redis", "url", help="Redis URL.  [default: CONFIG's, $WHOHAS_REDIS, or that of the running `whohas up`]"
)
@click.option("--port", type=click.IntRange(1, 65535), help="HTTP port.  [default: CONFIG's, or 8000]")
@click.option("--endpoints", help="Comma-separated base URLs of vLLM servers that whohas shall be put in front of.")
@click.option("--model", help="With --endpoints: what they serve, a Hugging Face id or directory.")
@click.option("--tokenizer", help="With --endpoints: tokenizer directory or id, where it is not the model's own.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(config: str | None, url: str | None, port: int | None, as_json: bool, **servers: str | None) -> None:
    """Check versions, Redis, GPUs, port and model files; and of servers that run already, in a fleet or to be put into
    one, that every engine caches what is computed for it (each answers a few tiny prompts).

    CONFIG is a Serve config file (see examples/). Exit code 1 if something is wrong.
    """
    try:
        app, file_port = _config(config, servers)
    except Problem as problem:
        checks = [Check("config", "wrong", str(problem))]
    else:
        checks = list(_examine(app, _redis_url(url, app), port or file_port or 8000))
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for check in checks:
            click.echo(f"{check.status:<6}{check.name:<18}{check.text}")
    sys.exit(any(check.status == "wrong" for check in checks))


def _config(path: str | None, servers: dict[str, str | None]) -> tuple[AppConfig | None, int | None]:
    if servers["endpoints"]:
        if path:
            raise Problem("a config file names its endpoints itself: give it or --endpoints")
        return config_from_options({**_NO_OPTIONS, **servers}), None
    if servers["model"] or servers["tokenizer"]:
        raise Problem("--model and --tokenizer go with --endpoints; a config file has its own")
    return config_from_file(path, _NO_OPTIONS) if path else (None, None)


def _redis_url(given: str | None, app: AppConfig | None) -> str:
    if given:
        return given
    if app and "redis" in app.model_fields_set:
        return app.redis
    return os.environ.get("WHOHAS_REDIS") or str(state.read().get("redis", DEFAULT_REDIS))


def _examine(app: AppConfig | None, redis: str, port: int) -> Iterator[Check]:
    yield _python()
    yield _package("ray", "Ray")
    yield _vllm(app)
    yield from _gpus(app)
    yield _port(port)
    encoder = None
    if app:
        encoder, checks = _model(app)
        yield from checks
    if app and encoder and app.engine.kind == "external":
        for line in asyncio.run(engine_check.examine(app, encoder)):
            yield Check(line.name, "wrong" if line.wrong else "ok", line.text)
    reachable, checks = _redis(redis)
    yield from checks
    if reachable:
        yield from _fleets(app, redis, encoder)


def _python() -> Check:
    here = sys.version_info
    text = f"{here.major}.{here.minor}.{here.micro}"
    if not (3, 11) <= here[:2] < (3, 14):
        return Check("Python", "wrong", f"{text}: whohas needs 3.11 to 3.13")
    return Check("Python", "ok", text if here[:2] == (3, 11) else f"{text} (tested: 3.11)")


def _package(name: str, title: str) -> Check:
    try:
        return _tested(title, name, version(name))
    except PackageNotFoundError:
        return Check(title, "wrong", f"not installed: pip install '{name}[serve]'")


def _tested(title: str, name: str, found: str) -> Check:
    tested = _TESTED[name]
    if found.startswith(tuple(f"{one}." for one in tested)):
        return Check(title, "ok", found)
    return Check(title, "note", f"{found} (tested: {', '.join(tested) or 'Valkey ' + _TESTED['valkey'][0]})")


def _vllm(app: AppConfig | None) -> Check:
    found = installed_version()
    if app and app.engine.kind == "vllm" and (problem := vllm_problem(app.engine)):
        return Check("vLLM", "wrong", problem)
    if found is None:
        return Check("vLLM", "note", "not installed; only the engine kind vllm needs it (`make install-vllm`)")
    return _tested("vLLM", "vllm", found)


def _gpus(app: AppConfig | None) -> Iterator[Check]:
    count = num_gpus()
    text = "some that can't be counted" if count is None else str(count)
    if app and app.engine.kind == "vllm":
        needed = app.engine.tensor_parallel_size if vllm_device(app.engine) == "cuda" else 0
        wrong = count is not None and count < needed
        yield Check("GPUs", "wrong" if wrong else "ok", f"{text}; tensor_parallel_size needs {needed} for each replica")
    else:
        yield Check("GPUs", "ok", text)


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            if str(state.read().get("url", "")).endswith(f":{port}"):
                return Check("port", "ok", f"{port}: the running `whohas up` listens there")
            return Check("port", "wrong", f"{port} can't be used ({error.strerror}): free it, or give another one")
    return Check("port", "ok", f"{port} is free")


def _model(app: AppConfig) -> tuple[PromptEncoder | None, list[Check]]:
    try:
        encoder = PromptEncoder.load(app.model, app.tokenizer_source, app.adapters)
    except ModelNotFound as error:
        return None, [Check("tokenizer", "wrong", str(error))]
    checks = [Check("tokenizer", "ok", f"that of {app.tokenizer_source}")]
    body = {"model": app.model, "messages": [{"role": "user", "content": "Hello"}]}
    try:
        tokens = encoder.prompt(CHAT_PATH, body).num_tokens
    except RouterError as error:
        text = (
            f"the ids of a plain chat can't be told ({error}): chats are routed by load; completions are not affected"
        )
        return encoder, [*checks, Check("chat template", "wrong", text)]
    return encoder, [*checks, Check("chat template", "ok", f"a chat of one word has {tokens} tokens")]


def _redis(url: str) -> tuple[bool, list[Check]]:
    """Is there a server with all that is needed?"""
    try:
        asyncio.run(_reach(url))
    except OwnershipUnavailable as error:
        return False, [Check("Redis", "wrong", str(error))]
    try:
        told = asyncio.run(server_info(url))
    except OwnershipUnavailable as error:
        return True, [Check("Redis", "note", f"{safe_url(url)} answers, but does not tell its version ({error})")]
    name = "valkey" if "valkey_version" in told else "redis"
    found = str(told[f"{name}_version"])
    title = name.capitalize()
    if tuple(int(part) for part in found.split(".")[:2]) < _NEEDED[name]:
        needed = ".".join(map(str, _NEEDED[name]))
        return True, [Check(title, "wrong", f"{found} at {safe_url(url)}: {needed} or later has what is needed")]
    check = _tested(title, name, found)
    checks = [Check(title, check.status, f"{check.text} at {safe_url(url)}")]
    if told.get("maxmemory", "0") != "0" and told.get("maxmemory_policy", "").startswith("allkeys"):
        text = f"maxmemory-policy {told['maxmemory_policy']} evicts blocks of the map; noeviction keeps them"
        checks.append(Check(f"{title} memory", "note", text))
    return True, checks


async def _reach(url: str) -> None:
    """Its functions can be loaded and called; nothing is left there but the functions."""
    ownership = RedisOwnershipMap(url, "", timeout_s=5.0)
    try:
        await ownership.members()
    finally:
        await ownership.close()


def _fleets(app: AppConfig | None, redis: str, encoder: PromptEncoder | None) -> Iterator[Check]:
    try:
        for fleet in [app.fleet_name] if app else asyncio.run(fleets(redis)):
            for line in asyncio.run(fleet_check.examine(redis, fleet, encoder, app.adapters if app else ())):
                yield Check(line.name, "wrong" if line.wrong else "ok", line.text)
    except OwnershipUnavailable as error:
        yield Check("fleet", "wrong", str(error))
