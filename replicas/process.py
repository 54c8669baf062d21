"""An engine's process, which never outlives the process that started it (see `guard.py`)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from replicas.engine_api import get

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_LINES = 40
_MAX_LINE_BYTES = 4000
_FIRST_ERRORS = 5
_ERROR = re.compile(r"(?:^|\] ?)(?:\w+\.)*\w*(?:Error|Exception|Exit)(?:: |$)")
"""The line of a traceback that names the exception, also where a logger has put something in front."""


class EngineFailed(RuntimeError):
    """The engine could not be started, or is gone. The message ends with its last log lines."""


class EngineProcess:
    """`on_log` gets the process' output line by line, in a thread of its own; by default it goes to the logger
    `whohas.engine.<name>` at INFO. Works in any event loop and any thread."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        on_log: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.pid: int | None = None
        self._env = None if env is None else dict(env)
        self._on_log = on_log or logging.getLogger(f"whohas.engine.{name}").info
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._errors: list[str] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    @property
    def returncode(self) -> int | None:
        """The command's exit status, 128 + N for signal N; None while it runs."""
        return None if self._guard is None else self._guard.poll()

    @property
    def tail(self) -> str:
        """The last lines that it printed, after the first errors that it told of before those: a server whose worker
        fails ends with its own complaints, and what went wrong stands far above."""
        last = list(self._tail)
        return "\n".join([*(line for line in self._errors if line not in last), *last])

    async def start(self, grace_s: float = 10.0) -> None:
        """`grace_s`: between SIGTERM and SIGKILL should this process die. Raises `EngineFailed`."""
        if self._guard is not None:
            raise RuntimeError(f"{self.name} was started before")
        line = await asyncio.to_thread(self._start, grace_s)
        if not line:
            await self.stop(0.0)
            raise EngineFailed(f"the guard of {self.name} ended at once\n{self.tail}")
        self.pid = int(line)

    def _start(self, grace_s: float) -> bytes:
        pid_read, pid_write = os.pipe()
        guard = [sys.executable, "-I", "-S", str(_GUARD), "--grace", str(grace_s), "--pid-fd", str(pid_write)]
        try:
            self._guard = subprocess.Popen(
                [*guard, "--", *self.argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._env,
                pass_fds=(pid_write,),
                start_new_session=True,  # Ctrl-C in the terminal is for the starter alone
            )
        finally:
            os.close(pid_write)
        self._reader = threading.Thread(target=self._read, args=(self._guard,), name=f"log {self.name}", daemon=True)
        self._reader.start()
        with os.fdopen(pid_read, "rb") as pid_file:
            return pid_file.readline()

    async def wait_ready(self, url: str, timeout_s: float, poll_s: float = 0.1) -> None:
        """Until GET `url`/health says 200. Raises `EngineFailed` when the process ends first, or the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.alive:
                await self._read_to_the_end()
                status = f"ended with status {self.returncode} before it was ready"
                raise EngineFailed(f"{self.argv[0]} {status}; its last lines:\n{self.tail}")
            with suppress(OSError):
                status_code, _ = await get(f"{url}/health", timeout_s=5.0)
                if status_code == 200:
                    return
            if time.monotonic() >= deadline:
                raise EngineFailed(f"{self.argv[0]} was not ready after {timeout_s:g} s; its last lines:\n{self.tail}")
            await asyncio.sleep(poll_s)

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, after `grace_s` SIGKILL, to all its processes. Returns when they are gone; may be called again."""
        guard = self._guard
        if guard is None:
            return
        if guard.stdin is not None and not guard.stdin.closed:
            with suppress(OSError):
                guard.stdin.write(f"{grace_s}\n".encode())
                guard.stdin.flush()
            with suppress(OSError):
                guard.stdin.close()
        await asyncio.to_thread(guard.wait)
        if guard.returncode == -signal.SIGKILL and self.pid is not None:
            # The guard was killed: its second half ends the engine with more patience than we have here.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        await self._read_to_the_end()

    async def _read_to_the_end(self) -> None:
        if self._reader is not None:
            # A stray holder of the pipe must not keep us here.
            await asyncio.to_thread(self._reader.join, 2.0)

    def _read(self, guard: subprocess.Popen[bytes]) -> None:
        assert guard.stdout is not None
        with guard.stdout as stdout:
            while line := stdout.readline(_MAX_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    self._tail.append(text)
                    if len(self._errors) < _FIRST_ERRORS and _ERROR.search(text) and text not in self._errors:
                        self._errors.append(text)
                    self._on_log(text)
