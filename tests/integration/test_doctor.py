"""`whohas doctor`: one line for each thing, and what is wrong is named."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicas.config import EngineConfig
from replicas.engine import make_engine
from replicas.ports import quiet_port
from replicas.replica import Replica
from router.model_files import _find_folder
from router.ownership import ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from router.prompt import PromptEncoder
from router.types import Prompt
from serve.cli import engine_check, fleet_check
from serve.config import AppConfig
from tests.integration.live import MODEL, WHOHAS, Live, config_file

pytestmark = pytest.mark.integration


def doctor(*args: str, home: Path) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the lines by name. `home`: a folder where no `whohas up` has left a trace."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(home), "WHOHAS_REDIS": "redis://127.0.0.1:1"}
    done = subprocess.run(
        [WHOHAS, "doctor", *args, "--json"], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, {line["name"]: line for line in json.loads(done.stdout)}


def test_a_sound_fleet_passes_and_every_engine_shows_what_it_caches(live: Live, tmp_path: Path) -> None:
    config = config_file(tmp_path)
    code, lines = doctor(str(config), "--redis", live.redis, "--port", str(quiet_port()), home=tmp_path)
    assert code == 0, lines
    assert {"Python", "Ray", "vLLM", "GPUs", "port", "tokenizer", "chat template", "Valkey", "fleet"} <= set(lines)
    assert lines["fleet"]["text"] == f"{MODEL}: 4 replicas, all with blocks of 16 tokens"
    replicas = [line for name, line in lines.items() if name.startswith("replica ")]
    assert [line["text"] for line in replicas] == [
        "canaries (base, salt, tools) are in the map and cached as computed"
    ] * 4


def test_the_lines_for_people_are_one_each(live: Live, tmp_path: Path) -> None:
    config, port = config_file(tmp_path), str(quiet_port())
    command = [WHOHAS, "doctor", str(config), "--redis", live.redis, "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) >= 12
    assert all(line.split()[0] in ("ok", "note") for line in lines)


def test_without_a_config_a_fleet_whose_tokenizer_is_unknown_asks_for_it(live: Live, tmp_path: Path) -> None:
    code, lines = doctor("--redis", live.redis, "--port", str(quiet_port()), home=tmp_path)
    assert code == 1
    assert any("give the config file" in line["text"] for line in lines.values())


def test_a_redis_that_is_not_there_is_wrong(tmp_path: Path) -> None:
    code, lines = doctor("--port", str(quiet_port()), home=tmp_path)
    assert code == 1
    assert lines["Redis"]["status"] == "wrong"
    assert "running and reachable" in lines["Redis"]["text"]


def test_a_port_that_somebody_else_has_is_wrong(valkey_url: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, lines = doctor("--redis", valkey_url, "--port", str(taken.getsockname()[1]), home=tmp_path)
    assert code == 1
    assert "can't be used" in lines["port"]["text"]


def test_a_tokenizer_that_is_missing_and_a_template_that_is_not_there_are_wrong(
    valkey_url: str, tmp_path: Path
) -> None:
    code, lines = doctor(
        str(config_file(tmp_path, tokenizer=str(tmp_path / "nowhere"))), "--redis", valkey_url, home=tmp_path
    )
    assert code == 1
    assert "nowhere" in lines["tokenizer"]["text"]
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((_find_folder("builtin") / "tokenizer.json").read_bytes())
    code, lines = doctor(str(config_file(tmp_path, tokenizer=str(bare))), "--redis", valkey_url, home=tmp_path)
    assert code == 1
    assert "no chat template" in lines["chat template"]["text"]


def test_a_config_with_a_mistake_is_named(tmp_path: Path) -> None:
    code, lines = doctor(str(config_file(tmp_path, replicas=0)), home=tmp_path)
    assert code == 1
    assert "replicas" in lines["config"]["text"]


def test_vllm_engines_that_this_machine_cannot_run_are_wrong(valkey_url: str, tmp_path: Path) -> None:
    engine = {"kind": "vllm", "command": [str(tmp_path / "no-vllm-here")]}
    code, lines = doctor(str(config_file(tmp_path, engine=engine)), "--redis", valkey_url, home=tmp_path)
    assert code == 1
    assert "make install-vllm" in lines["vLLM"]["text"]


CONFIG = EngineConfig(model=MODEL, tokenizer="builtin", speed=100.0, num_blocks=3000)


async def test_block_sizes_that_differ_are_wrong(valkey_url: str, fleet: str) -> None:
    encoder = PromptEncoder.load(MODEL, "builtin")  # first: meanwhile no lease would be renewed
    async with fleet_of(valkey_url, fleet, CONFIG, replace(CONFIG, block_size=32)):
        lines = await fleet_check.examine(valkey_url, fleet, encoder, ())
    assert [line.wrong for line in lines] == [True, False, False]
    assert "16: r0; 32: r1" in lines[0].text


async def test_an_engine_with_another_root_than_the_routers_is_wrong(
    valkey_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.handshake._EVENTS_S", 1.0)
    other = PromptEncoder.load("another model", "builtin")

    class OtherModel:
        """Right ids under a wrong root, as a router with another model name has them."""

        def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
            return other.prompt(path, {**body, "model": "another model"})

        def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return other.encode_text(text)

    encoder: Any = OtherModel()
    async with fleet_of(valkey_url, fleet, CONFIG):
        lines = await fleet_check.examine(valkey_url, fleet, encoder, ())
    assert [line.wrong for line in lines] == [False, True]
    assert "does not cache what is computed for it" in lines[1].text


async def test_what_a_replica_heard_of_its_engine_s_events_is_read_from_the_map(valkey_url: str, fleet: str) -> None:
    ownership = RedisOwnershipMap(valkey_url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
    await ownership.connect()
    try:
        record = ReplicaRecord("r0", MODEL, 16, seq=7, unused={"blocks_broken": 3})
        await ownership.join("r0", record, 60.0)
        assert await fleet_check._heard(ownership, "r0")() == {"batches": 8, "blocks_broken": 3}
        assert await fleet_check._heard(ownership, "r1")() == {}
    finally:
        await ownership.close()


async def test_servers_that_run_already_are_checked_before_whohas_is_in_front_of_them(
    valkey_url: str, tmp_path: Path
) -> None:
    at = await (engine := make_engine(CONFIG, "engine")).start()
    external = {"kind": "external", "endpoints": (at.url,), "events_endpoints": (at.events,)}
    encoder = PromptEncoder.load(MODEL, "builtin")
    try:
        there = ("--redis", valkey_url, "--port", str(quiet_port()), "--endpoints", at.url)
        what = ("--model", MODEL, "--tokenizer", "builtin")
        code, lines = await asyncio.to_thread(doctor, *there, *what, home=tmp_path)
        assert code == 0, lines
        text = "canaries (base, salt, tools) are cached as computed; its KV events are not read"
        assert lines[f"engine {at.url}"]["text"] == text
        app = AppConfig.model_validate({"model": MODEL, "tokenizer": "builtin", "engine": external})
        (line,) = await engine_check.examine(app, encoder)
        assert line.text == "canaries (base, salt, tools) are in its KV events and cached as computed"
        (line,) = await engine_check.examine(app.model_copy(update={"model": "other"}), encoder)
        assert (line.wrong, line.text.startswith(f"it serves {MODEL}, not other")) == (True, True)
    finally:
        await engine.stop()
    (line,) = await engine_check.examine(app, encoder)
    assert (line.wrong, "doesn't answer" in line.text) == (True, True)


def test_options_for_servers_say_what_they_go_with(tmp_path: Path) -> None:
    code, lines = doctor("--model", MODEL, home=tmp_path)
    assert (code, "--endpoints" in lines["config"]["text"]) == (1, True)
    code, lines = doctor(str(config_file(tmp_path)), "--endpoints", "http://127.0.0.1:1", home=tmp_path)
    assert (code, "--endpoints" in lines["config"]["text"]) == (1, True)


async def test_a_replica_that_does_not_answer_is_wrong(valkey_url: str, fleet: str) -> None:
    encoder = PromptEncoder.load(MODEL, "builtin")
    async with fleet_of(valkey_url, fleet, CONFIG) as replicas:
        await replicas[0]._engine.stop()
        lines = await fleet_check.examine(valkey_url, fleet, encoder, ())
    assert [line.wrong for line in lines] == [False, True]
    assert "no answer" in lines[1].text


@asynccontextmanager
async def fleet_of(redis: str, fleet: str, *configs: EngineConfig) -> AsyncIterator[list[Replica]]:
    """Replicas r0, r1... in this process."""
    ownership, encoder = (
        RedisOwnershipMap(redis, fleet, timeout_s=30.0, look_up_timeout_s=30.0),
        PromptEncoder.load(MODEL, "builtin"),
    )
    await ownership.connect()
    replicas: list[Replica] = []
    try:
        for number, config in enumerate(configs):
            replicas.append(await Replica.start(f"r{number}", config, ownership, encoder=encoder))
        yield replicas
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))
        await ownership.close()
