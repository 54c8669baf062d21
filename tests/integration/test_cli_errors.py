"""What is wrong before anything starts is said in one line that names what to do; the exit code is not 0."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from replicas.ports import quiet_port
from tests.integration.live import WHOHAS, config_file

pytestmark = pytest.mark.integration


def refused(*args: str) -> str:
    """The one line that `whohas up` ends with."""
    done = subprocess.run([WHOHAS, "up", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("whohas:", "Error:"))]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_taken_port_names_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "--port" in refused("--port", str(taken.getsockname()[1]))


def test_an_unreachable_redis_is_named_without_its_password() -> None:
    line = refused("--port", str(quiet_port()), "--redis", "redis://me:secret@127.0.0.1:1/0")
    assert "redis://127.0.0.1:1/0" in line
    assert "running and reachable" in line
    assert "secret" not in line


def test_something_that_is_no_redis_url_is_refused() -> None:
    assert "redis" in refused("--redis", "http://127.0.0.1:6379")


def test_a_missing_model_says_what_was_looked_for(tmp_path: Path) -> None:
    line = refused("--port", str(quiet_port()), "--model", str(tmp_path / "nothing-here"))
    assert "nothing-here" in line


def test_vllm_without_a_model_asks_for_it() -> None:
    assert "--model" in refused("--engine", "vllm")


def test_an_endpoint_where_nobody_answers_is_named(tmp_path: Path) -> None:
    line = refused("--port", str(quiet_port()), "--endpoints", "http://127.0.0.1:1", "--model", "m")
    assert "http://127.0.0.1:1" in line


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"replicas": 0}, "replicas"),
        ({"surprise": 1}, "surprise"),
        ({"engine": {"kind": "magic"}}, "kind"),
        ({"engine": {"kind": "emulated", "block_size": -1}}, "block_size"),
        ({"engine": {"kind": "emulated", "bloks": 3}}, "bloks"),
        ({"router": {"policy": "fastest"}}, "policy"),
        ({"autoscaling": {"min_replicas": 0}}, "min_replicas"),
    ],
    ids=lambda value: str(value),
)
def test_a_bad_config_names_the_field(tmp_path: Path, args: dict[str, object], field: str) -> None:
    assert field in refused(str(config_file(tmp_path, **args)))


def test_a_file_that_is_no_serve_config_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"model": "m"}))
    assert "applications" in refused(str(path))
    path.write_text("{")
    assert "can't be read" in refused(str(path))


def test_the_other_commands_say_when_nobody_is_there(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text("{}")
    for args in (["explain", str(body), "--url", "http://127.0.0.1:1"], ["map", "--redis", "redis://127.0.0.1:1"]):
        done = subprocess.run([WHOHAS, *args], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr.startswith("whohas: ")
        assert "Traceback" not in done.stderr
