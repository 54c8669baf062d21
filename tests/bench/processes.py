"""CPU time of a process tree, from /proc (Linux): what every process of it used, by what it does."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_GROUPS = (
    ("ray::ServeReplica:whohas:Ingress", "ingress"),
    ("ray::ServeReplica:whohas:Replica", "collectors"),
    ("ray::ServeReplica:trivial", "trivial"),
    ("instant_engine.py", "engine"),
    ("replicas.emulated", "engine"),
    ("/haproxy", "HAProxy"),
    ("valkey", "Valkey"),
)
REST = "Ray"


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds of CPU since each process started, with what it does."""

    at: float
    by_pid: Mapping[int, tuple[str, float]]

    def since(self, earlier: CpuReading, idle: Mapping[str, float] | None = None) -> dict[str, float]:
        """CPU seconds by group between the readings, less what `idle` (CPU seconds a second) would have taken."""
        used: defaultdict[str, float] = defaultdict(float)
        for pid, (group, seconds) in self.by_pid.items():
            used[group] += seconds - earlier.by_pid.get(pid, (group, 0.0))[1]
        passed = self.at - earlier.at
        return {group: seconds - (idle or {}).get(group, 0.0) * passed for group, seconds in used.items()}


def read_cpu(roots: Iterable[int]) -> CpuReading:
    now = time.monotonic()
    return CpuReading(now, {pid: (_group(pid), _cpu_s(pid)) for pid in tree(roots)})


def idle_rates(roots: Iterable[int], seconds: float) -> dict[str, float]:
    """CPU seconds a second that the tree takes while nobody asks it for anything."""
    roots = list(roots)
    before = read_cpu(roots)
    time.sleep(seconds)
    after = read_cpu(roots)
    return {group: used / (after.at - before.at) for group, used in after.since(before).items()}


def tree(roots: Iterable[int]) -> list[int]:
    """The roots and all that descends from them, as far as they live."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _stat(int(folder.name))):
            children[int(fields[1])].append(int(folder.name))
    found, waiting = [], list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children[pid]
    return found


def find(roots: Iterable[int], text: str) -> list[int]:
    """Processes of the tree with `text` in their command line."""
    return [pid for pid in tree(roots) if text in command_line(pid)]


def rss_mb(pid: int) -> float:
    """Resident memory in MB (1e6 bytes)."""
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 if fields else 0.0


def command_line(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def environment(pid: int) -> dict[str, str]:
    pairs = (line.partition("=") for line in _read(f"/proc/{pid}/environ").split("\0") if line)
    return {name: value for name, _, value in pairs}


def _group(pid: int) -> str:
    line = command_line(pid)
    return next((name for text, name in _GROUPS if text in line), REST)


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * _TICK_S if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before may hold spaces)."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:  # it ended meanwhile
        return ""
