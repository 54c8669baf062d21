"""Runs a command and ends it, with all its descendants, when whoever started it is gone.

    python -I -S guard.py --grace SECONDS [--pid-fd FD] -- COMMAND ARG...

The starter holds the other end of standard input. Its end, however it came (also kill -9 of the starter), or a line
with a number of seconds means: SIGTERM to the command's process group, after the grace SIGKILL to whatever is left.

    starter ---> outer guard ---> inner guard ---> command ---> ...

Both guards adopt orphans below them (child subreaper), so a detached grandchild is found too. Should the inner one be
killed, the kernel kills the command and the outer guard the rest; should the outer one be killed (Ray kills the
children of an actor that ends), the kernel tells the inner one to finish.
Exit status: the command's, 128 + N for signal N, 127 if it can't start.
Linux only; nothing but the standard library, since it runs without site-packages.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVER_GRACE_S = 2.0
_KILL_PATIENCE_S = 20.0


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _start(command: list[str]) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before the line above could matter
            os._exit(127)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"can't start {command[0]}: {error}\n".encode())
    os._exit(127)


def _descendants() -> list[int]:
    """All living processes below this one; zombies don't count."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found += children.get(pid, ())
    return found


class _Guard:
    def __init__(self, pid: int, grace_s: float, wake_fd: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self.grace_s = grace_s
        self.terminated = False
        self._wake_fd = wake_fd

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = status

    def sleep(self, seconds: float | None, *more: int) -> list[int]:
        """Until a signal, one of `more` or the time; those of `more` that are readable."""
        ready, _, _ = select.select([self._wake_fd, *more], [], [], seconds)
        if self._wake_fd in ready:
            os.read(self._wake_fd, 4096)
        return [fd for fd in ready if fd != self._wake_fd]

    def watch(self, *fds: int) -> None:
        """Return when the command ended or shall end."""
        while self.status is None and not self.terminated:
            if self.sleep(None, *fds):
                self.grace_s = _grace(os.read(fds[0], 64), self.grace_s)
                return
            self.reap()
        if self.status is not None:
            self.grace_s = min(self.grace_s, _LEFTOVER_GRACE_S)

    def end_all(self) -> None:
        targets = _descendants()
        if self.status is None:
            _signal_group(self.pid, signal.SIGTERM)
        else:
            _signal(targets, signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        while (targets := _descendants()) and time.monotonic() < deadline:
            self.sleep(0.1)
            self.reap()
        # Again and again: a dying process may have started another one meanwhile.
        deadline = time.monotonic() + _KILL_PATIENCE_S
        while targets and time.monotonic() < deadline:
            _signal(targets, signal.SIGKILL)
            self.sleep(0.02)
            self.reap()
            targets = _descendants()
        self.reap()


def _grace(line: bytes, otherwise: float) -> float:
    try:
        return max(0.0, float(line))
    except ValueError:
        return otherwise


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _signal_group(pid: int, number: int) -> None:
    """To the group that the process leads, or else to the process."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        _signal([pid], number)


def _watch_over(pid: int, grace_s: float, wake_fd: int, *fds: int) -> int:
    """Wait for the process, or for the end of `fds`, or SIGTERM; then end all that is left. The exit status."""
    guard = _Guard(pid, grace_s, wake_fd)

    def terminate(*_: object) -> None:
        guard.terminated = True

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, terminate)
    guard.reap()
    guard.watch(*fds)
    guard.end_all()
    if guard.status is None:
        return 128 + signal.SIGKILL
    code = os.waitstatus_to_exitcode(guard.status)
    return code if code >= 0 else 128 - code


def _wake_fd() -> int:
    """Readable after each signal that has a handler, SIGCHLD among them."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake_read


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="guard.py")
    parser.add_argument("--grace", type=float, default=10.0)
    parser.add_argument("--pid-fd", type=int, help="where to write the command's process id")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    if given.pid_fd is not None:
        os.set_inheritable(given.pid_fd, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    outer = os.getpid()
    inner = os.fork()
    if inner:
        os.close(0)
        if given.pid_fd is not None:
            os.close(given.pid_fd)
        # Longer than the inner guard's own patience: it has the first word.
        return _watch_over(inner, given.grace + _KILL_PATIENCE_S, _wake_fd())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != outer:
        return 127
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_fd = _wake_fd()
    pid = _start(given.command)
    if given.pid_fd is not None:
        os.write(given.pid_fd, f"{pid}\n".encode())
        os.close(given.pid_fd)
    return _watch_over(pid, given.grace, wake_fd, 0)


if __name__ == "__main__":
    sys.exit(main())
