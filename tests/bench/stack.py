"""`whohas up` as a child process, stopped however the benchmark ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from replicas.ports import quiet_port
from router.ownership import ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from serve.embedded_valkey import EmbeddedValkey
from tests.bench import processes, trivial_app
from tests.bench.client import CHAT
from tests.bench.prompts import MODEL

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 60.0
_HERE = Path(__file__).parent
_INSTANT = [sys.executable, "-P", str(_HERE / "instant_engine.py")]


@dataclass(frozen=True, slots=True)
class Up:
    """A running `whohas up`. `phases`: what it said while starting, with its own seconds."""

    pid: int
    url: str
    phases: list[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Stack:
    """whohas over instant engines, the trivial endpoint beside it behind the same HAProxy, and an engine's own URL.

    `engines`: the base URLs of all; `redis`: where the fleet meets.
    """

    up: Up
    valkey_pid: int
    redis: str
    engines: list[str]
    whohas: str
    trivial: str
    direct: str

    @property
    def roots(self) -> tuple[int, int]:
        return self.up.pid, self.valkey_pid

    @property
    def ingress_pid(self) -> int:
        (pid,) = processes.find([self.up.pid], "ray::ServeReplica:whohas:Ingress")
        return pid


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Up]:
    """`whohas up` with these arguments, on a free port, from "ready" on."""
    port = quiet_port()
    command = [str(Path(sys.executable).with_name("whohas")), "up", *arguments, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own: Ctrl-C is for the benchmark, which then stops its children in order.
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield Up(process.pid, f"http://127.0.0.1:{port}", _wait_ready(process, log))
        finally:
            _stop(process)


@contextlib.contextmanager
def instant_stack(*, with_trivial: bool = True) -> Iterator[Stack]:
    """One ingress, two replicas with instant engines, one trivial endpoint."""
    with contextlib.ExitStack() as stack:
        valkey = stack.enter_context(EmbeddedValkey())
        assert valkey.pid is not None
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="whohas-bench-"))
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(_config(valkey.url)))
        up = stack.enter_context(running(str(config), "--redis", valkey.url))
        if with_trivial:
            _add_trivial(up.pid)
        engines = asyncio.run(_engine_urls(valkey.url))
        urls = (up.url + CHAT, up.url + trivial_app.ROUTE + CHAT, engines[0] + CHAT)
        yield Stack(up, valkey.pid, valkey.url, engines, *urls)


def _config(redis: str) -> dict[str, Any]:
    engine = {"kind": "emulated", "command": _INSTANT, "block_size": 16, "stop_grace_s": 3.0}
    args = {
        "model": MODEL,
        "tokenizer": "builtin",
        "redis": redis,
        "replicas": 2,
        "engine": engine,
        "ingress": {"num_replicas": 1},
        "router": {"claim_s": 0.2},
        "drain_s": 1.0,
    }
    return {"applications": [{"name": "whohas", "route_prefix": "/", "import_path": "serve.app:build", "args": args}]}


def _add_trivial(up_pid: int) -> None:
    (raylet,) = [pid for pid in processes.find([up_pid], "--gcs-address") if "raylet/raylet" in _first(pid)]
    found = re.search(r"--gcs-address=(\S+)", processes.command_line(raylet))
    assert found is not None
    command = [sys.executable, "-m", "tests.bench.trivial_app", found[1]]
    done = subprocess.run(
        command, env=processes.environment(raylet), timeout=_START_TIMEOUT_S, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the trivial endpoint did not start:\n{done.stderr[-3000:]}")


def _first(pid: int) -> str:
    return processes.command_line(pid).partition(" ")[0]


async def _engine_urls(redis: str) -> list[str]:
    ownership = RedisOwnershipMap(redis, MODEL)
    try:
        members = await ownership.members()
    finally:
        await ownership.close()
    return [member.record.url for member in members if isinstance(member.record, ReplicaRecord)]


def _wait_ready(process: subprocess.Popen[bytes], log: Any) -> list[tuple[float, str]]:
    end = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end:
        text = _everything(log)
        phases = [(float(at), what) for at, what in re.findall(r"^\[ *([\d.]+) s\] (.*)$", text, re.MULTILINE)]
        if phases and phases[-1][1] == "ready":
            return phases
        if process.poll() is not None:
            raise RuntimeError(f"whohas up ended with status {process.returncode}:\n{text[-3000:]}")
        time.sleep(0.02)
    raise RuntimeError(f"whohas up was not ready after {_START_TIMEOUT_S:.0f} s:\n{_everything(log)[-3000:]}")


def _everything(log: Any) -> str:
    return os.pread(log.fileno(), 1 << 20, 0).decode("utf-8", "replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGINT, as Ctrl-C would; what is left after a minute is killed, each process by its pid."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave anything behind
    try:
        _stop_uninterrupted(process)
    finally:
        signal.signal(signal.SIGINT, previous)


def _stop_uninterrupted(process: subprocess.Popen[bytes]) -> None:
    family = processes.tree([process.pid])
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
        return
    for pid in {*family, *processes.tree([process.pid])}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
