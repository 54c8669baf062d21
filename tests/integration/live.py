"""A running `whohas up` as the tests see it: a process, a URL, and what it must leave behind: nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from replicas.ports import quiet_port

MODEL = "test-model"
START_S, STOP_S, PATIENCE_S = 180.0, 120.0, 90.0
WHOHAS = str(Path(sys.executable).with_name("whohas"))


@dataclass(frozen=True)
class Answer:
    """One whole HTTP answer. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replica(self) -> str:
        return self.headers["x-whohas-replica"]

    @property
    def predicted(self) -> int:
        return int(self.headers["x-whohas-predicted-cached-tokens"])

    @property
    def cached(self) -> int:
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass(frozen=True)
class Live:
    url: str
    redis: str
    process: subprocess.Popen[str]

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"content-type": "application/json", **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return _answer(response.status, response)
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error.code, error)

    def chat(self, *contents: str, **fields: Any) -> Answer:
        return self.request("POST", "/v1/chat/completions", {**chat_body(*contents), **fields})

    def owned_blocks(self, body: dict[str, Any]) -> int:
        """What any replica is said to hold of a prompt, by its engine's events. Nothing is sent to an engine, so that
        none has a reason to step."""
        candidates = self.request("POST", "/explain", body).json["candidates"]
        return max(int(one["owned_blocks"]) for one in candidates)


def chat_body(*contents: str) -> dict[str, Any]:
    """Of several contents the first one is the system prompt."""
    roles = ["system", *(["user", "assistant"] * len(contents))] if len(contents) > 1 else ["user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return {"model": MODEL, "messages": messages}


def until(check: Callable[[], Any]) -> None:
    """What happens at some time, however slow the machine."""
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def _answer(status: int, response: Any) -> Answer:
    return Answer(status, {key.lower(): value for key, value in response.headers.items()}, response.read())


def config_file(folder: Path, **args: Any) -> Path:
    """A Serve config with quick emulated engines; `args` go over it."""
    engine = {"kind": "emulated", "num_blocks": 4000, "speed": 10.0, "event_delay_s": 0.5}
    # These tests ask what is decided, on machines of any speed: no look-up may be cut short.
    router = {"look_up_timeout_s": 2.0}
    settings = {"model": MODEL, "tokenizer": "builtin", "engine": engine, "router": router, "replicas": 4}
    settings |= {"drain_s": 5.0, **args}
    application = {"name": "whohas", "route_prefix": "/", "import_path": "serve.app:build", "args": settings}
    path = folder / "app.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@contextmanager
def whohas_up(folder: Path, *options: str, **args: Any) -> Iterator[Live]:
    """Started as a user would, in a process group of its own; ended by Ctrl-C to the whole group."""
    port = quiet_port()
    log = (folder / "up.log").open("w+")
    process = subprocess.Popen(
        [WHOHAS, "up", str(config_file(folder, **args)), "--port", str(port), *options],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
    )
    try:
        live = Live(f"http://127.0.0.1:{port}", _wait_ready(process, folder), process)
        before = {pid: born(pid) for pid in descendants(process.pid)}
        yield live
        interrupt(process)
        leftover = [command_of(pid) for pid, birth in before.items() if born(pid) == birth and not _has_ended(pid)]
        assert not leftover, f"left behind: {leftover}"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(STOP_S)
        if process.stdout:
            process.stdout.close()
        log.close()


def _has_ended(pid: int) -> bool:
    """Or was killed, and only waits for its turn to end."""
    status = dict(line.split(":", 1) for line in _of(Path(f"/proc/{pid}/status")).decode().splitlines())
    pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
    return state_of(pid) in ("", "Z") or bool(pending >> (signal.SIGKILL - 1) & 1)


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, as a terminal sends it."""
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(STOP_S) == 0


def _wait_ready(process: subprocess.Popen[str], folder: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if states := list(folder.glob("whohas-*.json")):
            return str(json.loads(states[0].read_text())["redis"])
        time.sleep(0.2)
    raise AssertionError(f"whohas up did not start:\n{(folder / 'up.log').read_text()}")


def state_of(pid: int) -> str:
    """As in `ps`; empty where the process has gone, which any may do while one looks."""
    return _stat(pid, 0)


def born(pid: int) -> str:
    """When it was started: by the end of a long run its number may be that of another process, or thread."""
    return _stat(pid, 19)


def _stat(pid: int, field: int) -> str:
    """By number from the state on."""
    fields = _of(Path(f"/proc/{pid}/stat")).decode().rpartition(")")[2].split()
    return fields[field] if fields else ""


def command_of(pid: int, length: int = 120) -> str:
    """Empty where the process has gone."""
    return _of(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode()[:length]


def descendants(pid: int) -> list[int]:
    """Every process under `pid`, children before their own children."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _of(task).split()):
            found += [child, *descendants(child)]
    return found


def _of(file: Path) -> bytes:
    """What the kernel says of a process; b"" where that has gone."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
