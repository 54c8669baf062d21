"""Real processes: an engine never outlives its replica, whatever is killed, and says why it didn't start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicas.engine_api import get, read_facts, read_load
from replicas.ports import quiet_port
from replicas.process import EngineFailed, EngineProcess

pytestmark = pytest.mark.integration

DEADLINE_S = 30.0
ROOT = Path(__file__).parents[2]

# An engine with a child, a grandchild in a session of its own, and one that ignores SIGTERM. Writes their ids.
FAMILY = """
import json, os, signal, subprocess, sys, time
role, out = sys.argv[1], sys.argv[2]
if role == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = {"engine": ["child", "stubborn"], "child": ["detached"]}.get(role, [])
for name in below:
    subprocess.Popen([sys.executable, __file__, name, out], start_new_session=name == "detached")
with open(os.path.join(out, role + ".tmp"), "w") as file:
    file.write(str(os.getpid()))
os.rename(os.path.join(out, role + ".tmp"), os.path.join(out, role))
print(role, "is up", flush=True)
time.sleep(600)
"""
ROLES = ("engine", "child", "stubborn", "detached")

STARTER = """
import asyncio, sys
from replicas.process import EngineProcess

async def main():
    process = EngineProcess("test", sys.argv[1:])
    await process.start(grace_s=0.5)
    await asyncio.sleep(600)

asyncio.run(main())
"""

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = PAGES.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write(body or b"")
    def log_message(self, *args):
        pass
PAGES = {"/health": b"", "/v1/models": b'{"data": [{"id": "m", "max_model_len": 4096}]}', "/metrics": b'''
vllm:cache_config_info{block_size="32",num_gpu_blocks="65",x="a\\\\"b"} 1.0
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="0"} 4
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0
vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="1",sleep_state="discard_all"} 1.0
'''}
print("listening", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def eventually(check: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def script(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


class Family:
    """The processes of one fake engine, started by a starter that can be killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        engine = [sys.executable, script(folder, "family", FAMILY), "engine", str(folder)]
        starter = [sys.executable, script(folder, "starter", STARTER), *engine]
        self.starter = subprocess.Popen(starter, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)

    def pids(self) -> dict[str, int]:
        assert eventually(lambda: all((self._folder / role).exists() for role in ROLES))
        return {role: int((self._folder / role).read_text()) for role in ROLES}

    def guards(self) -> list[int]:
        """Outer and inner guard."""
        outer = only_child(self.starter.pid)
        return [outer, only_child(outer)]


def only_child(pid: int) -> int:
    """Children are listed by the thread that forked them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    (child,) = [int(found) for task in tasks for found in (task / "children").read_text().split()]
    return child


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path)
    yield family
    family.starter.kill()
    family.starter.wait()
    for role in ROLES:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((tmp_path / role).read_text()), signal.SIGKILL)


def test_kill_9_of_the_starter_leaves_no_process_behind(family: Family) -> None:
    pids = family.pids()
    guards = family.guards()
    family.starter.kill()
    assert eventually(lambda: not any(map(is_running, pids.values()))), {r: is_running(p) for r, p in pids.items()}
    assert eventually(lambda: not any(map(is_running, guards)))


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_kill_9_of_a_guard_leaves_no_process_behind(family: Family, which: str) -> None:
    pids = family.pids()
    outer, inner = family.guards()
    os.kill(outer if which == "outer" else inner, signal.SIGKILL)
    assert eventually(lambda: not any(map(is_running, pids.values()))), {r: is_running(p) for r, p in pids.items()}
    assert eventually(lambda: not is_running(inner))


def test_kill_9_of_starter_and_outer_guard_leaves_no_process_behind(family: Family) -> None:
    pids = family.pids()
    outer, inner = family.guards()
    os.kill(family.starter.pid, signal.SIGKILL)
    os.kill(outer, signal.SIGKILL)
    assert eventually(lambda: not any(map(is_running, [*pids.values(), inner])))


def test_an_engine_that_ends_by_itself_takes_its_descendants_along(family: Family) -> None:
    pids = family.pids()
    os.kill(pids["engine"], signal.SIGKILL)
    assert eventually(lambda: not any(map(is_running, pids.values())))


async def test_stop_ends_all_processes_and_may_be_repeated(tmp_path: Path) -> None:
    process = EngineProcess("t", [sys.executable, script(tmp_path, "family", FAMILY), "engine", str(tmp_path)])
    await process.start()
    assert await asyncio.to_thread(eventually, lambda: all((tmp_path / role).exists() for role in ROLES))
    pids = [int((tmp_path / role).read_text()) for role in ROLES]
    assert process.pid == pids[0]
    assert process.alive
    await process.stop(grace_s=0.3)
    assert not any(map(is_running, pids))
    assert not process.alive
    assert process.returncode == 128 + signal.SIGTERM
    await process.stop()


async def test_an_engine_that_obeys_sigterm_is_not_killed(tmp_path: Path) -> None:
    polite = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), sys.exit(7)))
    print("up", flush=True)
    time.sleep(600)
    """
    lines: list[str] = []
    process = EngineProcess("t", [sys.executable, script(tmp_path, "polite", polite)], on_log=lines.append)
    await process.start()
    assert await asyncio.to_thread(eventually, lambda: "up" in lines)
    await process.stop(grace_s=DEADLINE_S)
    assert process.returncode == 7
    assert lines == ["up", "bye"]


