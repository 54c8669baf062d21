"""Engines and whole applications of our own to load, stopped however the run ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from replicas.ports import quiet_port

MODEL = "whohas-bench"
_START_S, _STOP_S = 180.0, 60.0
_POLL_S = 0.1
_UP = "import sys; from serve.cli import main; sys.argv[0] = 'whohas'; main()"


class NotStarted(Exception):
    """What was to be loaded did not start; the message is the end of what it said."""


@contextlib.contextmanager
def emulated_engine(*flags: str, tokenizer: str = "builtin") -> Iterator[str]:
    """URL of an engine process on a free port of this machine. Raises `NotStarted`."""
    command = [sys.executable, "-m", "replicas.emulated", "--model", MODEL, "--tokenizer", tokenizer, "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=log, start_new_session=True)
        try:
            yield _wait(process, log, lambda: _found(r"^ready: .* at (http://[^\s,]+)", log))
        finally:
            _stop(process, signal.SIGTERM)


@contextlib.contextmanager
def whohas_up(args: Mapping[str, Any]) -> Iterator[str]:
    """URL of a `whohas up` on a free port, with these application settings. Raises `NotStarted`."""
    port = quiet_port()
    settings = {"model": MODEL, "tokenizer": "builtin", **args}
    application = {"name": "whohas", "route_prefix": "/", "import_path": "serve.app:build", "args": settings}
    with tempfile.TemporaryDirectory(prefix="whohas-bench-") as folder, tempfile.TemporaryFile("w+") as log:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump({"applications": [application]}))
        # Its state file goes beside its config: other commands still find the user's own `whohas up`.
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        process = subprocess.Popen(
            [sys.executable, "-c", _UP, "up", str(config), "--port", str(port)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
        try:
            yield _wait(process, log, lambda: _up_url(Path(folder)))
        finally:
            _stop(process, signal.SIGINT)


def _up_url(folder: Path) -> str | None:
    for state in folder.glob("whohas-*.json"):
        with contextlib.suppress(ValueError):  # half written
            return str(json.loads(state.read_text())["url"])
    return None


def _found(pattern: str, log: IO[str]) -> str | None:
    found = re.search(pattern, _said(log), re.MULTILINE)
    return found and found[1]


def _wait(process: subprocess.Popen[bytes], log: IO[str], ready: Any) -> str:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if url := ready():
            return str(url)
        if process.poll() is not None:
            break
        time.sleep(_POLL_S)
    raise NotStarted(_said(log)[-2000:].strip() or f"nothing was ready after {_START_S:.0f} s")


def _said(log: IO[str]) -> str:
    return os.pread(log.fileno(), 1 << 20, 0).decode("utf-8", "replace")


def _stop(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
