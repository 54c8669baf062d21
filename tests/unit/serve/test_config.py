"""Names and places of a model, from the `args` of a config file to the engine's command line."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from replicas.engine import EngineEndpoints, vllm_argv
from serve.config import AppConfig


def argv(**args: object) -> list[str]:
    config = AppConfig.model_validate(args).engine_config
    return vllm_argv(config, "127.0.0.1", 1, EngineEndpoints("http://x", "ipc://e", "ipc://r"))


def test_one_name_does_for_all() -> None:
    config = AppConfig.model_validate({"model": "org/name", "engine": {"kind": "vllm"}})
    assert config.fleet_name == config.tokenizer_source == config.engine_config.name == "org/name"
    assert "--served-model-name" not in argv(model="org/name", engine={"kind": "vllm"})


def test_a_folder_can_be_served_under_another_name() -> None:
    args = {"model": "nice", "engine": {"kind": "vllm", "model": "/models/ugly"}}
    config = AppConfig.model_validate(args)
    assert config.engine_config.name == "nice"
    assert config.tokenizer_source == "/models/ugly"
    command = argv(**args)
    assert command[command.index("serve") + 1] == "/models/ugly"
    assert command[command.index("--served-model-name") + 1] == "nice"


def test_two_served_names_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValidationError, match=r"engine\.model"):
        AppConfig.model_validate({"model": "a", "engine": {"kind": "vllm", "served_model_name": "b"}})


def test_the_reference_deployment_is_what_it_says() -> None:
    command = argv(
        model="Qwen/Qwen2.5-72B-Instruct",
        engine={
            "kind": "vllm",
            "device": "cuda",
            "tensor_parallel_size": 4,
            "gpu_memory_utilization": 0.9,
            "max_model_len": 32768,
            "block_size": 16,
        },
    )
    for flag, value in (
        ("--tensor-parallel-size", "4"),
        ("--gpu-memory-utilization", "0.9"),
        ("--max-model-len", "32768"),
        ("--block-size", "16"),
    ):
        assert command[command.index(flag) + 1] == value
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-events-config"} <= set(command)


def test_further_models_share_redis_and_front_and_nothing_else() -> None:
    args = {"model": "a", "adapters": ["a1"], "redis": "redis://r:1/0", "ingress": {"num_replicas": 3}}
    first, second = AppConfig.model_validate({**args, "also": [{"model": "b", "replicas": 2}]}).all_models
    assert (first.names, second.names) == (("a", "a1"), ("b",))
    assert (second.redis, second.ingress) == (first.redis, first.ingress)
    assert (first.fleet_name, second.fleet_name) == ("a", "b")
    assert (first.replicas, second.replicas) == (1, 2)


@pytest.mark.parametrize(
    ("also", "why"),
    [
        ([{"model": "a"}], "a is the name of two"),
        ([{"model": "b", "adapters": ["a"]}], "a is the name of two"),
        ([{"model": "b", "fleet": "a"}], "fleet of its own"),
        ([{"model": "b", "also": [{"model": "c"}]}], "no further ones itself"),
    ],
)
def test_models_that_could_not_be_told_apart_are_refused(also: list[object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        AppConfig.model_validate({"model": "a", "also": also})
