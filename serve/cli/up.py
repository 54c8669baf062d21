"""`whohas up`: everything on this machine, in one foreground process tree."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import click

from replicas.ports import quiet_ports, set_aside
from router.ownership.client import safe_url
from serve.cli import state
from serve.cli.preflight import Problem, check, config_from_file, config_from_options
from serve.config import AppConfig
from serve.embedded_valkey import EmbeddedValkey

APP = "whohas"


@click.command()
@click.argument("config", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--engine", type=click.Choice(["emulated", "vllm"]), help="What answers.  [default: emulated]")
@click.option("--model", help="Model name, Hugging Face id or directory.")
@click.option("--tokenizer", help="Tokenizer directory or Hugging Face id, where it is not the model's own.")
@click.option("--replicas", type=click.IntRange(1), help="How many replicas.  [default: 4 emulated, else 1]")
@click.option("--port", type=click.IntRange(1, 65535), help="HTTP port.  [default: 8000]")
@click.option("--redis", help="Redis URL; without it a Valkey of our own is started.")
@click.option("--endpoints", help="Comma-separated base URLs of vLLM servers that run already.")
@click.option("--block-size", type=click.IntRange(1), help="Tokens a KV block.  [default: the engine's own]")
@click.option("--max-model-len", type=click.IntRange(1), help="Longest context, in tokens.  [default: the model's]")
@click.option("--tensor-parallel-size", type=click.IntRange(1), help="Workers, and GPUs, a vllm engine.  [default: 1]")
@click.option("--engine-arg", multiple=True, metavar="ARG", help="One word of the engine's command line; repeatable.")
@click.option("--profile", help="Speed of emulated engines: a100x4-qwen72b, linear:TOKENS_PER_S, or a file.")
def up(config: str | None, port: int | None, **options: Any) -> None:
    """Serve on this machine until Ctrl-C: embedded Valkey, Ray, and the application.

    CONFIG is a Serve config file (see examples/); options go over what it says, and its Redis is not used: a Valkey is
    started unless --redis names a server.
    """
    _stop_when_told()
    progress = Progress()
    try:
        app, file_port = config_from_file(config, options) if config else (config_from_options(options), None)
        http_port = port or file_port or 8000
        set_aside(http_port)
        check(app, http_port, own_redis=options["redis"] is None)
        with contextlib.ExitStack() as stack:
            _run(stack, app, http_port, progress, own_redis=options["redis"] is None)
    except Problem as problem:
        progress.end()
        click.echo(f"whohas: {problem}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        progress.end()
        click.echo("stopped", err=True)


def _stop_when_told() -> None:
    """SIGTERM ends it as Ctrl-C does, and SIGINT also where a shell had it ignored: for what runs in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))


class Progress:
    """What is being done, on standard error, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = ""

    def say(self, text: str) -> None:
        if text != self._last:
            self._last = text
            click.echo(f"[{time.monotonic() - self._start:5.1f} s] {text}", err=True)

    def end(self) -> None:
        self._last = ""


def _run(stack: contextlib.ExitStack, app: AppConfig, port: int, progress: Progress, *, own_redis: bool) -> None:
    if own_redis:
        progress.say("starting Valkey")
        app = app.model_copy(update={"redis": stack.enter_context(EmbeddedValkey()).url})
    progress.say("starting Ray")
    stack.enter_context(_ray(app, progress))
    stack.enter_context(_serve(app, port, progress))
    url = f"http://127.0.0.1:{port}"
    state.write(url, app.redis)
    stack.callback(state.clear)
    progress.say("ready")
    click.echo(_welcome(app, url))
    while True:
        signal.pause()


@contextlib.contextmanager
def _ray(app: AppConfig, progress: Progress) -> Iterator[None]:
    folder = short_folder()
    os.environ.update(serve_environment(folder))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode every Ray process takes seconds longer
    import ray  # reads the environment when imported

    try:
        ray.init(
            num_cpus=max((os.cpu_count() or 1) + 1, 4),  # engines may take all there are: one more for the rest
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        _stop_when_told()  # Ray put a handler of its own there, which prints a stack and ends the process
        yield
    finally:
        with _uninterrupted():
            progress.say("stopping Ray")
            with _without_rays_word():
                ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _serve(app: AppConfig, port: int, progress: Progress) -> Iterator[None]:
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation

    from serve.app import build

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        progress.say("starting Ray Serve and HAProxy")
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host="0.0.0.0", port=port))
        with _watching(progress):
            try:
                serve.run(build(app), name=APP, route_prefix="/")
            except RuntimeError as error:
                raise Problem(f"the application did not start: {_why(serve, str(error))}") from error
        progress.say("waiting for HTTP")
        _wait_http(port)
        yield
    finally:
        with _uninterrupted():
            progress.say("stopping the replicas")
            with _without_rays_word():
                serve.shutdown()  # type: ignore[no-untyped-call]


def short_folder() -> str:
    """A new folder for Ray and HAProxy, whose sockets' paths have room for about 27 characters of it."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="whohas-", dir=base if len(base) <= 8 else "/tmp")


