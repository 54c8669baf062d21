"""`cluster.yaml`: valid for `ray up`, and true to what whohas needs on every node."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")

# In a process of its own: importing Ray warns, and starts threads that other unit tests can do without.
VALIDATE = """
import sys, yaml
from ray.autoscaler._private.util import prepare_config, validate_config
config = prepare_config(yaml.safe_load(open("cluster.yaml")))
validate_config(config)
print(yaml.safe_dump({name: node["resources"] for name, node in config["available_node_types"].items()}))
"""


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_ray_up_accepts_the_file() -> None:
    done = subprocess.run([sys.executable, "-c", VALIDATE], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    resources = yaml.safe_load(done.stdout)
    assert resources["head"]["GPU"] == 0
    assert resources["gpu4"]["GPU"] == 4


def test_workers_scale_to_the_clusters_own_maximum(config: dict[str, Any]) -> None:
    worker = config["available_node_types"]["gpu4"]
    assert 1 <= worker["min_workers"] < worker["max_workers"] == config["max_workers"]
    assert config["available_node_types"][config["head_node_type"]]["max_workers"] == 0


@pytest.mark.parametrize("commands", START_COMMANDS)
def test_every_ray_start_has_the_proxys_environment(config: dict[str, Any], commands: str) -> None:
    (start,) = [line for line in config[commands] if "ray start" in line]
    exported, _, _ = start.partition("ray start")
    for variable in ("RAY_SERVE_ENABLE_HA_PROXY=1", "RAY_SERVE_THROUGHPUT_OPTIMIZED=1", "RAY_AUTH_MODE=disabled"):
        assert variable in exported


def test_redis_and_ray_do_not_share_a_port(config: dict[str, Any]) -> None:
    (redis,) = re.findall(r"'port (\d+)'", "\n".join(config["head_setup_commands"]))
    (ray,) = re.findall(r"--head --port=(\d+)", "\n".join(config["head_start_ray_commands"]))
    assert redis != ray
    assert f"redis://whohas-head:{redis}/0" in (REPOSITORY / "cluster.yaml").read_text("utf-8")


def test_the_mounted_project_is_installed_on_every_node(config: dict[str, Any]) -> None:
    (folder,) = config["file_mounts"]
    assert any("pip install" in line and f"{folder}[vllm]" in line for line in config["setup_commands"])


@pytest.mark.parametrize(
    "commands", ["setup_commands", "head_setup_commands", "worker_setup_commands", *START_COMMANDS]
)
def test_every_command_is_a_line_that_a_shell_can_parse(config: dict[str, Any], commands: str) -> None:
    for line in config[commands]:
        assert "\n" not in line
        subprocess.run(["bash", "-n", "-c", line], check=True)
