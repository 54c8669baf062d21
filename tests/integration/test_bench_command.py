"""`whohas bench` as a user runs it, against one emulated engine process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from replicas.emulated.step_time import load_profile
from replicas.ports import quiet_port
from serve.loadgen.processes import emulated_engine
from tests.integration.live import WHOHAS

pytestmark = pytest.mark.integration

SPEED = "20"


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with emulated_engine("--speed", SPEED, "--num-blocks", "4000", "--max-model-len", "16384") as url:
        yield url


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([WHOHAS, "bench", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    return done


def figures(url: str, *arguments: str, speed: str = SPEED) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench("--url", url, "--time-factor", speed, *arguments, "--json").stdout)
    return found


def small(shared: int = 512, unshared: int = 100, output: int = 8) -> list[str]:
    return ["--shared-tokens", str(shared), "--unshared-tokens", str(unshared), "--output-tokens", str(output)]


def test_a_closed_loop_reports_hits_latency_and_rates() -> None:
    # Steps of 16 ms: an engine that waits for its turn for shorter than that tells no two tokens at once.
    with emulated_engine("--speed", "2") as url:
        found = figures(url, "--concurrency", "4", "--requests", "24", *small(), speed="2")
    assert (found["requests"], found["answered"], found["errors"]) == (24, 24, {})
    assert 0.6 < found["hit_rate"] <= 512 / 612  # all but the first few find the shared part
    assert 0 < found["ttft_p50_s"] <= found["ttft_p90_s"] <= found["ttft_p99_s"]
    assert found["itl_p50_s"] > 0.01
    assert found["total_tokens_per_s"] == pytest.approx(found["prompt_tokens_per_s"] + found["output_tokens_per_s"])
    assert found["output_tokens_per_s"] / found["prompt_tokens_per_s"] == pytest.approx(8 / 612, rel=0.01)
    assert (found["replicas"], found["predictions"]) == ({}, None)  # a bare engine names no replica
    assert found["stopped"] is None


def test_an_open_loop_sends_at_its_rate(engine: str) -> None:
    # The last answer may be late by 20 of these seconds: by 2.5 of the clock's.
    found = figures(engine, "--rate", "2", "--seconds", "40", "--seed", "1", *small(), speed="8")
    assert 50 <= found["answered"] <= 110
    assert found["span_s"] < 60


def test_the_text_says_what_was_measured_and_progress_goes_to_stderr(engine: str) -> None:
    done = bench("--url", engine, "--time-factor", SPEED, "--concurrency", "2", "--requests", "4", *small())
    for word in ("requests", "TTFT", "ITL", "TPOT", "tokens/s", "hit rate", "goodput"):
        assert word in done.stdout
    assert "in flight" not in done.stdout


def test_errors_are_counted_by_kind_and_end_with_1(engine: str) -> None:
    done = bench("--url", engine, "--model", "nobody", "--requests", "3", *small(), status=1)
    assert "0 answered of 3" in done.stdout
    assert "3 x HTTP 404" in done.stdout


def test_nothing_listening_is_said_in_one_line() -> None:
    done = bench("--url", f"http://127.0.0.1:{quiet_port()}", status=1)
    assert "nothing answers at" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_and_bodies_are_sent_at_their_times(engine: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2000 * i, "input_length": 1030, "output_length": 4, "hash_ids": [0, i, 9 + i]}
        for i in range(1, 6)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = figures(engine, "--trace", str(trace))
    assert found["answered"] == 5
    assert found["span_s"] > 5.0
    assert found["hit_rate"] == pytest.approx(4 * 512 / (5 * 1030))
    bodies = tmp_path / "bodies.jsonl"
    bodies.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}) + "\n")
    assert figures(engine, "--sessions", str(bodies))["answered"] == 1


def test_conversations_go_turn_by_turn(engine: str, tmp_path: Path) -> None:
    messages = [{"role": role, "content": f"{role} says {i}, and a good deal more. " * 9} for i in range(4) for role in
                ("user", "assistant")]  # fmt: skip
    lines: list[dict[str, Any]] = [{"kind": "header", "system": "Be kind. " * 200, "tools": []}]
    lines += [{"session": str(number), "messages": messages} for number in range(3)]
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = figures(engine, "--sessions", str(path), "--concurrency", "1", "--think", "0.5")
    assert found["answered"] == 12
    assert found["hit_rate"] > 0.85  # the three conversations are alike


def test_ctrl_c_prints_what_there_is(engine: str) -> None:
    command = [WHOHAS, "bench", "--url", engine, "--concurrency", "2", "--seconds", "100000", "--json", *small()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = iter(process.stderr.readline, "")
        assert any(re.search(r" [1-9]\d* answered", line) for line in told)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    found = json.loads(out)
    assert process.returncode == 130
    assert found["stopped"] == "interrupted"
    assert found["answered"] > 0
    assert found["unfinished"] <= 2


def test_a_fit_finds_the_parameters_of_an_engine_that_is_known(tmp_path: Path) -> None:
    """Within 10 % for a and b and 20 % for c, on a machine that others use, too: at 3 x a step is longer than the time
    for which the engine may have to wait for its turn."""
    known = {"a": 0.04, "b": 0.0004, "c": 0.001, "d": 1e-8, "e": 1e-7}
    given, written = tmp_path / "known.yaml", tmp_path / "fitted.json"
    given.write_text(yaml.safe_dump(known))
    with emulated_engine("--speed", "3", "--profile", str(given), "--max-model-len", "8192") as url:
        done = bench(
            *("--fit", "--url", url, "--time-factor", "3", "--max-num-batched-tokens", "2048"),
            *("--output", str(written)),
        )
    assert "root mean square of the residuals" in done.stdout
    found = load_profile(str(written))
    assert found.a == pytest.approx(known["a"], rel=0.1)
    assert found.b == pytest.approx(known["b"], rel=0.1)
    assert found.c == pytest.approx(known["c"], rel=0.2)
