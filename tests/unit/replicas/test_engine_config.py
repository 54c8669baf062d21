"""An engine's settings: the command line that they make, and what is refused."""

from __future__ import annotations

import json

import pytest

from replicas.config import EngineConfig
from replicas.engine import EngineEndpoints, emulated_argv, make_engine, vllm_argv

ENDPOINTS = EngineEndpoints("http://127.0.0.1:1", "ipc://@e", "ipc://@r")


def vllm(**fields: object) -> list[str]:
    return vllm_argv(EngineConfig("vllm", "some/model", **fields), "127.0.0.1", 8123, ENDPOINTS)  # type: ignore[arg-type]


def test_vllm_is_started_with_what_whohas_needs() -> None:
    argv = vllm(tensor_parallel_size=4, block_size=16, gpu_memory_utilization=0.9)
    assert argv[argv.index("serve") + 1] == "some/model"
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(argv)
    assert argv[argv.index("--tensor-parallel-size") + 1] == "4"
    assert argv[argv.index("--port") + 1] == "8123"
    events = json.loads(argv[argv.index("--kv-events-config") + 1])
    assert (events["endpoint"], events["replay_endpoint"]) == ("ipc://@e", "ipc://@r")
    assert events["enable_kv_cache_events"] is True
    assert "--max-model-len" not in argv


@pytest.mark.parametrize("args", [("--tensor-parallel-size", "2"), ("--tensor_parallel_size=2",), ("-tp", "2")])
def test_a_flag_of_the_user_wins(args: tuple[str, ...]) -> None:
    argv = vllm(tensor_parallel_size=4, args=args)
    assert argv[-len(args) :] == list(args)
    assert "4" not in argv


def test_a_flag_that_the_user_turned_off_stays_off() -> None:
    assert "--enable-prefix-caching" not in vllm(args=("--no-enable-prefix-caching",))


@pytest.mark.parametrize("flag", ["--port", "--host", "--kv-events-config", "--kv_events_config.topic", "-dp"])
def test_a_flag_that_whohas_must_own_is_refused(flag: str) -> None:
    with pytest.raises(ValueError, match="args must not have"):
        make_engine(EngineConfig("vllm", "m", args=(flag, "x")), "r")


def test_the_emulated_engine_gets_only_what_was_set() -> None:
    argv = emulated_argv(EngineConfig("emulated", "m", num_blocks=100), "127.0.0.1", 8123, ENDPOINTS)
    assert argv[argv.index("--num-blocks") + 1] == "100"
    assert "--block-size" not in argv


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "sglang"}, "kind"),
        ({"block_size": 0}, "block_size"),
        ({"speed": 0.0}, "speed"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"event_delay_s": -1.0}, "event_delay_s"),
        ({"kind": "external"}, "endpoints"),
        ({"kind": "external", "endpoints": ("127.0.0.1:1",)}, "endpoints"),
        ({"kind": "external", "endpoints": ("http://a", "http://b"), "events_endpoints": ("tcp://a:1",)}, "events_"),
        ({"kind": "external", "endpoints": ("http://a", "http://b"), "events_endpoints": ("tcp://a:1",) * 2}, "twice"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EngineConfig(**fields)  # type: ignore[arg-type]


def test_an_engine_needs_a_model() -> None:
    with pytest.raises(ValueError, match="model"):
        make_engine(EngineConfig(), "r")