def serve_environment(folder: str) -> dict[str, str]:
    """What Ray Serve must find in the environment: HAProxy on, our event loop the only one, files in `folder`."""
    # HAProxy is started seconds from now: meanwhile Ray's own connections must not be given these ports.
    metrics_port, stats_port = quiet_ports(2)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/h/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/h/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{folder}/h",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/h/server-state",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        # Despite its name, off means: this node is 127.0.0.1, also where the machine has other addresses.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_agent_register_timeout_ms": "120000",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


@contextlib.contextmanager
def _watching(progress: Progress) -> Iterator[None]:
    """Report how many replicas run while `serve.run` waits for them."""
    from ray import serve

    done = threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            with contextlib.suppress(Exception):  # the status is only for show
                deployments = serve.status().applications[APP].deployments
                counts = [f"{name} {_running(one)}" for name, one in sorted(deployments.items())]
                progress.say(f"starting: {', '.join(counts)}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)


def _running(deployment: Any) -> str:
    total = sum(deployment.replica_states.values())
    return f"{deployment.replica_states.get('RUNNING', 0)}/{total}"


def _why(serve: Any, fallback: str) -> str:
    """Serve's message about the first deployment that failed, cut to its last lines; an engine's own words."""
    with contextlib.suppress(Exception):
        for deployment in serve.status().applications[APP].deployments.values():
            if deployment.message and deployment.status != "HEALTHY":
                first, *rest = deployment.message.strip().rpartition("EngineFailed: ")[2].splitlines()
                return "\n".join([first, *rest[-12:]])
    return fallback


def _wait_http(port: int, timeout_s: float = 60.0) -> None:
    import urllib.error
    import urllib.request

    end = time.monotonic() + timeout_s
    last = ""
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except urllib.error.HTTPError as error:
            with error:
                last = f"{error}: {error.read(500).decode(errors='replace')}"
        except OSError as error:
            last = str(error)
        time.sleep(0.1)
    why = f"({last}); see HAProxy's log in Ray's session folder"
    raise Problem(f"/health on port {port} is not well after {timeout_s:.0f} s {why}")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Stopping is not broken off by a second Ctrl-C: it would leave processes behind."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _without_rays_word() -> contextlib.redirect_stdout[io.StringIO]:
    """A thread of Ray's prints what fails in its cluster, and of one that is being stopped something always may."""
    return contextlib.redirect_stdout(io.StringIO())


def _welcome(app: AppConfig, url: str) -> str:
    body = f'{{"model": "{app.model}", "messages": [{{"role": "user", "content": "Who has my blocks?"}}]}}'
    emulated = "\nThe engines are emulated: the answers are filler text." if app.engine.kind == "emulated" else ""
    return f"""
whohas serves {app.model} at {url} (ownership map in {safe_url(app.redis)}){emulated}

  curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'
  whohas map
  whohas explain body.json

Ctrl-C stops everything."""
