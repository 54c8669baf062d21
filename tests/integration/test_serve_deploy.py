"""`serve deploy` on a running cluster, as operators do it: the laptop example, scaled by load, and hit by kill -9."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from replicas.ports import quiet_ports
from serve.cli.up import serve_environment, short_folder
from tests.integration.live import Live, command_of, descendants, state_of

pytestmark = pytest.mark.integration
EXAMPLE = Path(__file__).parents[2] / "examples" / "laptop.yaml"
BIN = Path(sys.executable).parent
MODEL = "Qwen/Qwen2.5-72B-Instruct"

PICK = """
import asyncio, sys, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
handle = serve.get_deployment_handle("Replica", "whohas")
async def main():
    async with handle.choose_replica("anything", _reserve=False) as free:
        print(free._slot_token is None, sorted(free.replica_metadata))
    async with handle.choose_replica("anything") as held:
        print(held._slot_token is None)
asyncio.run(main())
"""


class Cluster:
    """One Ray head with its dashboard on loopback, and the application deployed on it."""

    def __init__(self, folder: Path, redis: str) -> None:
        self.gcs, self.dashboard, self.http, client, agent = quiet_ports(5)
        self.redis, self._folder = redis, folder
        self.env = {**os.environ, **serve_environment(str(folder))}
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)
        ports = {"port": self.gcs, "dashboard-port": self.dashboard, "ray-client-server-port": client}
        ports |= {"dashboard-agent-listen-port": agent, "min-worker-port": 0, "max-worker-port": 0}
        self._log = (folder / "ray.log").open("w+")
        self.process = subprocess.Popen(
            [
                *(BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=4"),
                *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--temp-dir={folder / 'r'}"),
                *("--object-store-memory=100000000", *(f"--{name}={port}" for name, port in ports.items())),
            ],
            env=self.env,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.live = Live(f"http://127.0.0.1:{self.http}", redis, self.process)  # type: ignore[arg-type]

    def deploy(self) -> None:
        config = yaml.safe_load(EXAMPLE.read_text())
        config["http_options"]["port"] = self.http
        args = config["applications"][0]["args"]
        args["redis"], args["engine"]["speed"], args["drain_s"] = self.redis, 5.0, 20
        args["router"] = {"look_up_timeout_s": 2.0}  # no look-up may be cut short on a slow machine
        args["autoscaling"] |= {"target_ongoing_requests": 2, "upscale_delay_s": 1, "downscale_delay_s": 2}
        args["autoscaling"] |= {"metrics_interval_s": 0.5, "look_back_period_s": 1}
        path = self._folder / "laptop.yaml"
        path.write_text(yaml.safe_dump(config))
        wait(lambda: self.get("/api/version"), "the dashboard", 90)
        address = f"http://127.0.0.1:{self.dashboard}"
        subprocess.run([BIN / "serve", "deploy", path, "-a", address], check=True, env=self.env, timeout=120)
        wait(lambda: self.status() == "RUNNING", "the application", 180)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.dashboard}{path}", timeout=60) as response:
            return json.load(response)

    def application(self) -> Any:
        return self.get("/api/serve/applications/")["applications"].get("whohas", {})

    def status(self) -> str:
        application = self.application()
        assert application.get("status") not in ("DEPLOY_FAILED", "UNHEALTHY"), application["message"]
        return str(application.get("status"))

    def replicas(self) -> list[str]:
        deployment = self.application()["deployments"]["Replica"]
        return [replica["replica_id"] for replica in deployment["replicas"] if replica["state"] == "RUNNING"]

    def settled(self, at_least: int) -> bool:
        """So many replicas run, each with its engine, and every ingress process knows of these and no others: it hears
        of a new replica a moment after Ray Serve calls it RUNNING."""
        running = {replica.rpartition("#")[2] for replica in self.replicas()}
        engines = len(self.engines())
        return len(running) == engines >= at_least and all(self.known() == running for _ in range(20))

    def known(self) -> set[str]:
        """The replicas of whichever ingress process answers."""
        body = {"model": MODEL, "prompt": "whom do you know?"}
        answer = self.live.request("POST", "/explain", body)
        return {one["replica"] for one in answer.json["candidates"]} if answer.status == 200 else set()

    def engines(self) -> list[int]:
        found = [pid for pid in descendants(self.process.pid) if "-m replicas.emulated" in command_of(pid)]
        return [pid for pid in found if "guard.py" not in command_of(pid)]

    def stop(self) -> None:
        processes = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._log.close()
        wait(lambda: not [pid for pid in processes if exists(pid)], "every process to end", 60)


def exists(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def wait(condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
    end, last = time.monotonic() + timeout_s, None
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except OSError as error:
            last = error
        time.sleep(0.3)
    raise AssertionError(f"waited {timeout_s} s for {what}: {last}")


@pytest.fixture(scope="module")
def cluster(valkey_url: str) -> Iterator[Cluster]:
    folder = short_folder()
    running = Cluster(Path(folder), valkey_url)
    try:
        running.deploy()
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


def chat(cluster: Cluster, text: str, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    return cluster.live.request("POST", "/v1/chat/completions", body)


def test_the_example_serves_and_routes(cluster: Cluster) -> None:
    text = "Whoever holds this holds it. " * 200
    first, second = chat(cluster, text, max_tokens=2), chat(cluster, text, max_tokens=2)
    assert first.status == second.status == 200
    assert second.replica == first.replica
    assert second.cached == second.predicted > 1000


def test_serve_still_knows_the_private_way_to_pick_without_holding_a_slot(cluster: Cluster) -> None:
    told = subprocess.run(
        [sys.executable, "-c", PICK, f"127.0.0.1:{cluster.gcs}"],
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.stdout.splitlines() == ["True ['block_size', 'model', 'url']", "False"], told.stderr


def test_a_killed_actor_takes_its_engine_along_and_requests_go_on(cluster: Cluster) -> None:
    wait(lambda: cluster.settled(2), "replicas that everybody knows", 60)
    engines = cluster.engines()
    assert len(engines) == len(cluster.replicas())
    victim = engines[0]
    os.kill(actor_of(victim), signal.SIGKILL)
    answers = [chat(cluster, f"{i} still there?", max_tokens=1) for i in range(20)]
    assert [answer.body for answer in answers if answer.status != 200] == []
    wait(lambda: not exists(victim), "the engine of the killed actor to end", 60)
    wait(lambda: cluster.settled(2), "a replacement", 120)


def test_a_killed_engine_is_replaced_and_requests_go_on(cluster: Cluster) -> None:
    before = cluster.engines()
    os.kill(before[0], signal.SIGKILL)
    answers = [chat(cluster, f"{i} and now?", max_tokens=1) for i in range(20)]
    assert [answer.body for answer in answers if answer.status != 200] == []
    wait(lambda: len(set(cluster.engines()) - {before[0]}) >= 2, "a replacement", 120)
    wait(lambda: cluster.settled(2), "it to run", 60)


def actor_of(pid: int) -> int:
    while "ServeReplica" not in command_of(pid):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def test_load_adds_replicas_that_get_requests_and_rest_removes_them(cluster: Cluster) -> None:
    wait(lambda: len(cluster.replicas()) == 2, "the lower bound", 60)
    stop, used, bad = threading.Event(), set(), []
    tokens = 600  # so that a request is at its engine nearly all the time, however slow the way there

    def client(i: int) -> None:
        for turn in range(1000):
            if stop.is_set():
                return
            answer = chat(cluster, f"{i} {turn} tell me more", max_tokens=tokens, ignore_eos=True)
            used.add(answer.headers.get("x-whohas-replica"))
            if answer.status != 200 or answer.json["usage"]["completion_tokens"] != tokens:
                bad.append(answer)

    clients = [threading.Thread(target=client, args=(i,)) for i in range(10)]
    for one in clients:
        one.start()
    try:
        wait(lambda: len(cluster.replicas()) == 4, "the upper bound", 240)
        wait(lambda: used >= {replica.rpartition("#")[2] for replica in cluster.replicas()}, "all to be used", 120)
    finally:
        stop.set()
        for one in clients:
            one.join(60)
    assert not bad
    wait(lambda: len(cluster.replicas()) == 2, "the lower bound again", 240)
    assert chat(cluster, "Anyone left?", max_tokens=1).status == 200


def test_an_engine_killed_while_it_streams_ends_the_stream_with_an_error_in_band(cluster: Cluster) -> None:
    wait(lambda: cluster.settled(2), "replicas that everybody knows", 120)
    body = {"model": MODEL, "prompt": "go on and on", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{cluster.live.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        for _ in range(6):
            response.readline()
        os.kill(engine_of(cluster, response.headers["x-whohas-replica"]), signal.SIGKILL)
        rest = response.read()
    *_, error, done, nothing = rest.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 502
    assert (done, nothing) == (b"data: [DONE]", b"")
    wait(lambda: cluster.settled(2), "a replacement", 120)


def engine_of(cluster: Cluster, replica: str) -> int:
    shown = subprocess.run(
        [BIN / "whohas", "map", "--redis", cluster.redis, "--json"], capture_output=True, check=True, timeout=60
    )
    (row,) = [row for row in json.loads(shown.stdout)[MODEL]["replicas"] if row["replica"] == replica]
    port = row["url"].rpartition(":")[2]
    (pid,) = [pid for pid in cluster.engines() if f"--port {port} " in command_of(pid, 2000)]
    return pid
