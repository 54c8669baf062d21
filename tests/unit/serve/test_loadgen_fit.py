"""Least squares over measurements that a known engine would have given."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from replicas.emulated.step_time import PROFILES, StepTime, StepWork, load_profile
from serve.loadgen.fit import Decode, Fit, Prefill, fit

FAST = StepTime(a=8e-3, b=0.05e-3, c=0.1e-3, d=2e-9, e=2e-8)
PROMPTS = (64, 512, 1024, 2000, 3000, 4000, 6000, 8000, 12000, 16000)
DECODES = ((1, 64), (2, 64), (8, 64), (32, 64), (1, 8000), (8, 4000), (16, 4000))


def measured(
    step: StepTime, chunk: int, front: float = 0.004, noise: float = 0.0, seed: int = 0
) -> tuple[list[Prefill], list[Decode]]:
    draw = random.Random(seed)
    prefills = []
    for tokens in PROMPTS:
        chunks = [(start, min(chunk, tokens - start)) for start in range(0, tokens, chunk)]
        time = front + sum(step.seconds(StepWork(size, 0, size * (start + size / 2), 0)) for start, size in chunks)
        prefills.append(Prefill(tokens, time * draw.gauss(1, noise)))
    decodes = [
        Decode(seqs, seqs * tokens, step.seconds(StepWork(0, seqs, 0.0, seqs * tokens)) * draw.gauss(1, noise))
        for seqs, tokens in DECODES
    ]
    return prefills, decodes


@pytest.mark.parametrize("step", [PROFILES["a100x4-qwen72b"], FAST])
@pytest.mark.parametrize("chunk", [2048, 8192])
def test_exact_measurements_give_the_parameters_and_the_step_size_back(step: StepTime, chunk: int) -> None:
    found = fit(*measured(step, chunk))
    assert found.chunk == chunk
    assert found.profile == pytest.approx(dict(zip("abcde", (step.a, step.b, step.c, step.d, step.e), strict=True)))
    assert found.front_s == pytest.approx(0.004)
    assert found.rms < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_half_a_percent_of_noise_leaves_a_b_and_c_within_a_tenth(seed: int) -> None:
    step = PROFILES["a100x4-qwen72b"]
    found = fit(*measured(step, 2048, noise=0.005, seed=seed), chunk=2048).step
    assert found.a == pytest.approx(step.a, rel=0.03)
    assert found.b == pytest.approx(step.b, rel=0.05)
    assert found.c == pytest.approx(step.c, rel=0.1)


def test_a_linear_engine_has_no_parameter_below_zero() -> None:
    found = fit(*measured(StepTime(1e-9, 1e-4, 0.0, 0.0, 0.0), 2048, noise=0.01)).step
    assert found.b == pytest.approx(1e-4, rel=0.03)
    assert min(found.a, found.c, found.d, found.e) >= 0.0


def test_residuals_name_what_was_measured() -> None:
    prefills, decodes = measured(FAST, 2048)
    prefills[3] = Prefill(prefills[3].tokens, prefills[3].ttft_s * 2)
    found = fit(prefills, decodes)
    worst = max(found.residuals, key=lambda one: abs(one.relative))
    assert worst.what == "TTFT of 2000 tokens"
    assert worst.relative < -0.3


def test_one_length_is_too_little() -> None:
    prefills, decodes = measured(FAST, 2048)
    with pytest.raises(ValueError, match="two prompt lengths"):
        fit(prefills[:1], decodes)


def test_the_profile_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(Fit(FAST, 0.0, 2048, []).profile))
    assert load_profile(str(path)) == FAST