async def test_an_engine_that_ends_before_it_is_ready_tells_its_last_lines() -> None:
    code = "import sys; print('CUDA out of memory', file=sys.stderr); sys.exit(3)"
    process = EngineProcess("t", [sys.executable, "-c", code])
    await process.start()
    with pytest.raises(EngineFailed, match=r"(?s)status 3 before it was ready.*CUDA out of memory"):
        await process.wait_ready("http://127.0.0.1:9", timeout_s=DEADLINE_S)
    await process.stop()


async def test_a_command_that_does_not_exist_is_named() -> None:
    process = EngineProcess("t", ["/does/not/exist"])
    await process.start()
    with pytest.raises(EngineFailed, match=r"(?s)status 127.*can't start /does/not/exist"):
        await process.wait_ready("http://127.0.0.1:9", timeout_s=DEADLINE_S)
    await process.stop()


async def test_an_engine_that_never_gets_ready_is_given_up() -> None:
    process = EngineProcess("t", [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"])
    await process.start()
    with pytest.raises(EngineFailed, match=r"not ready after 0\.5 s"):
        await process.wait_ready(f"http://127.0.0.1:{quiet_port()}", timeout_s=0.5)
    await process.stop(grace_s=1)


async def test_facts_and_load_come_from_the_engine(tmp_path: Path) -> None:
    port = quiet_port()
    process = EngineProcess("t", [sys.executable, script(tmp_path, "healthy", HEALTHY), str(port)])
    await process.start()
    url = f"http://127.0.0.1:{port}"
    await process.wait_ready(url, timeout_s=DEADLINE_S)
    facts = await read_facts(url)
    assert (facts.block_size, facts.max_model_len, facts.num_blocks, facts.models) == (32, 4096, 65, ("m",))
    awake, asleep = {"asleep": 0.0, "discarded": 0.0}, {"asleep": 1.0, "discarded": 1.0}
    assert await read_load(url) == {"num_running": 3.0, "num_waiting": 4.0, "kv_cache_usage": 0.25, **asleep}
    assert await read_load(url, 0) == {"num_running": 2.0, "num_waiting": 4.0, "kv_cache_usage": 0.25, **awake}
    assert await read_load(url, 1) == {"num_running": 1.0, **asleep}
    await process.stop()
    with pytest.raises(OSError, match=r"."):
        await get(f"{url}/health")


async def test_what_went_wrong_is_told_also_where_it_stands_far_above_the_last_lines() -> None:
    script = """
print("(Worker pid=7) WARNING [utils.py:255] this can cause errors like `OSError: [Errno 24] Too many open files`")
for _ in range(2):
    print("(Worker pid=7) ERROR [executor.py:1063] ValueError: CPU offloading is for GPUs only", flush=True)
for number in range(60):
    print(f"  File a.py, line {number}, in main")
print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
raise SystemExit(1)
"""
    process = EngineProcess("test", [sys.executable, "-c", script])
    await process.start()
    try:
        with pytest.raises(EngineFailed) as failed:
            await process.wait_ready("http://127.0.0.1:1", DEADLINE_S)
    finally:
        await process.stop()
    lines = str(failed.value).splitlines()
    assert lines[1] == "(Worker pid=7) ERROR [executor.py:1063] ValueError: CPU offloading is for GPUs only"
    assert lines[2] == "  File a.py, line 21, in main"
    assert lines[-1].startswith("RuntimeError: Engine core initialization failed")
