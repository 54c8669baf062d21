"""vLLM itself, on the CPU, under whohas: one engine under a replica, and the whole system in front of two."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.handover import with_token_ids
from router.prompt import PromptEncoder
from tests.integration.live import Live, command_of, descendants, state_of
from tests.vllm.adapters import tiny_adapter
from tests.vllm.media_model import tiny_idefics3
from tests.vllm.models import tiny_llama
from tests.vllm.real_engine import BLOCK, WAIT_S, Traffic, real_fleet, until, until_told

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

REQUESTS = 60
ADAPTERS = ("adapter-a", "adapter-b")


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest) -> Path:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM isn't installed: make install-vllm")
    cache = request.config.cache
    assert cache is not None
    return tiny_llama(cache.mkdir("models"))


@pytest.fixture(scope="module")
def fleet(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("real")
    adapters = {name: tiny_adapter(folder / name, seed) for seed, name in enumerate(ADAPTERS)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for what empties a cache
        with real_fleet(folder, tiny, adapters=adapters) as live:
            yield live


def alive(pids: list[int]) -> list[str]:
    return [command_of(pid) for pid in pids if state_of(pid) not in ("", "Z")]


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + WAIT_S
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(pids) == []


def test_an_engine_of_two_workers_passes_the_handshake_and_is_gone_with_its_killed_actor(
    tmp_path: Path, vllm_is_there: None
) -> None:
    model = tiny_idefics3(tmp_path)
    command = [sys.executable, "-m", "tests.vllm.real_engine", str(model), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as actor:
        try:
            assert actor.stdout is not None
            told = json.loads(actor.stdout.readline())
            assert told["findings"] == ["base: ok", "salt: ok", "media: ok"]
            assert (told["facts"]["block_size"], told["facts"]["max_model_len"]) == (32, 4096)
            assert told["facts"]["models"] == [str(model)]
            below = descendants(actor.pid)
            assert sum("Worker" in command for command in alive(below)) == 2
        finally:
            actor.kill()
    wait_until_gone(below)


def test_what_is_predicted_is_what_vllm_reports(fleet: Live, tiny: Path) -> None:
    outcomes = Traffic(fleet, tiny, adapters=ADAPTERS).send(REQUESTS)
    wrong = [one for one in outcomes if one.predicted != one.cached]
    assert len(wrong) <= REQUESTS // 100, wrong
    assert sum(one.cached for one in outcomes) > 0.4 * sum(one.prompt_tokens for one in outcomes)
    assert len({one.replica for one in outcomes}) == 2
    for what in ("with tools", "with a salt", "by an adapter"):
        assert any(what in one.kind and one.cached for one in outcomes), what
    assert fleet.request("GET", "/health").json["doubts"] == {}  # the handshake, with tools and each adapter


def test_p8_of_a_prompt_of_exactly_sixteen_cached_blocks_fifteen_are_promised_and_reused(
    fleet: Live, tiny: Path
) -> None:
    # Of a few blocks only, the holder might be passed over: the other ingress may not know yet that its work is done.
    body = {"model": str(tiny), "prompt": list(range(20_000, 20_512)), "max_tokens": 1, "temperature": 0}
    cold = fleet.request("POST", "/v1/completions", body)
    until_told(fleet, cold.replica, [*range(20_000, 20_512), 0], str(tiny))
    warm = fleet.request("POST", "/v1/completions", body)
    assert (cold.predicted, cold.cached) == (0, 0)
    assert (warm.predicted, warm.cached) == (480, 480)


def test_ids_sent_along_with_a_chat_give_the_same_answer_and_the_same_blocks(fleet: Live, tiny: Path) -> None:
    encoder = PromptEncoder.load(str(tiny), keep_ids=True)
    text = "Which of the replicas has the blocks of this prompt, and how many of them are they? " * 6
    turns = [{"role": "user", "content": text}]
    forms: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": turns, "max_tokens": 8},
        "/v1/responses": {"input": text, "max_output_tokens": 8},
        "/v1/messages": {"messages": turns, "max_tokens": 8},
    }
    for path, fields in forms.items():
        body = {"model": str(tiny), **fields, "temperature": 0}
        ids = encoder.hashed(path, body, BLOCK).token_ids
        raw = json.dumps(body).encode()
        plain = fleet.request("POST", path, raw)
        until_told(fleet, plain.replica, list(memoryview(ids).cast("I")), str(tiny))
        given = fleet.request("POST", path, with_token_ids(raw, ids))
        assert (plain.status, given.status) == (200, 200)
        assert spoken(plain.json) == spoken(given.json) != ""
        assert cached(given.body) == given.predicted == (len(ids) // 4 - 1) // BLOCK * BLOCK


def cached(body: bytes) -> int:
    return int(re.findall(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)', body)[-1])


def spoken(answer: dict[str, Any]) -> str:
    """What the model said, in any of the three forms."""
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    parts = answer["content"] if "content" in answer else answer["output"][-1]["content"]
    return "".join(part.get("text", "") for part in parts)


def test_e6_after_a_reset_of_idle_engines_nobody_is_credited_with_what_is_gone(fleet: Live, tiny: Path) -> None:
    body = {"model": str(tiny), "prompt": list(range(10_000, 10_512)), "max_tokens": 1, "temperature": 0}

    def held() -> int:
        return max(one["owned_blocks"] for one in fleet.request("POST", "/explain", body).json["candidates"])

    fleet.request("POST", "/v1/completions", body)
    until(lambda: held() > 0)
    until(lambda: fleet.request("POST", "/reset_prefix_cache").json == {"success": True})
    until(lambda: held() == 0)
    assert fleet.request("POST", "/v1/completions", body).cached == 0
    until(lambda: held() > 0)


def test_engines_that_are_paused_are_known_to_sleep_until_they_are_woken(fleet: Live) -> None:
    # Not below level 0: offloading the weights takes a GPU.
    assert fleet.request("POST", "/sleep?level=0").json == {"status": "sleeping", "level": 0}
    try:
        assert fleet.request("GET", "/is_sleeping").json == {"is_sleeping": True}
        until(lambda: len(fleet.request("GET", "/health").json["doubts"]) == 2)
    finally:
        woken = fleet.request("POST", "/wake_up?tags=scheduling")
    assert woken.json == {"status": "awake", "tags": ["scheduling"]}
    until(lambda: all(fleet.request("GET", "/health").json["status"] == "ok" for _ in range(20)))


def test_a_killed_engine_core_is_noticed_and_the_other_replica_serves_on(fleet: Live, tiny: Path) -> None:
    core = next(pid for pid in descendants(fleet.process.pid) if command_of(pid).startswith("VLLM::EngineCore"))
    server = int(Path(f"/proc/{core}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(core, signal.SIGKILL)
    wait_until_gone([core, server])
    answers = [Traffic(fleet, tiny, seed).send(2) for seed in range(3)]
    assert len({one.replica for outcomes in answers for one in outcomes}) == 1
